"""Whether this package works on a machine, and how fast: ``ezmsg-mlx selftest``.

Prints versions, the device, each kernel's difference from float64, its time beside that of ``x + 1``, what the buffer
cache of the device reuses, the speed of a short chain, bare and in a graph of three processes, and the time of a fused
chain beside that of its stages one by one, as a table to paste into a report. Takes less than two minutes. The exit
status is 1 where a kernel, a chain or the graph is wrong, or what ``--require`` names is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple, get_args

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.util.messages.axisarray import AxisArray

from .asarray import AsArrayTransformer
from .chain import Chain, ChainSettings, ChainTransformer, run_chain
from .detrend import DetrendTransformer
from .ewma import EWMATransformer
from .kernels import Recurrence, default_path, kernel
from .kernels.proof import TOLERANCE, difference_of, proofs_of
from .memory import memory_snapshot
from .pow import PowTransformer
from .simulate import SimulatedAcquisition, SimulatedAcquisitionSettings, simulated_acquisition
from .stream.device import gpu_backend, uses_gpu
from .stream.unit import Stage, Stages, run_steps, steps_of

N_FIRST = 8
"""Messages that are not timed: they load and compile."""

N_TIMED = 200

FUSED_TOLERANCE = 1e-4
"""Largest difference of the features, which are powers of ten."""

RATE = 30000.0


class Times(NamedTuple):
    """Medians in microseconds a message, from int16 on the host to features on the host."""

    fused: float
    stage_by_stage: float

    difference: float
    """The largest between the features of both; NaN if one is."""


def chain_of_five() -> list[Stage]:
    """From int16 to a smoothed power at every sample."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32", mlx_cache_limit_mb=512),
        DetrendTransformer(time_constant=1.0),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.1),
        AsArrayTransformer(backend="numpy"),
    ]


def chain_of_eight(n_samples: int) -> list[Stage]:
    """The same with a common reference, and one feature for *n_samples*."""
    to_mlx, detrend, square, power, to_numpy = chain_of_five()
    features: list[Stage] = [BinnedAggregateTransformer(bin_duration=n_samples / RATE), LogTransformer(clip_zero=True)]
    return [to_mlx, CommonRereferenceTransformer(), detrend, square, power, *features, to_numpy]


def time_chains(n_samples: int, n_channels: int) -> Times:
    """Run the chain of eight fused and stage by stage, in turns, over messages of *n_samples* of *n_channels*."""
    duration = (N_FIRST + N_TIMED) * n_samples / RATE
    stream = SimulatedAcquisitionSettings(
        n_channels=n_channels, samples_per_message=n_samples, duration=duration, stall_every=0
    )
    fused = ChainTransformer(make_chain=functools.partial(chain_of_eight, n_samples), lengths=(n_samples,))
    chains: tuple[Stages, Stages] = (fused, chain_of_eight(n_samples))
    times: tuple[list[float], list[float]] = ([], [])
    largest = 0.0
    for message in simulated_acquisition(stream):
        features = []
        for chain, taken in zip(chains, times, strict=True):
            begin = time.perf_counter()
            features += [result.data for result in run_steps(steps_of(chain), message)]
            taken.append(1e6 * (time.perf_counter() - begin))
        # In this order, so that a NaN stays.
        largest = float(np.maximum(np.abs(features[0] - features[1]).max(initial=0.0), largest))
    of_fused, one_by_one = (statistics.median(taken[N_FIRST:]) for taken in times)
    return Times(of_fused, one_by_one, largest)


LIMIT = 60.0
"""Seconds after which the graph is ended with all its processes. Starting them takes some seconds."""


@dataclasses.dataclass
class Outcome:
    """Counts and sums over the results of the chain."""

    n_messages: int = 0
    n_samples: int = 0
    sum_of_means: float = 0.0
    """Of the means of messages: NaN if a single value is."""

    first_at: float = 0.0
    """When the first message came out, by ``time.perf_counter()``."""

    last_at: float = 0.0

    def add(self, result: npt.NDArray[np.float32]) -> None:
        """Count one message."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.n_messages += 1
        self.n_samples += len(result)
        self.sum_of_means += float(result.mean(dtype=np.float64))

    def is_that_of(self, other: Outcome) -> bool:
        """Whether both are finite, and the same but for rounding."""
        counts = (self.n_messages, self.n_samples) == (other.n_messages, other.n_samples)
        is_close = math.isclose(self.sum_of_means, other.sum_of_means, rel_tol=1e-5)
        return counts and is_close and math.isfinite(self.sum_of_means)


class GraphError(Exception):
    """The graph has not run as it should; the message is the end of a sentence about it."""


def _stream(seconds: float) -> SimulatedAcquisitionSettings:
    return SimulatedAcquisitionSettings(stall_every=100, duration=seconds)


def run_bare(seconds: float) -> Outcome:
    """Run the chain of five in this process over *seconds* of a simulated stream."""
    outcome = Outcome()
    for result in run_chain(chain_of_five(), list(simulated_acquisition(_stream(seconds)))):
        outcome.add(result.data)
    return outcome


class _SinkSettings(ez.Settings):
    n_samples: int
    outcome: Outcome


class _Sink(ez.Unit):
    SETTINGS = _SinkSettings  # type: ignore[assignment]
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.SETTINGS.outcome.add(message.data)
        if self.SETTINGS.outcome.n_samples >= self.SETTINGS.n_samples:
            raise ez.NormalTermination


def graph_main(seconds: float) -> None:
    """Run the graph with this process as that of the sink, and write what came out to stdout, as JSON."""
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    stream, outcome = _stream(seconds), Outcome()
    source, chain = SimulatedAcquisition(stream), Chain(ChainSettings(chain_of_five, fuse=False))
    sink = _Sink(_SinkSettings(stream.n_samples or 0, outcome))
    ez.run(
        SOURCE=source,
        CHAIN=chain,
        SINK=sink,
        connections=((source.OUTPUT_SIGNAL, chain.INPUT_SIGNAL), (chain.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)),
        process_components=(source, chain),
        # A graph server of its own on a free port.
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    sys.stdout.write(f"\n{json.dumps(dataclasses.asdict(outcome))}\n")


def run_graph(seconds: float) -> Outcome:
    """Run the chain of five as a graph: source, chain and sink in processes of their own.

    Raises:
        GraphError: It did not end within :data:`LIMIT`, or with an error.
    """
    # Not as a module that is the main one: the other processes would import it under two names.
    code = f"from {__name__} import graph_main; graph_main({seconds!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"EZMSG_DISABLE_BACKPRESSURE_WARNING": "1"},
        # A group of its own, to be ended as a whole.
        start_new_session=True,
    )
    try:
        output, log = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise GraphError(f"does not end within {LIMIT:g} s") from None
    finally:
        # Also of one that was interrupted, and what a main process that has failed has left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = (log.strip() or "no message").splitlines()[-1]
        raise GraphError(f"ends with exit status {process.returncode}: {last}")
    return Outcome(**json.loads(output.strip().splitlines()[-1]))


PACKAGES = ("ezmsg-mlx", "mlx", "ezmsg", "ezmsg-baseproc", "ezmsg-sigproc", "numpy", "numba")

RECURRENCES: tuple[Recurrence, ...] = get_args(Recurrence)

SHAPES = ((300, 256), (3000, 256), (30000, 1024))
"""Samples and channels of messages that are timed. The last one on a GPU only."""

SECTIONS = np.array([[0.1, 0.2, 0.1, 1.0, -1.1, 0.4], [1.0, -2.0, 1.0, 1.0, -1.9, 0.91]])

ALPHA = 0.001

CHAIN_SHAPES = ((30, 256), (30, 1024), (300, 256))
"""Samples and channels of messages that the fused chain is timed with."""

CHAIN_SECONDS = 3.0
"""Length of the recording that the chain runs over."""

Verdict = Literal["", "right", "WRONG", "MISSING"]

Calls = dict[str, Callable[[], tuple[mx.array, ...]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report."""

    what: str
    found: str
    verdict: Verdict = ""


def _versions() -> Iterator[Row]:
    yield Row("system", f"{platform.platform()}, Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            yield Row(package, version(package))
        except PackageNotFoundError:
            yield Row(package, "not installed")


def _device(required: str | None) -> Iterator[Row]:
    backend = (gpu_backend() or "gpu") if uses_gpu() else "cpu"
    name = mx.device_info(mx.default_device()).get("device_name", "unknown")
    missing = required is not None and backend != required
    yield Row("device", f"{backend}, {name}", "MISSING" if missing else "")
    yield Row("kernels", default_path())


def _right() -> Iterator[Row]:
    for recurrence in RECURRENCES:
        what = f"{recurrence}: difference from float64"
        path = default_path()
        found = kernel(recurrence, path)
        try:
            difference = difference_of(recurrence, found, path)
        except Exception as error:
            yield Row(what, f"{type(error).__name__}: {error}", "WRONG")
            continue
        # A module, which says what took the place of one that failed its proof.
        name = str(getattr(found, "__name__", ""))
        if f".{path}." not in name:
            yield Row(what, f"{difference:.1e}, by {name}, since that for {path} fails", "WRONG")
        else:
            yield Row(what, f"{difference:.1e} of the largest value", "right" if difference <= TOLERANCE else "WRONG")


def _calls(shape: tuple[int, int]) -> Calls:
    path, n_channels = default_path(), shape[1]
    x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32))
    calls: Calls = {"x + 1": lambda: (x + 1,)}
    for recurrence in RECURRENCES:
        if recurrence == "recurrentcell":
            # It goes on by steps, and takes no messages of channels.
            continue
        # The last one has the longest state.
        case = proofs_of(recurrence)[-1]
        state = mx.zeros((*case.state_shape, n_channels))
        mx.eval(x, state)
        calls[recurrence] = functools.partial(
            kernel(recurrence, path).run, x, case.coefficients, state, axis=0, chunk_sizes=(32, 512)
        )
    if path == "metal":
        from ezmsg.sigproc.util.ewma_mlx_metal import ewma_mlx_metal
        from ezmsg.sigproc.util.sosfilt_mlx_metal import sosfilt_mlx_metal

        # Their kernels want time last, as their units give it to them.
        last, sos = mx.moveaxis(x, 0, -1), mx.array(SECTIONS.astype(np.float32))
        average, sections = mx.zeros((n_channels, 1)), mx.zeros((len(SECTIONS), n_channels, 2))
        mx.eval(average, sections, sos)
        calls["ewma of ezmsg-sigproc"] = lambda: ewma_mlx_metal(last, ALPHA, average, chunk_sizes=(32, 1024))
        calls["sosfilt of ezmsg-sigproc"] = lambda: sosfilt_mlx_metal(sos, last, sections, chunk_sizes=(32, 512))
    return calls


def _microseconds(calls: Calls, n: int, repeats: int) -> dict[str, float]:
    """Median time of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(n):
                mx.eval(*call())
            mx.synchronize()
            # The first round compiles, and fills the cache.
            if repeat:
                times[name].append((time.perf_counter() - begin) / n * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def _speed() -> Iterator[Row]:
    for shape in SHAPES if uses_gpu() else SHAPES[:-1]:
        times = _microseconds(_calls(shape), n=20 if shape[0] < 3000 else 3, repeats=7)
        floor = times.pop("x + 1")
        yield Row(f"x + 1, {shape[0]} x {shape[1]}", f"{floor:.0f} us")
        for name, taken in times.items():
            yield Row(f"{name}, {shape[0]} x {shape[1]}", f"{taken:.0f} us, {taken / floor:.2f} times x + 1")


def _reuse_window() -> str:
    """The largest surplus at which a freed buffer still serves a request, in KiB."""
    n_bytes, reused = 3000 * 256 * 4, []
    for surplus in (0, 4, 8, 16, 24, 32, 64):
        mx.clear_cache()
        freed = mx.zeros((n_bytes + surplus * 1024,), mx.uint8)
        mx.eval(freed)
        del freed
        before = mx.get_cache_memory()
        asked = mx.zeros((n_bytes,), mx.uint8)
        mx.eval(asked)
        if before and mx.get_cache_memory() < before:
            reused.append(surplus)
        del asked
    return f"{max(reused)} KiB larger" if reused else "none"


def _cache() -> Iterator[Row]:
    yield Row("largest free buffer of 3000 x 256 that is reused", _reuse_window())
    # MLX has no getter. The limit is there again before anything is allocated.
    limit = mx.set_cache_limit(1 << 62)
    mx.set_cache_limit(limit)
    yield Row("cache limit before the chain", f"{limit / 2**20:.0f} MiB")


def _chain() -> Iterator[Row]:
    begin = time.perf_counter()
    bare = run_bare(CHAIN_SECONDS)
    taken = time.perf_counter() - begin
    verdict: Verdict = "right" if bare.is_that_of(bare) else "WRONG"
    yield Row("chain of five, 256 channels of 30 kHz", f"{CHAIN_SECONDS / taken:.1f} times real time", verdict)
    yield Row("MLX's cache after it", f"{memory_snapshot().mlx_cache:.0f} MiB")
    what = "the same in a graph of three processes"
    try:
        graph = run_graph(CHAIN_SECONDS)
    except GraphError as error:
        yield Row(what, str(error), "WRONG")
        return
    if not graph.is_that_of(bare):
        yield Row(what, f"{graph.n_messages} messages of {bare.n_messages}, or other results", "WRONG")
        return
    # From the first message on: that one waits for what is compiled.
    speed = CHAIN_SECONDS / max(graph.last_at - graph.first_at, 1e-9)
    yield Row(what, f"{speed:.1f} times real time", "right")


def _fused() -> Iterator[Row]:
    for n_samples, n_channels in CHAIN_SHAPES:
        what = f"fused chain of eight, {n_samples} x {n_channels}"
        try:
            fused, stage_by_stage, difference = time_chains(n_samples, n_channels)
        except Exception as error:
            yield Row(what, f"{type(error).__name__}: {error}", "WRONG")
            continue
        # Wrong, too, where the difference is NaN.
        verdict: Verdict = "right" if difference <= FUSED_TOLERANCE else "WRONG"
        yield Row(what, f"{fused:.0f} us, {fused / stage_by_stage:.2f} times stage by stage", verdict)


def report(required: str | None = None) -> list[Row]:
    """All that is printed; *required* is a backend that must be in use."""
    return [*_versions(), *_device(required), *_right(), *_speed(), *_cache(), *_chain(), *_fused()]


def main(require: str | None = None, *, as_json: bool = False) -> int:
    """Print a report, which says whether MLX uses the backend *require*. Returns the exit status."""
    rows = report(require)
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    else:
        lines = ["| what | found | |", "|---|---|---|", *(f"| {r.what} | {r.found} | {r.verdict} |" for r in rows)]
        sys.stdout.write("\n".join(lines) + "\n")
    return int(any(row.verdict in ("WRONG", "MISSING") for row in rows))
