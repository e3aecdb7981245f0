"""The sampling rate and the first samples of a stream, for the filters with a memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, overload

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


@overload
def value_at(axis: LinearAxis, index: int) -> float: ...
@overload
def value_at(axis: LinearAxis, index: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]: ...
def value_at(axis: LinearAxis, index: int | npt.NDArray[np.integer]) -> float | npt.NDArray[np.float64]:
    """The value of *axis* at *index*, in float64 whatever the scalar types of its offset and its gain.

    ``LinearAxis.value`` computes in the type of the gain. In float32 an offset of three hours has steps of 1 ms, thirty
    samples at 30 kHz, and NumPy takes a Python float for one of these, too.
    """
    # By a Python float; that the result is float64 then is more than NumPy's annotations say.
    return cast("float | npt.NDArray[np.float64]", float(axis.offset) + index * float(axis.gain))


def is_same_rate(gain: float, known: float) -> bool:
    """Whether two sampling periods differ by no more than :data:`SAME_RATE`."""
    gain, known = float(gain), float(known)
    return abs(gain - known) <= SAME_RATE * abs(known)


def with_known_rate(message: AxisArray, dim: str | None, known: float) -> AxisArray:
    """*message* with *known* as the sampling period along *dim*, if its own is nearly that; for the state's hash."""
    axis = message.axes.get(dim) if dim is not None else None
    if not isinstance(axis, LinearAxis) or axis.gain == known or not is_same_rate(axis.gain, known):
        return message
    return replace(message, axes={**message.axes, dim: replace(axis, gain=known)})


def first_samples(
    x: mx.array, axis: int, largest: float, among: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The first sample of each channel that is finite and not too large, for a filter to begin at.

    Args:
        x: float32, with one sample or more; it is evaluated.
        axis: Of the samples.
        largest: Largest magnitude of a sample that counts.
        among: The channels to look at, with length 1 along *axis*; None for all.

    Returns:
        The samples, 0 where there is none, and where there is one; both with length 1 along *axis*.
    """
    samples = np.moveaxis(np.asarray(x), axis, 0)
    chosen = np.ones(samples.shape[1:], bool) if among is None else np.moveaxis(among, axis, 0)[0]
    first, found = np.zeros(chosen.shape), np.zeros(chosen.shape, bool)
    candidates = samples[:, chosen]
    taken = np.abs(candidates) <= largest
    found[chosen] = taken.any(axis=0)
    values = np.take_along_axis(candidates, taken.argmax(axis=0)[None], axis=0)[0]
    first[chosen] = np.where(found[chosen], values, 0.0)
    return np.expand_dims(first, axis), np.expand_dims(found, axis)
