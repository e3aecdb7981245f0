"""What holds for z-scores in particular, whichever kernels compute them.

Each case takes the name of a path of :func:`ezmsg.mlx.scaler.zscore`. What holds for every recurrence is in
:mod:`helpers.recurrence_cases`.
"""

import mlx.core as mx
import numpy as np

from .recurrences import FS, ZSCORE, Cases, alpha_of, check_close, noise

OWN_CASES = Cases()

FIRST = {
    "a glitch of 1e7": (1e7, 1.0),
    "a glitch of -3e17": (-3e17, 1.0),
    "5 V over 5 uV": (5.0, 5e-6),
    "a glitch of 1e7 over 1e-3": (1e7, 1e-3),
    "zero": (0.0, 1.0),
}
"""A first sample, and the standard deviation of those after it."""


@OWN_CASES.add(first=FIRST)
def first_sample_is_forgotten_after_15_time_constants(path: str, first: str) -> None:
    value, deviation = FIRST[first]
    for time_constant, offset in ((0.0005, 0.0), (0.0005, 100.0), (0.005, 100.0)):
        n = int(15 * time_constant * FS)
        x = noise(2 * n, 2) * np.float32(deviation) + np.float32(offset * deviation)
        x[0] = value
        alpha = alpha_of(time_constant)
        expected, _ = ZSCORE.reference(x, alpha)
        y, _ = ZSCORE.in_pieces(mx.array(x), [1, 17, n // 2], alpha, None, path)
        check_close(y[n:], expected[n:], peak=1.0, name=(time_constant, offset))


@OWN_CASES.add()
def small_deviation_on_a_large_offset_is_found(path: str) -> None:
    # Of the data as float32 has them: 1e6 are 0.06 apart from the next.
    x = noise(3000, 3) * np.float32([0.01, 0.1, 1.0]) + np.float32([1e4, 1e6, -1e6])
    expected, _ = ZSCORE.reference(x, alpha_of(0.05))
    y, _ = ZSCORE.in_pieces(mx.array(x), [1, 300, 1500], alpha_of(0.05), None, path)
    check_close(y, expected)


@OWN_CASES.add(value=[0.0, 0.1, -1234.567, 3e7, 1e-20, 1e18])
def channel_that_does_not_vary_gives_zeros(path: str, value: float) -> None:
    for time_constant in (0.001, 300.0):
        y, zf = ZSCORE.in_pieces(mx.full((1500, 2), value), [1, 300, 33], alpha_of(time_constant), None, path)
        assert not y.any()
        mean, var, _ = ZSCORE.state_of(zf)
        np.testing.assert_array_equal(mean, np.full((1, 2), np.float32(value))[0])
        assert not var.any()


@OWN_CASES.add(value=[777.7, -3e5, 0.0])
def channel_that_comes_to_rest_ends_at_zero(path: str, value: float) -> None:
    x = np.concatenate([noise(600, 2), np.full((4500, 2), value, np.float32)])
    y, _ = ZSCORE.in_pieces(mx.array(x), [600, *[300] * 10], alpha_of(0.001), None, path)
    assert not y[-300:].any()
