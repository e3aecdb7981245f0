"""Kernels of plain MLX operations, for any device: a scan in log2(chunk size) steps inside each chunk."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...scan import chunked_scan
from ..layout import two_sum


def split_state(zi: mx.array, alpha: float, axis: int) -> tuple[mx.array, mx.array]:
    """The average as a float32 pair, from the state ``zi = (1 - alpha) * average`` as one."""
    high, low = mx.split(zi, 2, axis=axis)
    # average = zi + zi * alpha / (1 - alpha): the small term alone is rounded to float32, not the whole.
    ratio = alpha / (1.0 - alpha) if alpha < 1.0 else 0.0
    return two_sum(high, low + ratio * high + ratio * low)


def join_state(average: tuple[mx.array, mx.array], alpha: float, axis: int) -> mx.array:
    """The inverse of :func:`split_state`."""
    high, low = average
    return mx.concatenate([*two_sum(high, low - alpha * high - alpha * low)], axis=axis)


def _scan(deviation: mx.array, alpha: float, axis: int) -> mx.array:
    """The moving average from zero along *axis*, in log2 steps (Hillis and Steele, Comm. ACM 29, 1170, 1986)."""
    lead = (slice(None),) * axis
    size = deviation.shape[axis]
    average = alpha * deviation
    step = 1
    while step < size:
        earlier = (1.0 - alpha) ** step * average[(*lead, slice(size - step))]
        average = mx.concatenate(
            [average[(*lead, slice(step))], average[(*lead, slice(step, size))] + earlier], axis=axis
        )
        step *= 2
    return average


def ewma_by(
    scan: Callable[[mx.array, float, int], mx.array],
    x: mx.array,
    alpha: float,
    zi: mx.array,
    axis: int,
    chunk_sizes: tuple[int, ...],
) -> tuple[mx.array, mx.array]:
    """The moving average, chunk by chunk, of the deviation from the average at the start of the chunk.

    That keeps a constant constant and needs no more of ``1 - alpha`` than float32 has.

    Args:
        scan: ``scan(deviation, alpha, axis)`` gives the moving average of a chunk from zero.
        x, alpha, zi, axis, chunk_sizes: See :func:`ezmsg.mlx.ewma.ewma`.
    """

    def launch(
        chunk: mx.array, average: tuple[mx.array, mx.array], size: int, valid_length: mx.array
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        high, low = average
        deviation = (chunk - high) - low
        # Not isfinite(chunk): near the ends of float32 a difference or a sum of finite samples overflows, and the
        # average would never come back from that.
        finite = mx.abs(deviation) <= 1e38
        moved = scan(mx.where(finite, deviation, 0.0), alpha, axis)
        y = mx.where(finite, high + (low + moved), chunk)
        return y, two_sum(high, low + mx.take(moved, valid_length - 1, axis=axis))

    y, average = chunked_scan(x, x.shape[axis], chunk_sizes, split_state(zi, alpha, axis), launch, axis=axis)
    return y, join_state(average, alpha, axis)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""
    return ewma_by(_scan, x, alpha, zi, axis, chunk_sizes)
