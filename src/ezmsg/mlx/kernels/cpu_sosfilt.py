"""Second-order sections on MLX's CPU device: numba over a view of the MLX array, all of it in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numba
import numpy as np
import numpy.typing as npt

from .layout import LARGEST_SAMPLE, from_pairs, to_pairs

BLOCK = 4096
"""Samples that go through all sections together: 32 KiB of float64, which the caches next to the core hold."""

ROW = 1024
"""Channels of a block where time is first. Whole rows of the data, so that memory is read as it comes: with 256 of
1024 channels at a time it takes 1.5 times as long."""

COLUMN = 128
"""Channels of a block where time is last: 32 samples of each, two cache lines."""

# Fused multiplications and additions, in any order that this allows; not what else fastmath does to NaN.
_compiled = numba.njit(cache=True, error_model="numpy", nogil=True, fastmath={"contract"})


@_compiled
def _sections(block: np.ndarray, z: np.ndarray, first: int, sos: np.ndarray) -> None:
    """All sections over *block* (time, channel) in place; *z* (section, 2, channel) from channel *first* on."""
    last = first + block.shape[1]
    for section in range(sos.shape[0]):
        b0, b1, b2, a1, a2 = (sos[section, 0], sos[section, 1], sos[section, 2], sos[section, 4], sos[section, 5])
        z0, z1 = z[section, 0, first:last], z[section, 1, first:last]
        for n in range(block.shape[0]):
            row = block[n]
            for channel in range(row.size):
                x = row[channel]
                y = b0 * x + z0[channel]
                z0[channel] = (b1 * x + z1[channel]) - a1 * y
                z1[channel] = b2 * x - a2 * y
                row[channel] = y


@_compiled
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(source.size):
        target[i] = source[i]


@_compiled
def _time_first(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """*x* (outer, time, channel), *y* the same with longer rows, *z* (outer, section, 2, channel)."""
    buffer = np.empty(BLOCK)
    width = min(x.shape[2], ROW)
    length = BLOCK // width
    for outer in range(x.shape[0]):
        for start in range(0, x.shape[1], length):
            n_samples = min(length, x.shape[1] - start)
            for first in range(0, x.shape[2], width):
                last = min(first + width, x.shape[2])
                block = buffer[: n_samples * (last - first)].reshape(n_samples, last - first)
                for n in range(n_samples):
                    _copy(x[outer, start + n, first:last], block[n])
                _sections(block, z[outer], first, sos)
                for n in range(n_samples):
                    _copy(block[n], y[outer, start + n, first:last])


@_compiled
def _time_last(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """*x* (channel, time), *y* the same with longer rows, *z* (section, 2, channel)."""
    buffer = np.empty(BLOCK)
    length = BLOCK // COLUMN
    for first in range(0, x.shape[0], COLUMN):
        n_channels = min(COLUMN, x.shape[0] - first)
        for start in range(0, x.shape[1], length):
            n_samples = min(length, x.shape[1] - start)
            block = buffer[: n_samples * n_channels].reshape(n_samples, n_channels)
            for channel in range(n_channels):
                for n in range(n_samples):
                    block[n, channel] = x[first + channel, start + n]
            _sections(block, z, first, sos)
            for channel in range(n_channels):
                for n in range(n_samples):
                    y[first + channel, start + n] = block[n, channel]


@_compiled
def _hold(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """One channel in which samples that are not finite, or too large, come out as they are and leave *z* alone."""
    for n in range(x.size):
        value = np.float64(x[n])
        if np.abs(value) <= LARGEST_SAMPLE:
            for section in range(sos.shape[0]):
                result = sos[section, 0] * value + z[section, 0]
                z[section, 0] = (sos[section, 1] * value + z[section, 1]) - sos[section, 4] * result
                z[section, 1] = sos[section, 2] * value - sos[section, 5] * result
                value = result
        y[n] = value


def sosfilt(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.sosfilt.sosfilt`. Evaluates *x*; *chunk_sizes* do not matter here."""
    shape = x.shape
    outer, n_samples, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    samples = np.asarray(x)
    if not samples.flags.c_contiguous:
        samples = np.ascontiguousarray(samples)
    # (outer, section, 2, inner)
    before = from_pairs(np.asarray(zi).reshape(len(sos), outer, 4, inner), axis=2).swapaxes(0, 1)
    z = before.copy()
    # Computed beside MLX and then copied, with a gap after each row: see ezmsg.mlx.kernels.cpu.
    if inner == 1:
        samples = samples.reshape(outer, n_samples, 1)
        rows = np.empty((outer, n_samples + 1, 1), np.float32)
        channels_last = np.ascontiguousarray(z[..., 0].transpose(1, 2, 0))
        _time_last(samples[..., 0], rows[..., 0], channels_last, sos)
        z[..., 0] = channels_last.transpose(2, 0, 1)
    else:
        samples = samples.reshape(outer, n_samples, inner)
        rows = np.empty((outer, n_samples, inner + 1), np.float32)
        _time_first(samples, rows, z, sos)
    y = rows[:, :n_samples, :inner]
    # NaN and inf stay in the recurrence, so the loops above need not look at every sample.
    for i, channel in np.argwhere(~(np.abs(z) <= np.finfo(np.float32).max).all(axis=(1, 2))):
        z[i, :, :, channel] = before[i, :, :, channel]
        _hold(samples[i, :, channel], y[i, :, channel], z[i, :, :, channel], sos)
    zf = to_pairs(z.swapaxes(0, 1), axis=2)
    return mx.array(y.reshape(shape)), mx.array(zf.reshape(zi.shape))
