"""Who should write the chunks of results: a writer of our own, zarr-python, its pipeline ``zarrs``, or ``tensorstore``.

    pip install zarrs
    python tests/benchmarks/chunk_writers.py --channels 64 --seconds 20 --json chunk_writers.json

Two figures each, in turns within a round: CPU-seconds a GB for ``ZarrSink`` alone, and the seconds and CPU-seconds of a
whole run (a band-pass of 300 to 6000 Hz over int16 counts, ``process_recording``). Everything but the writing of
whole chunks is the same code, and every writer gives the same values, which is checked. Libraries get one thread, as
our own writer has.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numcodecs
import numpy as np
import zarr
import zarrs  # noqa: F401
from numcodecs import Blosc
from offline_overlap import RATE, RawSource
from offline_overlap import make_stages as make_chain
from offline_results import PIECE, messages, signal
from results_file import write_results

from ezmsg.mlx import ZarrSink, process_recording
from ezmsg.mlx.offline.zarrlayout import RowWriter

COMPRESSORS = {"none": None, "lz4, bits": Blosc("lz4", 5, Blosc.BITSHUFFLE), "zstd:1, bits": Blosc("zstd", 1, 2)}


class Own(RowWriter):
    """A file for each whole chunk, as Zarr's format 2 has it: the values in C order, compressed."""

    def write(self, begin: int, rows: np.ndarray) -> None:
        array = self.array
        if array.shape[0] < begin + len(rows):
            array.resize((max(begin + len(rows), 2 * array.shape[0]), *array.shape[1:]))
        if len(rows) != array.chunks[0]:
            array[begin : begin + len(rows)] = rows
            return
        about = json.loads((self._folder / ".zarray").read_text())["compressor"]
        values = np.ascontiguousarray(rows)
        content = values if about is None else numcodecs.get_codec(about).encode(values)
        (self._folder / ".".join(map(str, (begin // len(rows), *[0] * (rows.ndim - 1))))).write_bytes(content)


class ThroughZarr(RowWriter):
    """Whatever pipeline zarr-python is configured to use."""

    def _opened(self) -> zarr.Array:
        return self.array


@contextlib.contextmanager
def written_by(name: str) -> Iterator[None]:
    """A context in which *name* writes the chunks."""
    with contextlib.ExitStack() as stack:
        if name == "zarrs":
            threads = {"threading.max_workers": 1, "codec_pipeline.chunk_concurrent_maximum": 1}
            stack.enter_context(zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", **threads}))
        writer = {"own": Own, "tensorstore": RowWriter}.get(name, ThroughZarr)
        stack.enter_context(mock.patch("ezmsg.mlx.offline.zarrsink.RowWriter", writer))
        yield


WRITERS = ("own", "zarr-python", "zarrs", "tensorstore")


class Figures(dict[str, float]):
    """Seconds and CPU-seconds of what was done while it was entered."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> "Figures":
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self[f"{self._prefix} wall"] = time.perf_counter() - self._begin[0]
        self[f"{self._prefix} cpu"] = time.process_time() - self._begin[1]


def results_alone(pieces: list, path: Path, compressor: object) -> Figures:
    shutil.rmtree(path, ignore_errors=True)
    sink = ZarrSink(path, compressor=compressor)  # type: ignore[arg-type]
    sink.open("results", "results")
    with contextlib.closing(sink), Figures("sink") as figures:
        for piece in pieces:
            sink.append(piece)
        sink.commit()
    return figures


def whole_run(source: RawSource, path: Path, compressor: object) -> Figures:
    shutil.rmtree(path, ignore_errors=True)
    with Figures("run") as figures:
        sink = ZarrSink(path, compressor=compressor)  # type: ignore[arg-type]
        process_recording(source, make_chain, sink, progress=False)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the recording [20]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", help="what it is called in the file [the kind of processor]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file for docs/results/data")
    options = parser.parse_args()
    numcodecs.blosc.set_nthreads(1)
    n_samples = round(options.seconds * RATE) // PIECE * PIECE
    data = signal(n_samples, options.channels)
    pieces = messages(data)
    cases = [(compressor, writer) for compressor in COMPRESSORS for writer in WRITERS]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.zarr")
        np.rint(data).astype(np.int16).tofile(recording := Path(folder, "recording.raw"))
        source = RawSource(recording, options.channels, np.inf)
        for number in range(options.rounds + 1):
            for compressor, writer in cases:
                with written_by(writer):
                    alone = results_alone(pieces, path, COMPRESSORS[compressor])
                    written = zarr.open_group(str(path), mode="r")["data"][:]
                    assert np.array_equal(written, data), f"{writer} has written other values"
                    whole = whole_run(source, path, COMPRESSORS[compressor])
                if number:  # the first round imports and compiles
                    found[compressor, writer].append({**alone, **whole})
    rows: list[dict[str, object]] = []
    for (compressor, writer), figures in found.items():
        middle = {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        rows.append(
            {
                "compressor": compressor,
                "writer": writer,
                "sink": round(middle["sink cpu"] / data.nbytes * 1e9, 2),
                "run": round(middle["run wall"], 2),
                "run cpu": round(middle["run cpu"], 2),
            }
        )
        print("  ".join(f"{value!s:>14}" for value in rows[-1].values()), flush=True)
    if options.json:
        write_results(
            options.json,
            title=f"Who writes the chunks: {options.seconds:g} s of {options.channels} channels in float32",
            command="python tests/benchmarks/chunk_writers.py "
            f"--channels {options.channels} --seconds {options.seconds:g} --rounds {options.rounds}",
            spread=f"Medians of {options.rounds} rounds, in turns",
            columns=[
                ("compressor", "compressor", None),
                ("writer", "writer", None),
                ("results alone, CPU-seconds a GB", "sink", 1),
                ("whole run, seconds", "run", 2),
                ("whole run, CPU-seconds", "run cpu", 2),
            ],
            rows=rows,
            machine=options.machine,
            packages=("ezmsg-mlx", "zarr", "numcodecs", "zarrs", "tensorstore"),
            state="not applicable",
        )


if __name__ == "__main__":
    main()
