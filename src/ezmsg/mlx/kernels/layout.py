"""What kernels share: data time first with flat channels, float32 pairs, memory that is quick to copy from.

A pair is a value as float32 and what that rounding lost, some 48 bits together. An array of pairs has the first
halves of all values along an axis, then the second halves.
"""

from __future__ import annotations

import math
import threading

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


_PAGE = 4096

KEPT_FLOATS = 1 << 18
"""Float32 values that :func:`scratch` keeps memory for, in each thread (1 MiB): a message of 1024 samples of 256
channels. Memory that is still in the processor's cache saves a tenth of the time of a short message."""

_kept = threading.local()


def scratch(size: int) -> npt.NDArray[np.float32]:
    """Memory for *size* float32 to compute in and copy from, before the next call in this thread."""
    if size > KEPT_FLOATS:
        return _half_a_page_on(size)
    try:
        return _kept.memory[:size]
    except AttributeError:
        _kept.memory = _half_a_page_on(KEPT_FLOATS)
        return _kept.memory[:size]


def _half_a_page_on(size: int) -> npt.NDArray[np.float32]:
    """Memory that begins half a page into a page.

    Large buffers of MLX and numpy begin 24 and 16 bytes into one. A copy between such neighbours is ten times slower
    on AMD Zen, where glibc's memcpy takes `rep movsb` and the target lies just above the source in its page.
    """
    memory = np.empty(size + _PAGE // 4, np.float32)
    start = (_PAGE // 2 - memory.__array_interface__["data"][0]) % _PAGE // 4
    return memory[start : start + size]


def to_pairs(values: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float32]:
    """*values* as pairs, in twice the length along *axis*."""
    high = values.astype(np.float32)
    return np.concatenate([high, (values - high).astype(np.float32)], axis=axis)
