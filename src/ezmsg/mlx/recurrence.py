"""What the filters with a memory share: choice of kernels, dtype, sampling rate, start of a stream."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, resolve_configured_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

if TYPE_CHECKING:
    import mlx.core as mx

SAME_RATE = 1e-6
"""Relative difference up to which two sampling rates count as one. Clock synchronisation (LSL) lets the nominal
rate wobble in the last digits; a filter that starts anew each time never settles."""

Path = Literal["cpu", "cuda", "metal", "plain"]
"""Kernels of a recurrence: numba's, those written for CUDA, those for Metal, and plain MLX operations."""

_PATHS: tuple[Path, ...] = get_args(Path)


def default_path() -> Path:
    """The path for MLX's default device, as it is now: a GPU build may run on its CPU device."""
    import mlx.core as mx

    return "cpu" if mx.default_device().type == mx.cpu else _gpu_path()


@functools.cache
def _gpu_path() -> Path:
    import mlx.core as mx

    if mx.cuda.is_available():
        return "cuda"
    return "metal" if mx.metal.is_available() else "plain"


def check_path(path: str | None) -> None:
    """
    Raises:
        ValueError: *path* is neither None nor a :data:`Path`.
    """
    if path is not None and path not in _PATHS:
        raise ValueError(f"path is {path!r}; allowed are {', '.join(_PATHS)} and None.")


def check_mlx(x: mx.array, zi: mx.array | None) -> None:
    """
    Raises:
        TypeError: *x* or *zi* is no MLX array; *zi* may be None.
    """
    import mlx.core as mx

    if not isinstance(x, mx.array):
        raise TypeError(f"x is a {type(x).__name__}; allowed is an MLX array.")
    if zi is not None and not isinstance(zi, mx.array):
        raise TypeError(f"zi is a {type(zi).__name__}; allowed are an MLX array and None.")


@functools.cache
def kernels(name: str) -> ModuleType:
    """The module *name* of :mod:`ezmsg.mlx.kernels`, imported at the first use, since it compiles or needs MLX."""
    return importlib.import_module(f"ezmsg.mlx.kernels.{name}")


def as_float32(x: mx.array, operation: str) -> mx.array:
    """*x* as float32, from any real dtype.

    Raises:
        TypeError: *x* is complex; the error calls what was to be done with it *operation*.
    """
    import mlx.core as mx

    if x.dtype == mx.float32:
        return x
    if x.dtype == mx.complex64:
        raise TypeError(f"{operation.capitalize()} of complex64 data is not defined; use a real dtype.")
    if x.dtype == mx.float64:
        # Only MLX's CPU device has float64; a GPU as the default device does not even cast it.
        return x.astype(mx.float32, stream=mx.cpu)
    return x.astype(mx.float32)


def schedule_before(path: Path, *states: mx.array | None) -> None:
    """Start computing the states of the last message, before that of the next is made of them.

    Or they would hold the graph of every message whose output nobody reads. On CUDA here and not after: a kernel makes
    the state together with the output, so that this is free where that has been read (else a launch, 70 us).
    """
    if path == "cuda":
        _schedule(states)


def schedule_after(path: Path, *states: mx.array | None, first: bool) -> None:
    """The same for the states of this message, where that is the place for it.

    Also for the *first* message, so that a transformer can be warmed up in one thread and used in another.
    """
    if path in ("metal", "plain") or (path == "cuda" and first):
        _schedule(states)


def _schedule(states: tuple[mx.array | None, ...]) -> None:
    import mlx.core as mx

    mx.async_eval(*(state for state in states if state is not None))


def stream_dimension(transformer: BaseStatefulTransformer, message: AxisArray, operation: str) -> str:
    """The dimension that *transformer* goes along: that of its settings, else the stream dimension of *message*.

    Raises:
        ValueError: *message* has no dimension; the error calls what needs one *operation*.
    """
    if not message.dims:
        raise ValueError(f"The message has data of shape (), without a dimension; {operation} needs one to go along.")
    return resolve_configured_stream_dim(transformer, message, transformer.settings.axis)


def sampling_period(message: AxisArray, dim: str, operation: str) -> float:
    """The sampling period in seconds along *dim*.

    Raises:
        ValueError: *dim* has no regular axis, or one whose gain is not a finite number > 0; the error calls what
            needs it *operation*.
    """
    axis = message.axes.get(dim)
    if not isinstance(axis, LinearAxis):
        kind = "no axis" if axis is None else f"a {type(axis).__name__}"
        raise ValueError(
            f"The stream dimension {dim!r} has {kind}; {operation} needs a LinearAxis, whose gain is the sampling "
            "period."
        )
    if not (math.isfinite(axis.gain) and axis.gain > 0):
        raise ValueError(f"The axis of the stream dimension {dim!r} has gain {axis.gain!r}; allowed is a number > 0.")
    return float(axis.gain)


def is_same_rate(gain: float, known: float) -> bool:
    """Whether two sampling periods differ by no more than :data:`SAME_RATE`."""
    return abs(gain - known) <= SAME_RATE * known


def with_known_rate(message: AxisArray, dim: str | None, known: float) -> AxisArray:
    """*message* with *known* as the sampling period along *dim*, if its own is nearly that; for the state's hash."""
    axis = message.axes.get(dim)
    gain = getattr(axis, "gain", known)
    if gain == known or not is_same_rate(gain, known):
        return message
    return replace(message, axes={**message.axes, dim: replace(axis, gain=known)})


def first_finite_samples(x: mx.array, axis: int) -> npt.NDArray[np.float64]:
    """The first finite sample of each channel, with length 1 along *axis*; 0 where there is none.

    Args:
        x: float32, with one sample or more; it is evaluated.
        axis: Of the samples.
    """
    samples = np.asarray(x)
    place = np.expand_dims(np.isfinite(samples).argmax(axis=axis), axis)
    first = np.take_along_axis(samples, place, axis=axis).astype(np.float64)
    return np.where(np.isfinite(first), first, 0.0)
