"""Kernels of recurrences, sorted by backend and recurrence, and the one place where one of them is chosen."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, get_args, overload

import numpy as np
import numpy.typing as npt

from ..stream.device import default_backend
from ..stream.unit import check_one_of
from .contract import Kernel, Path, Recurrence, check_state, schedule_after, schedule_before

if TYPE_CHECKING:
    import mlx.core as mx

    Array: TypeAlias = mx.array | npt.NDArray

__all__ = [
    "Kernel",
    "Path",
    "Recurrence",
    "check_kernel_path",
    "default_path",
    "in_stream",
    "kernel",
    "recursion",
    "use_plain_kernels",
]

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
    if (by_hand := _chosen_by_hand()) is not None:
        return by_hand
    backend = default_backend()
    return "plain" if backend == "gpu" else backend


def check_kernel_path(path: str | None) -> None:
    """Check an argument that names kernels.

    Raises:
        ValueError: *path* is neither None nor a :data:`~ezmsg.mlx.kernels.contract.Path`.
    """
    check_one_of("path", path, get_args(Path), none=True)


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
    if path in PROVED and path == default_backend():
        from .proof import holds

        if not holds(recurrence, path, found):
            return kernel(recurrence, "plain")
    return found


KernelCoefficients: TypeAlias = float | npt.NDArray[np.float64]
"""``alpha`` of averages and z-scores, sections of filters."""


class Recursion(Protocol):
    """As :meth:`.Kernel.run`, for data and a state that are both MLX's or both NumPy's; so are the results."""

    @overload
    def __call__(
        self, x: mx.array, coefficients: KernelCoefficients, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
    ) -> tuple[mx.array, mx.array]: ...

    @overload
    def __call__(
        self, x: Array, coefficients: KernelCoefficients, zi: Array, axis: int, chunk_sizes: tuple[int, ...]
    ) -> tuple[Array, Array]: ...


def recursion(recurrence: Recurrence, path: Path) -> Recursion:
    """The kernel of *recurrence* on *path* as one function that refuses a state of another shape than it reads.

    The kernels of the CPU compute NumPy data without a copy to MLX and back; other paths copy.

    Raises:
        ValueError: By the function: the state is not one of the data.
    """
    found = kernel(recurrence, path)
    key = found, path == "cpu"
    if key not in _recursions:
        _recursions[key] = _checked(recurrence, *key)
    return _recursions[key]


_recursions: dict[tuple[Kernel, bool], Recursion] = {}


def _checked(recurrence: Recurrence, found: Kernel, is_of_cpu: bool) -> Recursion:
    own: Callable[..., tuple[npt.NDArray, npt.NDArray]] | None = getattr(found, "run_numpy", None)
    of_numpy = own if own is not None and is_of_cpu else _copying(found)
    # The shapes of the last call, of which the next one nearly always is.
    known: object = None

    def checked(
        x: Any, coefficients: KernelCoefficients, zi: Any, axis: int, chunk_sizes: tuple[int, ...]
    ) -> tuple[Any, Any]:
        nonlocal known
        n_sections = None if isinstance(coefficients, float) else len(coefficients)
        if (shapes := (x.shape, zi.shape, axis, n_sections)) != known:
            check_state(recurrence, x.shape, zi.shape, axis, n_sections)
            known = shapes
        if isinstance(x, np.ndarray):
            return of_numpy(x, coefficients, zi, axis, chunk_sizes)
        return found.run(x, coefficients, zi, axis, chunk_sizes)

    return checked


def in_stream(
    recurrence: Recurrence,
    x: mx.array,
    coefficients: KernelCoefficients,
    zi: mx.array,
    axis: int,
    chunk_sizes: tuple[int, ...],
    n_before: int,
    accumulates: bool = True,
) -> tuple[mx.array, mx.array]:
    """The results of one message of a stream, and the state to go on from.

    Args:
        recurrence: Which recurrence.
        x: Data of the message, float32.
        coefficients: Those of the recurrence.
        zi: The state after the message before.
        axis: The stream dimension of *x*.
        chunk_sizes: Samples a launch, where a kernel is compiled for fixed sizes.
        n_before: Samples or messages since the start; 0 for the first message.
        accumulates: Whether the message counts; without it the state to go on from is *zi*.

    Raises:
        ValueError: The state is not one of the data.
    """
    path = default_path()
    schedule_before(path, zi)
    y, zf = recursion(recurrence, path)(x, coefficients, zi, axis, chunk_sizes)
    if not accumulates:
        return y, zi
    schedule_after(path, zf, first=n_before == 0)
    return y, zf


def _copying(found: Kernel) -> Callable[..., tuple[npt.NDArray, npt.NDArray]]:
    def copying(
        x: npt.NDArray, coefficients: KernelCoefficients, zi: npt.NDArray, axis: int, chunk_sizes: tuple[int, ...]
    ) -> tuple[npt.NDArray, npt.NDArray]:
        import mlx.core as mx

        y, zf = found.run(mx.array(x), coefficients, mx.array(zi), axis, chunk_sizes)
        return np.asarray(y), np.asarray(zf)

    return copying
