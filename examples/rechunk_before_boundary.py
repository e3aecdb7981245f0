"""What a stall does to the shared memory between two processes, with and without Rechunk in front of it.

    source -> AsArray(float32) [-> Rechunk] | sink

| is a process boundary. ezmsg passes large messages through a ring of shared
memory with room for 32 of them. A message that does not fit makes it anew, each
slot twice as large as that message, and it never shrinks: while everything is
copied nothing arrives, and one stall costs the memory for good. Rechunk in the
process of the source cuts the message to the ordinary length first.

    pip install "ezmsg-mlx[cpu,examples]"
    python rechunk_before_boundary.py
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from mmap import mmap

from support import checked_options as checked
from support.interrupts import GraphInterrupts

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from rich import box
from rich.console import Console
from rich.table import Table

from ezmsg.mlx import (
    ArrayBackend,
    AsArray,
    AsArraySettings,
    Rechunk,
    RechunkSettings,
    SimulatedAcquisition,
    SimulatedAcquisitionSettings,
)

MIB = 1 << 20


class AcquisitionSettings(ez.Settings):
    stream: SimulatedAcquisitionSettings
    rechunk: bool


class Acquisition(ez.Collection):
    """The source's process: float32 messages of shape (time, ch)."""

    SETTINGS = AcquisitionSettings

    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    SOURCE = SimulatedAcquisition()
    TO_FLOAT = AsArray(AsArraySettings(backend=ArrayBackend.numpy, dtype="float32"))
    RECHUNK = Rechunk()

    def configure(self) -> None:
        self.SOURCE.apply_settings(self.SETTINGS.stream)
        # One size only, and no larger one: the ring has room for 64 messages of the largest size.
        self.RECHUNK.apply_settings(RechunkSettings(sizes=(self.SETTINGS.stream.samples_per_message,)))

    def network(self) -> ez.NetworkDefinition:
        stages = [self.SOURCE, self.TO_FLOAT]
        if self.SETTINGS.rechunk:
            stages.append(self.RECHUNK)
        return (
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in zip(stages, stages[1:])),
            (stages[-1].OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


class Sink(ez.Unit):
    """Notes when each message arrives, and how large the shared memory is that it lies in."""

    SETTINGS = SimulatedAcquisitionSettings

    INPUT_SIGNAL = ez.InputStream(AxisArray)

    interrupts: GraphInterrupts

    async def initialize(self) -> None:
        self.lengths: list[int] = []
        self.times: list[float] = []
        self.segments: list[int] = []

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.times.append(time.monotonic())
        self.lengths.append(message.data.shape[0])
        self.segments.append(segment_size(message.data))
        # Rechunk may keep a piece that is shorter than a message.
        complete = self.SETTINGS.n_samples - sum(self.lengths) < self.SETTINGS.samples_per_message
        self.interrupts.running.set()
        if complete or self.interrupts.asked.is_set():
            raise ez.NormalTermination


def segment_size(data: np.ndarray) -> int:
    """Size in bytes of the shared-memory segment that *data* is a view into; 0 if it is none.

    Asked of the array and not of /dev/shm, which macOS does not have.
    """
    base = data
    while isinstance(base, np.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else None
    return len(memory) if isinstance(memory, mmap) else 0


def measure(stream: SimulatedAcquisitionSettings, rechunk: bool, interrupts: GraphInterrupts) -> dict[str, float]:
    """Run the graph once. Sizes in MiB, times in seconds, lengths in samples."""
    acquisition, sink = Acquisition(AcquisitionSettings(stream, rechunk)), Sink(stream)
    sink.interrupts = interrupts
    interrupts.running.clear()
    ez.run(
        ACQUISITION=acquisition,
        SINK=sink,
        connections=((acquisition.OUTPUT_SIGNAL, sink.INPUT_SIGNAL),),
        process_components=(acquisition,),
        # A graph server of its own on a free port, so that graphs that run at the same time do not meet.
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    if interrupts.asked.is_set():
        sys.exit(130)
    return {
        "first_segment": sink.segments[0] / MIB,
        "last_segment": sink.segments[-1] / MIB,
        "longest_gap": max(np.diff(sink.times)).item(),
        "longest_message": max(sink.lengths),
        "n_samples": sum(sink.lengths),
    }


def show(results: dict[str, dict[str, float]], stream: SimulatedAcquisitionSettings) -> None:
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("longest\nmessage", "ring at\nfirst", "ring at\nlast", "longest\ngap"):
        table.add_column(head, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['longest_message']}",
            f"{result['first_segment']:.0f} MiB",
            f"{result['last_segment']:.0f} MiB",
            f"{result['longest_gap']:.2f} s",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Messages of {stream.samples_per_message} samples x {stream.n_channels} channels, float32; "
        f"{stream.longest_stall:g} s of each gap are the stall itself.",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", metavar="N", type=checked.count, default=256, help="number of channels [256]")
    text = "length of an ordinary message [300]"
    parser.add_argument("--samples-per-message", metavar="N", type=checked.count, default=300, help=text)
    text = "length of the stall in seconds [0.5]"
    parser.add_argument("--stall", metavar="S", type=checked.positive, default=0.5, help=text)
    parser.add_argument("--json", metavar="FILE", type=checked.file, help="where to save the numbers")
    options = parser.parse_args()
    try:
        # One stall after half a second, and half a second after it, at the pace of the sampling rate.
        n_before = max(round(0.5 * 30000 / options.samples_per_message), 1)
        stream = SimulatedAcquisitionSettings(
            n_channels=options.channels,
            samples_per_message=options.samples_per_message,
            stall_every=n_before + 1,
            n_stall_lengths=1,
            shortest_stall=options.stall,
            longest_stall=options.stall,
            duration=1.0 + options.stall,
            real_time=True,
        )
    except ValueError as error:
        parser.error(str(error))
    # INFO lines would run into the table, and that the source waits for the sink meanwhile is the point.
    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING").upper())
    os.environ.setdefault("EZMSG_DISABLE_BACKPRESSURE_WARNING", "1")
    interrupts = GraphInterrupts()
    results = {
        name: measure(stream, rechunk, interrupts) for name, rechunk in (("as it comes", False), ("Rechunk", True))
    }
    show(results, stream)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    sys.exit(main())
