"""Speed of the example chain: MLX on the CPU against ezmsg-sigproc's units on NumPy.

pytest tests/benchmarks/test_chain_benchmark.py -s
"""

import time
from collections.abc import Sequence

from support import ewma_chain as shared

import numpy as np
import pytest
from ewma_chain_offline import make_chain
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.asarray import AsArraySettings, AsArrayTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.detrend import DetrendTransformer
from ezmsg.sigproc.ewma import EWMASettings, EWMATransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.sigproc.math.pow import PowTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import ChainTransformer, SimulatedAcquisitionSettings, simulated_acquisition

N_ROUNDS = 100
N_MESSAGES = 10
"""Messages in a round, in which the chains take turns."""


def _numpy_chain() -> list[BaseTransformer]:
    return [
        AsArrayTransformer(AsArraySettings(dtype="float32")),
        CommonRereferenceTransformer(shared.REFERENCE),
        DetrendTransformer(EWMASettings(time_constant=shared.BASELINE.time_constant)),
        PowTransformer(shared.SQUARE),
        EWMATransformer(EWMASettings(time_constant=shared.POWER.time_constant)),
        BinnedAggregateTransformer(shared.BIN),
        LogTransformer(shared.LOG),
    ]


def _run(chain: Sequence[BaseTransformer], messages: Sequence[AxisArray]) -> tuple[np.ndarray, list[float]]:
    """The features, and the time in microseconds that each message took."""
    features, times = [], []
    for message in messages:
        began = time.perf_counter()
        for stage in chain:
            message = stage(message)
        times.append(1e6 * (time.perf_counter() - began))
        features.append(message.data)
    return np.concatenate(features), times


@pytest.mark.parametrize("n_samples", [30, 300])
def test_a_fused_chain_takes_less_than_half_the_time_of_its_stages(n_samples):
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    stages, fused = make_chain(shared.to_mlx(512.0)), make_chain(shared.to_mlx(512.0))
    chains = {"stage by stage": stages, "fused": [ChainTransformer(make_chain=lambda: fused)]}
    stream = SimulatedAcquisitionSettings(samples_per_message=n_samples, stall_every=0, seed=1)
    source = simulated_acquisition(stream)
    times = {name: [] for name in chains}
    for number in range(N_ROUNDS):
        messages = [next(source) for _ in range(N_MESSAGES)]
        features = {}
        for name, chain in chains.items():
            features[name], took = _run(chain, messages)
            # The first messages load and compile.
            times[name] += took if number > 2 else []
        np.testing.assert_array_equal(features["fused"], features["stage by stage"])
    decile = {name: np.percentile(values, 10) for name, values in times.items()}
    ratio = decile["stage by stage"] / decile["fused"]
    for name, values in times.items():
        figures = f"{decile[name]:5.0f} us a message in the first decile, {np.median(values):5.0f} in the median"
        print(f"\n{n_samples} samples, {name:14} {figures}")
    print(f"fused is {ratio:.1f} times as fast")
    assert ratio >= 2.0


def test_the_offline_chain_is_at_least_as_fast_on_mlx_as_on_numpy():
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    chains = {"MLX": make_chain(shared.to_mlx(512.0)), "NumPy": _numpy_chain()}
    # 20 s, after which no average corrects the bias of its start any more; in long messages, which is quicker.
    start = SimulatedAcquisitionSettings(duration=20.0, samples_per_message=15000, stall_every=0)
    for chain in chains.values():
        _run(chain, list(simulated_acquisition(start)))

    stream = SimulatedAcquisitionSettings(samples_per_message=300, stall_every=0, seed=1)
    source = simulated_acquisition(stream)
    times = {name: [] for name in chains}
    for _ in range(N_ROUNDS):
        messages = [next(source) for _ in range(N_MESSAGES)]
        features = {}
        for name, chain in chains.items():
            features[name], took = _run(chain, messages)
            times[name] += took
        np.testing.assert_allclose(features["MLX"], features["NumPy"], rtol=0, atol=1e-5)

    # The first decile, since whatever else the machine does can only add to a message's time.
    decile = {name: np.percentile(values, 10) for name, values in times.items()}
    ratio = decile["NumPy"] / decile["MLX"]
    for name, values in times.items():
        print(
            f"\n{name:6} {decile[name]:5.0f} us a message in the first decile, {np.median(values):5.0f} in the median"
        )
    print(f"MLX is {ratio:.2f} times as fast")
    assert ratio >= 1.0
