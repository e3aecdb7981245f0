"""``ezmsg-mlx process``: run a chain over recordings, into Zarr groups.

Started again after Ctrl-C or a crash, it goes on where it was, and leaves complete results alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from .options import (
    DONE,
    INTERRUPTED,
    SOME_FAILED,
    Job,
    Options,
    Parser,
    UsageError,
    add_result_options,
    make_parser,
    nearest,
    parse,
)
from .progress import Ended, Estimate, Failed, Finished, Interrupts, Progress, Started, View, show_estimates, view_for

if typing.TYPE_CHECKING:
    from ezmsg.util.messages.axisarray import AxisArray

    from ..offline import ProcessedRecording, RecordingSource, ResultSink
    from ..stream.unit import Stages

BUDGET = 2.0
"""Seconds after which no further piece is measured."""


@dataclass
class Measured:
    """Time and memory of a piece of a recording."""

    seconds: float = 0.0
    """How much of the recording was run."""
    start: float = 0.0
    """Seconds until the first results were written, part of nothing else."""
    read: float = 0.0
    """Seconds for reading a second of the recording."""
    chain: float = 0.0
    """Seconds that the chain takes for one."""
    write: float = 0.0
    """Seconds for writing the results of one."""
    commit: float = 0.0
    """Seconds for completing results."""
    size: float = 0.0
    """Bytes of results for a second of recording."""
    fixed_size: int = 0
    """Bytes of results of any length."""


class _Clock:
    """Tells the time since it was last asked."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        before, self._last = self._last, time.monotonic()
        return self._last - before


def measure(job: Job, chain: Stages, folder: Path) -> Measured:
    """Run a piece of *job* into *folder*."""
    from ..stream.unit import flush_steps, run_steps, steps_of

    source, place = job.open(), folder / "results.zarr"
    rate, found, clock = source.sampling_rate, Measured(), _Clock()
    steps = steps_of(chain, "The result of the function of --chain")
    n_read = n_run = n_timed = 0
    until = math.inf
    with contextlib.closing(job.sink(place)) as sink:
        sink.open("dry run", "dry run")
        for n_new, piece in _pieces(source):
            found.read += clock.lap()
            n_read += n_new
            results = list(run_steps(steps, piece))
            chain_seconds = clock.lap()
            for result in results:
                sink.append(result)
            write_seconds = clock.lap()
            n_run += len(piece.data)
            if until == math.inf:
                # The first results compile, and import what writes them.
                found.start += chain_seconds + write_seconds
                until = time.monotonic() + BUDGET if results else math.inf
                continue
            found.chain += chain_seconds
            found.write += write_seconds
            n_timed += len(piece.data)
            if time.monotonic() > until:
                break
        for result in flush_steps(steps):
            sink.append(result)
        clock.lap()
        with contextlib.suppress(ValueError):  # so short a piece may have no results
            sink.commit()
        found.commit = clock.lap()
    found.seconds = n_run / rate
    found.read /= n_read / rate
    found.chain, found.write = (part / max(n_timed / rate, 1e-9) for part in (found.chain, found.write))
    sizes = {file: file.stat().st_size for file in place.rglob("*") if file.is_file()}
    growing = sum(size for file, size in sizes.items() if file.parent.name in ("data", "time") and file.name[0] != ".")
    found.size, found.fixed_size = growing / found.seconds, sum(sizes.values()) - growing
    return found


def _pieces(source: RecordingSource) -> Iterator[tuple[int, AxisArray]]:
    """The pieces that a chain gets, each with the number of samples that were read since the one before."""
    from ..offline.process import DEFAULT_RECHUNK
    from ..rechunk import RechunkTransformer

    rechunk, n_new = RechunkTransformer(DEFAULT_RECHUNK), 0
    for message in source.read(0):
        n_new += len(message.data)
        for piece in rechunk(message):
            yield n_new, piece
            n_new = 0
    for piece in rechunk.flush():
        yield n_new, piece
        n_new = 0


def dry_run(options: Options) -> int:
    """Say it for each recording and for all; the exit status."""
    place = nearest(options.output)
    try:
        with tempfile.TemporaryDirectory(prefix=".ezmsg-mlx-dry-run-", dir=place):
            pass
    except OSError as error:
        raise UsageError("--output", f"nothing can be written into {str(place)!r} ({error.strerror})") from error
    rows = list(estimates(options.jobs, options.chain.factory(), place))
    found = [row for row in rows if isinstance(row, Estimate)]
    if found:
        parts = {part: math.fsum(getattr(row, part) for row in found) for part in ("read", "chain", "write")}
        # Each process starts once, and works on a part of the pieces.
        n = min(options.workers or 1, os.cpu_count() or 1)
        start = max(row.start for row in found)
        parts = {part: value / n for part, value in parts.items()}
        total = Estimate(
            recording="",
            seconds=math.fsum(row.seconds for row in found),
            wall=start + math.fsum(parts.values()),
            start=start,
            size=sum(row.size for row in found),
            free=shutil.disk_usage(place).free,
            measured=math.fsum(row.measured for row in found),
            **parts,
        )
        rows.append(total)
    show_estimates(rows, options.json)
    return SOME_FAILED if len(found) < len(options.jobs) else DONE


def estimates(jobs: list[Job], factory: Callable[[], Stages], place: Path) -> Iterator[Estimate | Failed]:
    """One for each; recordings of one rate and shape are measured once."""
    known: dict[tuple, Measured] = {}
    for job in jobs:
        try:
            source = job.open()
            first = next(source.read(0))
            kind = (source.sampling_rate, first.data.dtype, first.data.shape[1:])
            is_new = kind not in known
            if is_new:
                # Where the results will go, since another disk has another speed.
                with tempfile.TemporaryDirectory(prefix=".ezmsg-mlx-dry-run-", dir=place) as folder:
                    known[kind] = measure(job, factory(), Path(folder))
            found = known[kind]
            seconds = source.n_samples / source.sampling_rate
        except ImportError:
            raise
        except Exception as error:  # what the run itself would say of this recording
            yield Failed(job.recording, f"{type(error).__name__}: {error}")
            continue
        read, chain = seconds * found.read, seconds * found.chain
        write = seconds * found.write + found.commit
        yield Estimate(
            recording=job.recording,
            seconds=seconds,
            wall=found.start + read + chain + write,
            read=read,
            chain=chain,
            write=write,
            start=found.start,
            size=round(seconds * found.size + found.fixed_size),
            free=shutil.disk_usage(place).free,
            measured=found.seconds if is_new else 0.0,
        )


def parser(prog: str) -> Parser:
    """The parser of the options, without those of a chain."""
    reader = make_parser(prog)
    add_result_options(reader, [])
    return reader


def main(prog: str, arguments: list[str]) -> int:
    """Run the command; the exit status."""
    options = parse(prog, arguments)
    # INFO lines would run into the bar; the variable reaches the workers.
    import ezmsg.core as ez

    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING").upper())
    return dry_run(options) if options.dry_run else run(options)


class _Run:
    """Events of recordings at work, for a view."""

    def __init__(self, jobs: list[Job], view: View, check: Callable[[], None]) -> None:
        self._jobs, self._view, self._check = jobs, view, check
        self._opened: list[tuple[Job, float, float]] = []
        """Recordings that have been begun, their sampling rate, and when."""
        self._at: dict[int, tuple[float, float]] = {}
        """Of recordings that have not ended, what was done when this run came to them, and what is done now."""
        self.done: list[Finished] = []
        self.n_failed = 0

    def pairs(self) -> Iterator[tuple[RecordingSource, ResultSink]]:
        """A source and a sink for each recording that can be opened."""
        for job in self._jobs:
            try:
                source = job.open()
                sink = job.sink()
            except ImportError:
                raise
            except Exception as error:  # one bad recording is no reason to leave the others
                self._fail(job, error)
                continue
            self._opened.append((job, source.sampling_rate, time.monotonic()))
            yield source, sink

    def report(self, number: int, done: int, total: int) -> None:
        """Take the progress of a recording."""
        self._check()
        job, rate, _ = self._opened[number]
        seconds = done / rate
        self._at[number] = (self._at.get(number, (seconds, seconds))[0], seconds)
        self._view.take(Progress(job.recording, seconds, total / rate))

    def end(self, number: int, result: ProcessedRecording | Exception) -> None:
        """Take what has become of a recording."""
        job, rate, begin = self._opened[number]
        self._at.pop(number, None)
        if isinstance(result, Exception):
            self._fail(job, result)
            return
        processed = (result.n_samples - result.first_sample) / rate
        event = Finished(job.recording, job.results, result.n_samples / rate, processed, time.monotonic() - begin)
        self.done.append(event)
        self._view.take(event)

    @property
    def seconds(self) -> float:
        """Samples that were processed, those of unfinished recordings included."""
        return math.fsum(event.processed for event in self.done) + math.fsum(
            now - first for first, now in self._at.values()
        )

    def _fail(self, job: Job, error: Exception) -> None:
        self.n_failed += 1
        self._view.take(Failed(job.recording, f"{type(error).__name__}: {error}"))


def run(options: Options) -> int:
    """Process all of them; the exit status."""
    from ..offline import process_recordings

    begin, status, problem, jobs = time.monotonic(), DONE, "", options.jobs
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(_workers(options))
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError("--output", f"{str(options.output)!r} cannot be made ({error.strerror})") from error
        view = stack.enter_context(contextlib.closing(view_for(options.json)))
        interrupts = stack.enter_context(Interrupts())
        run = _Run(jobs, view, interrupts.check)
        view.take(Started(len(jobs), str(options.chain), str(options.output)))
        try:
            results = process_recordings(
                run.pairs(),
                options.chain.factory(),
                checkpoint_seconds=options.checkpoint_seconds,
                progress=run.report,
                workers=workers,
                margin=options.margin,
                tolerance=options.tolerance,
            )
            # Closed here, so that all workers have ended before the summary.
            with contextlib.closing(typing.cast("Generator[tuple[int, ProcessedRecording | Exception]]", results)):
                for number, result in results:
                    run.end(number, result)
        except KeyboardInterrupt:
            status = INTERRUPTED
        except RuntimeError as error:  # there are no workers any more
            status, problem = SOME_FAILED, str(error)
        status = status or (SOME_FAILED if run.n_failed else DONE)
        view.take(
            Ended(
                finished=len(run.done),
                there=sum(not event.processed for event in run.done),
                failed=run.n_failed,
                left=len(jobs) - len(run.done) - run.n_failed,
                seconds=run.seconds,
                wall=time.monotonic() - begin,
                status=status,
            )
        )
    if problem:
        print(problem, file=sys.stderr)
    return status


@contextlib.contextmanager
def _workers(options: Options) -> Iterator[int | Executor | None]:
    """Arguments of :func:`ezmsg.mlx.process_recordings` for its workers."""
    if not options.scheduler:
        yield options.workers if options.workers and options.workers > 1 else None
        return
    from ..offline.reading import import_extra

    distributed = import_extra("distributed")
    try:
        client = distributed.Client(options.scheduler)
    except (OSError, ValueError) as error:
        raise UsageError("--scheduler", f"no Dask scheduler answers at {options.scheduler!r} ({error})") from error
    try:
        yield client.get_executor(pure=False)
    finally:
        with contextlib.suppress(Exception):  # it is to go, whether its scheduler answers or not
            client.close(timeout=2)
