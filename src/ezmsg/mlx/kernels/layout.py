"""What kernels share: data time first with flat channels, and float32 pairs.

A pair is a value as float32 and what that rounding lost, some 48 bits together. An array of pairs has the first
halves of all values along an axis, then the second halves.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

LARGEST_SAMPLE = 1e30
"""Largest magnitude of a sample that a cascade of sections takes: what it may gain inside one must fit in float32,
also in that of a state (a low-pass of 0.5 Hz at 30 kHz: 1e8)."""


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
    """*values* as pairs, in twice the length along *axis*."""
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
