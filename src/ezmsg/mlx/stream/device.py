"""Which device MLX uses, and which backend that device belongs to: asked in one place."""

from __future__ import annotations

from typing import Literal, TypeAlias

GPU: TypeAlias = Literal["cuda", "metal"]
"""The backends of MLX that compute on a GPU."""

Backend: TypeAlias = Literal["cpu", "cuda", "metal"]
"""All backends of MLX."""


def gpu_backend() -> GPU | None:
    """The GPU backend of the installed MLX that has a device on this machine; None without one."""
    import mlx.core as mx

    if mx.cuda.is_available():
        return "cuda"
    return "metal" if mx.metal.is_available() else None


def uses_gpu() -> bool:
    """Whether MLX's default device is a GPU, at the time of the call: a GPU build may run on its CPU device."""
    import mlx.core as mx

    return mx.default_device().type == mx.gpu


def has_gpu_allocator() -> bool:
    """Whether MLX's buffer cache is that of a GPU's allocator, which lets one buffer through past the limit."""
    return gpu_backend() is not None
