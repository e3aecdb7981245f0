"""Second-order sections on MLX's CPU device: numba over a view of the MLX array, all of it in float64."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...stream.hostmemory import used_again
from ..layout import LARGEST_SAMPLE
from .compiled import Samples, compiled, computed, flattened

BLOCK = 4096
"""Samples that go through all sections together: 32 KiB of float64, which the caches next to the core hold."""

ROW = 1024
"""Channels of a block where time is first. Whole rows of the data, so that memory is read as it comes."""

COLUMN = 60
"""The same where time is last: 68 samples of each channel. No power of two, with which the samples of a channel would
share a few sets of the cache."""

_LARGEST = np.float32(LARGEST_SAMPLE)

# A multiplication and an addition may be one instruction; what else fastmath allows would break NaN.
_compiled = compiled(fastmath={"contract"})


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
        target[i] = source[i] if np.abs(source[i]) <= _LARGEST else np.nan


@_compiled
def _store(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(source.size):
        target[i] = source[i]


@_compiled
def _get_state(pairs: np.ndarray, z: np.ndarray) -> None:
    """Of one channel, from (section, 4) to (section, 2)."""
    for section in range(z.shape[0]):
        for i in range(2):
            z[section, i] = np.float64(pairs[section, i]) + pairs[section, i + 2]


@_compiled
def _is_finite(z: np.ndarray) -> bool:
    # Not np.isfinite(z).all(), which takes a second to compile.
    for section in range(z.shape[0]):
        if not (np.isfinite(z[section, 0]) and np.isfinite(z[section, 1])):
            return False
    return True


@_compiled
def _put_state(z: np.ndarray, pairs: np.ndarray) -> None:
    for section in range(z.shape[0]):
        for i in range(2):
            pairs[section, i] = z[section, i]
            pairs[section, i + 2] = z[section, i] - np.float64(pairs[section, i])


@_compiled
def _hold(x: np.ndarray, y: np.ndarray, z: np.ndarray, sos: np.ndarray) -> None:
    """One channel in which samples that are not finite, or too large, come out as they are and leave *z* alone."""
    for n in range(x.size):
        value = np.float64(x[n])
        if np.abs(value) <= _LARGEST:
            for section in range(sos.shape[0]):
                result = sos[section, 0] * value + z[section, 0]
                z[section, 0] = (sos[section, 1] * value + z[section, 1]) - sos[section, 4] * result
                z[section, 1] = sos[section, 2] * value - sos[section, 5] * result
                value = result
        y[n] = value


@_compiled
def _filter(
    given: np.ndarray, x: np.ndarray, y: np.ndarray, zi: np.ndarray, zf: np.ndarray, sos: np.ndarray, width: int
) -> None:
    """Filter (outer, time, channel) from *x* to *y*, which may be the same array; *given* is what was in *x* at first.

    *zi* and *zf* are (section, outer, 4, channel), pairs of float32. With one channel all of *outer* go together.
    """
    buffer = np.empty(BLOCK)
    length = BLOCK // width
    rows = x.shape[2] > 1
    n_outer, n_channels = (x.shape[0], x.shape[2]) if rows else (1, x.shape[0])
    z = np.empty((len(sos), 2, n_channels))
    for outer in range(n_outer):
        for channel in range(n_channels):
            i, j = (outer, channel) if rows else (channel, 0)
            _get_state(zi[:, i, :, j], z[:, :, channel])
        for start in range(0, x.shape[1], length):
            stop = min(start + length, x.shape[1])
            for first in range(0, n_channels, width):
                last = min(first + width, n_channels)
                block = buffer[: (stop - start) * (last - first)].reshape(stop - start, last - first)
                # In the order of memory.
                if rows:
                    for n in range(start, stop):
                        _load(x[outer, n, first:last], block[n - start])
                else:
                    for channel in range(first, last):
                        _load(x[channel, start:stop, 0], block[:, channel - first])
                _sections(block, z, first, sos)
                if rows:
                    for n in range(start, stop):
                        _store(block[n - start], y[outer, n, first:last])
                else:
                    for channel in range(first, last):
                        _store(block[:, channel - first], y[channel, start:stop, 0])
        for channel in range(n_channels):
            i, j = (outer, channel) if rows else (channel, 0)
            of_channel = z[:, :, channel]
            if not _is_finite(of_channel):
                _get_state(zi[:, i, :, j], of_channel)
                _hold(given[i, :, j], y[i, :, j], of_channel, sos)
            _put_state(of_channel, zf[:, i, :, j])


def filter_into(given: Samples, x: Samples, y: Samples, zi: Samples, zf: Samples, sos: npt.NDArray[np.float64]) -> None:
    """Filter from *x* to *y*, which may be the same array; *given* is what was in *x* at first.

    Args:
        given: Of shape (outer, time, inner), as *x* and *y*.
        x: What is read.
        y: What is written.
        zi: The state before, of shape (section, outer, 4, inner).
        zf: Written: the state after.
        sos: The sections.
    """
    outer, _, inner = x.shape
    _filter(given, x, y, zi, zf, sos, min(inner, ROW) if inner > 1 else min(outer, COLUMN))


def compile_ahead(coefficients: npt.NDArray[np.float64], n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Compiled once on a machine, and loaded in each process."""
    _compile_ahead()


@functools.cache
def _compile_ahead() -> None:
    sos = np.array([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    run(mx.zeros((1, 2)), sos, mx.zeros((1, 4, 2)), 0, ())


def run(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Evaluates *x*; *chunk_sizes* do not matter here."""
    outer, n_samples, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    samples = np.ascontiguousarray(x).reshape(outer, n_samples, inner)
    states = np.ascontiguousarray(zi).reshape(len(sos), outer, 4, inner)
    zf = np.empty_like(states)

    def run(source: Samples, target: Samples) -> None:
        filter_into(samples, source, target, states, zf, sos)

    return computed(samples, x.shape, run), mx.array(zf.reshape(zi.shape))


def run_numpy(
    x: Samples, sos: npt.NDArray[np.float64], zi: Samples, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[Samples, Samples]:
    """As :func:`run`, of NumPy's arrays."""
    y, zf = used_again(x.shape, np.float32), np.empty(zi.shape, np.float32)
    samples, results = flattened((x, y), axis)
    shape = (len(sos), samples.shape[0], 4, samples.shape[2])
    filter_into(samples, samples, results, np.ascontiguousarray(zi).reshape(shape), zf.reshape(shape), sos)
    return y, zf
