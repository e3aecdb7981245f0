"""z-scores on MLX's CPU device: numba over a view of the MLX array, mean and variance in float64 and in one pass."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np

from ...stream.hostmemory import used_again
from ..layout import LARGEST_SCORED, RESOLUTION, SMALLEST_VARIANCE
from .compiled import Samples, common_weight, compiled, computed, flattened, get_pairs, pair_at, put_pair, tables

_LARGEST = np.float32(LARGEST_SCORED)
_NOTHING = np.float32(np.nan)
_RESOLUTION = np.float32(RESOLUTION)
_SMALLEST = np.float32(SMALLEST_VARIANCE)

BLOCK = 2048
"""Samples that are brought into the order of time first at a time, where they come time last: 8 KiB."""

COLUMN = 28
"""Channels of such a block: 73 samples of each. No power of two, with which the samples of a channel would share a few
sets of the cache."""

# A square root and a division in one approximate instruction and a step of Newton's: 1e-7 of the score, a third of the
# time. Not among the functions that see the state, which must keep NaN.
_approximate = compiled(fastmath={"contract", "arcp", "afn", "reassoc", "nsz"})

_compiled = compiled(fastmath={"contract"})


@_compiled
def _take(
    x: np.ndarray, mean: np.ndarray, var: np.ndarray, share: float, keep: float, row: tuple[np.ndarray, ...]
) -> None:
    """A sample of each channel into *mean* and *var*; to *row*, in float32, it, what it is off the mean, and *var*."""
    sample, off, var32 = row
    both = share * keep
    for channel in range(x.size):
        # NaN stays in the state, so the loops need not look for it; what was one is seen at the end.
        taken = x[channel] if np.abs(x[channel]) <= _LARGEST else _NOTHING
        delta = np.float64(taken) - mean[channel]
        after = keep * var[channel] + both * (delta * delta)
        mean[channel] += share * delta
        var[channel] = after
        sample[channel] = taken
        off[channel] = keep * delta
        var32[channel] = after


@_compiled
def _take_each(
    x: np.ndarray, mean: np.ndarray, var: np.ndarray, weight: np.ndarray, alpha: float, row: tuple[np.ndarray, ...]
) -> None:
    """The same where each channel has a weight of its own."""
    sample, off, var32 = row
    for channel in range(x.size):
        taken = x[channel] if np.abs(x[channel]) <= _LARGEST else _NOTHING
        delta = np.float64(taken) - mean[channel]
        before = weight[channel]
        after = before + alpha * (1.0 - before)
        share, keep = alpha / after, (1.0 - alpha) * before / after
        weight[channel] = after
        mean[channel] += share * delta
        var[channel] = keep * var[channel] + share * keep * (delta * delta)
        sample[channel] = taken
        off[channel] = keep * delta
        var32[channel] = var[channel]


@_approximate
def _score(row: tuple[np.ndarray, ...], y: np.ndarray) -> None:
    sample, off, var32 = row
    for channel in range(y.size):
        rounding = (sample[channel] - off[channel]) * _RESOLUTION
        varies = var32[channel] > max(rounding * rounding, _SMALLEST)
        y[channel] = off[channel] / np.sqrt(var32[channel]) if varies else np.float32(0.0)


@_compiled
def _rows(
    x: np.ndarray,
    y: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    weight: np.ndarray,
    common: float,
    share: np.ndarray,
    keep: np.ndarray,
    alpha: float,
) -> None:
    """Samples (time, channel); *x* and *y* may be one array. Without a *common* weight, each channel has its own."""
    sample = np.empty(x.shape[1], np.float32)
    off = np.empty(x.shape[1], np.float32)
    var32 = np.empty(x.shape[1], np.float32)
    row = (sample, off, var32)
    for n in range(x.shape[0]):
        if common >= 0.0:
            _take(x[n], mean, var, share[n], keep[n], row)
        else:
            _take_each(x[n], mean, var, weight, alpha, row)
        _score(row, y[n])


@_compiled
def _columns(
    x: np.ndarray,
    y: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    weight: np.ndarray,
    common: float,
    share: np.ndarray,
    keep: np.ndarray,
    alpha: float,
) -> None:
    """The same of samples (channel, time)."""
    width = min(x.shape[0], COLUMN)
    length = BLOCK // width
    buffer = np.empty(BLOCK, np.float32)
    for first in range(0, x.shape[0], width):
        last = min(first + width, x.shape[0])
        for start in range(0, x.shape[1], length):
            stop = min(start + length, x.shape[1])
            block = buffer[: (stop - start) * (last - first)].reshape(stop - start, last - first)
            for channel in range(first, last):
                for n in range(start, stop):
                    block[n - start, channel - first] = x[channel, n]
            tables_of_block = share[start:stop], keep[start:stop]
            _rows(block, block, mean[first:last], var[first:last], weight[first:last], common, *tables_of_block, alpha)
            for channel in range(first, last):
                for n in range(start, stop):
                    y[channel, n] = block[n - start, channel - first]


@_compiled
def _hold(
    x: np.ndarray, y: np.ndarray, mean: float, var: float, weight: float, alpha: float
) -> tuple[float, float, float]:
    """One channel in which samples that are not taken come out as they are and leave the state alone."""
    for n in range(x.size):
        y[n] = x[n]
        if np.abs(x[n]) <= _LARGEST:
            before, weight = weight, weight + alpha * (1.0 - weight)
            share, keep = alpha / weight, (1.0 - alpha) * before / weight
            delta = np.float64(x[n]) - mean
            mean += share * delta
            var = keep * var + share * keep * (delta * delta)
            rounding = RESOLUTION * mean
            y[n] = keep * delta / np.sqrt(var) if var > max(rounding * rounding, SMALLEST_VARIANCE) else 0.0
    return mean, var, weight


@_compiled
def _zscore(given: np.ndarray, x: np.ndarray, y: np.ndarray, zi: np.ndarray, zf: np.ndarray, alpha: float) -> None:
    """Scores of *x* in *y*.

    *x* and *y* are (outer, time, channel), and may be one array; *given* is what was in *x* at first; *zi* and *zf* are
    (outer, 6, channel).
    """
    n_outer, n_samples, n_channels = x.shape
    mean = np.empty((n_outer, n_channels))
    var = np.empty((n_outer, n_channels))
    weight = np.empty((n_outer, n_channels))
    share = np.empty(n_samples)
    keep = np.empty(n_samples)
    get_pairs(zi[:, :2], mean)
    get_pairs(zi[:, 2:4], var)
    get_pairs(zi[:, 4:], weight)
    common = common_weight(weight)
    last = tables(common, alpha, share[:0], share, keep) if common >= 0.0 else 0.0
    if n_channels == 1:
        # In one piece as numba sees it, so that what is compiled for rows serves here, too.
        samples, scores = x.reshape(n_outer, n_samples), y.reshape(n_outer, n_samples)
        of_each = mean.reshape(n_outer), var.reshape(n_outer), weight.reshape(n_outer)
        _columns(samples, scores, of_each[0], of_each[1], of_each[2], common, share, keep, alpha)
    else:
        for outer in range(n_outer):
            _rows(x[outer], y[outer], mean[outer], var[outer], weight[outer], common, share, keep, alpha)
    for outer in range(n_outer):
        for channel in range(n_channels):
            m, v = mean[outer, channel], var[outer, channel]
            w = last if common >= 0.0 else weight[outer, channel]
            if not np.isfinite(m):
                m, v, w = pair_at(zi, outer, 0, channel), pair_at(zi, outer, 2, channel), pair_at(zi, outer, 4, channel)
                m, v, w = _hold(given[outer, :, channel], y[outer, :, channel], m, v, w, alpha)
            put_pair(m, zf, outer, 0, channel)
            put_pair(v, zf, outer, 2, channel)
            put_pair(w, zf, outer, 4, channel)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Compiled once on a machine, and loaded in each process."""
    _compile_ahead()


@functools.cache
def _compile_ahead() -> None:
    x = np.zeros((1, 1, 2), np.float32)
    _zscore(x, x, x.copy(), np.zeros((1, 6, 2), np.float32), np.zeros((1, 6, 2), np.float32), 0.5)


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Evaluates *x*; *chunk_sizes* do not matter here."""
    shape = x.shape
    flat = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    samples = np.asarray(x)
    if not samples.flags.c_contiguous:
        samples = np.ascontiguousarray(samples)
    samples = samples.reshape(flat)
    states = np.ascontiguousarray(zi).reshape(flat[0], 6, flat[2])
    zf = np.empty_like(states)

    def run(source: Samples, target: Samples) -> None:
        _zscore(samples, source, target, states, zf, alpha)

    return computed(samples, shape, run), mx.array(zf.reshape(zi.shape))


def run_numpy(
    x: Samples, alpha: float, zi: Samples, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[Samples, Samples]:
    """As :func:`run`, of NumPy's arrays."""
    y, zf = used_again(x.shape, np.float32), np.empty(zi.shape, np.float32)
    samples, results, before, after = flattened((x, y, zi, zf), axis)
    _zscore(samples, samples, results, before, after, alpha)
    return y, zf
