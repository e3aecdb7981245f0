"""Filters without feedback on MLX's CPU device: numba over a view of the MLX array, sums in float64."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .compiled import compiled

Samples = npt.NDArray[np.float32]
Taps = npt.NDArray[np.float64]

_compiled = compiled(fastmath={"contract"})


@_compiled
def filter_rows(x: Samples, taps: Taps, y: Samples) -> None:
    """Filter along the first axis with each of several filters.

    Args:
        x: Samples, (n_taps - 1 + n, n_channels), the ones of before first.
        taps: (n_filters, n_taps).
        y: The results, (n_filters, n, n_channels).
    """
    n_channels, n_taps = y.shape[2], taps.shape[1]
    in_fours = n_taps - n_taps % 4
    sums = np.empty(n_channels)
    for k in range(y.shape[0]):
        for n in range(y.shape[1]):
            newest = n + n_taps - 1
            for channel in range(n_channels):
                sums[channel] = 0.0
            for j in range(0, in_fours, 4):
                a, b, c, d = taps[k, j], taps[k, j + 1], taps[k, j + 2], taps[k, j + 3]
                x0, x1, x2, x3 = x[newest - j], x[newest - j - 1], x[newest - j - 2], x[newest - j - 3]
                for channel in range(n_channels):
                    sums[channel] += (a * x0[channel] + b * x1[channel]) + (c * x2[channel] + d * x3[channel])
            for j in range(in_fours, n_taps):
                a, x0 = taps[k, j], x[newest - j]
                for channel in range(n_channels):
                    sums[channel] += a * x0[channel]
            for channel in range(n_channels):
                y[k, n, channel] = sums[channel]


@functools.cache
def compile_ahead() -> None:
    """Compiled once on a machine, and loaded in each process."""
    filter_rows(np.zeros((1, 1), np.float32), np.zeros((1, 1)), np.zeros((1, 1, 1), np.float32))
