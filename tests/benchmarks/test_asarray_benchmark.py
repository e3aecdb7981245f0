"""AsArray against ezmsg-sigproc's, and what the guard costs: `pytest tests/benchmarks --benchmark-enable -s`."""

import ezmsg.sigproc.asarray as sigproc
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.timing import seconds_in_turns

from ezmsg.mlx import AsArrayTransformer, apply_cache_limit

mx = pytest.importorskip("mlx.core")


def message() -> AxisArray:
    data = np.random.default_rng(0).standard_normal((300, 256), np.float32)
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})


def test_asarray_is_as_fast_as_that_of_sigproc(benchmark):
    given, ours, theirs = message(), AsArrayTransformer(backend="mlx"), sigproc.AsArrayTransformer(backend="mlx")
    theirs(given), ours(given)
    benchmark(ours, given)
    our_time, their_time = seconds_in_turns(lambda: ours(given), lambda: theirs(given), repeats=200)
    print(f"\nAsArray 300 x 256: {our_time * 1e6:.1f} us, {our_time / their_time:.3f} of ezmsg-sigproc's time")
    assert our_time <= 1.05 * their_time


def test_guard_takes_under_a_microsecond(benchmark):
    node = AsArrayTransformer(backend="mlx")
    apply_cache_limit(node, 512.0)
    benchmark(apply_cache_limit, node, 512.0)
    guard, look_up = seconds_in_turns(lambda: apply_cache_limit(node, 512.0), lambda: None, n=1000)
    print(f"\nguard: {(guard - look_up) * 1e9:.0f} ns")
    assert guard - look_up < 1e-6
