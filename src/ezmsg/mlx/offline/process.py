"""Run a chain over whole recordings in bounded memory, and go on where an interrupted run has stopped.

::

    source = NWBSource("session.nwb")
    sink = ZarrSink("session.zarr")
    process_recording(source, make_chain, sink)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import ezmsg.core as ez

from ..rechunk import RechunkSettings
from ..stream.unit import Stages, check_count, check_number, known
from . import checkpoint
from .contracts import PiecewiseSink, RecordingSource, ResultSink
from .engine import PieceDone, PieceTask, chain_of, recipe_of
from .executors import Tasks, run_through
from .pieces import Piece, Plan, Seams, differences, plan_pieces
from .spikeinterfacesource import as_source

Report = Callable[[int, int], None]
"""Takes the number of samples done and that of all samples."""


@contextlib.contextmanager
def reporting(progress: Report | typing.Literal[False] | None, source: RecordingSource) -> Iterator[Report | None]:
    """The function to call after each chunk; a bar while the ``with`` block lasts, if *progress* is None."""
    if progress is not None or not sys.stderr.isatty():
        yield None if progress is False else progress
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:  # it comes with the extra "offline"
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(source.identity.partition(" ")[0], total=None, speed="")
        begin, first = time.monotonic(), None

        def report(done: int, total: int) -> None:
            nonlocal first
            if first is None:
                first = done
            speed = (done - first) / float(source.sampling_rate) / max(time.monotonic() - begin, 1e-9)
            bar.update(task, completed=done, total=total, speed=f"{speed:.0f}x real time" if speed else "")

        yield report


DEFAULT_RECHUNK = RechunkSettings(sizes=(3000,))
"""How a recording is cut unless something else is asked for: 0.1 s at 30 kHz."""

Recordings = Iterable[tuple[RecordingSource, ResultSink]]
"""Sources and the sinks of their results."""

Told = Callable[[int, int, int], None]
"""Takes the number of a recording, its samples that are done, and all its samples."""

Margin: typing.TypeAlias = float | typing.Literal["exact"] | None
"""Seconds; ``"exact"`` for recordings that are not cut; None for what the chain says."""


@dataclass(frozen=True)
class Options:
    """How recordings are processed; see :func:`ezmsg.mlx.process_recordings`."""

    chain_factory: Callable[[], Stages]
    rechunk: RechunkSettings | None
    checkpoint_seconds: float
    workers: int | Executor | None
    margin: Margin
    tolerance: float

    def __post_init__(self) -> None:
        if not callable(self.chain_factory):
            raise TypeError(f"'chain_factory' must be a callable that builds a chain, got {self.chain_factory!r}")
        if not isinstance(self.rechunk, (RechunkSettings, type(None))):
            raise TypeError(f"'rechunk' must be RechunkSettings or None, got {self.rechunk!r}")
        check_number("checkpoint_seconds", self.checkpoint_seconds, infinite=True)
        if self.workers is not None and not isinstance(self.workers, Executor):
            check_count("workers", self.workers, 1)
        if not (self.margin is None or self.margin == "exact"):
            check_number("margin", self.margin, zero=True)
        check_number("tolerance", self.tolerance)


@dataclass(frozen=True)
class ProcessedRecording:
    """Report of :func:`process_recording`."""

    n_samples: int
    """Length of the recording in samples."""

    first_sample: int
    """The sample that this run began at: 0, or the place of a checkpoint; ``n_samples`` if there was nothing to do.
    With several workers, how many samples were there already."""

    n_pieces: int = 1
    """Into how many pieces the recording was cut."""

    largest_difference: float | None = None
    """Largest difference of the results of neighbouring pieces in front of their seam, as a share of the largest
    result of the channel; None where there is no seam, or the results were there."""


class _Recording:
    """A recording as a list of pieces, which is one unless there are workers."""

    def __init__(self, source: RecordingSource, sink: ResultSink, options: Options) -> None:
        if source.n_samples < 1:
            raise ValueError(f"{source.identity} has no samples.")
        self.source, self.sink, self._options = source, sink, options
        self._plan: Plan | None = None
        self.tasks: list[PieceTask] = []
        """One for each piece; none if the results are there."""
        self.done: dict[int, PieceDone] = {}
        """Outcomes of the pieces, by their numbers."""
        self.so_far: dict[int, int] = {}
        """Samples of each piece that are done."""
        if options.workers is None or options.margin == "exact":
            self.tasks = [self._task(sink, Piece(0, 0, source.n_samples))]
        else:
            self._plan_pieces()

    def _task(self, sink: ResultSink, piece: Piece) -> PieceTask:
        options = self._options
        return PieceTask(self.source, options.chain_factory, options.rechunk, sink, piece, options.checkpoint_seconds)

    def _plan_pieces(self) -> None:
        source, sink, options = self.source, self.sink, self._options
        if not all(callable(getattr(sink, name, None)) for name in ("piece", "about_pieces")):
            raise TypeError(
                f"'sink' must be one for pieces, for example a ZarrSink, got {sink!r}; or use margin='exact'"
            )
        steps = chain_of(options.chain_factory, options.rechunk)
        plan = plan_pieces(
            source.n_samples,
            float(source.sampling_rate),
            steps,
            seconds=options.checkpoint_seconds,
            margin=typing.cast("float | None", options.margin),
            tolerance=options.tolerance,
        )
        recipe = recipe_of(source, steps)
        opened = sink.open(recipe, f"{recipe}\n{checkpoint.environment()}\n{plan}")
        if opened.is_complete:
            ez.logger.info(f"Results are there already: {source.identity}")
            return
        if opened.checkpoint is None:
            # From here on, what belongs to this plan stays, whatever happens.
            sink.checkpoint(str(plan).encode())
        self._plan = plan
        piece_of = typing.cast(PiecewiseSink, sink).piece
        self.tasks = [self._task(piece_of(piece.number, plan.borders), piece) for piece in plan.pieces]

    def finish(self) -> ProcessedRecording:
        """Show the results of all pieces under their final name; ValueError if they differ too much at a seam."""
        n_samples, n_there = self.source.n_samples, sum(done.n_there for done in self.done.values())
        if not self.tasks:
            return ProcessedRecording(n_samples, n_samples)
        if self._plan is None:
            return ProcessedRecording(n_samples, n_there)
        pieces = self._plan.pieces
        packed = [known(self.done[piece.number].checkpoint) for piece in pieces]
        seams = differences(list(map(Seams.unpacked, packed)))
        largest = max(seams, default=None)
        if largest is not None and not largest <= self._options.tolerance:
            at = pieces[seams.index(largest) + 1].begin / self.source.sampling_rate
            raise ValueError(
                f"The results of neighbouring pieces differ at {at:.3f} s by {largest:.2g} of the largest, and "
                f"tolerance is {self._options.tolerance:g}: {self._plan} ({self.source.identity}). Give a longer "
                "margin, a larger tolerance, or margin='exact'."
            )
        about: dict[str, object] = {"count": len(pieces), "margin": self._plan.margin}
        about["first_rows"] = list(self._plan.borders[:-1])
        if largest is not None:
            about["largest_difference"] = largest
        typing.cast(PiecewiseSink, self.sink).about_pieces(about)
        self.sink.commit()
        return ProcessedRecording(n_samples, n_there, len(pieces), largest)


def _process_on_workers(
    recordings: Recordings, options: Options, told: Told | None
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    """Process recordings on workers; the pieces of all of them are one queue."""
    assert options.workers is not None
    tasks, begun = Tasks(options.workers), dict[int, _Recording]()
    in_work: dict[int, tuple[int, PieceTask]] = {}

    def queue() -> Iterator[tuple[int, PieceTask | Exception | None]]:
        """The pieces of each recording; the error where there are none, and None where the results are there."""
        for number, (source, sink) in enumerate(recordings):
            try:
                begun[number] = recording = _Recording(source, sink, options)
            except Exception as error:
                sink.close()
                yield number, error
                continue
            if not recording.tasks:
                yield number, None
            for task in recording.tasks:
                yield number, task

    rest = queue()
    try:
        while True:
            while tasks.has_room() and (following := next(rest, None)) is not None:
                number, task = following
                if isinstance(task, Exception):
                    yield number, task
                elif task is None:
                    yield number, _finished(begun.pop(number))
                elif number in begun:  # else another piece of it has failed
                    try:
                        in_work[tasks.submit(task)] = number, task
                    except TypeError as error:  # it cannot be pickled
                        begun.pop(number).sink.close()
                        yield number, error
            if not in_work:
                return
            event = tasks.wait()
            if event.number not in in_work:
                continue
            number, task = in_work[event.number] if not event.is_finished else in_work.pop(event.number)
            if (found := begun.get(number)) is None:
                continue  # what is left of one that has failed
            if isinstance(event.outcome, Exception):
                # Other pieces of it that are in work end, and are kept.
                begun.pop(number).sink.close()
                yield number, event.outcome
                continue
            found.so_far[task.piece.number] = task.n_samples if event.is_finished else event.done
            if told is not None:
                told(number, sum(found.so_far.values()), found.source.n_samples)
            if event.is_finished:
                found.done[task.piece.number] = typing.cast(PieceDone, event.outcome)
                if len(found.done) == len(found.tasks):
                    yield number, _finished(begun.pop(number))
    finally:
        tasks.close()
        for recording in begun.values():
            recording.sink.close()


def _finished(recording: _Recording) -> ProcessedRecording | Exception:
    try:
        return recording.finish()
    except Exception as error:
        return error
    finally:
        recording.sink.close()


def _process_here(
    source: RecordingSource, sink: ResultSink, options: Options, report: Report | None
) -> ProcessedRecording:
    """Process a recording in this process, in one piece."""
    recording = _Recording(source, sink, options)
    told = None if report is None else lambda done: report(done, source.n_samples)
    for task in recording.tasks:
        recording.done[task.piece.number] = run_through(task.steps(), told)
    return recording.finish()


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
    if not callable(getattr(source, "read", None)):
        raise TypeError(f"'source' must be a source of recordings, for example an NWBSource, got {source!r}")
    if not callable(getattr(sink, "append", None)):
        raise TypeError(f"'sink' must be a sink of results, for example a ZarrSink, got {sink!r}")
    if not (progress is None or progress is False or callable(progress)):
        raise TypeError(f"'progress' must be a callable, False or None, got {progress!r}")
    options = Options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    with reporting(progress, source) as report:
        if workers is None:
            return _process_here(source, sink, options, report)
        told = None if report is None else lambda number, done, total: report(done, total)
        ((_, outcome),) = _process_on_workers([(source, sink)], options, told)
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
    options = Options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    pairs = ((as_source(source), sink) for source, sink in recordings)
    return (_process_one_by_one if workers is None else _process_on_workers)(pairs, options, progress)


def _process_one_by_one(
    recordings: Recordings, options: Options, told: Told | None
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    for number, (source, sink) in enumerate(recordings):
        try:
            report = None if told is None else functools.partial(told, number)
            yield number, _process_here(source, sink, options, report)
        except Exception as error:
            yield number, error
