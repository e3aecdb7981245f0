"""Parts that kernels share: data time first with flat channels, float32 pairs, and tables of weights.

A pair is a value as float32 and what that rounding lost, some 48 bits together.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

LARGEST_SAMPLE = float(np.float32(1e30))
"""Largest magnitude of a sample that averages and cascades of sections take, this one included: what it may gain inside
a section must fit in float32, also in that of a state (a low-pass of 0.5 Hz at 30 kHz: 1e8)."""

LARGEST_SCORED = float(np.float32(1e18))
"""The same for z-scores: the square of twice as much must fit in float32."""

SMALLEST_VARIANCE = 2.0**-120
"""Variance up to which a channel counts as constant: below it the squares that it is made of, and the second halves of
pairs, begin to fall out of float32 (2**-126, and some GPUs round what is smaller to 0). A deviation of 1e-18."""

RESOLUTION = 2.0**-32
"""Standard deviation, relative to the mean, up to which a channel counts as constant. Data in float32 that is not
constant varies by 2**-24 of itself at once; what is far below that is rounding, in a channel that has come to rest."""


def time_first(x: mx.array, axis: int, lead: int = 0) -> mx.array:
    """*x* with *axis* moved behind the first *lead* axes and all others made one, the last."""
    moved = mx.moveaxis(x, axis, lead) if axis != lead else x
    return moved.reshape(*moved.shape[: lead + 1], math.prod(moved.shape[lead + 1 :]))


def time_back(flat: mx.array, shape: tuple[int, ...], axis: int, lead: int = 0) -> mx.array:
    """The inverse of :func:`time_first`, for *x* of *shape*."""
    others = shape[:axis] + shape[axis + 1 :]
    moved = flat.reshape(*others[:lead], shape[axis], *others[lead:])
    return mx.moveaxis(moved, lead, axis) if axis != lead else moved


def two_sum(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """``a + b`` as a float32 pair, exactly (Knuth, The Art of Computer Programming, vol. 2, 4.2.2)."""
    total = a + b
    from_b = total - a
    return total, (a - (total - from_b)) + (b - from_b)


def to_pairs(values: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float32]:
    """*values* as pairs, in twice the length along *axis*: the first halves of all, then the second halves."""
    high = values.astype(np.float32)
    return np.concatenate([high, (values - high).astype(np.float32)], axis=axis)


EXACT_LENGTH = 512
"""Samples up to which a buffer has just the length of its message."""


def buffer_length(n_samples: int) -> int:
    """The length in samples of the buffer for the results of *n_samples*: eight lengths an octave, rounded up.

    Not exact lengths, so that rare messages share few size classes of MLX's cache; at most an eighth is left unused,
    and unwritten. The few short lengths are exact, which saves the short, steady message the cut.
    """
    if n_samples <= EXACT_LENGTH:
        return n_samples
    step = 1 << (n_samples - 1).bit_length() - 4
    return -(-n_samples // step) * step


def decays_and_gains(alpha: float, n: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """``(1 - alpha)**k`` for k from 0 to *n*, and 1 minus that, in which nothing cancels."""
    if alpha == 1.0:
        gains = np.minimum(np.arange(n + 1.0), 1.0)
        return 1.0 - gains, gains
    exponents = np.arange(n + 1) * math.log1p(-alpha)
    return np.exp(exponents), -np.expm1(exponents)
