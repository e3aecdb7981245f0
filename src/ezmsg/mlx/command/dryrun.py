"""How long a run will take and how large its results will be, from a short piece that is measured."""

import contextlib
import math
import os
import shutil
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .events import Estimate, Failed
from .jobs import Job
from .processoptions import Options, nearest
from .usage import DONE, SOME_FAILED
from .views import show_estimates

if typing.TYPE_CHECKING:
    from ezmsg.util.messages.axisarray import AxisArray

    from ..offline import RecordingSource
    from ..stream.steps import Chain

BUDGET = 2.0
"""Seconds after which no further piece is measured."""


@dataclass
class Measured:
    """What a piece of a recording took."""

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


def measure(job: Job, chain: "Chain", folder: Path) -> Measured:
    """Run a piece of *job* into *folder*."""
    from ..stream.steps import flush_steps, run_steps, steps_of

    source, place = job.open(), folder / "results.zarr"
    rate, found, clock = source.sampling_rate, Measured(), _Clock()
    steps = steps_of(chain, "what the function of --chain returned")
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


def _pieces(source: "RecordingSource") -> "Iterator[tuple[int, AxisArray]]":
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


def estimates(jobs: list[Job], factory: "Callable[[], Chain]", place: Path) -> Iterator[Estimate | Failed]:
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
