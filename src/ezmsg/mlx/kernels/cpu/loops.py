"""Loops over NumPy arrays that give what MLX gives on its CPU device, up to the rounding of the compiler.

MLX adds float32 up in order, where NumPy adds in pairs, and so do they. Sums of many rows or columns go side by
side, so that none waits for its own last addition.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from .compiled import compiled
from .median import check_groups

_ROWS = 8


@functools.cache
def compile_ahead() -> None:
    """Compile all loops for the data that fused stages have. Once on a machine; loaded in each process."""
    x = np.ones((_ROWS + 1, 2), np.float32)
    subtract_row_means(x, np.float32(0.5))
    bin_means(x, np.array([1, 2]), np.empty((2, 2), np.float32))
    logarithm(x.reshape(-1), np.float32(1.0), np.float32(1.0))
    subtract_means(x, x, np.arange(2), np.array([2]), np.ones(1, np.float32))


@compiled()
def subtract_row_means(x: npt.NDArray[np.float32], share: np.float32) -> None:
    """Subtract from each row of *x* its sum times *share*, in place."""
    n_rows, n_columns = x.shape
    in_blocks = n_rows - n_rows % _ROWS
    total = np.zeros(_ROWS, np.float32)
    for start in range(0, in_blocks, _ROWS):
        a = b = c = d = e = f = g = h = np.float32(0.0)
        for j in range(n_columns):
            a += x[start, j]
            b += x[start + 1, j]
            c += x[start + 2, j]
            d += x[start + 3, j]
            e += x[start + 4, j]
            f += x[start + 5, j]
            g += x[start + 6, j]
            h += x[start + 7, j]
        total[0], total[1], total[2], total[3] = a, b, c, d
        total[4], total[5], total[6], total[7] = e, f, g, h
        for k in range(_ROWS):
            mean = total[k] * share
            for j in range(n_columns):
                x[start + k, j] -= mean
    for i in range(in_blocks, n_rows):
        a = np.float32(0.0)
        for j in range(n_columns):
            a += x[i, j]
        mean = a * share
        for j in range(n_columns):
            x[i, j] -= mean


@compiled()
def subtract_means(
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    members: npt.NDArray[np.intp],
    ends: npt.NDArray[np.intp],
    gains: npt.NDArray[np.float32],
) -> None:
    """As :func:`ezmsg.mlx.kernels.cpu.median.subtract_medians`, of means."""
    check_groups(x, y, members, ends, gains)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j]
        start = 0
        for group in range(ends.size):
            total = 0.0
            for k in range(start, ends[group]):
                total += y[i, members[k]]
            mean = np.float32(total / (ends[group] - start)) if ends[group] > start else np.float32(0.0)
            for k in range(start, ends[group]):
                y[i, members[k]] = (y[i, members[k]] - mean) * gains[group]
            start = ends[group]


@compiled()
def bin_means(x: npt.NDArray[np.float32], ends: npt.NDArray[np.int64], y: npt.NDArray[np.float32]) -> None:
    """The mean over the rows of *x* up to each of *ends*, from the one before, into the rows of *y*."""
    start = 0
    if y.shape[0] < ends.size or y.shape[1] != x.shape[1] or (ends.size > 0 and ends[-1] > x.shape[0]):
        raise IndexError("ends are not those of bins of x.")
    for k in range(ends.size):
        for j in range(x.shape[1]):
            y[k, j] = np.float32(0.0)
        for i in range(start, ends[k]):
            for j in range(x.shape[1]):
                y[k, j] += x[i, j]
        share = np.float32(1.0 / (ends[k] - start)) if ends[k] > start else np.float32(np.nan)
        for j in range(x.shape[1]):
            y[k, j] *= share
        start = ends[k]


@compiled()
def logarithm(x: npt.NDArray[np.float32], least: np.float32, divisor: np.float32) -> None:
    """``log(max(x, least)) / divisor``, in place; NaN stays, and *least* of minus infinity changes nothing."""
    for i in range(x.size):
        value = x[i]
        if value < least:
            value = least
        x[i] = math.log(value) / divisor
