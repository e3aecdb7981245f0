"""A recording in pieces of time: where it is cut, what a worker does with a piece, whether neighbours fit together.

A piece begins a margin earlier than the results that it keeps. The last results of that margin, right in front of the
seam, are also the last ones of the piece before, which has been running for much longer. What they differ by is what
the chain has not forgotten yet, and it becomes less behind the seam. To compare them costs no further computing.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor, CompositeProcessor, resolve_stream_dim
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..rechunk import RechunkSettings
from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.fusible import ResultGrid, result_grid, says_settling, settling_time
from ..stream.segments import Layout, Segment, cut
from ..stream.unit import Output, Stage, Stages, flush_steps, run_steps
from . import checkpoint
from .checkpoint import pack, unpack
from .contracts import PieceSink, RecordingSource, ResultSink
from .engine import ProcessedRecording, chain_of, check_type, process_in_order

LEAST_MARGINS = 4
"""Length of a piece in margins, at least: what is computed twice is a quarter of the whole or less."""

PIECES = 8
"""Pieces of a recording, at least, if they are long enough: so many that workers finish at about the same time."""

LONG_ENOUGH = 4.0
"""Seconds of a piece for which to begin and to finish it costs little."""

MARGINS_LONG_ENOUGH = 16
"""Length of a piece in margins for which the margin costs little."""


@dataclass(frozen=True)
class Piece:
    """A piece of a recording, and of its results."""

    number: int

    start: int
    """The sample at which reading begins, a margin earlier than the piece; 0 is the start of the recording."""

    begin: int
    """First sample of the piece."""

    end: int
    """The sample behind its last."""

    first_result: int
    """Number of the result that a chain gives first which begins at *start*."""

    results_begin: int
    """Number of the first result of the piece, counted from the start of the recording."""

    results_end: int
    """Number of the result behind its last."""


@dataclass(frozen=True)
class Plan:
    """How a recording is cut."""

    margin: float
    """Seconds that a piece begins earlier, at least."""

    n_samples: int
    """Length of a piece; the last is shorter."""

    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{len(self.pieces)} pieces of {self.n_samples} samples, begun {self.margin:g} s earlier"


def plan_pieces(
    n_samples: int,
    sampling_rate: float,
    steps: Sequence[Stage],
    *,
    seconds: float,
    margin: float | None,
    tolerance: float,
    multiple: int = 1,
) -> Plan:
    """Cut a recording for a chain.

    Args:
        n_samples: Length of the recording.
        sampling_rate: Samples a second.
        steps: The chain, as it was made.
        seconds: Length of a piece, unless :data:`LEAST_MARGINS` margins are longer; a shorter recording has shorter
            ones, so that there are :data:`PIECES`. With infinity there is one piece.
        margin: In seconds; None: as long as the steps say.
        tolerance: For what they say.
        multiple: Pieces begin at multiples of so many samples.

    Raises:
        ValueError: A step does not say how long it remembers, or does not forget at all.
    """
    # As a time axis has it, so that steps which compute with the rate of a message find the same places.
    gain = 1.0 / sampling_rate
    if margin is None:
        margin = chain_settling_time(steps, tolerance, gain)
    least = max(math.ceil(margin / gain) * LEAST_MARGINS, 1)
    wanted = (
        n_samples if math.isinf(seconds) else max(round(_piece_length(n_samples * gain, margin, seconds) / gain), least)
    )
    length = min(-(-wanted // multiple) * multiple, -(-n_samples // multiple) * multiple)
    grids = list(grids_of(steps, gain))
    pieces = []
    for number, begin in enumerate(range(0, n_samples, length)):
        start, first_result = _start_of(grids, begin - math.ceil(margin / gain))
        end = min(begin + length, n_samples)
        results = [results_after(grids, sample) for sample in (begin, end)]
        pieces.append(Piece(number, start, begin, end, first_result, *results))
    return Plan(margin, length, tuple(pieces))


def _piece_length(recording: float, margin: float, most: float) -> float:
    """Seconds of a piece, *most* at most. Not by the number of workers, on which no bit of the results may depend."""
    return min(max(recording / PIECES, LONG_ENOUGH, MARGINS_LONG_ENOUGH * margin), most)


def chain_settling_time(steps: Sequence[Stage], tolerance: float, gain: float) -> float:
    """Seconds after which a chain has forgotten that it began in the middle: the sum of what its steps need.

    The sum, since what a step has not forgotten is the input of the next.

    Raises:
        ValueError: A step does not say how long it remembers, or does not forget at all.
    """
    total = 0.0
    for step in _flat(steps):
        time = settling_time(step, tolerance, gain)
        if time is None and isinstance(step, BaseProcessor) and not isinstance(step, Stateful):
            time = 0.0
        if time is None or not math.isfinite(time):
            reason = (
                "does not say how long it remembers (a method settling_time, or settling_of for its class, does)"
                if time is None
                else "does not forget how it began, with these settings"
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
    if any(type(step).__module__.startswith("ezmsg.sigproc.") for step in steps):
        # It says for them how long they remember; here, since it loads all of their modules.
        from ..chain import foreign  # noqa: F401

    for step in steps:
        parts = list(checkpoint.parts_of(step).values())
        if parts and isinstance(step, CompositeProcessor) and not hasattr(step, "settling_time"):
            yield from _flat(parts)
        else:
            yield step


def grids_of(steps: Sequence[Stage], gain: float) -> Iterator[ResultGrid]:
    """Where the results of each step lie on its input; *gain* is that of the first."""
    for step in _flat(steps):
        grid = result_grid(step, gain)
        yield grid
        gain = grid.gain


def results_after(grids: Sequence[ResultGrid], n_samples: int) -> int:
    """How many results a chain has given after that many samples."""
    for grid in grids:
        n_samples = grid.results_after(n_samples)
    return n_samples


def _start_of(grids: Sequence[ResultGrid], sample: int) -> tuple[int, int]:
    """Where a fresh chain may begin, at *sample* or before; and the number of the result that it then gives first."""
    if sample <= 0:
        return 0, 0
    number = results_after(grids, sample)
    while number > 0:
        start = number
        for grid in reversed(grids):
            start = grid.start_of(start)
        if start <= sample:
            return start, number
        number -= 1
    return 0, 0


def begin_at(steps: Sequence[Stage], gain: float, number: int) -> None:
    """Have a fresh chain begin with the result of that number."""
    for grid in reversed(list(grids_of(steps, gain))):
        grid.begin(number)
        number = grid.start_of(number)


MOST_ROWS = 256
"""Results in front of a seam that are compared, at most."""

SHARE_OF_MARGIN = 64
"""Of how many results of a margin one is compared: those at its end, where the chain has settled."""


class Seams(typing.NamedTuple):
    """What is kept of a piece to compare it with its neighbours."""

    before: npt.NDArray
    """Results in front of the piece, of shape (row, ...): computed, but not part of it."""

    last: npt.NDArray
    """The last results of the piece, as many as the next one needs at most."""

    largest: npt.NDArray
    """The largest absolute value of each channel in the piece, of shape (...); 0 where none is finite.
    Empty where it has no results."""

    def packed(self) -> bytes:
        """As bytes, for :meth:`unpacked`."""
        return pack(tuple(self), ())

    @classmethod
    def unpacked(cls, packed: bytes) -> Seams:
        """The inverse of :meth:`packed`."""
        return cls(*typing.cast("tuple[npt.NDArray, npt.NDArray, npt.NDArray]", unpack(packed, ())))


def n_compared(n_margin: int) -> int:
    """How many of the results of a margin are compared."""
    return min(max(n_margin // SHARE_OF_MARGIN, 1), MOST_ROWS, n_margin)


def differences(pieces: Sequence[Seams]) -> list[float]:
    """The largest difference at each seam, as a share of the largest result of the channel; in order.

    Results that are alike count as 0, also where they are not finite. A difference of channels whose results are all 0,
    or of results of which only one is not finite, is infinite.
    """
    largest = [piece.largest for piece in pieces if piece.largest.size]
    peak = np.max(largest, axis=0) if largest else np.zeros(())
    found = []
    for piece, following in itertools.pairwise(pieces):
        n = min(len(piece.last), len(following.before))
        one, other = (rows[len(rows) - n :] for rows in (piece.last, following.before))
        found.append(_difference(one, other, peak))
    return found


def _difference(one: npt.NDArray, other: npt.NDArray, peak: npt.NDArray) -> float:
    if not one.size:
        return 0.0
    one, other = (_as_inexact(each) for each in (one, other))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(same, 0.0, np.abs(one - other) / peak)
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max())


def _as_inexact(values: npt.NDArray) -> npt.NDArray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


class SeamKeeper:
    """Collects the :class:`Seams` of a piece while its results pass by.

    Args:
        n_last: Results to keep of its end.
    """

    def __init__(self, n_last: int) -> None:
        self._n_last = n_last
        self._before: list[npt.NDArray] = []
        self._last: list[npt.NDArray] = []
        self._largest: npt.NDArray | None = None

    def take_before(self, rows: npt.NDArray) -> None:
        """Results of the margin, of shape (row, ...)."""
        self._before.append(np.array(rows))

    def take(self, rows: npt.NDArray) -> None:
        """Results of the piece, of shape (row, ...)."""
        if not len(rows):
            return
        if self._n_last:
            self._last.append(np.array(rows[-self._n_last :]))
            while sum(map(len, self._last[1:])) >= self._n_last:
                del self._last[0]
        largest = self._largest_of(rows)
        self._largest = largest if self._largest is None else np.maximum(self._largest, largest)

    def _largest_of(self, rows: npt.NDArray) -> npt.NDArray:
        if rows.dtype.kind not in "fiu":
            return np.abs(np.nan_to_num(rows)).max(axis=0).astype(np.float64)
        # Two reductions, which copy nothing, since this is done for all results.
        ends = np.array([np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0)], np.float64)
        if not np.isfinite(ends).all():
            rows = np.where(np.isfinite(rows), rows, 0)
            ends = np.array([rows.min(axis=0), rows.max(axis=0)], np.float64)
        return np.abs(ends).max(axis=0)

    def seams(self) -> Seams:
        """What has come by so far."""
        last = np.concatenate(self._last)[-self._n_last :] if self._last else np.zeros((0,))
        before = np.concatenate(self._before) if self._before else np.zeros((0,))
        largest = np.zeros((0,)) if self._largest is None else self._largest
        return Seams(before, last, largest)


@dataclass(frozen=True)
class WholeTask:
    """A recording that is not cut."""

    source: RecordingSource
    chain_factory: Callable[[], Stages]
    sink: ResultSink
    rechunk: RechunkSettings | None
    checkpoint_seconds: float

    @property
    def n_samples(self) -> int:
        """Length of the recording."""
        return self.source.n_samples

    def steps(self) -> Generator[int, None, ProcessedRecording]:
        """Process it; yields the samples that are done."""
        return process_in_order(self.source, self.chain_factory, self.sink, self.rechunk, self.checkpoint_seconds)


class PieceDone(typing.NamedTuple):
    """What has become of a piece."""

    was_there: bool
    """It had been done already."""

    seams: bytes
    """Packed :class:`~.seams.Seams`."""


@dataclass(frozen=True)
class PieceTask:
    """One piece of a recording."""

    source: RecordingSource
    chain_factory: Callable[[], Stages]
    sink: PieceSink
    rechunk: RechunkSettings | None
    piece: Piece

    @property
    def n_samples(self) -> int:
        """Length of the piece."""
        return self.piece.end - self.piece.begin

    def steps(self) -> Generator[int, None, PieceDone]:
        """Process it; yields the samples of the piece that are done.

        Raises:
            ValueError: The source gives other samples than it announced; a step gives another number of results than it
                says, or keeps something outside of its state; a sample of the margin is not finite.
        """
        try:
            seams = self.sink.open()
            if seams is not None:
                return PieceDone(True, seams)
            seams = yield from self._process()
            self.sink.commit(seams)
            return PieceDone(False, seams)
        finally:
            self.sink.close()

    def _process(self) -> Generator[int, None, bytes]:
        piece = self.piece
        steps = chain_of(self.chain_factory, self.rechunk)
        made = [each for step in unspoken(steps) for each in checkpoint.as_made(step)]
        begin_at(steps, 1.0 / self.source.sampling_rate, piece.first_result)
        checked = _checked_steps(steps)
        n_margin = piece.results_begin - piece.first_result
        keeper = _Keeper(self.sink, n_margin)
        done = piece.start
        for message in span(self.source, piece.start, piece.end):
            if done < piece.begin:
                _check_finite(message, self.source.identity)
            for result in run_steps(checked, message):
                keeper.take(result)
                # Here, too, so that other workers do not wait for all of a long message.
                yield max(done - piece.begin, 0)
            done += _length(message)
            yield max(done - piece.begin, 0)
        for result in flush_steps(checked):
            keeper.take(result)
        try:
            checkpoint.check_keeps_nothing(made)
        except checkpoint.CannotSave as error:
            raise ValueError(f"{error}; a method settling_time says how long it remembers.") from error
        if keeper.n_taken != piece.results_end - piece.first_result:
            raise ValueError(
                f"The chain gave {keeper.n_taken} results of samples {piece.start} to {piece.end} of "
                f"{self.source.identity}, but its steps say {piece.results_end - piece.first_result}: one that gives "
                "another number of results than samples has to say so (see ezmsg.mlx.stream.fusible); "
                "or use margin='exact'."
            )
        return keeper.seams.seams().packed()


def _length(message: AxisArray) -> int:
    return message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]


def span(source: RecordingSource, start: int, end: int) -> Iterator[AxisArray]:
    """The samples from number *start* on, up to *end*.

    Raises:
        ValueError: The source gives fewer.
    """
    done = start
    for message in source.read(start):
        n = _length(message)
        if done + n > end:
            message, _ = _split(message, end - done)
            n = end - done
        done += n
        yield message
        if done == end:
            return
    raise ValueError(f"{source.identity} has {source.n_samples} samples, but {done - start} were read from {start} on.")


def _split(message: AxisArray, n: int) -> tuple[AxisArray, AxisArray]:
    """The first *n* samples of a message, and the others; each has some."""
    (first, rest), _ = cut((Segment(message),), [n, _length(message) - n], Layout.of(message))
    return first, rest


def _check_finite(message: AxisArray, recording: str) -> None:
    """ValueError for a sample in a margin that averages and filters leave out: they would settle later."""
    from ..kernels.layout import LARGEST_SAMPLE

    data = message.data
    if data.dtype.kind == "f" and not (np.abs(data) <= LARGEST_SAMPLE).all():
        raise ValueError(
            f"{recording} has samples that are not finite where pieces begin, so that they do not settle within the "
            "margin; use margin='exact'."
        )


def _checked_steps(steps: Sequence[Stage]) -> list[Stage]:
    """The steps, which name whoever gives them something else than a message."""
    givers = ["the source", *(checkpoint.description(step).partition("(")[0] for step in steps)]
    return [_CheckedStep(step, giver) for step, giver in zip(steps, givers, strict=False)]


class _CheckedStep:
    def __init__(self, step: Stage, giver: str) -> None:
        self._step, self._giver = step, giver
        if callable(flush := getattr(step, "flush", None)):
            self.flush = flush

    def __call__(self, message: AxisArray) -> Output:
        check_type(message, self._giver)
        return self._step(message)


class _Keeper:
    """Hands on the results of a piece but for those of the margin, and collects what its seams need."""

    def __init__(self, sink: PieceSink, n_margin: int) -> None:
        self._sink = sink
        self._n_margin = n_margin
        self._n_compared = n_compared(n_margin)
        self.seams = SeamKeeper(MOST_ROWS)
        self.n_taken = 0
        """Results so far, those of the margin included."""

    def take(self, message: AxisArray) -> None:
        """Take the next results."""
        check_type(message, "the last step")
        if is_mlx_array(message.data):
            message = replace(message, data=mlx_to_numpy(message.data))
        n, before = _length(message), self._n_margin - self.n_taken
        self.n_taken += n
        if before >= n:
            self._compare(message, before)
            return
        if before > 0:
            margin, message = _split(message, before)
            self._compare(margin, before)
        self.seams.take(_rows(message))
        self._sink.append(message)

    def _compare(self, message: AxisArray, n_left: int) -> None:
        """Keep the last of the results in front of the piece; *n_left* are to come, with these."""
        rows = _rows(message)
        first = n_left - self._n_compared
        if first < len(rows):
            self.seams.take_before(rows[max(first, 0) :])


def _rows(message: AxisArray) -> npt.NDArray:
    data = np.asarray(message.data)
    return np.moveaxis(data, message.get_axis_idx(resolve_stream_dim(message)), 0)
