"""Stages of a chain on MLX, and what they are to give by NumPy and SciPy in float64.

A stage takes and gives a stream, time first, with a bound for the error in each channel. Samples that are not finite,
and those that float32 cannot hold, are part of it.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter, sosfilt, sosfilt_zi

from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE

LARGEST = float(np.finfo(np.float32).max)
TOLERANCE = 1e-5
"""Of the largest finite sample that a stage gets."""

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Stream:
    x: Array
    """Shape (time, channels)."""

    error: Array
    """Largest error in each channel, shape (channels,)."""

    @property
    def size(self) -> Array:
        """Largest finite magnitude in each channel."""
        return np.abs(np.where(np.isfinite(self.x), self.x, 0.0)).max(axis=0, initial=0.0)


def to_float32(x: npt.NDArray) -> Stream:
    """What conversion to float32 makes of *x*, time first."""
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(np.float64)
    return Stream(x, np.zeros(x.shape[1]))


def _rounded(x: Array, error: Array) -> Stream:
    """What is beyond float32 is infinite there."""
    return Stream(np.where(np.abs(x) > LARGEST, np.copysign(np.inf, x), x), error)


def _taken_only(x: Array, is_taken: npt.NDArray[np.bool_], function: Callable[[Array], Array]) -> Array:
    """*function* of the samples of each channel that are taken, as if there were no others; those stay as they are."""
    y = x.copy()
    for channel in range(x.shape[1]):
        rows = is_taken[:, channel]
        if rows.any():
            y[rows, channel] = function(x[rows, channel])
    return y


def average(stream: Stream, decay: float) -> Stream:
    def corrected(x: Array) -> Array:
        weights = -np.expm1(np.arange(1, len(x) + 1) * math.log(decay))
        return lfilter([1.0 - decay], [1.0, -decay], x) / weights

    y = _taken_only(stream.x, np.abs(stream.x) <= LARGEST_SAMPLE, corrected)
    return Stream(y, stream.error + TOLERANCE * stream.size)


def detrend(stream: Stream, decay: float) -> Stream:
    with np.errstate(invalid="ignore"):
        y = stream.x - average(stream, decay).x
    return _rounded(y, 2.0 * stream.error + 2.0 * TOLERANCE * stream.size)


def power(stream: Stream, exponent: float) -> Stream:
    with np.errstate(over="ignore", invalid="ignore"):
        y = stream.x**exponent
        slope = abs(exponent) * (stream.size + stream.error) ** (exponent - 1.0)
        return _rounded(y, stream.error * slope + 1e-6 * stream.size**exponent)


def sections(stream: Stream, sos: npt.NDArray) -> Stream:
    """A channel begins as if its first sample had been there for ever."""
    is_finite = np.abs(stream.x) <= LARGEST_SAMPLE
    y = stream.x.copy()
    for channel in range(y.shape[1]):
        rows = is_finite[:, channel]
        x = y[rows, channel]
        if not len(x):
            continue
        y[rows, channel], _ = sosfilt(sos, x, zi=sosfilt_zi(sos) * x[0])
    # What the filter can make of an error, the start from the first sample included.
    gain = np.abs(sosfilt(sos, np.eye(1, 4096)[0])).sum() + np.abs(sosfilt_zi(sos)).sum()
    return _rounded(y, gain * (stream.error + TOLERANCE * stream.size))


def check(y: npt.NDArray, expected: Stream) -> None:
    """That *y*, time first, is the stream, channel by channel.

    Where a finite value is within its error of the largest that float32 holds, infinite is right as well.
    """
    assert y.shape == expected.x.shape, (y.shape, expected.x.shape)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected.x))
    may_overflow = np.abs(np.abs(expected.x) - LARGEST) <= expected.error + 1e-6 * LARGEST
    is_inf = np.isinf(expected.x)
    np.testing.assert_array_equal(np.isinf(y) & ~may_overflow, is_inf & ~may_overflow)
    np.testing.assert_array_equal(y[is_inf & ~may_overflow], expected.x[is_inf & ~may_overflow])
    finite = np.isfinite(y) & np.isfinite(expected.x)
    y, x = np.where(finite, y, 0.0).astype(np.float64), np.where(finite, expected.x, 0.0)
    difference = np.abs(y - x)
    # A denormal is 0 to some devices.
    assert (difference <= expected.error + 1e-6 * np.abs(x) + 1e-37).all(), (
        f"off by {difference.max(axis=0)}, allowed {expected.error}"
    )
