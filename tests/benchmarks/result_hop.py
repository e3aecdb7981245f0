"""What a full-rate result costs from the chain's process to the sink's: ``python tests/benchmarks/result_hop.py``.

First the parts in one process, in turns: ezmsg's pickle with its copy to shared memory, reading it there, and a bare
copy of the same bytes. Then the whole way between two processes, from before a message is published to when the other
process has it, with no more than one message under way, and the same for a message of 16 values, which is what a hop
costs without data. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import ezmsg.core as ez
import numpy as np
from ezmsg.core.messagemarshal import Marshal
from ezmsg.util.messages.axisarray import AxisArray
from results_file import write_results

SHAPES = ((1, 16), (30, 256), (30, 1024), (300, 256), (3000, 256), (3000, 1024))
RATE = 30_000.0


def result_of(n_samples: int, n_channels: int) -> AxisArray:
    channels = AxisArray.CoordinateAxis(data=np.array([f"ch{i}" for i in range(n_channels)]), dims=["ch"])
    axes = {"time": AxisArray.TimeAxis(fs=RATE), "ch": channels}
    data = np.random.default_rng(0).standard_normal((n_samples, n_channels), np.float32)
    return AxisArray(data, ["time", "ch"], axes, attrs={"sent": 0.0}, key="hop", stream_dim="time")


def parts(message: AxisArray, n: int) -> dict[str, float]:
    """Microseconds of each part in one process."""
    data, target = message.data, np.empty_like(message.data)
    memory = memoryview(bytearray(data.nbytes + 2**16))
    times: dict[str, list[float]] = {"written": [], "read": [], "copied": []}
    for number in range(n + 5):
        at = time.perf_counter()
        Marshal.to_mem(number, message, memory)
        written = time.perf_counter()
        with Marshal.obj_from_mem(memory) as received:
            read = time.perf_counter()
            del received
        copied = time.perf_counter()
        np.copyto(target, data)
        end = time.perf_counter()
        if number >= 5:
            for name, took in (("written", written - at), ("read", read - written), ("copied", end - copied)):
                times[name].append(1e6 * took)
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


class SenderSettings(ez.Settings):
    shape: tuple[int, int]
    n: int
    seconds: float


class Sender(ez.Unit):
    SETTINGS = SenderSettings
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        message = result_of(*self.SETTINGS.shape)
        for _ in range(self.SETTINGS.n):
            await asyncio.sleep(self.SETTINGS.seconds)
            message.attrs["sent"] = time.monotonic()
            yield self.OUTPUT_SIGNAL, message


class Receiver(ez.Unit):
    SETTINGS = SenderSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.took: list[float] = []

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.took.append(1e6 * (time.monotonic() - message.attrs["sent"]))
        if len(self.took) == self.SETTINGS.n:
            raise ez.NormalTermination


def hop(shape: tuple[int, int], n: int) -> tuple[float, float]:
    """Median and 99th percentile in microseconds of the way between two processes."""
    settings = SenderSettings(shape, n, 0.002 + 4e-9 * shape[0] * shape[1])
    sender, receiver = Sender(settings), Receiver(settings)
    sender.OUTPUT_SIGNAL.buf_size = 4 * shape[0] * shape[1] + 2**16
    ez.run(
        SENDER=sender,
        RECEIVER=receiver,
        connections=((sender.OUTPUT_SIGNAL, receiver.INPUT_SIGNAL),),
        process_components=(sender,),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    median, p99 = np.percentile(receiver.took[20:], (50, 99))
    return round(float(median), 1), round(float(p99), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=400, help="of each shape [400]")
    parser.add_argument("--out", metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn", force=True)
    ez.logger.setLevel("WARNING")
    rows = []
    for shape in SHAPES:
        message = result_of(*shape)
        row: dict[str, object] = {"shape": f"{shape[0]} × {shape[1]}", "kib": round(message.data.nbytes / 1024)}
        row |= parts(message, options.messages)
        row["hop"], row["p99"] = hop(shape, options.messages)
        rows.append(row)
        print(row, flush=True)
    if options.out:
        write_results(
            Path(options.out),
            title="A full-rate result from the chain's process to the sink's",
            command="python tests/benchmarks/result_hop.py",
            packages=("ezmsg",),
            form="graph",
            spread="One run, parts in turns; medians",
            columns=[
                ("float32 result", "shape", None),
                ("KiB", "kib", 0),
                ("pickled and written to shared memory, µs", "written", 1),
                ("read there, µs", "read", 1),
                ("a bare copy, µs", "copied", 1),
                ("from process to process, µs", "hop", 0),
                ("p99, µs", "p99", 0),
            ],
            rows=rows,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
