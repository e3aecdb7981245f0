"""The scaler, and averages from the first message on, on MLX's CPU device: called bare, as ratios within one run.

pytest tests/benchmarks/test_scaler_benchmark.py --benchmark-enable -s
"""

from collections.abc import Callable

import ezmsg.sigproc.ewma as sigproc_ewma
import ezmsg.sigproc.scaler as sigproc_scaler
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.timing import seconds_in_turns

from ezmsg.mlx import AdaptiveStandardScalerTransformer, EWMATransformer

mx = pytest.importorskip("mlx.core")

SHAPES = [(30, 256), (300, 256), (3000, 256), (300, 1024)]

SETTLED, NEVER = 0.001, 1e6
"""Time constants in seconds: of an average that has settled after a few messages, and of one that does not."""

MOST_EWMAS = 2.5
"""Times of EWMA that the scaler may take."""

MOST_SETTLED = 1.3
"""Times of a settled average that one may take that is still corrected for its start."""

pytestmark = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="about MLX's CPU backend")


def message(data: np.ndarray | mx.array) -> AxisArray:
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})


def warmed_up(kind: type, time_constant: float, given: AxisArray) -> Callable[[], object]:
    transformer = kind(time_constant=time_constant)
    # Past the bias correction of the short time constant, which takes 17 of it, or 37 in float64.
    for _ in range(max(3, 1500 // given.data.shape[0])):
        transformer(given)
    return lambda: transformer(given)


def ratios(*calls: Callable[[], object], n_samples: int) -> list[float]:
    """Times of the others, relative to that of the first; each of them several calls in a row."""
    first, *others = seconds_in_turns(*calls, n=10 if n_samples < 1000 else 1, repeats=60)
    return [other / first for other in others]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scaler_and_start_of_an_average_cost_little_more_than_a_settled_one(benchmark, shape):
    given = message(mx.array(np.random.default_rng(0).standard_normal(shape, np.float32)))
    average, first = (warmed_up(EWMATransformer, tau, given) for tau in (SETTLED, NEVER))
    scaler, scaler_first = (warmed_up(AdaptiveStandardScalerTransformer, tau, given) for tau in (SETTLED, NEVER))
    benchmark(scaler)
    of_first, of_scaler, of_both = ratios(average, first, scaler, scaler_first, n_samples=shape[0])
    print(
        f"\n{shape}: of a settled average, one from the first message on takes {of_first:.2f}, "
        f"the scaler {of_scaler:.2f} and {of_both:.2f}"
    )
    assert of_first < MOST_SETTLED and max(of_scaler, of_both) < MOST_EWMAS


@pytest.mark.parametrize("time_constant", [SETTLED, NEVER])
@pytest.mark.parametrize("kinds", ["EWMA", "scaler"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_slower_than_sigproc_on_numpy(benchmark, shape, kinds, time_constant):
    ours, theirs = {
        "EWMA": (EWMATransformer, sigproc_ewma.EWMATransformer),
        "scaler": (AdaptiveStandardScalerTransformer, sigproc_scaler.AdaptiveStandardScalerTransformer),
    }[kinds]
    data = np.random.default_rng(0).standard_normal(shape, np.float32)
    call = warmed_up(ours, time_constant, message(mx.array(data)))
    benchmark(call)
    (of_theirs,) = ratios(call, warmed_up(theirs, time_constant, message(data)), n_samples=shape[0])
    print(f"\n{kinds} {shape}, {time_constant} s: {of_theirs:.1f} times as fast as ezmsg-sigproc on NumPy")
    assert of_theirs > 1.0
