"""Medians over the channels of each sample, on MLX's CPU device.

A selection by counting: from the least and the largest value on, the range that holds the median is halved by counting
how many values lie below. No value is moved and no branch depends on one, so the processor counts many at a time; a
partition, which swaps values, takes several times as long.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .compiled import compiled

Samples = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_compiled = compiled()

_LEAST, _LARGEST = np.int32(-(2**31)), np.int32(2**31 - 1)

# The bits of infinity, above which those of NaN are.
_INFINITY = np.int32(0x7F800000)

# After so many halvings the ends of the range move to values that are there: many of them may be equal.
_HALVINGS = 6

# After so many it is halved by bits, which ends after 32 whatever the values are.
_HALVINGS_OF_VALUES = 24


@_compiled
def _ordered(bits: np.int32) -> np.int32:
    """The bits of a float32 as an integer that is in the order of the values; and back."""
    return bits ^ ((bits >> 31) & _LARGEST)


@_compiled
def _n_up_to(keys: npt.NDArray[np.int32], n: int, bound: np.int32) -> np.int32:
    count = np.int32(0)
    for j in range(n):
        count += keys[j] <= bound
    return count


@_compiled
def _last_up_to(keys: npt.NDArray[np.int32], n: int, bound: np.int32) -> np.int32:
    last = _LEAST
    for j in range(n):
        last = max(last, keys[j] if keys[j] <= bound else _LEAST)
    return last


@_compiled
def _first_above(keys: npt.NDArray[np.int32], n: int, bound: np.int32) -> np.int32:
    first = _LARGEST
    for j in range(n):
        first = min(first, keys[j] if keys[j] > bound else _LARGEST)
    return first


@_compiled
def _median(keys: npt.NDArray[np.int32], n: int, bits: npt.NDArray[np.int32]) -> np.float32:
    """The median of the first *n* ordered *keys*; *bits* is room for two."""
    values = bits.view(np.float32)
    low, high = _LARGEST, _LEAST
    for j in range(n):
        low, high = min(low, keys[j]), max(high, keys[j])
    if high > _INFINITY or low < _ordered(_INFINITY | _LEAST):
        return np.float32(np.nan)
    rank = (n - 1) // 2
    n_halvings = 0
    while low < high:
        # The value of this rank is one from low to high.
        bits[0], bits[1] = _ordered(low), _ordered(high)
        values[0] = np.float32(0.5) * values[0] + np.float32(0.5) * values[1]
        middle = _ordered(bits[0])
        if middle < low or middle >= high or n_halvings >= _HALVINGS_OF_VALUES:
            middle = np.int32((np.int64(low) + np.int64(high)) >> 1)
        count = _n_up_to(keys, n, middle)
        n_halvings += 1
        if count == rank + 1:
            low = high = _last_up_to(keys, n, middle)
        elif count == rank:
            low = high = _first_above(keys, n, middle)
        elif count > rank:
            high = middle if n_halvings < _HALVINGS else _last_up_to(keys, n, middle)
        else:
            low = middle + np.int32(1) if n_halvings < _HALVINGS else _first_above(keys, n, middle)
    bits[0] = bits[1] = _ordered(low)
    if n % 2 == 0 and _n_up_to(keys, n, low) == rank + 1:
        bits[1] = _ordered(_first_above(keys, n, low))
    return (values[0] + values[1]) * np.float32(0.5) if n % 2 == 0 else values[0]


@_compiled
def check_groups(x: Samples, y: Samples, members: Indices, ends: Indices, gains: Samples) -> None:
    """Raise IndexError unless the arguments of :func:`subtract_medians` belong together."""
    n_channels, begin = x.shape[1], 0
    if y.shape[0] != x.shape[0] or y.shape[1] != n_channels or gains.size < ends.size:
        raise IndexError("x, y, ends and gains do not belong together.")
    for group in range(ends.size):
        if ends[group] < begin or ends[group] > members.size or ends[group] - begin > n_channels:
            raise IndexError("ends are not those of groups of members.")
        begin = ends[group]
    for k in range(members.size):
        if members[k] < 0 or members[k] >= n_channels:
            raise IndexError("members has a channel that x does not have.")


@_compiled
def subtract_medians(x: Samples, y: Samples, members: Indices, ends: Indices, gains: Samples) -> None:
    """Subtract from the channels of each group their median, sample by sample.

    A group with a value that is NaN becomes NaN.

    Args:
        x: Samples, shape (n_samples, n_channels).
        y: The result, of the same shape; may be *x*. Channels of no group are those of *x*.
        members: The channels of all groups, one group after the other; no channel twice.
        ends: Where in *members* each group ends.
        gains: By what the differences of each group are multiplied.

    Raises:
        IndexError: *y*, *ends* or *gains* do not fit the others, or *members* are not channels of *x*.
    """
    n_samples, n_channels = x.shape
    check_groups(x, y, members, ends, gains)
    keys = np.empty(n_channels, np.int32)
    values, bits = keys.view(np.float32), np.empty(2, np.int32)
    is_one = ends.size == 1 and ends[0] == n_channels
    for i in range(n_samples):
        if is_one:
            # Without a look-up for each channel.
            for j in range(n_channels):
                values[j] = x[i, j]
            for j in range(n_channels):
                keys[j] = _ordered(keys[j])
            median = _median(keys, n_channels, bits)
            for j in range(n_channels):
                y[i, j] = (x[i, j] - median) * gains[0]
            continue
        for j in range(n_channels):
            y[i, j] = x[i, j]
        start = 0
        for group in range(ends.size):
            n = ends[group] - start
            for j in range(n):
                values[j] = y[i, members[start + j]]
            for j in range(n):
                keys[j] = _ordered(keys[j])
            median = _median(keys, n, bits)
            for j in range(n):
                y[i, members[start + j]] = (y[i, members[start + j]] - median) * gains[group]
            start = ends[group]


@functools.cache
def compile_ahead() -> None:
    """Compiled once on a machine, and loaded in each process."""
    x = np.zeros((1, 2), np.float32)
    subtract_medians(x, x.copy(), np.arange(2), np.array([2]), np.ones(1, np.float32))
