"""Kernels of plain MLX operations, for any device: a scan in log2(chunk size) steps inside each chunk."""

from __future__ import annotations

import mlx.core as mx

from ..scan import chunked_scan


def _two_sum(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """``a + b`` as a float32 pair, exactly (Knuth, The Art of Computer Programming, vol. 2, 4.2.2)."""
    total = a + b
    from_b = total - a
    return total, (a - (total - from_b)) + (b - from_b)


def split_state(zi: mx.array, alpha: float, axis: int) -> tuple[mx.array, mx.array]:
    """The average as a float32 pair, from the state ``zi = (1 - alpha) * average`` as one."""
    high, low = mx.split(zi, 2, axis=axis)
    # average = zi + zi * alpha / (1 - alpha): the small term alone is rounded to float32, not the whole.
    ratio = alpha / (1.0 - alpha) if alpha < 1.0 else 0.0
    return _two_sum(high, low + ratio * high + ratio * low)


def join_state(average: tuple[mx.array, mx.array], alpha: float, axis: int) -> mx.array:
    """The inverse of :func:`split_state`."""
    high, low = average
    return mx.concatenate(_two_sum(high, low - alpha * high - alpha * low), axis=axis)


def ewma(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.ewma.ewma`. Lazy.

    Computed on the deviation from the average at the start of the chunk, which keeps a constant constant and
    needs no more of ``1 - alpha`` than float32 has.
    """
    lead = (slice(None),) * axis

    def launch(
        chunk: mx.array, average: tuple[mx.array, mx.array], size: int, valid_length: mx.array
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        high, low = average
        deviation = (chunk - high) - low
        # Not isfinite(chunk): near the ends of float32 a difference or a sum of finite samples overflows, and the
        # average would never come back from that.
        finite = mx.abs(deviation) <= 1e38
        deviation = alpha * mx.where(finite, deviation, 0.0)
        step = 1
        while step < size:
            earlier = (1.0 - alpha) ** step * deviation[(*lead, slice(size - step))]
            deviation = mx.concatenate(
                [deviation[(*lead, slice(step))], deviation[(*lead, slice(step, size))] + earlier], axis=axis
            )
            step *= 2
        y = mx.where(finite, high + (low + deviation), chunk)
        last = mx.take(deviation, valid_length - 1, axis=axis)
        return y, _two_sum(high, low + last)

    y, average = chunked_scan(x, x.shape[axis], chunk_sizes, split_state(zi, alpha, axis), launch, axis=axis)
    return y, join_state(average, alpha, axis)
