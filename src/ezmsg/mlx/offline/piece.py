"""What a worker does: a piece of a recording, or a whole one."""

import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..rechunk import RechunkSettings
from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.segments import Layout, Segment, cut
from ..stream.steps import Chain, Output, Step, flush_steps, run_steps
from . import checkpoint
from .contracts import PieceSink, RecordingSource, ResultSink
from .plan import Piece, begin_at, unspoken
from .resumable import check_type
from .seams import MOST_ROWS, SeamKeeper, n_compared
from .sequential import ProcessedRecording, chain_of, process_in_order


@dataclass(frozen=True)
class WholeTask:
    """A recording that is not cut."""

    source: RecordingSource
    chain_factory: Callable[[], Chain]
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
    chain_factory: Callable[[], Chain]
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
                "another number of results than samples has to say so (see ezmsg.mlx.stream.settling); "
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


def _checked_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps, which name whoever gives them something else than a message."""
    givers = ["the source", *(checkpoint.description(step).partition("(")[0] for step in steps)]
    return [_CheckedStep(step, giver) for step, giver in zip(steps, givers, strict=False)]


class _CheckedStep:
    def __init__(self, step: Step, giver: str) -> None:
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
