"""Kernels for Metal: those of ezmsg-sigproc, which its maintainers test there."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

MAX_TIME_CONSTANT_ERROR = 1e-3
"""Relative change of the time constant that the kernel's float32 coefficients may cause (1 s at 30 kHz: 9e-4)."""


def snapped(alpha: float) -> float:
    """The *alpha* nearest to the given one for which ``alpha + float32(1 - alpha)`` is exactly 1.

    The kernel holds ``1 - alpha`` in float32. With the plain *alpha* its two coefficients would not sum to 1, and
    a constant would come out as another one.
    """
    return 1.0 - float(np.float32(1.0 - alpha))


def supports(alpha: float) -> bool:
    """Whether float32 coefficients keep the time constant within :data:`MAX_TIME_CONSTANT_ERROR`.

    Rounding moves ``1 - alpha`` by up to 2**-25. An *alpha* so small that it might is refused even where it happens
    to be hit exactly (280 s at 30 kHz): the state, too, has no more than float32, and would stand still.
    """
    return alpha * MAX_TIME_CONSTANT_ERROR >= 2.0**-25


def ewma(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.ewma.ewma`. Lazy; only for an *alpha* that :func:`supports` accepts."""
    from ezmsg.sigproc.util.ewma_mlx_metal import ewma_mlx_metal

    high, low = mx.split(zi, 2, axis=axis)
    state = high + low
    finite = mx.isfinite(x)
    # The kernel cannot skip a sample; the average as it was before the message leaves its own nearly alone.
    average = state * (1.0 / (1.0 - alpha) if alpha < 1.0 else 0.0)
    samples = mx.where(finite, x, average)
    y, zf = ewma_mlx_metal(
        mx.moveaxis(samples, axis, -1), snapped(alpha), mx.moveaxis(state, axis, -1), chunk_sizes=chunk_sizes
    )
    zf = mx.moveaxis(zf, -1, axis)
    y = mx.where(finite, mx.moveaxis(y, -1, axis), x)
    return y, mx.concatenate([zf, mx.zeros_like(zf)], axis=axis)
