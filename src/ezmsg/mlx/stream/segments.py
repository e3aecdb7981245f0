"""Consecutive samples of a stream, cut at any place and joined again, each under its own time stamp."""

import typing
from types import ModuleType
from typing import TypeGuard

import numpy as np
from array_api_compat import get_namespace
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis
from ezmsg.util.messages.util import replace

from .owned import owned_attrs, owned_axes
from .sampling import is_same_rate, value_at

if typing.TYPE_CHECKING:
    import mlx.core as mx
    import numpy.typing as npt

    Array: typing.TypeAlias = npt.NDArray | mx.array

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
    def of(cls, message: AxisArray) -> "Layout":
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
    return typing.cast("CoordinateAxis", message.axes[name])


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


def _namespace(data: "Array") -> ModuleType:
    return np if isinstance(data, np.ndarray) else get_namespace(data)


def _slice(data: "Array", start: int, stop: int | None, axis: int) -> "Array":
    return data[(slice(None),) * axis + (slice(start, stop),)]


def _joined(spans: "list[tuple[Array, int, int]]", axis: int) -> "Array":
    if len(spans) == 1:
        return _slice(*spans[0], axis)
    parts = [_slice(*span, axis) for span in spans]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        # NumPy's own concatenation forgets the masks.
        return np.ma.concatenate(parts, axis=axis)
    return _namespace(parts[0]).concat(parts, axis=axis)


def _copied(data: "Array") -> "Array":
    if isinstance(data, np.ndarray):
        return np.array(data, subok=True)  # with its mask, if it has one
    xp = _namespace(data)
    copy = xp.asarray(data, copy=True)
    if xp.__name__ == "mlx.core":
        # A lazy slice would keep its parent alive, and a lazy parent the whole graph it comes from.
        xp.eval(copy)
    return copy
