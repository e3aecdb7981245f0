"""Moving averages on MLX's CPU device: numba over a view of the MLX array, state in float64."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np

from ...stream.hostmemory import used_again
from ..layout import LARGEST_SAMPLE
from .compiled import Samples, common_weight, compiled, computed, flattened, get_pairs, pair_at, put_pair, tables

_LARGEST = np.float32(LARGEST_SAMPLE)
_NOTHING = np.float32(np.nan)

_compiled = compiled(fastmath={"contract"})

# The samples are in *x* or, if *in_place*, in *y*, which is another array. *scale* is what the average after each
# sample is multiplied by (1 of a plain one, which costs less than a second compilation). A sample that is not taken
# becomes NaN, which stays in the recurrence: the loops need not look for it, and what was one is seen at the end.


@_compiled
def _time_first(x: np.ndarray, y: np.ndarray, in_place: bool, z: np.ndarray, scale: np.ndarray, alpha: float) -> None:
    beta = 1.0 - alpha
    for outer in range(y.shape[0]):
        # From the first sample on *z* is the average itself: the same operations, but two thirds of the time.
        before = 1.0
        for n in range(y.shape[1]):
            of_row = scale[n]
            if in_place:
                # In two, since a loop over two arrays that may be the same one takes twice as long.
                for channel in range(y.shape[2]):
                    sample = y[outer, n, channel]
                    taken = sample if np.abs(sample) <= _LARGEST else _NOTHING
                    z[outer, channel] = alpha * np.float64(taken) + before * z[outer, channel]
                for channel in range(y.shape[2]):
                    y[outer, n, channel] = z[outer, channel] * of_row
            else:
                for channel in range(y.shape[2]):
                    sample = x[outer, n, channel]
                    taken = sample if np.abs(sample) <= _LARGEST else _NOTHING
                    average = alpha * np.float64(taken) + before * z[outer, channel]
                    z[outer, channel] = average
                    y[outer, n, channel] = average * of_row
            before = beta
        for channel in range(y.shape[2]):
            z[outer, channel] *= beta


@_compiled
def _time_last(x: np.ndarray, y: np.ndarray, in_place: bool, z: np.ndarray, scale: np.ndarray, alpha: float) -> int:
    """All but the last few channels; how many."""
    # Four channels at a time: the recurrence of one waits for its own last result, that of another does not.
    beta = 1.0 - alpha
    samples = y if in_place else x
    taken = np.empty(4, np.float32)
    in_fours = y.shape[0] - y.shape[0] % 4
    for a in range(0, in_fours, 4):
        b, c, d = a + 1, a + 2, a + 3
        za, zb, zc, zd = z[a, 0], z[b, 0], z[c, 0], z[d, 0]
        for n in range(y.shape[1]):
            for i in range(4):
                sample = samples[a + i, n, 0]
                taken[i] = sample if np.abs(sample) <= _LARGEST else _NOTHING
            ya = alpha * np.float64(taken[0]) + za
            yb = alpha * np.float64(taken[1]) + zb
            yc = alpha * np.float64(taken[2]) + zc
            yd = alpha * np.float64(taken[3]) + zd
            za, zb, zc, zd = beta * ya, beta * yb, beta * yc, beta * yd
            y[a, n, 0], y[b, n, 0], y[c, n, 0], y[d, n, 0] = ya * scale[n], yb * scale[n], yc * scale[n], yd * scale[n]
        z[a, 0], z[b, 0], z[c, 0], z[d, 0] = za, zb, zc, zd
    return in_fours


@_compiled
def _each_weight(x: np.ndarray, y: np.ndarray, z: np.ndarray, w: np.ndarray, alpha: float) -> None:
    """Of channels that have not all taken as many samples; *x* and *y* may be one array."""
    beta = 1.0 - alpha
    for outer in range(y.shape[0]):
        for n in range(y.shape[1]):
            for channel in range(y.shape[2]):
                sample = x[outer, n, channel]
                taken = sample if np.abs(sample) <= _LARGEST else _NOTHING
                average = alpha * np.float64(taken) + z[outer, channel]
                z[outer, channel] = beta * average
                w[outer, channel] += alpha * (1.0 - w[outer, channel])
                y[outer, n, channel] = average / w[outer, channel]


@_compiled
def _hold(x: np.ndarray, y: np.ndarray, state: float, weight: float, alpha: float) -> tuple[float, float]:
    """One channel in which a sample that is not taken leaves the state alone; with a *weight* of -1, without one."""
    for n in range(x.size):
        if np.abs(x[n]) <= _LARGEST:
            average = alpha * np.float64(x[n]) + state
            state = (1.0 - alpha) * average
            if weight >= 0.0:
                weight += alpha * (1.0 - weight)
                average /= weight
            y[n] = average
        else:
            y[n] = x[n]
    return state, weight


@_compiled
def _ewma(x: np.ndarray, y: np.ndarray, in_place: bool, zi: np.ndarray, zf: np.ndarray, alpha: float) -> None:
    weighted = zi.shape[1] == 4
    # Two arrays rather than rows of one, with which loops take twice as long.
    z = np.empty((y.shape[0], y.shape[2]))
    w = np.empty((y.shape[0], y.shape[2]))
    scale = np.ones(y.shape[1])
    get_pairs(zi[:, :2], z)
    common = last = 0.0
    if weighted:
        get_pairs(zi[:, 2:], w)
        common = common_weight(w)
        last = tables(common, alpha, scale, scale[:0], scale[:0])
    if common < 0.0:
        _each_weight(x, y, z, w, alpha)
    else:
        done = _time_last(x, y, in_place, z, scale, alpha) if y.shape[2] == 1 else 0
        _time_first(x[done:], y[done:], in_place, z[done:], scale, alpha)
    for outer in range(y.shape[0]):
        for channel in range(y.shape[2]):
            state, weight = z[outer, channel], w[outer, channel] if common < 0.0 else last
            if not np.isfinite(state):
                state = pair_at(zi, outer, 0, channel)
                weight = pair_at(zi, outer, 2, channel) if weighted else -1.0
                state, weight = _hold(x[outer, :, channel], y[outer, :, channel], state, weight, alpha)
            put_pair(state, zf, outer, 0, channel)
            if weighted:
                put_pair(weight, zf, outer, 2, channel)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Compiled once on a machine, and loaded in each process."""
    _compile_ahead()


@functools.cache
def _compile_ahead() -> None:
    x, z = np.zeros((1, 1, 2), np.float32), np.zeros((1, 2, 2), np.float32)
    _ewma(x, x.copy(), False, z, z.copy(), 0.5)


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Evaluates *x*; *chunk_sizes* do not matter here."""
    shape = x.shape
    flat = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    samples = np.asarray(x)
    if not samples.flags.c_contiguous:
        samples = np.ascontiguousarray(samples)
    samples = samples.reshape(flat)
    zf = np.empty((flat[0], zi.shape[axis], flat[2]), np.float32)
    states = np.ascontiguousarray(zi).reshape(zf.shape)

    def run(source: Samples, target: Samples) -> None:
        _ewma(samples, target, source is target, states, zf, alpha)

    return computed(samples, shape, run), mx.array(zf.reshape(zi.shape))


def run_numpy(
    x: Samples, alpha: float, zi: Samples, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[Samples, Samples]:
    """As :func:`run`, of NumPy's arrays."""
    y, zf = used_again(x.shape, np.float32), np.empty(zi.shape, np.float32)
    samples, results, before, after = flattened((x, y, zi, zf), axis)
    _ewma(samples, results, False, before, after, alpha)
    return y, zf
