"""z-scores on Metal, in one launch a message: see ``sources/zscore.metal``."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from ...scan import chunked_scan
from ..layout import buffer_length, decays_and_gains, time_back, time_first
from .kernel import SAMPLES, SIMDGROUP, THREADS, TILE, Launch, launch_of, metal_kernel, threadgroups

DECAYS = 2
"""Where the table has what is left of a weight after 0 to :data:`TILE` samples."""

SHARES = DECAYS + TILE + 1
"""Where it has the share of sample 1 to :data:`SAMPLES` of a strip in the weight of the strip so far."""

RESTS = SHARES + SAMPLES
"""Where it has the share of those before."""

GAINS = RESTS + SAMPLES
"""Where it has what a weight has gained of what it lacked, after 0 to :data:`TILE` samples."""

BLOCK = 6
"""Strips that are linked before their blocks are: about the square root of the most of them."""

BLOCKS = THREADS // BLOCK + SIMDGROUP
"""Room for the blocks of a threadgroup, the last of which may be shorter."""


@functools.lru_cache(maxsize=64)
def _table(alpha: float) -> mx.array:
    """The table of *alpha* for the kernel, rounded to float32 from float64; uploaded once."""
    beta = 1.0 - alpha
    decays, gains = decays_and_gains(alpha, TILE)
    shares = alpha / gains[1 : SAMPLES + 1]
    rests = beta * gains[:SAMPLES] / gains[1 : SAMPLES + 1]
    return mx.array(np.concatenate([[alpha, beta], decays, shares, rests, gains]).astype(np.float32))


@functools.lru_cache(maxsize=256)
def _launch(alpha: float, n_samples: int, n_channels: int) -> Launch:
    places = {"DECAYS": DECAYS, "SHARES": SHARES, "RESTS": RESTS, "GAINS": GAINS}
    kernel = metal_kernel("zscore", SAMPLES=SAMPLES, THREADS=THREADS, BLOCK=BLOCK, BLOCKS=BLOCKS, **places)
    shapes = [(buffer_length(n_samples), n_channels), (6, n_channels)]
    return launch_of(kernel, _table(alpha), shapes, threadgroups(n_samples, n_channels))


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Metal compiles one kernel for all messages."""
    _compile_ahead(n_channels)


@functools.lru_cache(maxsize=64)
def _compile_ahead(n_channels: int) -> None:
    mx.eval(run(mx.zeros((8, n_channels)), 0.5, mx.zeros((6, n_channels)), 0, ()))


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy. Nothing is compiled for a size."""
    n_samples, sizes = x.shape[axis], (buffer_length(x.shape[axis]),)
    flat, state = time_first(x, axis), time_first(zi, axis)
    launch = _launch(alpha, n_samples, flat.shape[1])
    y, zf = chunked_scan(flat, n_samples, sizes, state, launch, axis=0, pad=False)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis)
