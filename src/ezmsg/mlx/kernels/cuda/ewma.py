"""Kernels for CUDA, through ``mx.fast.cuda_kernel``: data time first, blocks along time and channels.

A block takes a tile of samples and up to 32 channels. Each thread has consecutive samples of one channel, in registers
or, of a longer message, in shared memory. It runs the recurrence over them from a zero state, and learns from the
threads before it what the true state was; the first thread of a channel learns it from the tiles before, as
:mod:`ezmsg.mlx.kernels.cuda.kernel` says. Whatever the length, each sample is read and written once.

Computed on the deviation from the average before the message, in float32; the state, and what links the tiles, in
float64 (a few operations a tile and channel).
"""

from __future__ import annotations

import functools
import itertools

import mlx.core as mx
import numpy as np

from ...scan import chunked_scan
from ..layout import buffer_length, decays_and_gains, time_back, time_first
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

SHORT_SAMPLES = 32
"""Samples of one thread in a message that is one block along time."""

SHORT_THREADS = 16
"""Threads of a block along time for such a message."""

SHORT_TILE = SHORT_THREADS * SHORT_SAMPLES
"""Samples of the largest such message."""

GAINS = 4 + max(SHORT_SAMPLES, SAMPLES) + 1
"""Where the table has what a weight has gained of what it lacked, after 0 samples of a thread or more."""


@functools.lru_cache(maxsize=64)
def _table(alpha: float) -> mx.array:
    """*alpha* and ``beta ** TILE`` as float32 pairs, ``beta ** k`` for k samples, and 1 less that; uploaded once."""

    def pair(value: float) -> list[float]:
        high = float(np.float32(value))
        return [high, value - high]

    decays, gains = decays_and_gains(alpha, TILE)
    most = max(SHORT_SAMPLES, SAMPLES) + 1
    return mx.array(np.array([*pair(alpha), *pair(decays[TILE]), *decays[:most], *gains[:most]], np.float32))


@functools.lru_cache(maxsize=256)
def _launch(alpha: float, n_samples: int, n_channels: int, n_states: int) -> Launch:
    size = buffer_length(n_samples)
    shapes = [(size, n_channels), (n_states, n_channels)]
    of_state = {"WEIGHTED": int(n_states == 4), "GAINS": GAINS}
    if n_samples <= SHORT_TILE:
        lanes = min(LANES, 1 << (n_channels - 1).bit_length())
        grid = (-(-n_channels // lanes) * lanes, SHORT_THREADS, 1)
        kernel = cuda_kernel(
            "ewma_short", LANES=lanes, SAMPLES=SHORT_SAMPLES, THREADS=SHORT_THREADS, TILE=SHORT_TILE, **of_state
        )
        of_message = {"grid": grid, "threadgroup": (lanes, SHORT_THREADS, 1)}
        return launch_of(kernel, _table(alpha), shapes, of_message)
    # For as many samples as the buffer has, of which there are fewer lengths.
    published = nothing_published(-(-size // TILE), n_states // 2, n_channels)
    kernel = cuda_kernel("ewma_long", LONG_INPUTS, LANES=LANES, SAMPLES=SAMPLES, THREADS=THREADS, TILE=TILE, **of_state)
    return launch_of(kernel, _table(alpha), shapes, blocks(n_samples, n_channels), published)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Takes seconds in each process."""
    _compile_ahead(min(n_channels, LANES))


@functools.cache
def _compile_ahead(n_channels: int) -> None:
    for n_samples, n_states in itertools.product((1, SHORT_TILE + 1), (2, 4)):
        mx.eval(run(mx.zeros((n_samples, n_channels)), 0.5, mx.zeros((n_states, n_channels)), 0, ()))


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy, and compiled for all sizes at once."""
    n_samples, sizes = x.shape[axis], (buffer_length(x.shape[axis]),)
    if axis == 0 and x.ndim == 2:
        launch = _launch(alpha, n_samples, x.shape[1], zi.shape[0])
        return chunked_scan(x, n_samples, sizes, zi, launch, axis=0, pad=False)
    flat = time_first(x, axis)
    launch = _launch(alpha, n_samples, flat.shape[1], zi.shape[axis])
    y, zf = chunked_scan(flat, n_samples, sizes, time_first(zi, axis), launch, axis=0, pad=False)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis)
