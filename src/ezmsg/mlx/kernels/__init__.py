"""Kernels of recurrences, sorted by backend and recurrence, and the one place where one of them is chosen."""

from __future__ import annotations

import functools
import importlib
import os
from typing import cast, get_args

from ..stream.device import gpu_backend, uses_gpu
from .contract import Kernel, Path, Recurrence

__all__ = ["Kernel", "Path", "Recurrence", "check_kernel_path", "default_path", "kernel", "use_plain_kernels"]


VARIABLE = "EZMSG_MLX_KERNELS"
"""Environment variable that chooses kernels by hand: ``plain`` has all that is computed by plain MLX operations."""

PROVED: tuple[Path, ...] = ("metal", "cuda")
"""Paths whose kernels have to prove themselves on the machine: those that its driver compiles."""


@functools.cache
def _chosen_by_hand() -> Path | None:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "plain"):
        raise ValueError(f"{VARIABLE} must be 'plain' or not set, got {value!r}")
    return "plain" if value else None


def use_plain_kernels(plain: bool = True) -> None:
    """Choose plain MLX operations for all that is computed from now on, or with False the kernels of the device again.

    For this process and those that it starts: what is set is the environment variable ``EZMSG_MLX_KERNELS``. To be
    called before a stream starts, since what a running one has compiled stays as it is.

    Example:
        >>> from ezmsg.mlx.kernels import default_path, use_plain_kernels
        >>> use_plain_kernels()
        >>> default_path()
        'plain'
        >>> use_plain_kernels(False)
    """
    if plain:
        os.environ[VARIABLE] = "plain"
    else:
        os.environ.pop(VARIABLE, None)
    _chosen_by_hand.cache_clear()


def default_path() -> Path:
    """The path for MLX's default device, as it is now: a GPU build may run on its CPU device.

    ``"plain"`` after :func:`use_plain_kernels`, or where the environment variable ``EZMSG_MLX_KERNELS`` has that value.

    Raises:
        ValueError: The variable has another value.
    """
    return _chosen_by_hand() or ((gpu_backend() or "plain") if uses_gpu() else "cpu")


def check_kernel_path(path: str | None) -> None:
    """Check an argument that names kernels.

    Raises:
        ValueError: *path* is neither None nor a :data:`~ezmsg.mlx.kernels.contract.Path`.
    """
    if path is not None and path not in get_args(Path):
        raise ValueError(f"'path' must be one of {', '.join(get_args(Path))} or None, got {path!r}")


@functools.cache
def kernel(recurrence: Recurrence, path: Path) -> Kernel:
    """The kernel of *recurrence* on *path*, or in plain operations where that backend has none of its own.

    Imported at its first use, since it compiles or needs MLX. On the device that it is made for, a kernel for a GPU
    first has to prove itself (:mod:`ezmsg.mlx.kernels.proof`): where it does not, plain operations take its place.
    Elsewhere, where only a *path* given by hand leads to it, it is taken as it is.
    """
    name = f"{__name__}.{path}.{recurrence}"
    try:
        found = cast("Kernel", importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name != name or path == "plain":
            raise
        return kernel(recurrence, "plain")
    if path in PROVED and path == gpu_backend() and uses_gpu():
        from .proof import holds

        if not holds(recurrence, path, found):
            return kernel(recurrence, "plain")
    return found
