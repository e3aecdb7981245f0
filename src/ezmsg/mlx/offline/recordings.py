"""Many recordings, in pieces, on several workers: one queue."""

import itertools
import math
import operator
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import ezmsg.core as ez

from ..rechunk import RechunkSettings
from ..stream.steps import Chain
from . import checkpoint
from .contracts import PiecewiseSink, RecordingSource, ResultSink
from .crew import Crew, Event, Task
from .piece import PieceDone, PieceTask, WholeTask
from .plan import Plan, plan_pieces
from .seams import Seams, differences
from .sequential import ProcessedRecording, chain_of, recipe_of

Recordings = Iterable[tuple[RecordingSource, ResultSink]]
"""Sources and the sinks of their results."""

Told = Callable[[int, int, int], None]
"""Takes the number of a recording, its samples that are done, and all its samples."""


@dataclass(frozen=True)
class Options:
    """How recordings are processed; see :func:`ezmsg.mlx.process_recordings`."""

    chain_factory: Callable[[], Chain]
    rechunk: RechunkSettings | None
    checkpoint_seconds: float
    margin: float | typing.Literal["exact"] | None
    tolerance: float


@dataclass
class _InWork:
    """A recording of which some pieces are done."""

    source: RecordingSource
    sink: PiecewiseSink
    plan: Plan
    tasks: list[PieceTask]
    done: dict[int, PieceDone] = field(default_factory=dict)
    so_far: dict[int, int] = field(default_factory=dict)
    """Samples of each piece that are done."""

    def join(self, options: Options) -> ProcessedRecording:
        """Make one of the pieces.

        Raises:
            ValueError: The results differ at a seam by more than is allowed.
        """
        pieces = self.plan.pieces
        seams = differences([Seams.unpacked(self.done[piece.number].seams) for piece in pieces])
        largest = max(seams, default=None)
        if largest is not None and not largest <= options.tolerance:
            at = pieces[seams.index(largest) + 1].begin / self.source.sampling_rate
            raise ValueError(
                f"The results of neighbouring pieces differ at {at:.3f} s by {largest:.2g} of the largest, and "
                f"tolerance is {options.tolerance:g}: {self.plan} ({self.source.identity}). Give a longer margin, a "
                "larger tolerance, or margin='exact'."
            )
        about = {"count": len(pieces), "samples": self.plan.n_samples, "margin": self.plan.margin}
        if largest is not None:
            about["largest_difference"] = largest
        self.sink.join(len(pieces), about)
        self.sink.commit()
        were_there = sum(piece.end - piece.begin for piece in pieces if self.done[piece.number].was_there)
        return ProcessedRecording(self.source.n_samples, were_there, len(pieces), largest)


def process_in_pieces(
    recordings: Recordings, options: Options, crew: Crew, told: Told | None
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    """Process recordings on the workers of *crew*, which is closed at the end."""
    queue = _Queue(options, told)
    numbers, rest, may_be_more = itertools.count(), iter(recordings), True
    try:
        while True:
            while crew.has_room():
                if queue.tasks:
                    crew.submit(*queue.tasks.popleft())
                    continue
                if (pair := next(rest, None)) is None:
                    may_be_more = False
                    break
                number = next(numbers)
                outcome = queue.open(number, *pair)
                if outcome is not None:
                    yield number, outcome
            if not queue.in_flight:
                return
            n_to_come = sum(task.n_samples for _, task in queue.tasks)
            for event in crew.wait(n_to_come, may_be_more and operator.length_hint(rest, 1) > 0):
                finished = queue.take(event)
                if finished is not None:
                    yield finished
    finally:
        crew.close()
        queue.close()


class _Queue:
    """The recordings that are open, and the tasks that they consist of."""

    def __init__(self, options: Options, told: Told | None) -> None:
        self._options = options
        self._told = told
        self._numbers = itertools.count()
        self._open: dict[int, _InWork] = {}
        self._of_task: dict[int, tuple[int, Task]] = {}
        self.tasks: deque[tuple[int, Task]] = deque()
        """What is to be done, in order."""

    @property
    def in_flight(self) -> bool:
        """Whether a task is not finished."""
        return bool(self._of_task)

    def open(self, number: int, source: RecordingSource, sink: ResultSink) -> ProcessedRecording | Exception | None:
        """Add the tasks of a recording; what has become of it if there are none."""
        options = self._options
        try:
            if options.margin == "exact":
                whole = WholeTask(source, options.chain_factory, sink, options.rechunk, options.checkpoint_seconds)
                self._add(number, whole)
                return None
            return self._open_pieces(number, source, sink)
        except Exception as error:
            sink.close()
            return error

    def _open_pieces(self, number: int, source: RecordingSource, sink: ResultSink) -> ProcessedRecording | None:
        if not all(callable(getattr(sink, name, None)) for name in ("piece", "join")):
            raise TypeError(
                f"sink is {sink!r}; allowed with workers is one for pieces, for example a ZarrSink; or use "
                "margin='exact'."
            )
        sink = typing.cast(PiecewiseSink, sink)
        options = self._options
        if source.n_samples < 1:
            raise ValueError(f"{source.identity} has no samples.")
        steps = chain_of(options.chain_factory, options.rechunk)
        plan = plan_pieces(
            source.n_samples,
            float(source.sampling_rate),
            steps,
            seconds=options.checkpoint_seconds,
            margin=typing.cast("float | None", options.margin),
            tolerance=options.tolerance,
            multiple=1 if options.rechunk is None else math.lcm(*options.rechunk.sizes),
        )
        recipe = recipe_of(source, steps)
        opened = sink.open(recipe, f"{recipe}\n{checkpoint.environment()}\n{plan}")
        if opened.is_complete:
            sink.close()
            ez.logger.info(f"Results are there already: {source.identity}")
            return ProcessedRecording(source.n_samples, source.n_samples)
        if opened.checkpoint is None:
            # From here on, what belongs to this plan stays, whatever happens.
            sink.checkpoint(str(plan).encode())
        n_results = plan.pieces[0].results_end
        in_work = _InWork(source, sink, plan, [])
        self._open[number] = in_work
        for piece in plan.pieces:
            of_piece = sink.piece(piece.number, n_results)
            task = PieceTask(source, options.chain_factory, of_piece, options.rechunk, piece)
            in_work.tasks.append(task)
            self._add(number, task)
        return None

    def _add(self, number: int, task: Task) -> None:
        key = next(self._numbers)
        self._of_task[key] = number, task
        self.tasks.append((key, task))

    def take(self, event: Event) -> tuple[int, ProcessedRecording | Exception] | None:
        """What an event means: the number of a recording and what has become of it, if it is finished."""
        if event.number not in self._of_task:
            return None
        number, task = self._of_task[event.number]
        in_work = self._open.get(number)
        if not event.is_finished:
            self._tell(number, task, in_work, event.done)
            return None
        del self._of_task[event.number]
        if isinstance(event.outcome, Exception):
            self._give_up(number)
            return number, event.outcome
        if in_work is None:
            outcome = typing.cast(ProcessedRecording, event.outcome)
            self._tell(number, task, None, outcome.n_samples)
            return number, outcome
        piece = typing.cast(PieceTask, task).piece
        in_work.done[piece.number] = typing.cast(PieceDone, event.outcome)
        self._tell(number, task, in_work, piece.end - piece.begin)
        if len(in_work.done) < len(in_work.tasks):
            return None
        try:
            return number, in_work.join(self._options)
        except Exception as error:
            return number, error
        finally:
            in_work.sink.close()
            del self._open[number]

    def _tell(self, number: int, task: Task, in_work: _InWork | None, done: int) -> None:
        if self._told is None:
            return
        if in_work is None:
            self._told(number, done, typing.cast(WholeTask, task).source.n_samples)
            return
        in_work.so_far[typing.cast(PieceTask, task).piece.number] = done
        self._told(number, sum(in_work.so_far.values()), in_work.source.n_samples)

    def _give_up(self, number: int) -> None:
        """Forget what is left of a recording; pieces that are in work end, and are kept."""
        self.tasks = deque(each for each in self.tasks if self._of_task[each[0]][0] != number)
        if (in_work := self._open.pop(number, None)) is not None:
            in_work.sink.close()
        self._of_task = {key: each for key, each in self._of_task.items() if each[0] != number}

    def close(self) -> None:
        """Let go of all sinks that are open."""
        for in_work in self._open.values():
            in_work.sink.close()
        self._open.clear()
