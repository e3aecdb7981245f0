"""``ezmsg-mlx process``: run a chain over recordings, into Zarr groups.

Started again after Ctrl-C or a crash, it goes on where it was, and leaves complete results alone.
"""

import contextlib
import math
import os
import sys
import time
import typing
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor

from .dryrun import dry_run
from .events import Ended, Failed, Finished, Progress, Started
from .interrupts import Interrupts
from .jobs import Job
from .processoptions import Options, parse
from .usage import DONE, INTERRUPTED, SOME_FAILED, USAGE, UsageError
from .views import View, view_for

if typing.TYPE_CHECKING:
    from ..offline import ProcessedRecording, RecordingSource, ResultSink


def main(prog: str, arguments: list[str]) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        SystemExit: With status 2 after wrong usage.
    """
    options = parse(prog, arguments)
    # INFO lines would run into the bar; the variable reaches the workers.
    import ezmsg.core as ez

    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING").upper())
    try:
        return dry_run(options) if options.dry_run else run(options)
    except UsageError as error:
        print(f"{prog}: error: argument {error.option}: {error}", file=sys.stderr)
        return USAGE


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

    def pairs(self) -> Iterator[tuple["RecordingSource", "ResultSink"]]:
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

    def end(self, number: int, result: "ProcessedRecording | Exception") -> None:
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
        """What was processed, of recordings that have not ended as well."""
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
        options.output.mkdir(parents=True, exist_ok=True)
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
def _workers(options: Options) -> "Iterator[int | Executor | None]":
    """What :func:`ezmsg.mlx.process_recordings` takes as its workers."""
    if not options.scheduler:
        yield options.workers if options.workers and options.workers > 1 else None
        return
    from ..offline.extra import import_extra

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
