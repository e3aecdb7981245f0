"""The recommended limit costs no speed, and a quarter of the working set does.

Ratios of wall-clock times, so only on a machine that has nothing else to do, and not part of the test suite::

    pytest -o addopts= -s tests/benchmarks/test_plan_benchmark.py
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx.asarray import ArrayBackend, AsArraySettings, AsArrayTransformer
from ezmsg.mlx.plan import recommend_cache_limit

pytest.importorskip("mlx.core")

N_CHANNELS = 1024
STEADY, RARE = 9000, (11000, 13000)


def message(n_samples: int) -> AxisArray:
    data = np.random.default_rng(0).standard_normal((n_samples, N_CHANNELS), np.float32)
    return AxisArray(data, dims=["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)}, stream_dim="time")


def several_bands(message: AxisArray) -> AxisArray:
    """Six results that are alive at the same time, so that MLX cannot compute in place, and their sum."""
    parts = [message.data * float(number) for number in range(1, 7)]
    return replace(message, data=sum(parts[1:], start=parts[0]))


def make_chain() -> list[Callable[[AxisArray], AxisArray]]:
    return [
        AsArrayTransformer(AsArraySettings(backend=ArrayBackend.mlx, mlx_cache_limit_mb=None)),
        several_bands,
        AsArrayTransformer(AsArraySettings(backend=ArrayBackend.numpy)),
    ]


def seconds_per_steady_message(limits: dict[str, float], stream: list[AxisArray], rounds: int) -> dict[str, float]:
    """Median over all steady messages but the first two of a round; the limits take turns."""
    import mlx.core as mx

    taken: dict[str, list[float]] = {name: [] for name in limits}
    before = None
    for _ in range(rounds):
        for name, limit_mb in limits.items():
            found = mx.set_cache_limit(int(limit_mb * 2**20))
            before = found if before is None else before
            mx.clear_cache()
            taken[name] += list(times_of_steady(stream))[2:]
    mx.set_cache_limit(before)
    return {name: float(np.median(times)) for name, times in taken.items()}


def times_of_steady(stream: list[AxisArray]) -> Iterator[float]:
    chain = make_chain()
    for result in stream:
        n_samples, start = len(result.data), time.perf_counter()
        for step in chain:
            result = step(result)
        if n_samples == STEADY:
            yield time.perf_counter() - start


@pytest.mark.parametrize("rare", [(), RARE], ids=["one length", "stalls"])
def test_recommended_limit_costs_no_speed(rare):
    steady = message(STEADY)
    stream = [message(n) for n in rare] + [steady] * 6 if rare else [steady] * 6
    recommendation = recommend_cache_limit(make_chain, stream)
    limits = {
        "no limit": 2.0**40,
        "recommended": recommendation.limit_mb,
        "quarter": recommendation.working_set_mb / 4,
    }
    seconds = seconds_per_steady_message(limits, stream, rounds=3)
    print(f"\n{recommendation.reason}")
    print({name: f"{1e3 * value:.1f} ms" for name, value in seconds.items()})
    assert seconds["recommended"] <= 1.05 * seconds["no limit"]
    assert seconds["quarter"] >= 1.2 * seconds["no limit"]
