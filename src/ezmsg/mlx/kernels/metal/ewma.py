"""Kernels for Metal: those of ezmsg-sigproc, which its maintainers test there, each launch from a state of zero."""

from __future__ import annotations

import mlx.core as mx

from ..plain.ewma import ewma_by

MAX_CHUNK_SIZE = 512
"""Most samples that the kernel averages in one go. It rounds 1 - alpha and all its powers to float32: over 1024 samples
that is 1.4e-5 of the largest value, over 512 half of it. With the whole state handed on from chunk to chunk, a constant
would be 1e-4 off at a time constant of 0.5 s at 30 kHz. (Emulated in float32, without Metal.)"""


def _scan(deviation: mx.array, alpha: float, axis: int) -> mx.array:
    from ezmsg.sigproc.util.ewma_mlx_metal import ewma_mlx_metal

    time_last = mx.moveaxis(deviation, axis, -1)
    zero = mx.zeros((*time_last.shape[:-1], 1))
    average, _ = ewma_mlx_metal(time_last, alpha, zero, chunk_sizes=(time_last.shape[-1],))
    return mx.moveaxis(average, -1, axis)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""
    sizes = tuple(min(size, MAX_CHUNK_SIZE) for size in chunk_sizes)
    return ewma_by(_scan, x, alpha, zi, axis, sizes)
