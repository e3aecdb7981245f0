"""What a worker of offline_recordings.py does with a recording. Needs no other file of the examples."""

import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer

from ezmsg.mlx import (
    ArrayBackend,
    AsArrayTransformer,
    DetrendTransformer,
    EWMATransformer,
    NWBSource,
    PowTransformer,
    ZarrSink,
    apply_cache_limit,
    cache_limit,
    process_recording,
)


@dataclass(frozen=True)
class Job:
    recording: str
    results: str
    series: str | None = None
    """Name of the electrical series, if a file has several."""
    limit_mb: float | str | None = 512.0
    """Limit on MLX's cache of the process, in MiB."""
    checkpoint_seconds: float = 60.0
    chunk_mb: float = 16.0
    """How much is read at once, in MiB."""


@dataclass(frozen=True)
class Outcome:
    job: Job
    seconds: float
    """Length of the recording."""
    seconds_done: float
    """What of it was to be done: all, or less after an interrupted run."""
    wall: float
    pid: int
    peak_mb: float
    """The most memory (resident set) that the process has ever used, in MiB."""
    limit_mb: float | str | None
    """The limit on MLX's cache that was in force at the end, in MiB."""


class Worker:
    """Asks for the limit on behalf of this process: the chains come and go with the recordings."""

    node_name = f"worker {os.getpid()}"


WORKER = Worker()


def make_chain(limit_mb: float | str | None) -> list[BaseTransformer]:
    """The stages, from int16 counts (time, ch) to float32 log power (bin, ch) every 10 ms."""
    return [
        AsArrayTransformer(backend=ArrayBackend.mlx, dtype="float32", mlx_cache_limit_mb=limit_mb),
        CommonRereferenceTransformer(mode="mean"),
        DetrendTransformer(time_constant=1.0),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.1),
        BinnedAggregateTransformer(bin_duration=0.01, operation=AggregationFunction.MEAN),
        LogTransformer(clip_zero=True),
        AsArrayTransformer(backend=ArrayBackend.numpy),
    ]


def extract_features(job: Job, report: Callable[[float, float], None]) -> Outcome:
    """Process a recording, unless its results are there; *report* gets the seconds that are done, and those of all."""
    begin = time.monotonic()
    if job.limit_mb != "auto":
        apply_cache_limit(WORKER, job.limit_mb)
    source = NWBSource(job.recording, job.series, chunk_mb=job.chunk_mb)
    # Another process writes the same results only if Dask has given it up while it was still alive.
    sink = ZarrSink(job.results, wait=600.0)
    done = process_recording(
        source,
        lambda: make_chain(job.limit_mb),
        sink,
        checkpoint_seconds=job.checkpoint_seconds,
        progress=lambda done, total: report(done / source.sampling_rate, total / source.sampling_rate),
    )
    return Outcome(
        job=job,
        seconds=done.n_samples / source.sampling_rate,
        seconds_done=(done.n_samples - done.first_sample) / source.sampling_rate,
        wall=time.monotonic() - begin,
        pid=os.getpid(),
        peak_mb=_peak_mb(),
        limit_mb=cache_limit().limit_mb,
    )


TOPIC = "offline_recordings"


def extract_features_on_worker(job: Job) -> Outcome:
    """The same as a task of Dask, which reports through the scheduler."""
    from distributed import get_worker

    worker = get_worker()
    last = -math.inf

    def report(seconds: float, total: float) -> None:
        nonlocal last
        # Once a second: each event is work for the one scheduler that all workers share.
        if time.monotonic() < last + 1.0:
            return
        last = time.monotonic()
        worker.log_event(TOPIC, {"recording": job.recording, "seconds": seconds, "total": total})

    return extract_features(job, report)


def _peak_mb() -> float:
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)
