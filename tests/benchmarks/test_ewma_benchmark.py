"""EWMA on MLX's CPU device against ezmsg-sigproc's on NumPy and against a bare copy.

pytest tests/benchmarks/test_ewma_benchmark.py --benchmark-enable -s
"""

import ezmsg.sigproc.ewma as sigproc
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.timing import seconds_in_turns

from ezmsg.mlx import EWMATransformer

mx = pytest.importorskip("mlx.core")

TIME_CONSTANT = 0.01

AIM = 20
"""Times the speed of ezmsg-sigproc's. Not reached on the machines that this was run on: 8 to 14."""

REACHED = 6
"""Less than that on any machine is a step back."""


def message(data: np.ndarray | mx.array) -> AxisArray:
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="about MLX's CPU backend")
@pytest.mark.parametrize(("n_samples", "most_copies"), [(300, 10), (9000, 4)])
def test_ewma_is_near_the_speed_of_a_copy(benchmark, n_samples, most_copies):
    data = np.random.default_rng(0).standard_normal((n_samples, 256), np.float32)
    ours, theirs = EWMATransformer(time_constant=TIME_CONSTANT), sigproc.EWMATransformer(time_constant=TIME_CONSTANT)
    ours_given, theirs_given = message(mx.array(data)), message(data)
    # Past the bias correction, which takes 17 time constants.
    for _ in range(max(1, 6000 // n_samples) + 2):
        ours(ours_given), theirs(theirs_given)
    benchmark(ours, ours_given)
    n = 20 if n_samples == 300 else 2
    our_time, their_time, copy_time = seconds_in_turns(
        lambda: ours(ours_given), lambda: theirs(theirs_given), data.copy, n=n, repeats=40
    )
    faster, copies = their_time / our_time, our_time / copy_time
    print(f"\nEWMA {n_samples} x 256: {our_time * 1e6:.0f} us, {faster:.1f} times as fast, {copies:.1f} bare copies")
    assert copies < most_copies
    assert faster >= REACHED
    if faster < AIM:
        pytest.xfail(f"{faster:.1f} times as fast; the aim is {AIM}, of which copies and calls alone leave half")
