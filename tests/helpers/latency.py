"""A graph of three processes that notes when each sample exists, and when its feature has arrived.

    source | chain | sink

The clock is ``time.monotonic()``, which all processes of a machine share on Linux and macOS.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import multiprocessing
import threading
import time
from collections.abc import AsyncGenerator, Callable

import ezmsg.core as ez
import ezmsg.sigproc.detrend as sigproc_detrend
import ezmsg.sigproc.ewma as sigproc_ewma
import ezmsg.sigproc.math.pow as sigproc_pow
import numpy as np
import psutil
from ezmsg.sigproc.affinetransform import CommonRereference, CommonRereferenceSettings, CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregate, BinnedAggregateSettings, BinnedAggregateTransformer
from ezmsg.sigproc.math.log import Log, LogSettings, LogTransformer
from ezmsg.util.messages.axisarray import AxisArray

import ezmsg.mlx as mlx

RATE = 30000.0
N_BUFFERS = 8
"""Messages that may be under way between two processes."""

WAYS = ("NumPy", "unit by unit", "fused")
CHAINS = ("features", "raw to decoder", "samples")


@dataclasses.dataclass(frozen=True)
class Case:
    """One graph to measure."""

    way: str
    """One of :data:`WAYS`."""
    n_samples: int
    """Of a message."""
    n_channels: int
    seconds: float
    """Length of the stream."""
    real_time: bool = True
    """At the pace of the rate, or as fast as the chain takes it."""
    stall_every: float = 0.0
    """Seconds from one stall to the next, after which everything unread comes as one message; 0: none."""
    stall: float = 0.1
    """Length of a stall in seconds."""
    bin_duration: float = 0.0
    """Of a feature, in seconds; 0: that of a message, so that each message gives one."""
    chain: str = "features"
    """One of :data:`CHAINS`; all but the first run fused."""

    @property
    def lengths(self) -> list[int]:
        """The lengths of all messages in samples."""
        n_total, lengths = round(self.seconds * RATE), []
        per_stall = round(self.stall_every * RATE)
        n_sent = 0
        while n_sent < n_total:
            stalls = per_stall and n_sent // per_stall != (n_sent + self.n_samples) // per_stall
            # Lengths that never come twice in a row.
            n = round(self.stall * RATE) + len(lengths) % 97 if stalls else self.n_samples
            lengths.append(min(n, n_total - n_sent))
            n_sent += lengths[-1]
        return lengths

    @property
    def bin(self) -> float:
        return self.bin_duration or self.n_samples / RATE

    @property
    def n_before(self) -> int:
        """Messages before the stream begins, of whole bins: more than are under way between the processes."""
        per_bin = max(round(self.bin * RATE / self.n_samples), 1)
        return -(-3 * N_BUFFERS // per_bin) * per_bin

    @property
    def n_results(self) -> int:
        """Messages that come of the stream, one for each bin or, where these are shorter, for each message."""
        return min(len(self.lengths), int(sum(self.lengths) / RATE / self.bin + 1e-6))


class SourceSettings(ez.Settings):
    case: Case
    """What to send."""


class Source(ez.Unit):
    """Sends int16 counts. A thread waits for each message's last sample, as the driver of an amplifier does."""

    SETTINGS = SourceSettings
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        case = self.SETTINGS.case
        rng = np.random.default_rng(0)
        n_kept = max([*case.lengths, round(RATE / 10)])
        self.recording = rng.normal(0.0, 200.0, (n_kept, case.n_channels)).astype(np.int16)
        labels = np.array([f"ch{number}" for number in range(case.n_channels)])
        self.channels = AxisArray.CoordinateAxis(data=labels, dims=["ch"])

    def message(self, start: int, n: int, due: float, is_last: bool) -> AxisArray:
        first = start % (len(self.recording) - n + 1)
        return AxisArray(
            self.recording[first : first + n],
            ["time", "ch"],
            {"time": AxisArray.TimeAxis(fs=RATE, offset=start / RATE), "ch": self.channels},
            attrs={"due": due, "last": is_last},
            key="latency",
            stream_dim="time",
        )

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        case, sent = self.SETTINGS.case, 0
        lengths = case.lengths
        # The first messages load and compile all that the chain needs. The stream begins when that is over, which the
        # source knows by the buffers that come free.
        for _ in range(case.n_before):
            yield self.OUTPUT_SIGNAL, self.message(0, case.n_samples, 0.0, False)
        if not case.real_time:
            for number, n in enumerate(lengths):
                now = time.monotonic()
                yield self.OUTPUT_SIGNAL, self.message(sent, n, now, number == len(lengths) - 1)
                sent += n
            return
        arrived: asyncio.Queue = asyncio.Queue()
        loop, started_at = asyncio.get_running_loop(), time.monotonic() + 0.1

        def wait_for_samples() -> None:
            n_due = 0
            for n in lengths:
                n_due += n
                due = started_at + n_due / RATE
                time.sleep(max(due - time.monotonic(), 0.0))
                loop.call_soon_threadsafe(arrived.put_nowait, due)

        threading.Thread(target=wait_for_samples, daemon=True).start()
        for number, n in enumerate(lengths):
            due = await arrived.get()
            yield self.OUTPUT_SIGNAL, self.message(sent, n, due, number == len(lengths) - 1)
            sent += n


def make_chain(bin_duration: float) -> list:
    """The example chain, with bins of this length."""
    return [
        mlx.AsArrayTransformer(backend="mlx", dtype="float32"),
        CommonRereferenceTransformer(),
        mlx.DetrendTransformer(time_constant=1.0),
        mlx.PowTransformer(),
        mlx.EWMATransformer(time_constant=0.1),
        BinnedAggregateTransformer(bin_duration=bin_duration),
        LogTransformer(clip_zero=True),
        mlx.AsArrayTransformer(backend="numpy"),
    ]


def make_decoder_chain(n_channels: int) -> dict:
    """That of examples/raw_to_decoder.py, whose bins are of 20 ms, with a decoder of any weights."""
    from raw_to_decoder import make_chain

    weights = np.random.default_rng(0).standard_normal((2 * n_channels, 2)) / np.sqrt(n_channels)
    return make_chain(mlx.LinearRegressorSettings(weights, labels=("x", "y")))


def make_samples_chain() -> list:
    """Band-pass of order 4, common reference and z-score: a result of the size of the message, as float32."""
    return [
        mlx.AsArrayTransformer(backend="mlx", dtype="float32"),
        mlx.ButterworthFilterTransformer(order=4, cuton=300.0, cutoff=6000.0, coef_type="sos"),
        CommonRereferenceTransformer(),
        mlx.AdaptiveStandardScalerTransformer(time_constant=1.0),
        mlx.AsArrayTransformer(backend="numpy"),
    ]


def maker_of(case: Case) -> Callable[[], list | dict]:
    """What makes the stages of *case*, where they run."""
    if case.chain == "features":
        return functools.partial(make_chain, case.bin)
    if case.chain == "samples":
        return make_samples_chain
    return functools.partial(make_decoder_chain, case.n_channels)


class Stages(ez.Collection):
    """The chain in one process: as one unit, or as a unit for each stage."""

    SETTINGS = SourceSettings
    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    CHAIN = mlx.Chain()
    TO_MLX = mlx.AsArray(mlx.AsArraySettings(backend="mlx", dtype="float32"))
    REFERENCE = CommonRereference(CommonRereferenceSettings())
    DETREND = mlx.DetrendUnit(mlx.EWMASettings(time_constant=1.0))
    SQUARE = mlx.Pow(mlx.PowSettings())
    POWER = mlx.EWMAUnit(mlx.EWMASettings(time_constant=0.1))
    BIN = BinnedAggregate()
    LOG = Log(LogSettings(clip_zero=True))
    TO_NUMPY = mlx.AsArray(mlx.AsArraySettings(backend="numpy"))
    TO_FLOAT = mlx.AsArray(mlx.AsArraySettings(backend="numpy", dtype="float32"))
    NUMPY_DETREND = sigproc_detrend.DetrendUnit(sigproc_ewma.EWMASettings(time_constant=1.0))
    NUMPY_SQUARE = sigproc_pow.Pow(sigproc_pow.PowSettings())
    NUMPY_POWER = sigproc_ewma.EWMAUnit(sigproc_ewma.EWMASettings(time_constant=0.1))

    def configure(self) -> None:
        case = self.SETTINGS.case
        self.BIN.apply_settings(BinnedAggregateSettings(bin_duration=case.bin))
        self.CHAIN.apply_settings(mlx.ChainSettings(make_chain=maker_of(case)))
        last = self.stages[-1]
        n_bytes = max(case.lengths) * case.n_channels * 4 if case.chain == "samples" else 0
        last.OUTPUT_SIGNAL.num_buffers, last.OUTPUT_SIGNAL.buf_size = N_BUFFERS, n_bytes + 2**20

    @property
    def stages(self) -> list[ez.Unit]:
        way = self.SETTINGS.case.way
        if way == "fused":
            return [self.CHAIN]
        if way == "NumPy":
            mine = [self.TO_FLOAT, self.REFERENCE, self.NUMPY_DETREND, self.NUMPY_SQUARE, self.NUMPY_POWER]
            return [*mine, self.BIN, self.LOG]
        mine = [self.TO_MLX, self.REFERENCE, self.DETREND, self.SQUARE, self.POWER, self.BIN, self.LOG]
        return [*mine, self.TO_NUMPY]

    def network(self) -> ez.NetworkDefinition:
        stages = self.stages
        return (
            (self.INPUT_SIGNAL, stages[0].INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in itertools.pairwise(stages)),
            (stages[-1].OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


def cpu_seconds() -> list[float]:
    """CPU time so far of the processes that this one has started, in their order, and of this one."""
    pids = sorted(process.pid for process in multiprocessing.active_children())
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return [*(used.user + used.system for used in times), time.process_time()]


class Sink(ez.Unit):
    """Notes when features arrive, in the main process."""

    SETTINGS = SourceSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.rows: list[tuple[float, float, int]] = []
        self.is_complete = threading.Event()
        self.cpu_before = self.cpu_after = None

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.rows.append((message.attrs["due"], time.monotonic(), len(message.data)))
        if message.attrs["due"] > 0.0 and self.cpu_before is None:
            self.cpu_before = cpu_seconds()
        if message.attrs["last"]:
            self.cpu_after = cpu_seconds()
            self.is_complete.set()

    @ez.main
    def wait(self) -> None:
        n_before = -1
        # A stream that has stopped is over, too: what has not come is lost.
        while not self.is_complete.wait(60.0) and len(self.rows) != n_before:
            self.print_newest(max(n_before, 0))
            n_before = len(self.rows)
        raise ez.NormalTermination

    def print_newest(self, first: int) -> None:
        """How it went lately, for whoever waits for the end of a long stream, and in case that it does not come."""
        ms = [1000 * (arrived - due) for due, arrived, _ in self.rows[first:] if due > 0.0] or [np.nan]
        middle, late, longest = np.percentile(ms, [50, 99, 100])
        print(
            f"{len(self.rows)} results, the newest: p50 {middle:.2f}, p99 {late:.2f}, longest {longest:.2f} ms",
            flush=True,
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of one case."""

    latency_us: np.ndarray
    """From a message's last sample to its feature in the sink, in microseconds, in order."""
    n_expected: int
    """Features that should come, without those of the first messages."""
    n_lost: int
    seconds: float
    """From the first feature to the last."""
    times_real_time: float
    cpu_us: list[float]
    """CPU time a message of the source's process, the chain's and the sink's, in microseconds. Unlike all else it does
    not depend on what else the machine does."""


def measure(case: Case) -> Measured:
    """Run the graph of *case*. To be called once a process, after ``set_start_method("spawn")``."""
    settings = SourceSettings(case)
    source, stages, sink = Source(settings), Stages(settings), Sink(settings)
    longest = max(case.lengths)
    source.OUTPUT_SIGNAL.num_buffers = N_BUFFERS
    source.OUTPUT_SIGNAL.buf_size = longest * case.n_channels * 2 + 2**16
    ez.run(
        SOURCE=source,
        STAGES=stages,
        SINK=sink,
        connections=((source.OUTPUT_SIGNAL, stages.INPUT_SIGNAL), (stages.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)),
        process_components=(source, stages),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    rows = [row for row in sink.rows if row[0] > 0.0]
    due, arrived = (np.array([row[i] for row in rows]) for i in range(2))
    n_expected = case.n_results
    seconds = float(arrived[-1] - arrived[0]) if len(arrived) > 1 else float("nan")
    streamed = case.seconds - case.lengths[0] / RATE
    lost = n_expected - len(rows)
    cpu_us = []
    if sink.cpu_before and sink.cpu_after:
        used = zip(sink.cpu_before, sink.cpu_after, strict=True)
        cpu_us = [round(1e6 * (after - before) / len(case.lengths), 1) for before, after in used]
    return Measured(1e6 * (arrived - due), n_expected, lost, seconds, streamed / seconds, cpu_us)


def spawn() -> None:
    """A forked child of a process that has used MLX hangs."""
    multiprocessing.set_start_method("spawn", force=True)
