"""A recording in pieces of time: where it is cut, and whether neighbours fit together.

A piece begins a margin earlier than the results that it keeps. The last results of that margin, right in front of the
seam, are also the last ones of the piece before, which has been running for much longer. What they differ by is what
the chain has not forgotten yet, and it becomes less behind the seam. To compare them costs no further computing.
"""

from __future__ import annotations

import bisect
import itertools
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor, CompositeProcessor, resolve_stream_dim
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..stream.fusible import ResultGrid, grid_in_a_row, result_grid, says_settling, settling_time
from ..stream.segments import Layout, Segment, cut
from ..stream.unit import Stage, a_type, known
from . import checkpoint
from .checkpoint import pack, unpack
from .contracts import RecordingSource, ResultSink

LEAST_MARGINS = 4
"""Length of a piece in margins, at least: what is computed twice is a quarter of the whole or less."""

PIECES = 8
"""Pieces of a recording, at least, if they are long enough: so many that workers finish at about the same time."""

LONG_ENOUGH = 4.0
"""Seconds of a piece for which to begin and to finish it costs little."""

MARGINS_LONG_ENOUGH = 16
"""Length of a piece in margins for which the margin costs little."""


SHARE_OF_MARGIN = 64
"""A piece begins so much of a margin earlier than it has to, for settled results to compare."""

STEPS_OF_LENGTH = 8
"""A piece has a multiple of a power of two of results, at least so many: a chunk of any length then divides it."""


@dataclass(frozen=True)
class Piece:
    """A piece of a recording, and of its results."""

    number: int

    begin: int
    """First sample of the piece."""

    end: int
    """The sample behind its last."""

    margin: int = 0
    """How many samples earlier reading begins for results to have settled at :attr:`begin`."""

    start: int = 0
    """The sample at which reading begins; 0 is the start of the recording."""

    first_result: int = 0
    """Number of the result that a chain gives first which begins at :attr:`start`."""

    first_settled: int = 0
    """Number of the first result that has settled."""

    results_begin: int = 0
    """Number of the first result of the piece, counted from the start of the recording."""

    results_end: int | None = None
    """Number of the result behind its last; None for a whole recording, whose steps need not say it."""

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole recording."""
        return self.results_end is None

    def begun_at(self, sample: int, grid: ResultGrid) -> Piece:
        """The same piece, read from *sample* on, or from a little earlier."""
        start, first_result = _start_of(grid, sample)
        # At the start of the recording it is as settled as one run is.
        settled = grid.results_after(self.begin - self.margin // SHARE_OF_MARGIN - 1) if start else 0
        return replace(self, start=start, first_result=first_result, first_settled=max(settled, first_result))

    def settled_after_gaps(self, source: RecordingSource, steps: Sequence[Stage]) -> Piece:
        """The same piece, begun so early that each channel settles, although averages and filters leave samples out.

        Those are samples that are not finite or too large. A channel needs as many others as the margin is long.
        """
        piece, grid = self, grid_in_a_row(steps, 1.0 / source.sampling_rate)
        while piece.start > 0 and (n_lacking := _n_lacking(source, piece)):
            piece = self.begun_at(piece.start - max(n_lacking, piece.begin - piece.start), grid)
        return piece


def _n_lacking(source: RecordingSource, piece: Piece) -> int:
    """How many samples the channels lack that begin to settle in front of *piece*, at most.

    A channel that has no sample in the piece itself needs none.
    """
    from ..kernels.layout import LARGEST_SAMPLE

    n_left_out = np.zeros((), int)
    for message in span(source, piece.start, piece.begin):
        rows = _rows(message)
        if rows.dtype.kind != "f":
            return 0
        n_left_out = n_left_out + np.sum(~(np.abs(rows) <= LARGEST_SAMPLE), axis=0)
    room = piece.begin - piece.start - piece.margin - piece.margin // SHARE_OF_MARGIN
    if not (n_left_out > room).any():
        return 0
    has_none = np.ones(n_left_out.shape, bool)
    for message in span(source, piece.begin, piece.end):
        has_none &= ~(np.abs(_rows(message)) <= LARGEST_SAMPLE).any(axis=0)
    return int(np.where(has_none, 0, n_left_out - room).max(initial=0))


@dataclass(frozen=True)
class Plan:
    """How a recording is cut."""

    margin: float
    """Seconds that a piece begins earlier, at least."""

    pieces: tuple[Piece, ...]

    @property
    def borders(self) -> tuple[int, ...]:
        """Number of the first result of each piece, and of all results."""
        ends = [known(piece.results_end) for piece in self.pieces]
        return (self.pieces[0].results_begin, *ends)

    def __str__(self) -> str:
        n_results, n_samples = self.pieces[0].results_end, self.pieces[0].end
        return f"{len(self.pieces)} pieces of {n_results} results, {n_samples} samples, begun {self.margin:g} s earlier"


def plan_pieces(
    n_samples: int,
    sampling_rate: float,
    steps: Sequence[Stage],
    *,
    seconds: float,
    margin: float | None,
    tolerance: float,
) -> Plan:
    """Cut a recording for a chain, as it was made, after equal numbers of results.

    A piece is *seconds* long, unless :data:`LEAST_MARGINS` margins are longer; a shorter recording has shorter ones, so
    that there are :data:`PIECES`, and with infinity there is one. A *margin* that is None is as long as the steps say
    for that *tolerance*; ValueError if one does not say it, or does not forget at all.
    """
    # As a time axis has it, so that steps which compute with the rate of a message find the same places.
    gain = 1.0 / sampling_rate
    if margin is None:
        margin = chain_settling_time(steps, tolerance, gain)
    n_margin = math.ceil(margin / gain)
    grid = grid_in_a_row(steps, gain)
    n_results = grid.results_after(n_samples)
    length = max(n_results, 1)
    if math.isfinite(seconds):
        # Not by the number of workers, on which no bit of the results may depend.
        wanted = min(max(n_samples * gain / PIECES, LONG_ENOUGH, MARGINS_LONG_ENOUGH * margin), seconds)
        n = grid.results_after(max(round(wanted / gain), LEAST_MARGINS * n_margin))
        # So that chunks of many lengths divide it.
        step = 1 << max(n // STEPS_OF_LENGTH, 1).bit_length() - 1
        length = -(-max(n, 1) // step) * step
    borders = [(0, 0)]
    for number in range(length, n_results, length):
        sample = bisect.bisect_left(range(n_samples), number, key=grid.results_after)
        # A step that gives several results at once may have none that ends there.
        if grid.results_after(sample) == number:
            borders.append((sample, number))
    pieces = []
    for number, ((begin, first), (end, last)) in enumerate(itertools.pairwise([*borders, (n_samples, n_results)])):
        piece = Piece(number, begin, end, n_margin, results_begin=first, results_end=last)
        pieces.append(piece.begun_at(begin - n_margin - n_margin // SHARE_OF_MARGIN, grid))
    return Plan(margin, tuple(pieces))


def chain_settling_time(steps: Sequence[Stage], tolerance: float, gain: float) -> float:
    """Seconds after which a chain has forgotten that it began in the middle: the sum of what its steps need.

    The sum, since what a step has not forgotten is the input of the next. ValueError if one never forgets, or does not
    say it.
    """
    total = 0.0
    for step in _flat(steps):
        time = settling_time(step, tolerance, gain)
        if time is None and isinstance(step, BaseProcessor) and not isinstance(step, Stateful):
            time = 0.0
        if time is None or not math.isfinite(time):
            reason = "does not forget how it began, with these settings"
            if time is None:
                reason = (
                    "does not say how long it remembers (a method settling_time, or settling_of for its class, does)"
                )
            raise ValueError(
                f"{checkpoint.description(step)} {reason}, so the recording cannot be cut into pieces; "
                "use margin='exact', or give a margin in seconds."
            )
        total += time
        gain = result_grid(step, gain).gain
    return total


def unspoken(steps: Sequence[Stage]) -> list[Stage]:
    """The steps that do not say how long they remember."""
    return [step for step in _flat(steps) if not says_settling(step)]


def _flat(steps: Sequence[Stage]) -> Iterator[Stage]:
    """The steps, with those that composites consist of in their places, unless a composite speaks for itself."""
    for step in steps:
        parts = list(checkpoint.parts_of(step).values())
        if parts and isinstance(step, CompositeProcessor) and not hasattr(step, "settling_time"):
            yield from _flat(parts)
        else:
            yield step


def _start_of(grid: ResultGrid, sample: int) -> tuple[int, int]:
    """Where a fresh chain may begin, at *sample* or before; and the number of the result that it then gives first."""
    number = grid.results_after(sample) if sample > 0 else 0
    while number > 0 and grid.start_of(number) > sample:
        number -= 1
    return (grid.start_of(number), number) if number > 0 else (0, 0)


MOST_ROWS = 256
"""Results in front of a seam that are compared, at most."""

LEAST_SCALE = 1e-4
"""On how much of the largest result of all channels a channel is measured, at least: one that holds a constant leaves a
band-pass as the noise of rounding, about 1e-12 of the others, which is never the same twice."""


class Seams(typing.NamedTuple):
    """Results of a piece that are compared with its neighbours."""

    before: npt.NDArray
    """Results in front of the piece that have settled, of shape (row, ...): computed, but not part of it."""

    last: npt.NDArray
    """The last results of the piece, as many as the next one needs at most."""

    largest: npt.NDArray
    """The largest absolute value of each channel in the piece, of shape (...); 0 where none is finite.
    Empty where it has no results."""

    constant: float
    """The largest absolute value of the samples, if each channel holds a constant; else 0."""

    def packed(self) -> bytes:
        """As bytes, for :meth:`unpacked`."""
        return pack(tuple(self), ())

    @classmethod
    def unpacked(cls, packed: bytes) -> Seams:
        """The inverse of :meth:`packed`."""
        return cls(*typing.cast("tuple[npt.NDArray, npt.NDArray, npt.NDArray, float]", unpack(packed, ())))


def differences(pieces: Sequence[Seams]) -> list[float]:
    """The largest difference at each seam, as a share of the largest result of the channel; in order.

    A channel counts as having results of :data:`LEAST_SCALE` of the largest of all channels, at least. Integers, which
    were rounded, may differ by one. Results that are alike count as 0, also where they are not finite. A difference of
    channels whose results are all 0, or of results of which only one is not finite, is infinite.
    """
    largest = [piece.largest for piece in pieces if piece.largest.size]
    peak = np.max(largest, axis=0) if largest else np.zeros(())
    # Of a recording of nothing but constants the noise of rounding may be all that is left.
    peak = np.maximum(peak, max(LEAST_SCALE * peak.max(initial=0.0), min(piece.constant for piece in pieces)))
    found = []
    for piece, following in itertools.pairwise(pieces):
        n = min(len(piece.last), len(following.before))
        one, other = (rows[len(rows) - n :] for rows in (piece.last, following.before))
        found.append(_difference(one, other, peak))
    return found


def _difference(one: npt.NDArray, other: npt.NDArray, peak: npt.NDArray) -> float:
    if not one.size:
        return 0.0
    room = 1.0 if one.dtype.kind in "iu" else 0.0
    one, other = (rows.astype(np.complex128 if rows.dtype.kind == "c" else np.float64) for rows in (one, other))
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(one - other)
        same = (one == other) | (np.isnan(one) & np.isnan(other)) | (off <= room)
        shares = np.where(same, 0.0, off / peak)
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max())


class PieceResults:
    """Hands on the results of a piece but for those in front of it, and collects what its seams need."""

    def __init__(self, sink: ResultSink, piece: Piece) -> None:
        self._sink = sink
        self._piece = piece
        self._next = piece.first_result
        """Number of the next result."""
        self._before: list[npt.NDArray] = []
        self._last: list[npt.NDArray] = []
        self._largest = np.zeros((0,))
        self._constant: npt.NDArray | None = None
        """The first samples, as long as all others were the same."""
        self._has_samples = False

    def watch(self, messages: Iterator[AxisArray]) -> Iterator[AxisArray]:
        """The samples that the results come from, on their way to the chain."""
        for message in messages:
            if isinstance(message, AxisArray) and 0 not in message.data.shape:
                if not self._has_samples:
                    self._constant, self._has_samples = np.array(_rows(message)[:1]), True
                if self._constant is not None and not (_rows(message) == self._constant).all():
                    self._constant = None
            yield message

    def append(self, message: AxisArray) -> None:
        """Take the next results, in memory of NumPy."""
        n, n_before = length(message), self._piece.results_begin - self._next
        if n_before > 0:
            before, *rest = _split(message, n_before) if n_before < n else (message,)
            rows = _rows(before)
            n_unsettled = max(self._piece.first_settled, self._piece.results_begin - MOST_ROWS) - self._next
            self._before.append(np.array(rows[max(n_unsettled, 0) :]))
            self._next += len(rows)
            if not rest:
                return
            (message,) = rest
        self._next += length(message)
        if len(rows := _rows(message)):
            self._last.append(np.array(rows[-MOST_ROWS:]))
            while sum(map(len, self._last[1:])) >= MOST_ROWS:
                del self._last[0]
            largest = _largest_of(rows)
            self._largest = np.maximum(self._largest, largest) if self._largest.size else largest
        self._sink.append(message)

    def checkpoint(self, state: bytes) -> None:
        """A part of a recording has no checkpoints."""
        raise NotImplementedError

    @property
    def seams(self) -> bytes:
        """Packed :class:`Seams` of what has come so far."""
        last = np.concatenate(self._last)[-MOST_ROWS:] if self._last else np.zeros((0,))
        before = np.concatenate(self._before) if self._before else np.zeros((0,))
        constant = 0.0 if self._constant is None else float(np.abs(self._constant).max())
        return Seams(before, last, self._largest, constant).packed()

    def finish(self, recording: str) -> None:
        """Have the sink keep the seams with the results; ValueError if those are not as many as the steps say."""
        piece = self._piece
        if self._next != piece.results_end:
            raise ValueError(
                f"The chain gave {self._next - piece.first_result} results of samples {piece.start} to {piece.end} of "
                f"{recording}, but its steps say {known(piece.results_end) - piece.first_result}: one that "
                "gives another number of results than samples has to say so (see ezmsg.mlx.stream.fusible); or use "
                "margin='exact'."
            )
        self._sink.checkpoint(self.seams)


def _largest_of(rows: npt.NDArray) -> npt.NDArray:
    """The largest absolute value of each channel."""
    if rows.dtype.kind not in "fiu":
        return np.abs(np.nan_to_num(rows)).max(axis=0).astype(np.float64)
    # Two reductions, which copy nothing, since this is done for all results.
    ends = np.array([np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0)], np.float64)
    if not np.isfinite(ends).all():
        rows = np.where(np.isfinite(rows), rows, 0)
        ends = np.array([rows.min(axis=0), rows.max(axis=0)], np.float64)
    return np.abs(ends).max(axis=0)


def length(message: AxisArray) -> int:
    """Samples of a message."""
    return message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]


def span(source: RecordingSource, start: int, end: int) -> Iterator[AxisArray]:
    """The samples from *start* up to *end*; ValueError if the source gives fewer, or goes on behind its end."""
    done = start
    for message in source.read(start) if start < end else ():
        if isinstance(message, AxisArray) and done + length(message) > end and end < source.n_samples:
            message, _ = _split(message, end - done)
        yield message
        done += length(message)
        if done == end < source.n_samples:
            return
    if done != end:
        raise ValueError(f"{source.identity} has {source.n_samples} samples, but {done} were read.")


def _split(message: AxisArray, n: int) -> tuple[AxisArray, AxisArray]:
    """The first *n* samples of a message, and the others; each has some."""
    (first, rest), _ = cut((Segment(message),), [n, length(message) - n], Layout.of(message))
    return first, rest


def _rows(message: AxisArray) -> npt.NDArray:
    data = np.asarray(message.data)
    return np.moveaxis(data, message.get_axis_idx(resolve_stream_dim(message)), 0)


def check_type(message: object, giver: str) -> None:
    """TypeError unless *message*, which *giver* gave, is one."""
    if not isinstance(message, AxisArray):
        raise TypeError(f"Messages are of type AxisArray, but {giver} gave {a_type(message)}.")
