"""Run a chain over whole recordings in bounded memory, and go on where an interrupted run has stopped.

::

    source = NWBSource("session.nwb")
    sink = ZarrSink("session.zarr")
    process_recording(source, make_chain, sink)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field

import ezmsg.core as ez

from ..rechunk import RechunkSettings
from ..stream.unit import Stages, check_count, check_number
from . import checkpoint
from .contracts import PiecewiseSink, RecordingSource, ResultSink
from .engine import ProcessedRecording, chain_of, process_in_order, recipe_of
from .pieces import PieceDone, PieceTask, Plan, Seams, WholeTask, differences, plan_pieces
from .spikeinterfacesource import as_source
from .workers import Crew, ExecutorCrew, ProcessCrew, Task, TaskEvent, run_through

Report = Callable[[int, int], None]
"""Takes the number of samples done and that of all samples."""


@contextlib.contextmanager
def reporting(
    progress: Report | typing.Literal[False] | None, recording: str, sampling_rate: float
) -> Iterator[Report | None]:
    """What to call after each chunk; a bar while the ``with`` block lasts, if *progress* is None.

    Args:
        progress: See :func:`ezmsg.mlx.process_recording`.
        recording: Its identity, which begins with its name.
        sampling_rate: Samples a second.
    """
    if progress is not None:
        yield None if progress is False else progress
        return
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:  # it comes with the extra "offline"
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(recording.partition(" ")[0], total=None, speed="")
        begin, first = time.monotonic(), None

        def report(done: int, total: int) -> None:
            nonlocal first
            if first is None:
                first = done
            speed = (done - first) / float(sampling_rate) / max(time.monotonic() - begin, 1e-9)
            bar.update(task, completed=done, total=total, speed=f"{speed:.0f}x real time" if speed else "")

        yield report


Recordings = Iterable[tuple[RecordingSource, ResultSink]]
"""Sources and the sinks of their results."""

Told = Callable[[int, int, int], None]
"""Takes the number of a recording, its samples that are done, and all its samples."""


@dataclass(frozen=True)
class Options:
    """How recordings are processed; see :func:`ezmsg.mlx.process_recordings`."""

    chain_factory: Callable[[], Stages]
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

    def take(self, event: TaskEvent) -> tuple[int, ProcessedRecording | Exception] | None:
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


DEFAULT_RECHUNK = RechunkSettings(sizes=(3000,))
"""How a recording is cut unless something else is asked for: 0.1 s at 30 kHz."""

Margin: typing.TypeAlias = float | typing.Literal["exact"] | None
"""Seconds; ``"exact"`` for recordings that are not cut; None for what the chain says."""


def process_recording(
    source: RecordingSource,
    chain_factory: Callable[[], Stages],
    sink: ResultSink,
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Report | typing.Literal[False] | None = None,
    workers: int | Executor | None = None,
    margin: Margin = None,
    tolerance: float = 1e-6,
) -> ProcessedRecording:
    """Run a chain over a recording.

    In memory at any time: one chunk that was read, the state of the chain, and what the sink collects for one write.
    When the recording ends, every step that has a ``flush`` (Rechunk, ReadLate) is flushed. An incomplete last bin or
    window is not part of the results, as it is not in a graph.

    **Interrupted** by Ctrl-C, an exception or the end of the process, the run leaves nothing under the final name. The
    next one goes on at the last checkpoint, with results equal bit for bit to those of one run, if recording, settings,
    versions of the packages, processor and MLX's device are the same; else it starts over and says why (INFO).
    The source code of your own steps is not compared: after a change, delete the partial results.

    States that can be saved are those of ezmsg-baseproc's processors, nested ones included, if they consist of numbers,
    text, containers, NumPy and MLX arrays, and objects of ezmsg's packages or of the step's own: all states of this
    package do. With a function, a generator or anything else in the chain or in a state, there are no checkpoints (the
    log says so once, INFO), and an interrupted run starts over. Reading a checkpoint cannot run code.

    Args:
        source: The recording, for example an :obj:`ezmsg.mlx.NWBSource`, or a ``spikeinterface.BaseRecording``.
        chain_factory: Builds the chain, for this recording alone: a transformer, or another callable that takes and
            returns a message, or a sequence of them, applied in order. One that returns a list or tuple has its
            messages fed on one by one; None ends the message there.
        sink: Where the results go, for example a :obj:`ezmsg.mlx.ZarrSink`. Closed at the end, whatever happens.
        rechunk: How the recording is cut before the chain, so that the chain sees few message lengths and the same
            ones however the file is read: 3000 samples, 0.1 s at 30 kHz, by default. None: as the source reads it.
        checkpoint_seconds: Seconds of the recording between checkpoints, ``math.inf`` for none.
        progress: Called after each chunk with the number of samples done and that of all samples. None: a bar on stderr
            if that is a terminal and rich is installed. False: nothing.
        workers: See :func:`process_recordings`. None: in this process, one sample after the other.
        margin: See :func:`process_recordings`.
        tolerance: See :func:`process_recordings`.

    Raises:
        ValueError: The recording has no samples, or others than it announced; *checkpoint_seconds* is not above 0.
        TypeError: An argument is not of its type; *chain_factory* builds no chain; a step returns something else than
            messages.
        FileExistsError: The sink holds complete results of another recording or other settings.
    """
    source = as_source(source)
    for argument, value, method, allowed in (
        ("source", source, "read", "a source of recordings, for example an NWBSource"),
        ("sink", sink, "append", "a sink of results, for example a ZarrSink"),
    ):
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{argument!r} must be {allowed}, got {value!r}")
    if not (progress is None or progress is False or callable(progress)):
        raise TypeError(f"'progress' must be a callable, False or None, got {progress!r}")
    options = _options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    if source.n_samples < 1:
        raise ValueError(f"{source.identity} has no samples.")
    with reporting(progress, source.identity, source.sampling_rate) as report:
        if workers is None:
            steps = process_in_order(source, chain_factory, sink, rechunk, checkpoint_seconds)
            return run_through(steps, None if report is None else lambda done: report(done, source.n_samples))
        told = None if report is None else lambda number, done, total: report(done, total)
        ((_, outcome),) = process_in_pieces([(source, sink)], options, _crew_of(workers), told)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def process_recordings(
    recordings: Recordings,
    chain_factory: Callable[[], Stages],
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Told | None = None,
    workers: int | Executor | None = None,
    margin: Margin = None,
    tolerance: float = 1e-6,
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    """Run a chain over many recordings, on several workers; what has become of each, in the order they are finished.

    Recordings are cut into pieces of time, and all pieces are one queue, so that no worker waits for the last
    recording. A recording that fails does not stop the others.

    Args:
        recordings: Sources and sinks, in pairs. Taken one by one, as workers come to them.
        chain_factory: As for :func:`process_recording`; for *workers* a function of a module.
        rechunk: As for :func:`process_recording`.
        checkpoint_seconds: As for :func:`process_recording`; the length of a piece at most, or four margins if they are
            longer. A shorter recording is cut into 8 pieces, of 4 s and of 16 margins at least.
        progress: Called with the number of a recording, its samples that are done, and all its samples.
        workers: A number of processes on this machine, this one included: the others are spawned when there is enough
            to do for them, and the iterator is to be used in one thread. Or an executor, for example that of a Dask
            cluster (``client.get_executor(pure=False)``). None: in this process, one recording after the other, with
            threads that read and write.
        margin: Seconds that a piece begins earlier, so that filters and averages have settled. None: it follows from
            the chain. ``"exact"``: recordings are not cut, and results are those of one run to the last bit.
        tolerance: What results may differ from those of one run, as a share of the largest.

    Yields:
        The number of a recording, and what was done or the error that ended it.
    """
    if not (progress is None or callable(progress)):
        raise TypeError(f"'progress' must be a callable or None, got {progress!r}")
    options = _options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    return _outcomes(map(_with_source, recordings), options, workers, progress)


def _with_source(pair: tuple[RecordingSource, ResultSink]) -> tuple[RecordingSource, ResultSink]:
    return as_source(pair[0]), pair[1]


def _outcomes(
    recordings: Recordings, options: Options, workers: int | Executor | None, progress: Told | None
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    if workers is not None:
        yield from process_in_pieces(recordings, options, _crew_of(workers), progress)
        return
    for number, (source, sink) in enumerate(recordings):
        report = None if progress is None else functools.partial(progress, number)
        try:
            done = process_recording(
                source,
                options.chain_factory,
                sink,
                rechunk=options.rechunk,
                checkpoint_seconds=options.checkpoint_seconds,
                progress=report or False,
            )
        except Exception as error:
            yield number, error
        else:
            yield number, done


def _crew_of(workers: int | Executor) -> Crew:
    return ExecutorCrew(workers) if isinstance(workers, Executor) else ProcessCrew(workers)


def _options(
    chain_factory: Callable[[], Stages],
    rechunk: RechunkSettings | None,
    checkpoint_seconds: float,
    workers: int | Executor | None,
    margin: Margin,
    tolerance: float,
) -> Options:
    """The options, checked."""
    if not callable(chain_factory):
        raise TypeError(f"'chain_factory' must be a callable that builds a chain, got {chain_factory!r}")
    if not isinstance(rechunk, (RechunkSettings, type(None))):
        raise TypeError(f"'rechunk' must be RechunkSettings or None, got {rechunk!r}")
    check_number("checkpoint_seconds", checkpoint_seconds, infinite=True)
    if workers is not None and not isinstance(workers, Executor):
        check_count("workers", workers, 1)
    if not (margin is None or margin == "exact"):
        check_number("margin", margin, zero=True)
    check_number("tolerance", tolerance)
    return Options(chain_factory, rechunk, float(checkpoint_seconds), margin, float(tolerance))
