"""What it costs to keep results: processor time, size, and the time to read a window, by compressor, chunk and dtype.

    python tests/benchmarks/offline_results.py --json results.json

The results are what a band-pass of 300 to 6000 Hz leaves of noise of 50 counts, as float32, and rounded to int16. They
are written by ``ZarrSink``, and read again: one second of all channels, and all of the time of one channel. Processor
time is that of all threads, which other work on the machine changes little; sizes are shares of the uncompressed ones.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numcodecs
import numpy as np
import zarr
from ezmsg.util.messages.axisarray import AxisArray
from numcodecs import Blosc
from results_file import write_results
from scipy.signal import butter, sosfilt

from ezmsg.mlx import ZarrSink

RATE = 30_000.0
PIECE = 3000

COMPRESSORS = {
    "none": None,
    "default": "default",
    "lz4": Blosc("lz4", 5, Blosc.SHUFFLE),
    "lz4, bits": Blosc("lz4", 5, Blosc.BITSHUFFLE),
    "zstd:1": Blosc("zstd", 1, Blosc.SHUFFLE),
    "zstd:1, bits": Blosc("zstd", 1, Blosc.BITSHUFFLE),
    "zstd:5": Blosc("zstd", 5, Blosc.SHUFFLE),
    "zstd:5, bits": Blosc("zstd", 5, Blosc.BITSHUFFLE),
    "zstd:9, bits": Blosc("zstd", 9, Blosc.BITSHUFFLE),
}

IN_ALL_CHUNKS = ("none", "zstd:1, bits")

CHUNKS: dict[str, dict[str, float | int]] = {
    "4 MiB": {},
    "1 MiB": {"chunk_mb": 1.0},
    "16 MiB": {"chunk_mb": 16.0},
    "4 MiB, 16 channels": {"chunk_channels": 16},
}


def signal(n_samples: int, n_channels: int) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0.0, 50.0, (n_samples, n_channels))
    return sosfilt(butter(5, (300.0, 6000.0), "bandpass", fs=RATE, output="sos"), noise, axis=0).astype(np.float32)


def messages(data: np.ndarray) -> list[AxisArray]:
    return [
        AxisArray(
            data[begin : begin + PIECE],
            dims=["time", "ch"],
            axes={"time": AxisArray.TimeAxis(fs=RATE, offset=begin / RATE)},
            stream_dim="time",
        )
        for begin in range(0, len(data), PIECE)
    ]


def timed(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def measure(pieces: list[AxisArray], folder: Path, **options: object) -> dict[str, float]:
    """Processor time in seconds for all of it, and the size in bytes."""
    path = folder / "results.zarr"
    shutil.rmtree(path, ignore_errors=True)
    sink = ZarrSink(path, **options)  # type: ignore[arg-type]
    sink.open("results", "results")

    def write() -> None:
        for piece in pieces:
            sink.append(piece)
        sink.commit()

    found = {"write": timed(write)}
    sink.close()
    data = zarr.open_group(str(path), mode="r")["data"]
    begin = len(pieces) * PIECE // 3
    found["window"] = timed(lambda: data[begin : begin + round(RATE)])
    found["channel"] = timed(lambda: data[:, 0])
    found["size"] = sum(file.stat().st_size for file in (path / "data").iterdir())
    return found


def write(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """A file for docs/results/data."""
    command = "python tests/benchmarks/offline_results.py"
    write_results(
        options.json,
        title=f"Keeping the results of a band-pass, {options.channels} channels",
        command=f"{command} --channels {options.channels} --seconds {options.seconds:g} --rounds {options.rounds}",
        spread=f"Medians of {options.rounds} rounds, in turns",
        columns=[
            ("results", "dtype", None),
            ("chunk", "chunk", None),
            ("compressor", "compressor", None),
            ("CPU-seconds a GB", "write", 1),
            ("size", "size", 2),
            ("read 1 s, CPU-ms", "window", 0),
            ("read one channel, CPU-ms a minute", "channel", 0),
        ],
        rows=rows,
        notes=[
            "A GB is one of uncompressed results, and the size a share of it. CPU-seconds are those of ZarrSink as a "
            "whole: copies, compressing, writing, checksum. “bits” shuffles bits, the others bytes.",
            "Without a compressor the last chunk takes as much as each other one, which shows in short results.",
        ],
        machine=options.machine,
        packages=("ezmsg-mlx", "zarr", "numcodecs"),
        state="not applicable",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the results [20]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write [a temporary one]")
    parser.add_argument("--machine", help="what it is called in the file [the kind of processor]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file for docs/results/data")
    options = parser.parse_args()
    numcodecs.blosc.set_nthreads(1)
    n_samples = round(options.seconds * RATE) // PIECE * PIECE
    data = signal(n_samples, options.channels)
    recordings = {"float32": messages(data), "int16": messages(np.rint(data).astype(np.int16))}
    del data
    cases = [
        *((dtype, "4 MiB", name) for dtype in recordings for name in COMPRESSORS),
        *(
            (dtype, chunk, name)
            for dtype in recordings
            for chunk in list(CHUNKS)[1:]
            for name in ("none", "zstd:1, bits")
        ),
    ]
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.rounds):
            for dtype, chunk, name in cases:
                figures = measure(recordings[dtype], Path(folder), compressor=COMPRESSORS[name], **CHUNKS[chunk])
                found[dtype, chunk, name].append(figures)
    rows = []
    for (dtype, chunk, name), figures in found.items():
        n_bytes = n_samples * options.channels * np.dtype(dtype).itemsize
        middle = {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        rows.append(
            {
                "dtype": dtype,
                "chunk": chunk,
                "compressor": name,
                "write": round(middle["write"] / n_bytes * 1e9, 2),
                "size": round(middle["size"] / n_bytes, 3),
                "window": round(middle["window"] * 1e3, 1),
                "channel": round(middle["channel"] * 1e3 * 60.0 / options.seconds, 1),
            }
        )
        print("  ".join(f"{value!s:>18}" for value in rows[-1].values()), flush=True)
    if options.json:
        write(options, rows)


if __name__ == "__main__":
    main()
