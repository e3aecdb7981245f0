"""Kernels of recurrences, sorted by backend and recurrence, and the one place where one of them is chosen."""

from __future__ import annotations

import functools
import importlib
from typing import cast, get_args

from ..stream.device import gpu_backend, uses_gpu
from .contract import Kernel, Path, Recurrence

__all__ = ["Kernel", "Path", "Recurrence", "check_path", "default_path", "kernel"]


def default_path() -> Path:
    """The path for MLX's default device, as it is now: a GPU build may run on its CPU device."""
    return (gpu_backend() or "plain") if uses_gpu() else "cpu"


def check_path(path: str | None) -> None:
    """Check an argument that names kernels.

    Raises:
        ValueError: *path* is neither None nor a :data:`~ezmsg.mlx.kernels.contract.Path`.
    """
    if path is not None and path not in get_args(Path):
        raise ValueError(f"path is {path!r}; allowed are {', '.join(get_args(Path))} and None.")


@functools.cache
def kernel(recurrence: Recurrence, path: Path) -> Kernel:
    """The kernel of *recurrence* on *path*, or in plain operations where that backend has none of its own.

    Imported at its first use, since it compiles or needs MLX.
    """
    name = f"{__name__}.{path}.{recurrence}"
    try:
        return cast("Kernel", importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    return kernel(recurrence, "plain")
