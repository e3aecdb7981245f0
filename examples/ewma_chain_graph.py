"""Band power features from a simulated recording, as an ezmsg graph.

    source | AsArray(mlx) -> common reference -> x - EWMA(x) -> square
           -> EWMA -> bin 10 ms -> log -> AsArray(numpy) | sink

Each | is a process boundary: everything that touches MLX is in one process,
and only NumPy arrays cross. The stages are one unit, which runs them as one
function; with --unit-by-unit each is a unit of its own, for the same features. Stalls make messages of ever new
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
from collections.abc import Sequence

from support import ewma_chain as shared
from support.ewma_chain_acquisition import Acquisition, RunSettings
from support.ewma_chain_metered import Metered, MeteredChain
from support.interrupts import GraphInterrupts, end_all_processes

import ezmsg.core as ez
import numpy as np
from ewma_chain_offline import make_chain
from ezmsg.sigproc.affinetransform import CommonRereference
from ezmsg.sigproc.binned_aggregate import BinnedAggregate
from ezmsg.sigproc.math.log import Log
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArray, DetrendUnit, EWMAUnit, MemorySnapshot, Pow
from ezmsg.mlx.memory.__main__ import save_plot


class Chain(MeteredChain):
    """From int16 counts (time, ch) to float32 log power (bin, ch), in one unit."""

    make_chain = staticmethod(make_chain)


class UnitByUnit(Metered):
    """The same with a unit for each stage."""

    TO_MLX = AsArray()
    REFERENCE = CommonRereference(shared.REFERENCE)
    DETREND = DetrendUnit(shared.BASELINE)
    SQUARE = Pow(shared.SQUARE)
    POWER = EWMAUnit(shared.POWER)
    BIN = BinnedAggregate(shared.BIN)
    LOG = Log(shared.LOG)
    TO_NUMPY = AsArray(shared.TO_NUMPY)

    def configure(self) -> None:
        super().configure()
        self.TO_MLX.apply_settings(self.SETTINGS)

    @property
    def stages(self) -> Sequence[ez.Unit]:
        before_bins = (self.TO_MLX, self.REFERENCE, self.DETREND, self.SQUARE, self.POWER)
        return (*before_bins, self.BIN, self.LOG, self.TO_NUMPY)


class Sink(ez.Unit):
    """Keeps the features and shows the progress, in the main process; ends the graph after the last bin."""

    SETTINGS = RunSettings

    INPUT_FEATURES = ez.InputStream(AxisArray)
    INPUT_METER = ez.InputStream(shared.Meter)
    INPUT_MEMORY = ez.InputStream(AxisArray)

    interrupts: GraphInterrupts
    """Of the main process, from before the processes start."""

    async def initialize(self) -> None:
        self.features: list[np.ndarray] = []
        self.memory: list[tuple[float, MemorySnapshot]] = []
        self.stalls: list[float] = []
        self.meter = shared.Meter()
        self.progress = shared.ProgressLine(self.SETTINGS.stream.duration)
        self.has_last_bin = self.has_last_meter = False
        self.complete = threading.Event()

    @ez.subscriber(INPUT_FEATURES)
    async def on_features(self, message: AxisArray) -> None:
        # A copy, for ezmsg uses the memory of the message again.
        self.features.append(message.data.copy())
        self.progress.update(shared.end_of(message), self.meter)
        if len(message.data) > self.SETTINGS.most_ordinary_bins:
            self.stalls.append(time.monotonic())
        # A bin that the stream ends in is never sent: this message is the last if the stream cannot fill another bin.
        n_bins = math.ceil(shared.end_of(message) / shared.BIN.bin_duration - 1e-6)
        if not self.SETTINGS.fills(n_bins + 1):
            self.has_last_bin = True

    @ez.subscriber(INPUT_METER)
    async def on_meter(self, meter: shared.Meter) -> None:
        self.meter = meter
        # It has counted the message that the last bin came of.
        self.has_last_meter = self.has_last_bin
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
        if self.has_last_meter and self.memory:
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


def main(chain: type[Metered] = Chain, unit_by_unit: type[Metered] = UnitByUnit, description: str = __doc__) -> int:
    options = shared.parse_options(description, of_graph=True)
    settings = RunSettings(options.stream, rechunk=options.rechunk, monitor=options.monitor)
    if not settings.fills(1):
        print(f"{options.stream.duration} s are too short for a single bin", file=sys.stderr)
        return 2
    chain_type = unit_by_unit if options.unit_by_unit else chain
    acquisition, stages, sink = Acquisition(settings), chain_type(options.to_mlx), Sink(settings)
    # The progress line shows whether the chain keeps up; a warning from another process would run into it.
    os.environ.setdefault("EZMSG_DISABLE_BACKPRESSURE_WARNING", "1")
    sink.interrupts = GraphInterrupts()
    print("starting the processes", flush=True)
    ez.run(
        ACQUISITION=acquisition,
        CHAIN=stages,
        SINK=sink,
        connections=(
            (acquisition.OUTPUT_SIGNAL, stages.INPUT_SIGNAL),
            (stages.OUTPUT_FEATURES, sink.INPUT_FEATURES),
            (stages.OUTPUT_METER, sink.INPUT_METER),
            (stages.OUTPUT_MEMORY, sink.INPUT_MEMORY),
        ),
        process_components=(acquisition, stages),
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
