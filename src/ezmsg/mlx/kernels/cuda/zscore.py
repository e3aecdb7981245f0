"""z-scores on CUDA, in the same blocks as averages (:mod:`ezmsg.mlx.kernels.cuda.ewma`).

Each thread goes over its samples twice, from registers or shared memory: for their own moments, and, once it knows
the state before them, for their scores. Sample by sample that is float32, with the mean as a pair; what links threads
and tiles is float64, a few operations each. So each sample is read and written once.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from ...scan import chunked_scan
from ..layout import buffer_length, decays_and_gains, time_back, time_first
from .ewma import SHORT_SAMPLES, SHORT_THREADS, SHORT_TILE
from .kernel import (
    LANES,
    LONG_INPUTS,
    SAMPLES,
    THREADS,
    TILE,
    Launch,
    blocks,
    cuda_kernel,
    launch_of,
    nothing_published,
)


@functools.lru_cache(maxsize=128)
def _table(alpha: float, n: int) -> mx.array:
    """*alpha*, what is left of a weight after 0 to *n* samples, and what they weigh: float64, uploaded once."""
    return mx.array(np.concatenate([[alpha], *decays_and_gains(alpha, n)]).view(np.int64))


@functools.lru_cache(maxsize=256)
def _launch(alpha: float, n_samples: int, n_channels: int) -> Launch:
    size = buffer_length(n_samples)
    shapes = [(size, n_channels), (6, n_channels)]
    if n_samples <= SHORT_TILE:
        lanes = min(LANES, 1 << (n_channels - 1).bit_length())
        grid = (-(-n_channels // lanes) * lanes, SHORT_THREADS, 1)
        kernel = cuda_kernel("zscore_short", LANES=lanes, SAMPLES=SHORT_SAMPLES, THREADS=SHORT_THREADS, TILE=SHORT_TILE)
        of_message = {"grid": grid, "threadgroup": (lanes, SHORT_THREADS, 1)}
        return launch_of(kernel, _table(alpha, SHORT_TILE), shapes, of_message)
    # For as many samples as the buffer has, of which there are fewer lengths.
    published = nothing_published(-(-size // TILE), 3, n_channels)
    kernel = cuda_kernel("zscore_long", LONG_INPUTS, LANES=LANES, SAMPLES=SAMPLES, THREADS=THREADS, TILE=TILE)
    return launch_of(kernel, _table(alpha, TILE), shapes, blocks(n_samples, n_channels), published)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Takes seconds in each process."""
    _compile_ahead(min(n_channels, LANES))


@functools.cache
def _compile_ahead(n_channels: int) -> None:
    for n_samples in (1, SHORT_TILE + 1):
        mx.eval(run(mx.zeros((n_samples, n_channels)), 0.5, mx.zeros((6, n_channels)), 0, ()))


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy, and compiled for all sizes at once."""
    n_samples, sizes = x.shape[axis], (buffer_length(x.shape[axis]),)
    if axis == 0 and x.ndim == 2:
        launch = _launch(alpha, n_samples, x.shape[1])
        return chunked_scan(x, n_samples, sizes, zi, launch, axis=0, pad=False)
    flat, state = time_first(x, axis), time_first(zi, axis)
    launch = _launch(alpha, n_samples, flat.shape[1])
    y, zf = chunked_scan(flat, n_samples, sizes, state, launch, axis=0, pad=False)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis)
