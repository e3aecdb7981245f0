"""Which messages are alike: those that leave the state of no stage behind, and mean the same to each."""

from __future__ import annotations

from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis

from ..stream.segments import same_axis


class Likeness:
    """What a message has in common with others that are run by the same functions; its length and offset are free.

    Args:
        message: Of which :meth:`has_regular_samples` is true.
    """

    def __init__(self, message: AxisArray) -> None:
        data, self.dim = message.data, resolve_stream_dim(message)
        self.axis = message.get_axis_idx(self.dim)
        self._array_type, self.dtype = type(data), data.dtype
        self._before, self._after = data.shape[: self.axis], data.shape[self.axis + 1 :]
        self._names = list(message.dims), message.key, message.stream_dim
        # Brought up to date with each message, so that the next one's axes are known by identity.
        self._axes = dict(message.axes)

    @staticmethod
    def has_regular_samples(message: AxisArray) -> bool:
        """Whether the stream dimension has samples, at a constant rate, and no coordinates that change with them."""
        if type(message) is not AxisArray or not message.dims or 0 in message.data.shape:
            return False
        dim = resolve_stream_dim(message)
        return (
            dim in message.dims
            and type(message.axes.get(dim)) is LinearAxis
            and not any(dim in getattr(axis, "dims", ()) for axis in message.axes.values())
        )

    def shape(self, n_samples: int) -> tuple[int, ...]:
        """The shape of an alike message of *n_samples*."""
        return (*self._before, n_samples, *self._after)

    def n_samples(self, message: AxisArray) -> int | None:
        """The length of *message*; None if it is not alike."""
        data = message.data
        if type(message) is not AxisArray or type(data) is not self._array_type or data.dtype != self.dtype:
            return None
        shape, axis = data.shape, self.axis
        if len(shape) <= axis or shape[:axis] != self._before or shape[axis + 1 :] != self._after:
            return None
        dims, key, stream_dim = self._names
        if message.key != key or message.stream_dim != stream_dim or message.dims != dims:
            return None
        return shape[axis] if self._has_same_axes(message) else None

    def _has_same_axes(self, message: AxisArray) -> bool:
        known = self._axes
        if message.axes.keys() != known.keys():
            return False
        for name, axis in message.axes.items():
            before = known[name]
            if axis is before:
                continue
            if name == self.dim:
                if (
                    not isinstance(before, LinearAxis)
                    or type(axis) is not LinearAxis
                    or axis.gain != before.gain
                    or axis.unit != before.unit
                ):
                    return False
            elif not same_axis(before, axis):
                return False
            known[name] = axis
        return True
