"""Band power features from a simulated recording, as an ezmsg graph.

    source | AsArray(mlx) -> common reference -> x - EWMA(x) -> square
           -> EWMA -> bin 10 ms -> log -> AsArray(numpy) | sink

Each | is a process boundary: everything that touches MLX is one Collection in
one process, and only NumPy arrays cross. Stalls make messages of ever new
lengths, which fill MLX's cache; the first stage keeps it below its limit. With
--rechunk the source's process cuts them to three lengths before they cross, and
the cache needs less. The same chain without a graph, with the same features, is
in ewma_chain_offline.py.

    pip install "ezmsg-mlx[cpu,examples]"
    python ewma_chain_graph.py --real-time --limit 64
    python ewma_chain_graph.py --rechunk --monitor --plot memory.png
"""

import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator

from support import ewma_chain as shared
from support.ewma_chain_acquisition import Acquisition, RunSettings
from support.interrupts import GraphInterrupts, end_all_processes
from support.memory_view import save_plot

import ezmsg.core as ez
import numpy as np
from ezmsg.sigproc.affinetransform import CommonRereference
from ezmsg.sigproc.binned_aggregate import BinnedAggregate
from ezmsg.sigproc.math.log import Log
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx import (
    AsArray,
    AsArraySettings,
    DetrendUnit,
    EWMAUnit,
    MemoryMonitor,
    MemoryMonitorSettings,
    MemorySnapshot,
    Pow,
)


class MeterUnit(ez.Unit):
    """Measures its own process, and hands the result on with the features."""

    INPUT_SIGNAL = ez.InputStream(AxisArray)
    INPUT_FEATURES = ez.InputStream(AxisArray)
    OUTPUT_FEATURES = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        self.meter = shared.Meter()

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.meter.count(message)

    @ez.subscriber(INPUT_FEATURES)
    @ez.publisher(OUTPUT_FEATURES)
    async def on_features(self, message: AxisArray) -> AsyncGenerator:
        self.meter.measure()
        yield self.OUTPUT_FEATURES, replace(message, attrs={**message.attrs, "meter": self.meter})


class Chain(ez.Collection):
    """From int16 counts (time, ch) to float32 log power (bin, ch)."""

    SETTINGS = AsArraySettings

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_FEATURES = ez.OutputTopic(AxisArray)
    OUTPUT_MEMORY = ez.OutputTopic(AxisArray)

    TO_MLX = AsArray()
    REFERENCE = CommonRereference(shared.REFERENCE)
    DETREND = DetrendUnit(shared.BASELINE)
    SQUARE = Pow(shared.SQUARE)
    POWER = EWMAUnit(shared.POWER)
    BIN = BinnedAggregate(shared.BIN)
    LOG = Log(shared.LOG)
    TO_NUMPY = AsArray(shared.TO_NUMPY)
    METER = MeterUnit()
    MONITOR = MemoryMonitor(MemoryMonitorSettings(interval=0.1))

    def configure(self) -> None:
        self.TO_MLX.apply_settings(self.SETTINGS)
        # Room for the bins of a second of 2500 channels, as the source's ring has room for its longest message.
        self.METER.OUTPUT_FEATURES.num_buffers = 4
        self.METER.OUTPUT_FEATURES.buf_size = 2**20

    def network(self) -> ez.NetworkDefinition:
        stages = (self.TO_MLX, self.REFERENCE, self.DETREND, self.SQUARE, self.POWER, self.BIN, self.LOG, self.TO_NUMPY)
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in zip(stages, stages[1:])),
            (self.INPUT_SIGNAL, self.METER.INPUT_SIGNAL),
            (self.TO_NUMPY.OUTPUT_SIGNAL, self.METER.INPUT_FEATURES),
            (self.METER.OUTPUT_FEATURES, self.OUTPUT_FEATURES),
            (self.MONITOR.OUTPUT_SIGNAL, self.OUTPUT_MEMORY),
        )


class Sink(ez.Unit):
    """Keeps the features and shows the progress, in the main process; ends the graph after the last bin."""

    SETTINGS = RunSettings

    INPUT_FEATURES = ez.InputStream(AxisArray)
    INPUT_MEMORY = ez.InputStream(AxisArray)

    interrupts: GraphInterrupts
    """Of the main process, from before the processes start."""

    async def initialize(self) -> None:
        self.features: list[np.ndarray] = []
        self.memory: list[tuple[float, MemorySnapshot]] = []
        self.stalls: list[float] = []
        self.meter = shared.Meter()
        self.progress = shared.ProgressLine(self.SETTINGS.stream.duration)
        self.has_last_bin = False
        self.complete = threading.Event()

    @ez.subscriber(INPUT_FEATURES)
    async def on_features(self, message: AxisArray) -> None:
        # A copy, for ezmsg uses the memory of the message again.
        self.features.append(message.data.copy())
        self.meter = message.attrs["meter"]
        self.progress.update(shared.end_of(message), self.meter)
        if len(message.data) > self.SETTINGS.most_ordinary_bins:
            self.stalls.append(time.monotonic())
        # A bin that the stream ends in is never sent: this message is the last if the stream cannot fill another bin.
        n_bins = math.ceil(shared.end_of(message) / shared.BIN.bin_duration - 1e-6)
        if not self.SETTINGS.fills(n_bins + 1):
            self.has_last_bin = True
            self._end_if_complete()

    @ez.subscriber(INPUT_MEMORY)
    async def on_memory(self, message: AxisArray) -> None:
        snapshot = MemorySnapshot(**dict(zip(message.axes["metric"].data.tolist(), message.data[0].tolist())))
        self.memory.append((message.axes["time"].offset, snapshot))
        if self.SETTINGS.monitor:
            self.progress.memory = snapshot
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        # A short stream may be over before the first row of the monitor has come.
        if self.has_last_bin and self.memory:
            self.complete.set()

    @ez.main
    def wait(self) -> None:
        n_processes = len(multiprocessing.active_children())
        with self.progress:
            while not self.complete.wait(0.2) and len(multiprocessing.active_children()) == n_processes:
                self.interrupts.check()
        if len(multiprocessing.active_children()) < n_processes:
            # Out of memory, say.
            end_all_processes("a process of the graph has died", 1)
        raise ez.NormalTermination


def main(chain_type: type[ez.Collection] = Chain, description: str = __doc__) -> int:
    options = shared.parse_options(description, of_graph=True)
    settings = RunSettings(options.stream, rechunk=options.rechunk, monitor=options.monitor)
    if not settings.fills(1):
        print(f"{options.stream.duration} s are too short for a single bin", file=sys.stderr)
        return 2
    acquisition, chain, sink = Acquisition(settings), chain_type(options.to_mlx), Sink(settings)
    # The progress line shows whether the chain keeps up; a warning from another process would run into it.
    os.environ.setdefault("EZMSG_DISABLE_BACKPRESSURE_WARNING", "1")
    sink.interrupts = GraphInterrupts()
    print("starting the processes", flush=True)
    ez.run(
        ACQUISITION=acquisition,
        CHAIN=chain,
        SINK=sink,
        connections=(
            (acquisition.OUTPUT_SIGNAL, chain.INPUT_SIGNAL),
            (chain.OUTPUT_FEATURES, sink.INPUT_FEATURES),
            (chain.OUTPUT_MEMORY, sink.INPUT_MEMORY),
        ),
        process_components=(acquisition, chain),
        # A graph server of its own on a free port, so that graphs that run at the same time do not meet.
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    sink.progress.print_summary(sink.meter)
    if options.plot and sink.memory:
        save_plot(sink.memory, options.plot, sink.stalls)
    if sink.progress.interrupted:
        return 130
    if options.save:
        np.save(options.save, np.concatenate(sink.features))
    return 0


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    sys.exit(main())
