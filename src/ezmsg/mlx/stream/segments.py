"""Consecutive samples of a stream, cut at any place and joined again, each under its own time stamp."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard, TypeVar, overload

import numpy as np
import numpy.typing as npt
from array_api_compat import get_namespace
from ezmsg.baseproc import BaseStatefulTransformer, resolve_configured_stream_dim, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis
from ezmsg.util.messages.util import replace

from .unit import a_type

if TYPE_CHECKING:
    import mlx.core as mx

    Array: typing.TypeAlias = npt.NDArray | mx.array

T = TypeVar("T")


def owned(value: T) -> T:
    """*value*, copied if it is a NumPy array that is a view into memory of others."""
    if isinstance(value, np.ndarray) and not value.flags.owndata:
        # With its mask, if it has one.
        return np.array(value, subok=True)
    return value


def owned_axes(axes: Mapping[str, AxisBase]) -> dict[str, AxisBase]:
    """*axes* with coordinates in memory of their own; the same objects where they are already."""
    result = dict(axes)
    for name, axis in axes.items():
        values = getattr(axis, "data", None)
        if (copy := owned(values)) is not values:
            result[name] = replace(axis, data=copy)
    return result


def owned_attrs(attrs: Mapping[str, object]) -> dict[str, object]:
    """*attrs* with copies of all NumPy arrays, since nothing says who else may write to them."""
    return {
        name: np.array(value, subok=True) if isinstance(value, np.ndarray) else value for name, value in attrs.items()
    }


def owned_message(message: AxisArray) -> AxisArray:
    """*message* with NumPy data, coordinates and attrs in memory of their own."""
    data = message.data.copy() if isinstance(message.data, np.ndarray) else message.data
    return replace(message, data=data, axes=owned_axes(message.axes), attrs=owned_attrs(message.attrs))


SAME_RATE = 1e-6
"""Relative difference up to which two sampling rates count as one. Clock synchronisation (LSL) lets the nominal
rate wobble in the last digits; a filter that starts anew each time never settles."""


def stream_dimension(transformer: BaseStatefulTransformer, message: AxisArray, operation: str) -> str:
    """The dimension that *transformer* goes along: that of its settings, else the stream dimension of *message*.

    Raises ValueError, with the name of the *operation*, if *message* has no dimension.
    """
    if not message.dims:
        raise ValueError(f"The message has data of shape (), without a dimension; {operation} needs one to go along.")
    return resolve_configured_stream_dim(transformer, message, transformer.settings.axis)


def linear_axis(axes: Mapping[str, AxisBase], dim: str) -> LinearAxis:
    """The axis of *dim*, which is known to be regular."""
    axis = axes[dim]
    assert isinstance(axis, LinearAxis)
    return axis


def sampling_period(message: AxisArray, dim: str, operation: str) -> float:
    """The sampling period in seconds along *dim*.

    Raises ValueError, with the name of the *operation*, if that has no regular axis, or none with a finite gain > 0.
    """
    axis = message.axes.get(dim)
    if not isinstance(axis, LinearAxis):
        kind = "no axis" if axis is None else a_type(axis)
        raise ValueError(
            f"The stream dimension {dim!r} has {kind}; {operation} needs a LinearAxis, whose gain is the sampling "
            "period."
        )
    if not (math.isfinite(axis.gain) and axis.gain > 0):
        raise ValueError(f"The axis of the stream dimension {dim!r} must have a gain > 0, got {axis.gain!r}")
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
    value: typing.Any = float(axis.offset) + index * float(axis.gain)
    return value


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


GAP_TOLERANCE = 0.5
"""Distance between the expected and the given offset of a message, in samples, that is still no gap."""


class Segment(typing.NamedTuple):
    """Consecutive samples of one message, carried or just arrived."""

    message: AxisArray
    """The samples and what is known of them. A linear stream axis stays as it arrived, see ``first``."""

    first: int = 0
    """Index, on the linear stream axis, of the first sample: every offset is computed from the one that arrived."""


def lengths(n: int, sizes: tuple[int, ...], emit: bool) -> list[int]:
    """Lengths to cut ``n`` samples to: the largest sizes that fit, then powers of two if the rest is to be emitted."""
    found: list[int] = []
    for size in sorted(sizes, reverse=True):
        count, n = divmod(n, size)
        found += [size] * count
    if emit:
        found += [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    return found


class Layout(typing.NamedTuple):
    """Where a message streams."""

    dim: str
    """Name of the stream dimension."""

    idx: int
    """Its position in the data."""

    streamed: tuple[str, ...]
    """Names of the axes whose values belong to the samples, and which are to be cut together with them."""

    @classmethod
    def of(cls, message: AxisArray) -> Layout:
        """The layout of *message*."""
        dim = resolve_stream_dim(message)
        streamed = tuple(
            name
            for name, axis in message.axes.items()
            if (_is_linear(axis) and name == dim)
            or (isinstance(axis, CoordinateAxis) and (name == dim or dim in axis.dims))
        )
        return cls(dim, message.dims.index(dim), streamed)


def cut(
    segments: tuple[Segment, ...], wanted: list[int], layout: Layout
) -> tuple[list[AxisArray], tuple[Segment, ...]]:
    """Cut segments of one uninterrupted stream into pieces of the given lengths, and what is left over to be carried.

    All segments but the last, which may be the message that has just arrived, own their memory.
    """
    pieces: list[AxisArray] = []
    i, start = 0, 0
    for length in wanted:
        spans: list[tuple[Segment, int, int]] = []
        while length:
            segment = segments[i]
            n = segment.message.data.shape[layout.idx]
            stop = min(start + length, n)
            spans.append((segment, start, stop))
            length -= stop - start
            i, start = (i, stop) if stop < n else (i + 1, 0)
        pieces.append(_piece(spans, layout))

    rest = list(segments[i:])
    if start and len(rest) > 1:
        rest[0], start = _owned(rest[0], start, layout), 0
    if rest:
        rest[-1] = _owned(rest[-1], start, layout)
    return pieces, tuple(rest)


def _piece(spans: list[tuple[Segment, int, int]], layout: Layout) -> AxisArray:
    """One message made of samples ``start`` to ``stop`` of each of the segments."""
    segment, start, stop = spans[0]
    message = spans[-1][0].message
    if len(spans) == 1 and segment.first == 0 and stop - start == message.data.shape[layout.idx]:
        return message
    axes = message.axes.copy()
    for name in layout.streamed:
        axis = segment.message.axes[name]
        if _is_linear(axis):
            axes[name] = replace(axis, gain=float(axis.gain), offset=value_at(axis, segment.first + start))
        else:
            values: list[tuple[Array, int, int]] = [
                (_coordinates(span.message, name).data, begin, end) for span, begin, end in spans
            ]
            of_first = _coordinates(segment.message, name)
            axes[name] = replace(of_first, data=_joined(values, _position(of_first, layout.dim)))
    data = _joined([(span.message.data, begin, end) for span, begin, end in spans], layout.idx)
    return replace(message, data=data, axes=axes)


def _owned(segment: Segment, start: int, layout: Layout) -> Segment:
    """The samples of a segment from ``start`` on, in memory of their own."""
    message = segment.message
    # Axes that are not cut stay the same objects where they can, so that the next message's are known by identity.
    axes = owned_axes({name: axis for name, axis in message.axes.items() if name not in layout.streamed})
    for name in layout.streamed:
        axis = message.axes[name]
        if not _is_linear(axis):
            axis = _coordinates(message, name)
            axis = replace(axis, data=_copied(_slice(axis.data, start, None, _position(axis, layout.dim))))
        axes[name] = axis
    axes = {name: axes[name] for name in message.axes}
    attrs = owned_attrs(message.attrs)
    data = _copied(_slice(message.data, start, None, layout.idx))
    return Segment(replace(message, data=data, axes=axes, attrs=attrs), segment.first + start)


def continues(carried: Segment, message: AxisArray, layout: Layout) -> bool:
    """Whether the samples of the message are the next ones of the stream that the carried samples belong to."""
    old, new = carried.message, message
    if (old.key, old.dims, old.stream_dim) != (new.key, new.dims, new.stream_dim):
        return False
    if _namespace(old.data) is not _namespace(new.data) or old.data.dtype != new.data.dtype:
        return False
    idx = layout.idx
    old_shape, new_shape = old.data.shape, new.data.shape
    if old_shape[:idx] != new_shape[:idx] or old_shape[idx + 1 :] != new_shape[idx + 1 :]:
        return False
    if old.axes.keys() != new.axes.keys() or layout != Layout.of(old):
        return False
    n_next = carried.first + old_shape[idx]
    return all(
        _follows(axis, new.axes[name], n_next) if name in layout.streamed else same_axis(axis, new.axes[name])
        for name, axis in old.axes.items()
    )


def _is_linear(axis: AxisBase) -> TypeGuard[LinearAxis]:
    # The type first: asking an abstract class for its instances takes ten times as long.
    return type(axis) is LinearAxis or isinstance(axis, LinearAxis)


def _coordinates(message: AxisArray, name: str) -> CoordinateAxis:
    """The axis *name* of a message, which :class:`Layout` knows to be streamed and not linear."""
    axis = message.axes[name]
    assert isinstance(axis, CoordinateAxis)
    return axis


def _position(axis: CoordinateAxis, dim: str) -> int:
    return axis.dims.index(dim) if dim in axis.dims else 0


def _follows(old: AxisBase, new: AxisBase, n_next: int) -> bool:
    """Whether ``new`` goes on where ``old`` would have its value number ``n_next``."""
    if new.unit != old.unit:
        return False
    if _is_linear(old):
        return (
            _is_linear(new)
            and is_same_rate(new.gain, old.gain)
            and abs(float(new.offset) - value_at(old, n_next)) <= GAP_TOLERANCE * abs(float(old.gain))
        )
    if not (isinstance(old, CoordinateAxis) and isinstance(new, CoordinateAxis)):
        return False
    return new.dims == old.dims and new.data.dtype == old.data.dtype


def same_axis(old: AxisBase, new: AxisBase) -> bool:
    """Whether two axes have the same values; known by identity, or else by what ezmsg has made of their contents."""
    if old is new:
        return True
    fingerprint = getattr(old, "fingerprint", None)
    if fingerprint is None:
        return old == new
    return fingerprint == getattr(new, "fingerprint", None)


def _namespace(data: Array) -> ModuleType:
    return np if isinstance(data, np.ndarray) else get_namespace(data)


def _slice(data: Array, start: int, stop: int | None, axis: int) -> Array:
    return data[(slice(None),) * axis + (slice(start, stop),)]


def _joined(spans: list[tuple[Array, int, int]], axis: int) -> Array:
    if len(spans) == 1:
        return _slice(*spans[0], axis)
    parts = [_slice(*span, axis) for span in spans]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        # NumPy's own concatenation forgets the masks.
        return np.ma.concatenate(parts, axis=axis).astype(parts[0].dtype, copy=False)
    if isinstance(parts[0], np.ndarray):
        # Else in the byte order of the machine, whatever that of the parts is.
        return np.concatenate(parts, axis=axis, dtype=parts[0].dtype)
    return _namespace(parts[0]).concat(parts, axis=axis)


def _copied(data: Array) -> Array:
    if isinstance(data, np.ndarray):
        return np.array(data, subok=True)  # with its mask, if it has one
    xp = _namespace(data)
    copy = xp.asarray(data, copy=True)
    if xp.__name__ == "mlx.core":
        # A lazy slice would keep its parent alive, and a lazy parent the whole graph it comes from.
        xp.eval(copy)
    return copy
