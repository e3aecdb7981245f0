"""Features from a folder of NWB recordings into Zarr, in one process or on a Dask cluster.

    each recording -> AsArray(mlx) -> common reference -> x - EWMA(x) -> square
        -> EWMA -> bin 10 ms -> log -> AsArray(numpy) -> <output>/<recording>.zarr

Memory does not grow with the length of a recording. Started again after Ctrl-C
or a crash, it goes on where it was; recordings that are finished are left alone.
Without --recordings it writes some simulated ones first. What a worker does is
in offline_features.py; on a cluster of yours (--scheduler), ezmsg-mlx[cpu,offline]
is installed on the workers, and they see the same folders.

    pip install "ezmsg-mlx[cpu,examples,offline]"
    python offline_recordings.py --workers 2
"""

import argparse
import contextlib
import functools
import getpass
import logging
import os
import sys
import tempfile
import time
import typing
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from support import checked_options as checked
from support import offline_features
from support.interrupts import hidden_from_children
from support.offline_features import Job, Outcome

import ezmsg.core as ez
import rich
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ezmsg.mlx import SimulatedAcquisitionSettings
from ezmsg.mlx.command.progress import Interrupts
from ezmsg.mlx.offline.reading import import_extra

if typing.TYPE_CHECKING:
    from distributed import Client

RETRIES = 2
"""How often a recording is tried again after an error. Death of a worker is counted apart, by Dask: three times."""

SPAWN_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, metavar="FOLDER", help="folder of .nwb files")
    parser.add_argument("--series", metavar="NAME", help="the electrical series, if a file has several")
    default = Path(tempfile.gettempdir(), f"ezmsg-mlx-{getpass.getuser()}", "features")
    text = f"folder of the results [{default}]".replace("%", "%%")
    parser.add_argument("--output", type=checked.folder, metavar="FOLDER", default=str(default), help=text)
    text = "run on a Dask cluster of N processes of this machine"
    parser.add_argument("--workers", type=checked.count, metavar="N", help=text)
    parser.add_argument("--scheduler", metavar="ADDRESS", help="run on the Dask cluster of this scheduler")
    text = 'of MLX\'s cache, or "none" [512]'
    parser.add_argument("--limit", type=checked.mib, metavar="MIB", default=512.0, help=text)
    text = 'every S seconds of recording, or "inf" for never [60]'
    parser.add_argument("--checkpoint", type=checked.positive_or_inf, metavar="S", default=60.0, help=text)
    simulated = parser.add_argument_group("without --recordings")
    simulated.add_argument("--count", type=checked.count, metavar="N", default=4, help="number of recordings [4]")
    simulated.add_argument("--channels", type=checked.count, metavar="N", default=64, help="[64]")
    text = "length of a recording [30]"
    simulated.add_argument("--seconds", type=checked.positive, metavar="S", default=30.0, help=text)
    options = parser.parse_args()
    if options.workers and options.scheduler:
        parser.error("--workers starts a cluster and --scheduler uses one that is there: give one of them")
    if options.recordings and not options.recordings.is_dir():
        parser.error(f"--recordings {options.recordings} is no folder")
    try:
        SimulatedAcquisitionSettings(duration=options.seconds, stall_every=0)
    except ValueError as error:
        parser.error(f"argument --seconds: {error}")
    checked.require_mlx(parser)
    try:
        for name in ("pynwb", "zarr", "distributed") if options.workers or options.scheduler else ("pynwb", "zarr"):
            import_extra(name)
    except ImportError as error:
        parser.exit(1, f"{error}\n")
    # INFO lines would run into the progress bar; the variable reaches the workers.
    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING").upper())
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    if options.recordings:
        recordings = sorted(options.recordings.glob("*.nwb"))
    else:
        from support.synthetic_recordings import write_recordings

        rich.print(f"recordings: {options.count} simulated ones in {options.output / 'recordings'}")
        recordings = write_recordings(options.output / "recordings", options.count, options.channels, options.seconds)
    return [
        Job(
            recording=str(recording.resolve()),
            results=str(options.output.resolve() / f"{recording.stem}.zarr"),
            series=options.series,
            limit_mb=options.limit,
            checkpoint_seconds=options.checkpoint,
        )
        for recording in recordings
    ]


Report = Callable[[str, float, float], None]
"""Gets a recording, the seconds of it that are done, and those that it has."""


class SchedulerGone(Exception):
    """The scheduler of the cluster does not answer any more."""


def run_here(jobs: list[Job], report: Report) -> Iterator[tuple[Job, Outcome | Exception]]:
    for job in jobs:
        try:
            yield job, offline_features.extract_features(job, functools.partial(report, job.recording))
        except Exception as error:
            # One bad recording is no reason to leave the others.
            yield job, error


def _package_of_the_worker() -> str:
    """A file with all that a worker needs of the examples."""
    file = Path(tempfile.mkdtemp()) / "support.zip"
    with zipfile.ZipFile(file, "w") as package:
        package.writestr("support/__init__.py", "")
        package.write(offline_features.__file__, "support/offline_features.py")
    return str(file)


def run_on_cluster(
    jobs: list[Job], options: argparse.Namespace, report: Report
) -> Iterator[tuple[Job, Outcome | Exception]]:
    import dask
    from distributed import Client, LocalCluster, as_completed

    with contextlib.ExitStack() as stack:
        if options.scheduler:
            try:
                client = Client(options.scheduler)
            except (OSError, ValueError) as error:
                sys.exit(f"--scheduler {options.scheduler}: there is no Dask scheduler that answers ({error})")
            stack.callback(_close, client)
            # What it has to say if the scheduler goes away is said below, in one line.
            for name in ("client", "core", "comm", "utils", "batched"):
                logging.getLogger(f"distributed.{name}").setLevel(logging.CRITICAL)
            client.upload_file(_package_of_the_worker())
        else:
            # By default Dask has the workers hand freed memory back at once, to take it anew for each message; they
            # never hold much, and a fifth of their time is in that.
            environment = dict(dask.config.get(SPAWN_ENVIRONMENT))
            environment.pop("MALLOC_TRIM_THRESHOLD_", None)
            stack.enter_context(dask.config.set({SPAWN_ENVIRONMENT: environment}))
            # One thread each, since MLX's limit and its streams belong to process and thread. Dask spawns them.
            # A terminal sends Ctrl-C to the workers, too; they end with the cluster.
            with hidden_from_children():
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=options.workers,
                        threads_per_worker=1,
                        processes=True,
                        dashboard_address=":0",
                        silence_logs=logging.ERROR,
                    )
                )
            client = stack.enter_context(Client(cluster))

        def report_event(event: tuple[float, dict]) -> None:
            report(event[1]["recording"], event[1]["seconds"], event[1]["total"])

        client.subscribe_topic(offline_features.TOPIC, report_event)
        futures = {
            client.submit(offline_features.extract_features_on_worker, job, pure=False, retries=RETRIES): job
            for job in jobs
        }
        for future in as_completed(futures):
            if future.status in ("cancelled", "lost"):
                raise SchedulerGone
            error = future.exception()
            yield futures[future], error if error is not None else future.result()


def _close(client: "Client") -> None:
    with contextlib.suppress(Exception):  # it is to go, whether its scheduler answers or not
        client.close(timeout=2)


class View:
    """A progress bar on a terminal, a line for each finished recording elsewhere."""

    def __init__(self, jobs: list[Job]) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[finished]}/{task.total:.0f}"),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("recordings", total=len(jobs), finished=0)
        self._seconds: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        """How much of each recording is done."""
        self.outcomes: list[Outcome] = []
        self.errors: list[tuple[Job, Exception]] = []
        self._jobs = jobs
        self._there_before = _finished(jobs)
        self._told: set[Job] = set()
        self._interrupts = Interrupts()
        self._begin = time.monotonic()

    def __enter__(self) -> "View":
        self._interrupts.__enter__()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._interrupts.__exit__()
        self._bar.stop()

    def report(self, recording: str, seconds: float, total: float) -> None:
        self._interrupts.check()
        self._seconds[recording] = seconds
        self._shares[recording] = seconds / total
        speed = sum(self._seconds.values()) / (time.monotonic() - self._begin)
        self._bar.update(
            self._task,
            description=f"recordings ({speed:.0f}x real time)",
            completed=sum(self._shares.values()),
        )

    def finished(self, job: Job, result: Outcome | Exception) -> None:
        self._told.add(job)
        name = Path(job.recording).name
        if isinstance(result, Exception):
            self.errors.append((job, result))
            self._bar.console.print(f"{name}: {type(result).__name__}: {result}", markup=False)
        else:
            self.outcomes.append(result)
            self._bar.console.print(f"{name}: {_what_was_done(result)}", markup=False)
        self._shares[job.recording] = 1.0
        self._bar.update(self._task, completed=sum(self._shares.values()), finished=len(self._told))

    def untold(self) -> set[Job]:
        """Whose results have come to their final names without a word: while Ctrl-C ended everything."""
        return _finished(self._jobs) - self._there_before - self._told

    def what_is_left(self) -> str:
        """What the same command would do, once everything has ended."""
        finished = _finished(self._jobs)
        begun = {job for job in self._jobs if Path(job.results + ".partial", "checkpoint").exists()} - finished
        return (
            f"the same command leaves {len(finished)} finished recordings alone, goes on with {len(begun)} at their "
            f"last checkpoints, and begins {len(self._jobs) - len(finished) - len(begun)} at the start"
        )


def _finished(jobs: list[Job]) -> set[Job]:
    """Whose results are at their final names; those that are not complete are elsewhere."""
    return {job for job in jobs if Path(job.results).exists()}


def _what_was_done(outcome: Outcome) -> str:
    if not outcome.seconds_done:
        return "was there already"
    text = f"{outcome.seconds_done:.1f} s in {outcome.wall:.1f} s"
    return text if outcome.seconds_done == outcome.seconds else f"{text}, the rest was there"


def print_summary(view: View, output: Path, wall: float) -> None:
    worked = [outcome for outcome in view.outcomes if outcome.seconds_done]
    seconds = sum(outcome.seconds_done for outcome in worked)
    table = Table("worker", "recordings", "seconds", "peak RSS, MiB", "cache limit, MiB", box=None)
    for pid in sorted({outcome.pid for outcome in worked}):
        own = [outcome for outcome in worked if outcome.pid == pid]
        limit = own[-1].limit_mb
        table.add_row(
            str(pid),
            str(len(own)),
            f"{sum(outcome.seconds_done for outcome in own):.1f}",
            f"{max(outcome.peak_mb for outcome in own):.0f}",
            "MLX's" if limit is None else f"{limit:g}",
        )
    rich.print(table)
    print(f"results: {output}")
    print(
        f"{len(worked)} recordings of {seconds:.1f} s in {wall:.1f} s: {60 * len(worked) / wall:.1f} a minute, "
        f"{seconds / wall:.1f}x real time; {len(view.outcomes) - len(worked)} were there, {len(view.errors)} failed"
        + (f", {len(untold)} finished during Ctrl-C" if (untold := view.untold()) else "")
    )


def main() -> int:
    options = parse_options()
    stopped = ""
    view = None
    begin = time.monotonic()
    try:
        jobs = jobs_of(options)
        if not jobs:
            print(f"no .nwb file in {options.recordings}", file=sys.stderr)
            return 1
        options.output.mkdir(parents=True, exist_ok=True)
        with View(jobs) as view:
            begin = time.monotonic()
            if options.workers or options.scheduler:
                results = run_on_cluster(jobs, options, view.report)
            else:
                results = run_here(jobs, view.report)
            with contextlib.closing(results):
                for job, result in results:
                    view.finished(job, result)
    except KeyboardInterrupt:
        stopped = "interrupted"
    except SchedulerGone:
        stopped = f"--scheduler {options.scheduler}: it does not answer any more"
    # After everything has ended, since what is at the final names counts.
    if stopped:
        left = view.what_is_left() if view else "the same command writes the recordings that are not there yet"
        print(f"{stopped}; {left}")
    if view is not None:
        print_summary(view, options.output, time.monotonic() - begin)
    return 130 if stopped == "interrupted" else 1 if stopped or view.errors else 0


if __name__ == "__main__":
    sys.exit(main())
