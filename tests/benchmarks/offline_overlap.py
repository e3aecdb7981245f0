"""Whether reading, upload, computing and writing of a recording overlap: each by itself, and the whole, in turns.

    python tests/benchmarks/offline_overlap.py --samples 1000000 --channels 64
    python tests/benchmarks/offline_overlap.py --gpu --json overlap.json

The work is a causal band-pass of order 5 and the mean of all channels subtracted, from int16. The phases are measured
alone on the same data, in the same run: reading from the file into memory, upload to MLX and widening to float32, the
chain on data that is there, reading its results back (on a GPU; elsewhere it is part of the chain), and writing them.
Then the whole: ``process_recording``, and the same without threads. In rounds, so that what else the machine does meets
all alike; the table has the medians. What it is held to: the whole takes the time of the slowest phase, within 20 %.

Where all phases wait for the same cores, nothing can be gained. ``--read`` and ``--write`` make the storage as slow as
that of a network: each chunk then takes at least the time that it would take there.

``--gpu`` is for a machine with CUDA: 384 channels, a file and results in memory where there is room, float32 and int16
results, two lengths of pieces, and the same without writing; under 90 seconds. It needs NumPy, MLX and ezmsg's
packages, not Zarr.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from results_file import write_results

from ezmsg.mlx import (
    AsArrayTransformer,
    ChainTransformer,
    Opened,
    RechunkSettings,
    RechunkTransformer,
    ZarrSink,
    process_recording,
)
from ezmsg.mlx.butterworthfilter import ButterworthFilterTransformer
from ezmsg.mlx.offline import checkpoint
from ezmsg.mlx.offline import engine as sequential

RATE = 30_000.0
N_REPEATED = 100_000
"""Samples of a recording that repeat."""

IS_GPU = mx.default_device().type == mx.gpu


def wait_until(then: float) -> None:
    time.sleep(max(then - time.perf_counter(), 0.0))


class SlowSink(ZarrSink):
    """A Zarr group on storage that takes so many bytes a second."""

    speed = np.inf

    def append(self, message: AxisArray) -> None:
        begin = time.perf_counter()
        super().append(message)
        wait_until(begin + message.data.nbytes / self.speed)


class RawSink:
    """Results in a file without a header, or nowhere."""

    speed = np.inf

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0

    def open(self, recipe: str, fingerprint: str) -> Opened:
        self._file = open(self.path, "wb")
        return Opened(False, None)

    def append(self, message: AxisArray) -> None:
        begin = time.perf_counter()
        data = np.ascontiguousarray(message.data)
        self._file.write(data.data)
        self.n_bytes += data.nbytes
        wait_until(begin + data.nbytes / self.speed)

    def checkpoint(self, state: bytes) -> None:
        """An interrupted run starts over."""

    def restart(self) -> None:
        self._file.truncate(0)

    def commit(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RawSource:
    """A raw file of int16 counts, (time, ch)."""

    def __init__(
        self, path: Path, n_channels: int, mb_per_second: float, *, multiple: int = 1, most: float = np.inf
    ) -> None:
        self._speed = mb_per_second * 1e6
        self.path, self.n_channels, self.sampling_rate = path, n_channels, RATE
        self.n_samples = int(min(path.stat().st_size // (2 * n_channels), most))
        self.identity = f"{path.name}, {self.n_samples} samples"
        self._chunk = max(16 * 2**20 // (2 * n_channels) // multiple, 1) * multiple

    def read(self, start: int) -> Iterator[AxisArray]:
        with open(self.path, "rb") as file:
            file.seek(start * 2 * self.n_channels)
            while start < self.n_samples:
                begin = time.perf_counter()
                n = min(self._chunk, self.n_samples - start)
                data = np.fromfile(file, np.int16, n * self.n_channels).reshape(-1, self.n_channels)
                wait_until(begin + data.nbytes / self._speed)
                time_axis = AxisArray.TimeAxis(fs=RATE, offset=start / RATE)
                yield AxisArray(data, dims=["time", "ch"], axes={"time": time_axis}, stream_dim="time")
                start += len(data)


def upload() -> AsArrayTransformer:
    return AsArrayTransformer(backend="mlx", dtype="float32")


def download(dtype: str) -> AsArrayTransformer:
    return AsArrayTransformer(backend="numpy", dtype=dtype, rounding="nearest")


def core() -> list[Callable[[AxisArray], AxisArray]]:
    return [
        ButterworthFilterTransformer(order=5, cuton=300.0, cutoff=6000.0, coef_type="sos"),
        CommonRereferenceTransformer(mode="mean"),
    ]


def make_stages(dtype: str = "float32") -> list[Callable[[AxisArray], AxisArray]]:
    return [upload(), *core(), download(dtype)]


def make_chain(dtype: str = "float32") -> ChainTransformer:
    return ChainTransformer(make_chain=functools.partial(make_stages, dtype))


class InTurn:
    """What writes behind, without a thread."""

    def __init__(self, sink: ZarrSink | RawSink) -> None:
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
        mock.patch.object(sequential, "uses_gpu", lambda: False),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured."""

    dtype: str
    """Of the results."""
    piece: int
    """Samples at a time."""
    sink: str
    chunk_mb: float
    read: float
    write: float

    def __str__(self) -> str:
        return f"{self.dtype} results by {self.sink}, pieces of {self.piece} samples"


PHASES = ("reading", "upload", "computing", "reading back", "writing")


class Phases:
    """Each phase by itself, on what the one before has left."""

    def __init__(self, source: RawSource, folder: Path, case: Case, number: int) -> None:
        self.source, self.folder, self.case, self.number = source, folder, case, number
        self.data: list[AxisArray] = []
        self.results: list[AxisArray] = []
        self.rechunk = RechunkSettings(sizes=(case.piece,))

    def sink(self) -> ZarrSink | RawSink:
        # One place for all, as large files in memory are slow to remove.
        path = self.folder / "results"
        if self.case.sink == "zarr":
            shutil.rmtree(path, ignore_errors=True)
            sink: ZarrSink | RawSink = SlowSink(path, chunk_mb=self.case.chunk_mb)
        else:
            sink = RawSink(path if self.case.sink == "raw" else Path(os.devnull))
        sink.speed = self.case.write * 1e6
        return sink

    def pieces(self) -> list[AxisArray]:
        rechunk = RechunkTransformer(self.rechunk)
        found = [piece for message in self.source.read(0) for piece in rechunk(message)]
        return [*found, *rechunk.flush()]

    def run(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "reading", self.read
        self.data, self.to_mlx = self.pieces(), upload()
        yield "upload", self.upload
        self.data = [self.to_mlx(piece) for piece in self.data]
        mx.eval([piece.data for piece in self.data])
        yield "computing", self.compute
        self.data, self.results = self.results, []
        if IS_GPU:
            yield "reading back", self.read_back
            self.data, self.results = self.results, []
        yield "writing", self.write
        self.data.clear()
        mx.clear_cache()
        # In turn, so that neither always comes behind the other.
        wholes = [("whole", self.whole), ("whole, in turn", self.in_turn)]
        yield from wholes if self.number % 2 else reversed(wholes)

    def read(self) -> None:
        for message in self.source.read(0):
            message.data[::4096].sum()

    def upload(self) -> None:
        if not IS_GPU:
            for piece in self.data:
                mx.eval(self.to_mlx(piece).data)
            return
        from ezmsg.mlx.stream.hostmemory import device_memory

        memory = device_memory()
        for piece in self.data:
            staged = memory.take(piece.data.nbytes)
            x = staged.filled(piece.data, piece.data.dtype).astype(mx.float32)
            mx.async_eval(x)
            memory.give_back_after(staged, [x])
        mx.eval(x)

    def compute(self) -> None:
        stages = core() if IS_GPU else [*core(), download(self.case.dtype)]
        chain, before = ChainTransformer(make_chain=lambda: stages), None
        for message in self.data:
            result = chain(message)
            if IS_GPU:
                mx.async_eval(result.data)
                if before is not None:
                    mx.eval(before.data)
                before = result
            self.results.append(result)
        if before is not None:
            mx.eval(before.data)

    def read_back(self) -> None:
        from ezmsg.mlx.stream.convert import begin_reading

        begun: list[tuple[AxisArray, object]] = []
        for message in [*self.data, None, None]:
            if message is not None:
                begun.append((message, begin_reading(message.data, self.case.dtype, rounds=True)))
            if begun and (len(begun) > 2 or message is None):
                done, unread = begun.pop(0)
                self.results.append(replace(done, data=unread.read()))

    def write(self) -> None:
        sink = self.sink()
        sink.open("writing", "writing")
        for message in self.data:
            sink.append(message)
        sink.commit()
        sink.close()

    def whole(self) -> None:
        chain_factory = functools.partial(make_chain, self.case.dtype)
        process_recording(self.source, chain_factory, self.sink(), rechunk=self.rechunk, progress=False)

    def in_turn(self) -> None:
        with without_threads():
            self.whole()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(path: Path, n_channels: int, folder: Path, case: Case, rounds: int) -> dict[str, object]:
    """One row of the table."""
    source = RawSource(path, n_channels, case.read, multiple=case.piece)
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    peak = 0
    # The first one compiles, and makes memory.
    short = RawSource(source.path, source.n_channels, np.inf, multiple=case.piece, most=12 * case.piece)
    for number in range(-1, rounds):
        for name, phase in Phases(source if number >= 0 else short, folder, case, number).run():
            mx.reset_peak_memory()
            begin, used = time.perf_counter(), cpu_seconds()
            phase()
            if number >= 0:
                wall.setdefault(name, []).append(time.perf_counter() - begin)
                cpu.setdefault(name, []).append(cpu_seconds() - used)
            if name == "whole":
                peak = max(peak, mx.get_peak_memory())
    (folder / "results").unlink() if case.sink == "raw" else shutil.rmtree(folder / "results", ignore_errors=True)
    phases = [name for name in PHASES if name in wall]
    slowest = [max(wall[name][i] for name in phases) for i in range(rounds)]

    def ratio(times: dict[str, list[float]], other: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(times["whole"], other, strict=True)), 3)

    seconds = {name: round(statistics.median(times), 4) for name, times in wall.items()}
    whole, n_bytes = seconds["whole"], source.n_samples * source.n_channels
    row = {
        "case": str(case),
        **seconds,
        **{f"CPU, {name}": round(statistics.median(times), 3) for name, times in cpu.items()},
        "bound": max(phases, key=lambda name: seconds[name]),
        "of slowest": ratio(wall, slowest),
        "of in turn": ratio(wall, wall["whole, in turn"]),
        "CPU of in turn": ratio(cpu, cpu["whole, in turn"]),
        "times real time": round(source.n_samples / RATE / whole, 1),
        "GB/s in": round(2 * n_bytes / whole / 1e9, 3),
        "GB/s out": round(np.dtype(case.dtype).itemsize * n_bytes / whole / 1e9, 3),
        "MLX peak, MiB": round(peak / 2**20, 1),
    }
    print(f"\n{case}: {source.n_samples} samples x {source.n_channels} channels, {rounds} rounds, medians in seconds")
    print(f"{'':16}{'wall':>8}{'CPU':>8}")
    for name in wall:
        print(f"{name:16}{seconds[name]:8.3f}{row[f'CPU, {name}']:8.3f}")
    print(
        f"the whole takes {row['of slowest']:.2f} of the slowest phase, {row['bound']} (held to 1.2), "
        f"{row['of in turn']:.2f} of the whole in turn (CPU: {row['CPU of in turn']:.2f}); "
        f"{row['times real time']:.0f} times real time, {row['GB/s in']:.2f} GB/s in, {row['GB/s out']:.2f} GB/s out, "
        f"MLX's peak {row['MLX peak, MiB']:.0f} MiB",
        flush=True,
    )
    return row


def write(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """A file for docs/results/data."""
    command = "python tests/benchmarks/offline_overlap.py" + (" --gpu" if options.gpu else "")
    if not options.gpu:
        command += f" --samples {options.samples} --channels {options.channels} --rounds {options.rounds}"
        command += "".join(
            f" --{name} {value:g}" for name in ("read", "write") if np.isfinite(value := getattr(options, name))
        )
    heads = {name: f"{name}, s" for name in PHASES if any(name in row for row in rows)}
    size = f"{options.samples:,}".replace(",", "\u202f") + f" × {options.channels} samples of int16"
    speeds = (f"{options.read:g} MB/s to read", f"{options.write:g} MB/s to write")
    slow = "".join(f", {said}" for said in speeds if not said.startswith("inf"))
    write_results(
        options.json,
        title=f"Phases of an offline run, each by itself, and the whole ({size}{slow})",
        command=command,
        spread=f"Medians of {options.rounds} rounds, in turns",
        columns=[
            ("", "case", None),
            *((head, name, 2) for name, head in heads.items()),
            ("whole, s", "whole", 2),
            ("without threads, s", "whole, in turn", 2),
            ("whole / slowest phase", "of slowest", 2),
            ("slowest phase", "bound", None),
            ("× real time", "times real time", 0),
            ("GB/s in", "GB/s in", 2),
            ("MLX's peak, MiB", "MLX peak, MiB", 0),
        ],
        rows=rows,
        machine=options.machine or str(mx.device_info().get("device_name", platform.machine())),
    )


def written(path: Path, n_samples: int, n_channels: int) -> Path:
    """A recording of noise."""
    noise = np.random.default_rng(0).normal(0.0, 30.0, (min(n_samples, N_REPEATED), n_channels)).astype(np.int16)
    with open(path, "wb") as file:
        for begin in range(0, n_samples, N_REPEATED):
            file.write(noise[: n_samples - begin].data)
    return path


def place(options: argparse.Namespace) -> Path | None:
    """Memory, where there is room for the recording and its results; else where temporary files go."""
    memory = Path("/dev/shm")
    needed = 2 * 7 * options.samples * options.channels
    if options.folder is None and memory.is_dir() and options.gpu and shutil.disk_usage(memory).free > needed:
        return memory
    return options.folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the cases for a machine with CUDA")
    parser.add_argument("--samples", type=int, help="[1000000]")
    parser.add_argument("--channels", type=int, help="[64; 384 with --gpu]")
    parser.add_argument("--rounds", type=int, help="[5; 3 with --gpu]")
    parser.add_argument("--piece", type=int, nargs="+", help="samples at a time [3000; 3000 and 30000 with --gpu]")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "int16"), help="of the results [float32; both]")
    parser.add_argument("--sink", choices=("zarr", "raw", "none"), help="where they go [zarr; raw with --gpu]")
    parser.add_argument("--chunk-mb", type=float, default=4.0, help="of the results, in Zarr")
    parser.add_argument("--read", type=float, default=np.inf, metavar="MB/S", help="speed of the storage [as it is]")
    parser.add_argument("--write", type=float, default=np.inf, metavar="MB/S", help="the same for results")
    parser.add_argument("--folder", type=Path, help="where to read and write [memory with --gpu, or a temporary one]")
    parser.add_argument("--seconds", type=float, help="begin no further case after so many [65 with --gpu]")
    parser.add_argument("--machine", help="what it is called in the file [as MLX calls the device]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file for docs/results/data")
    options = parser.parse_args()
    defaults = {
        "samples": (1_000_000, 1_000_000),
        "channels": (64, 384),
        "rounds": (5, 3),
        "piece": ([3000], [30_000, 3000]),
        "dtype": (["float32"], ["float32", "int16"]),
        "sink": ("zarr", "raw"),
        "seconds": (np.inf, 65.0),
    }
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.gpu])
    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING"))
    begin, rows = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("llvmlite") is None:
            # It tells the kind of processor, which a checkpoint depends on.
            stack.enter_context(mock.patch.object(checkpoint, "_processor", platform.machine))
        if IS_GPU and importlib.util.find_spec("numba") is None:
            # It compiles what chains run on a CPU, which is loaded here, too, but not called.
            loops = types.ModuleType("compiled")
            loops.compiled = lambda **_: lambda function: function  # type: ignore[attr-defined]
            sys.modules["ezmsg.mlx.kernels.cpu.compiled"] = loops
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place(options))))
        print(f"{mx.default_device()}, files in {folder.parent}")
        path = written(folder / "recording.raw", options.samples, options.channels)
        sinks = [options.sink, "none"] if options.gpu else [options.sink]
        cases = [
            Case(dtype, piece, sink, options.chunk_mb, options.read, options.write)
            for sink in sinks
            for piece in options.piece
            for dtype in options.dtype
            if sink == options.sink or piece == max(options.piece)
        ]
        for case in cases:
            if time.monotonic() - begin < options.seconds:
                rows.append(measure(path, options.channels, folder, case, options.rounds))
                if options.json:
                    write(options, rows)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
