"""Kernels for MLX's CPU device: numba over a view of the MLX array, state in float64."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np

from .compiled import compiled
from .memory import Samples, computed

_compiled = compiled()


# The samples are in *x* or, if *in_place* is not None, in *y*: numba compiles either by itself, since a loop over two
# arrays that may be the same one takes twice as long.


@_compiled
def _time_first(x: np.ndarray, y: np.ndarray, in_place: bool | None, z: np.ndarray, alpha: float) -> None:
    if in_place is None:
        samples = x
    else:
        samples = y
    beta = 1.0 - alpha
    for outer in range(y.shape[0]):
        for channel in range(y.shape[2]):
            z[outer, channel] += alpha * np.float64(samples[outer, 0, channel])
            y[outer, 0, channel] = z[outer, channel]
        # From here on *z* is the average itself: the same operations, but two thirds of the time.
        for n in range(1, y.shape[1]):
            for channel in range(y.shape[2]):
                average = alpha * np.float64(samples[outer, n, channel]) + beta * z[outer, channel]
                z[outer, channel] = average
                y[outer, n, channel] = average
        for channel in range(y.shape[2]):
            z[outer, channel] *= beta


@_compiled
def _time_last(x: np.ndarray, y: np.ndarray, in_place: bool | None, z: np.ndarray, alpha: float) -> None:
    if in_place is None:
        samples = x
    else:
        samples = y
    # Four channels at a time: the recurrence of one waits for its own last result, that of another does not.
    beta = 1.0 - alpha
    in_fours = y.shape[0] - y.shape[0] % 4
    for a in range(0, in_fours, 4):
        b, c, d = a + 1, a + 2, a + 3
        za, zb, zc, zd = z[a, 0], z[b, 0], z[c, 0], z[d, 0]
        for n in range(y.shape[1]):
            ya = alpha * np.float64(samples[a, n, 0]) + za
            yb = alpha * np.float64(samples[b, n, 0]) + zb
            yc = alpha * np.float64(samples[c, n, 0]) + zc
            yd = alpha * np.float64(samples[d, n, 0]) + zd
            za, zb, zc, zd = beta * ya, beta * yb, beta * yc, beta * yd
            y[a, n, 0], y[b, n, 0], y[c, n, 0], y[d, n, 0] = ya, yb, yc, yd
        z[a, 0], z[b, 0], z[c, 0], z[d, 0] = za, zb, zc, zd
    _time_first(x[in_fours:], y[in_fours:], in_place, z[in_fours:], alpha)


@_compiled
def _hold(x: np.ndarray, y: np.ndarray, state: float, alpha: float) -> float:
    """One channel in which a sample that is not finite leaves the state alone."""
    for n in range(x.size):
        if np.isfinite(x[n]):
            average = alpha * np.float64(x[n]) + state
            state = (1.0 - alpha) * average
            y[n] = average
        else:
            y[n] = x[n]
    return state


@_compiled
def _ewma(x: np.ndarray, y: np.ndarray, in_place: bool | None, zi: np.ndarray, zf: np.ndarray, alpha: float) -> None:
    before = zi[:, 0, :].astype(np.float64) + zi[:, 1, :]
    z = before.copy()
    if y.shape[2] == 1:
        _time_last(x, y, in_place, z, alpha)
    else:
        _time_first(x, y, in_place, z, alpha)
    for outer in range(y.shape[0]):
        for channel in range(y.shape[2]):
            state = z[outer, channel]
            if not np.isfinite(state):
                # Such a sample stays in the recurrence, so the loops above need not look at every one.
                state = _hold(x[outer, :, channel], y[outer, :, channel], before[outer, channel], alpha)
            zf[outer, 0, channel] = state
            zf[outer, 1, channel] = state - np.float64(zf[outer, 0, channel])


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Compiled once on a machine, and loaded in each process."""
    _compile_ahead()


@functools.cache
def _compile_ahead() -> None:
    x, z = np.zeros((1, 1, 2), np.float32), np.zeros((1, 2, 2), np.float32)
    for in_place in (None, True):
        _ewma(x, x.copy(), in_place, z, z.copy(), 0.5)


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Evaluates *x*; *chunk_sizes* do not matter here."""
    shape = x.shape
    flat = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    samples = np.asarray(x)
    if not samples.flags.c_contiguous:
        samples = np.ascontiguousarray(samples)
    samples = samples.reshape(flat)
    zf = np.empty((flat[0], 2, flat[2]), np.float32)

    def run(source: Samples, target: Samples) -> None:
        in_place = True if source is target else None
        _ewma(samples, target, in_place, np.asarray(zi).reshape(zf.shape), zf, alpha)

    return computed(samples, shape, run), mx.array(zf.reshape(zi.shape))
