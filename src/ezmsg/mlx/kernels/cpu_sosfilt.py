"""Second-order sections on MLX's CPU device: numba over a view of the MLX array, all of it in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numba
import numpy as np
import numpy.typing as npt

from .layout import LARGEST_SAMPLE, from_pairs, half_a_page_on, to_pairs

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
def _load(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(source.size):
        # NaN stays in the state, so the loops need not look at every sample; what was one is seen at the end.
        target[i] = source[i] if np.abs(source[i]) <= LARGEST_SAMPLE else np.nan


@_compiled
def _store(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(source.size):
        target[i] = source[i]


@_compiled
def _time_first(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """*x* and *y* (outer, time, channel), *z* (outer, section, 2, channel)."""
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
                    _load(x[outer, start + n, first:last], block[n])
                _sections(block, z[outer], first, sos)
                for n in range(n_samples):
                    _store(block[n], y[outer, start + n, first:last])


@_compiled
def _time_last(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """*x* and *y* (channel, time), *z* (section, 2, channel)."""
    buffer = np.empty(BLOCK)
    length = BLOCK // COLUMN
    for first in range(0, x.shape[0], COLUMN):
        n_channels = min(COLUMN, x.shape[0] - first)
        for start in range(0, x.shape[1], length):
            n_samples = min(length, x.shape[1] - start)
            block = buffer[: n_samples * n_channels].reshape(n_samples, n_channels)
            for channel in range(n_channels):
                _load(x[first + channel, start : start + n_samples], block[:, channel])
            _sections(block, z, first, sos)
            for channel in range(n_channels):
                _store(block[:, channel], y[first + channel, start : start + n_samples])


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
    samples = samples.reshape(outer, n_samples, inner)
    # Computed beside MLX and then copied: see ezmsg.mlx.kernels.cpu.
    y = half_a_page_on(samples.size).reshape(samples.shape)
    # (outer, section, 2, inner)
    before = from_pairs(np.asarray(zi).reshape(len(sos), outer, 4, inner), axis=2).swapaxes(0, 1)
    if inner == 1:
        z = before[..., 0].transpose(1, 2, 0).copy()
        _time_last(samples[..., 0], y[..., 0], z, sos)
        z = z.transpose(2, 0, 1)[..., None]
    else:
        z = before.copy()
        _time_first(samples, y, z, sos)
    for i, channel in np.argwhere(~np.isfinite(z).all(axis=(1, 2))):
        alone = before[i, :, :, channel].copy()
        _hold(samples[i, :, channel], y[i, :, channel], alone, sos)
        z[i, :, :, channel] = alone
    zf = to_pairs(z.swapaxes(0, 1), axis=2)
    return mx.array(y.reshape(shape)), mx.array(zf.reshape(zi.shape))
