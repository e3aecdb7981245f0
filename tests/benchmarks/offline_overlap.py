"""Whether reading, upload, computing and writing of a recording overlap: each by itself, and the whole, in turns.

    python tests/benchmarks/offline_overlap.py --samples 1000000 --channels 64

The four are measured alone on the same data, in the same run: reading from the file into memory, upload to MLX and
widening to float32, the chain on data that is there (its result read back), and writing the results. Then the whole:
``process_recording``, and the same without threads. In rounds, so that what else the machine does meets all alike; the
table has the medians. What it is held to: the whole takes the time of the slowest of the four, within 20 %.

Where all four wait for the same cores, nothing can be gained. ``--read`` and ``--write`` make the storage as slow as
that of a network: each chunk then takes at least the time that it would take there.
"""

import argparse
import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx import AsArrayTransformer, RechunkTransformer, ZarrSink, process_recording
from ezmsg.mlx.butterworthfilter import ButterworthFilterTransformer
from ezmsg.mlx.offline import sequential
from ezmsg.mlx.offline.process import DEFAULT_RECHUNK

RATE = 30_000.0


def wait_until(then: float) -> None:
    time.sleep(max(then - time.perf_counter(), 0.0))


class SlowSink(ZarrSink):
    """A Zarr group on storage that takes so many bytes a second."""

    speed = np.inf

    def _write(self, when: np.ndarray, rows: np.ndarray) -> None:
        begin = time.perf_counter()
        super()._write(when, rows)
        wait_until(begin + rows.nbytes / self.speed)


class RawSource:
    """A raw file of int16 counts, (time, ch)."""

    def __init__(self, path: Path, n_channels: int, mb_per_second: float) -> None:
        self._speed = mb_per_second * 1e6
        self.path, self.n_channels, self.sampling_rate = path, n_channels, RATE
        self.n_samples = path.stat().st_size // (2 * n_channels)
        self.identity = f"{path.name}, {self.n_samples} samples"
        self._chunk = max(16 * 2**20 // (2 * n_channels), 1)

    def read(self, start: int) -> Iterator[AxisArray]:
        with open(self.path, "rb") as file:
            file.seek(start * 2 * self.n_channels)
            while start < self.n_samples:
                begin = time.perf_counter()
                data = np.fromfile(file, np.int16, self._chunk * self.n_channels).reshape(-1, self.n_channels)
                wait_until(begin + data.nbytes / self._speed)
                time_axis = AxisArray.TimeAxis(fs=RATE, offset=start / RATE)
                yield AxisArray(data, dims=["time", "ch"], axes={"time": time_axis}, stream_dim="time")
                start += len(data)


def upload() -> AsArrayTransformer:
    return AsArrayTransformer(backend="mlx", dtype="float32")


def core() -> list[Callable[[AxisArray], AxisArray]]:
    return [
        ButterworthFilterTransformer(order=5, cuton=300.0, cutoff=6000.0),
        CommonRereferenceTransformer(mode="mean"),
        AsArrayTransformer(backend="numpy"),
    ]


def make_chain() -> list[Callable[[AxisArray], AxisArray]]:
    return [upload(), *core()]


class InTurn:
    """What writes behind, without a thread."""

    def __init__(self, sink: ZarrSink) -> None:
        self.append, self.checkpoint = sink.append, sink.checkpoint

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing waits."""


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    with (
        mock.patch.object(sequential, "WriteBehind", InTurn),
        mock.patch.object(sequential, "read_ahead", contextlib.nullcontext),
    ):
        yield


class Phases:
    """Each phase by itself, on what the one before has left."""

    def __init__(self, source: RawSource, folder: Path, chunk_mb: float, mb_per_second: float, number: int) -> None:
        self.source, self.folder, self.chunk_mb = source, folder, chunk_mb
        self.speed, self.number = mb_per_second * 1e6, number
        self.data: list[AxisArray] = []
        self.results: list[AxisArray] = []

    def sink(self) -> ZarrSink:
        sink = SlowSink(Path(tempfile.mkdtemp(dir=self.folder)) / "results.zarr", chunk_mb=self.chunk_mb)
        sink.speed = self.speed
        return sink

    def pieces(self) -> list[AxisArray]:
        rechunk = RechunkTransformer(DEFAULT_RECHUNK)
        return [piece for message in self.source.read(0) for piece in rechunk(message)]

    def run(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "reading", self.read
        self.data, self.to_mlx = self.pieces(), upload()
        yield "upload", self.upload
        self.data = [self.to_mlx(piece) for piece in self.data]
        mx.eval([piece.data for piece in self.data])
        self.steps = core()
        yield "computing", self.compute
        self.data = [replace(result, data=np.array(result.data)) for result in self.results]
        self.results.clear()
        yield "writing", self.write
        self.data.clear()
        # In turn, so that neither always comes behind the other.
        wholes = [("whole", self.whole), ("whole, in turn", self.in_turn)]
        yield from wholes if self.number % 2 else reversed(wholes)

    def read(self) -> None:
        for message in self.source.read(0):
            message.data[::4096].sum()

    def upload(self) -> None:
        for piece in self.data:
            mx.eval(self.to_mlx(piece).data)

    def compute(self) -> None:
        for message in self.data:
            for step in self.steps:
                message = step(message)
            self.results.append(message)

    def write(self) -> None:
        sink = self.sink()
        sink.open("writing", "writing")
        for message in self.data:
            sink.append(message)
        sink.commit()
        sink.close()

    def whole(self) -> None:
        process_recording(self.source, make_chain, self.sink(), progress=False)

    def in_turn(self) -> None:
        with without_threads():
            self.whole()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-mb", type=float, default=4.0, help="of the results")
    parser.add_argument("--read", type=float, default=np.inf, metavar="MB/S", help="speed of the storage [as it is]")
    parser.add_argument("--write", type=float, default=np.inf, metavar="MB/S", help="the same for results")
    parser.add_argument("--folder", type=Path, help="where to read and write [a temporary one]")
    options = parser.parse_args()
    os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING")
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "recording.raw"
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:
            for begin in range(0, options.samples, 100_000):
                n = min(100_000, options.samples - begin)
                file.write(rng.normal(0.0, 30.0, (n, options.channels)).astype(np.int16).tobytes())
        source = RawSource(path, options.channels, options.read)
        for number in range(options.rounds):
            for name, phase in Phases(source, Path(folder), options.chunk_mb, options.write, number).run():
                begin, used = time.perf_counter(), cpu_seconds()
                phase()
                wall.setdefault(name, []).append(time.perf_counter() - begin)
                cpu.setdefault(name, []).append(cpu_seconds() - used)
    print(f"{options.samples} samples x {options.channels} channels, {options.rounds} rounds, medians in seconds")
    print(f"{'':16}{'wall':>8}{'CPU':>8}")
    for name in wall:
        print(f"{name:16}{statistics.median(wall[name]):8.2f}{statistics.median(cpu[name]):8.2f}")
    slowest = [max(wall[name][i] for name in list(wall)[:4]) for i in range(options.rounds)]
    of_slowest = statistics.median(a / b for a, b in zip(wall["whole"], slowest, strict=True))
    of_turn = statistics.median(a / b for a, b in zip(wall["whole"], wall["whole, in turn"], strict=True))
    of_cpu = statistics.median(a / b for a, b in zip(cpu["whole"], cpu["whole, in turn"], strict=True))
    print(
        f"the whole takes {of_slowest:.2f} of the slowest phase (held to 1.2), "
        f"{of_turn:.2f} of the whole in turn (CPU: {of_cpu:.2f})"
    )


if __name__ == "__main__":
    main()
