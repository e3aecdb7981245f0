"""Moving averages on Metal, in one launch a message: see ``sources/ewma.metal``."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from ...scan import chunked_scan
from ..layout import buffer_length, decays_and_gains, time_back, time_first
from .kernel import SAMPLES, THREADS, TILE, Launch, launch_of, metal_kernel, threadgroups

DECAYS = 4
"""Where the table has what is left of a state after 0 to :data:`SAMPLES` samples."""

GAINS = DECAYS + SAMPLES + 1
"""Where it has what a weight has gained of what it lacked, after 0 to :data:`TILE` samples."""


@functools.lru_cache(maxsize=64)
def _table(alpha: float) -> mx.array:
    """The table of *alpha* for the kernel, rounded to float32 from float64; uploaded once."""
    beta = 1.0 - alpha
    decays, gains = decays_and_gains(alpha, TILE)
    front = [alpha, beta, alpha / beta, 1.0 / beta] if alpha <= 0.5 else [alpha, beta, 0.0, 0.0]
    return mx.array(np.concatenate([front, decays[: SAMPLES + 1], gains]).astype(np.float32))


@functools.lru_cache(maxsize=256)
def _launch(alpha: float, n_samples: int, n_channels: int, n_states: int) -> Launch:
    shapes = [(buffer_length(n_samples), n_channels), (n_states, n_channels)]
    kernel = metal_kernel("ewma", SAMPLES=SAMPLES, THREADS=THREADS, DECAYS=DECAYS, GAINS=GAINS)
    return launch_of(kernel, _table(alpha), shapes, threadgroups(n_samples, n_channels))


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Metal compiles one kernel for all messages."""
    _compile_ahead(n_channels)


@functools.lru_cache(maxsize=64)
def _compile_ahead(n_channels: int) -> None:
    mx.eval(run(mx.zeros((8, n_channels)), 0.5, mx.zeros((4, n_channels)), 0, ()))


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy. Nothing is compiled for a size."""
    n_samples, sizes = x.shape[axis], (buffer_length(x.shape[axis]),)
    flat, state = time_first(x, axis), time_first(zi, axis)
    launch = _launch(alpha, n_samples, flat.shape[1], state.shape[0])
    y, zf = chunked_scan(flat, n_samples, sizes, state, launch, axis=0, pad=False)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis)
