"""Cut a stream into messages of a few fixed lengths, so that the code behind it sees few shapes.

Every message length that MLX has not seen before mints a new size class in its buffer cache, and a stall makes an
acquisition source publish everything unread as one message of such a length. Padding would treat that at the price of
samples that were never recorded; :obj:`Rechunk` cuts instead, so that every piece holds real samples only, each of them
once, in order and under its own time stamp.

Put it in front of a process boundary, too: ezmsg's shared-memory ring grows to the largest message for good.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

import ezmsg.core as ez
from ezmsg.baseproc import BaseStatefulTransformer, processor_state, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from .stream.segments import Layout, Segment, continues, cut, lengths
from .stream.unit import PublishesEach, check_count, check_message, check_one_of, show_settings


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)):
        raise TypeError(f"'sizes' must be a tuple or list of one or more integers of at least 1, got {sizes!r}")
    if not sizes:
        raise ValueError(f"'sizes' must be a tuple or list of one or more integers of at least 1, got {sizes!r}")
    return tuple(check_count(f"sizes[{number}]", size) for number, size in enumerate(sizes))


class RechunkSettings(ez.Settings):
    """Settings for :obj:`Rechunk`.

    Raises:
        TypeError: ``sizes`` is not a tuple or list, or holds something else than integers; bool does not count as one.
        ValueError: ``sizes`` is empty or holds a number below 1; ``remainder`` is not one of its two values.
    """

    sizes: tuple[int, ...] = (300,)
    """Lengths to cut to, in samples along the stream dimension, in any order.

    Several sizes drain a stall faster: what 15 000 samples cost behind this node is set by the number of pieces, 50
    at ``(300,)`` and 8 at ``(300, 1200, 4800)``, at the price of one working set for each size."""

    remainder: typing.Literal["carry", "emit"] = "carry"
    """Treatment of the samples that are left, fewer than ``min(sizes)``, when the largest sizes that fit are cut off.

    ``"carry"`` keeps them and puts them in front of the next message: only ``sizes`` come out, and a sample waits for
    at most ``min(sizes) - 1`` others. ``"emit"`` sends them at once in descending powers of two: no delay, and
    the powers of two below ``min(sizes)`` as further lengths (nine at 300)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _checked_sizes(self.sizes))
        check_one_of("remainder", self.remainder, ("carry", "emit"))


@processor_state
class RechunkState:
    """State of :obj:`RechunkTransformer`."""

    carry: tuple[Segment, ...] = ()
    """Samples that no piece has taken yet, a segment for each message they came with. They own their memory: ezmsg
    reuses the buffers that messages live in. MLX samples are evaluated, so that no graph hangs on the state."""

    n_carried: int = 0
    """Samples in ``carry``."""


@show_settings
class RechunkTransformer(BaseStatefulTransformer[RechunkSettings, AxisArray, list[AxisArray], RechunkState]):
    """Cut messages along their stream dimension; a call returns the pieces, possibly none.

    Data: numpy or MLX arrays of any dtype, one dimension or more, the stream dimension anywhere among them (declared
    ``stream_dim``, else ``"time"``, else the first). A piece has the shape of its message but for the stream dimension.

    - A message whose length is one of ``sizes`` is returned as the same object when nothing is carried. Other pieces
      are views into their message; only one that begins with carried samples is a concatenation.
    - The stream axis of a piece is exact for its first sample: the offset that its message arrived with, plus the gain
      times the index. Coordinates along the stream dimension are cut with the data. Everything else (attrs, other
      axes) is that of the message which the piece's last sample arrived in.
    - A change flushes the carry, in front of the new message and with the old metadata, so that no piece straddles
      it: another key, dims, dtype, array library, channel set or other axis; a rate that moved by more than 1 ppm; an
      offset that is more than half a sample off. Changed attrs do not. A flush is cut to ``sizes`` and then to
      powers of two, as with ``remainder="emit"``, to keep the number of shapes bounded.
    - Where the stream dimension has coordinates or no axis at all, gaps cannot be recognised and are not looked for.
    - A message without samples is returned as it is, and the carry stays.
    - New settings cut the carry with the next message; nothing is dropped.

    Call :meth:`flush` when the stream has ended.

    Raises:
        ValueError: The message has no dimension.
        TypeError: What is given is not a message.
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"sizes", "remainder"})

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        # A reset would drop the carry. Changes are found in _process, and only while there is a carry to protect.
        return 0

    def _reset_state(self, message: AxisArray) -> None:
        """Keep the carry: a reset is asked for on the first message after a state was restored, too."""

    def _process(self, message: AxisArray) -> list[AxisArray]:
        if not message.dims:
            raise ValueError("The message has data of shape (), without a dimension; Rechunk needs one to cut along.")
        sizes = self.settings.sizes
        n_new = message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]
        carry, n_carried = self._state.carry, self._state.n_carried
        if n_new == 0 or (not carry and n_new in sizes):
            return [message]

        flushed: list[AxisArray] = []
        layout = Layout.of(message)
        if carry and not continues(carry[-1], message, layout):
            flushed = self._flushed()
            carry, n_carried = (), 0
        n_total = n_carried + n_new
        wanted = lengths(n_total, sizes, emit=self.settings.remainder == "emit")
        pieces, rest = cut((*carry, Segment(message)), wanted, layout)
        self._state.carry, self._state.n_carried = rest, n_total - sum(wanted)
        return flushed + pieces

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: values do not depend on the messages before."""
        return 0.0

    def flush(self) -> list[AxisArray]:
        """Take the carry out, for the end of an offline run.

        Returns:
            The carried samples, cut to ``sizes`` and then to powers of two; an empty list if there are none.
        """
        pieces = self._flushed()
        self._state.carry, self._state.n_carried = (), 0
        return pieces

    def _flushed(self) -> list[AxisArray]:
        carry = self._state.carry
        if not carry:
            return []
        wanted = lengths(self._state.n_carried, self.settings.sizes, emit=True)
        return cut(carry, wanted, Layout.of(carry[-1].message))[0]


class Rechunk(PublishesEach[RechunkSettings, list[AxisArray], RechunkTransformer]):
    """Publish the pieces of every message one after the other, see :obj:`RechunkTransformer`.

    What is carried when the graph shuts down, fewer than ``min(sizes)`` samples, is not published.

    Pieces of a message from another process are views into the slot of shared memory that it arrived in, like what any
    unit forwards or slices: a node of this process that keeps samples, or awaits before it reads them, has to copy.
    """

    SETTINGS = RechunkSettings  # type: ignore[assignment]
