"""Band-pass and common reference of one recording, by this package and by SpikeInterface, side by side.

    pip install spikeinterface
    python tests/benchmarks/spikeinterface_comparison.py --channels 64 --rounds 2 --json comparison.json
    python tests/benchmarks/spikeinterface_comparison.py --input nwb --channels 384 --samples 1000000 --rounds 1 \\
        --dtypes float32 --outputs plain --workers 1 2 --json large.json

The same causal Butterworth band-pass of order 5 (second-order sections), the same reference, the same type of results.
Each run is a process of its own, and the ways take turns. The clock starts when everything is imported and a tenth of
a second of the recording has been processed once; workers start while it runs. CPU-seconds are those of all processes.
The peak is that of the proportional set size of all of them, looked at ten times a second; what is imported is part of
it, and told apart: what the process holds when the clock starts. The difference is the largest one from one run in
float64, after the first second, in 16 of the channels.

Compressed results are Zarr with the same compressor, plain ones Zarr without one and SpikeInterface's binary file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

RATE = 30_000.0
LOW, HIGH, ORDER = 300.0, 6000.0, 5
MARGIN_MS = 5000.0 / LOW
"""Of SpikeInterface: as its band-pass takes by default."""

OURS, THEIRS = "ezmsg-mlx", "SpikeInterface"

MOST_CHECKED = 16
"""Channels whose results are compared."""

BLOCK = 30_000
"""Samples that are written and compared at a time."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to make one kind of results."""

    way: str
    reference: str
    dtype: str
    output: str
    """``"compressed"`` or ``"plain"``: Zarr without a compressor, or binary."""
    workers: int


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--channels", type=int, default=64, metavar="N", help="[64]")
    add("--samples", type=int, default=300_000, metavar="N", help="length of the recording [300000]")
    add("--rounds", type=int, default=2, metavar="N", help="runs of each way [2]")
    add("--references", nargs="+", choices=("mean", "median"), default=["mean", "median"])
    add("--dtypes", nargs="+", choices=("float32", "int16"), default=["float32", "int16"])
    add("--outputs", nargs="+", choices=("plain", "compressed"), default=["plain", "compressed"])
    add("--workers", nargs="+", type=int, default=[1, 2], metavar="N", help="[1 2]")
    add("--input", choices=("binary", "nwb"), default="binary", help="what the recording is stored as [binary]")
    add("--piece", type=float, metavar="S", help="seconds of a piece for several workers, at most [60]")
    add("--work", type=Path, metavar="FOLDER", help="where files go [a temporary folder]")
    add("--json", type=Path, metavar="FILE", help="write a file for docs/results/data")
    add("--case", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("channels", "samples", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be an integer of at least 1, got {getattr(options, name)}")
    options.piece = options.piece or 60.0
    return options


def cases(options: argparse.Namespace) -> Iterator[Case]:
    kinds = itertools.product(options.references, options.dtypes, options.outputs, options.workers)
    for reference, dtype, output, workers in kinds:
        for way in (OURS, THEIRS):
            yield Case(way, reference, dtype, output, workers)


def write_recording(path: Path, n_samples: int, n_channels: int) -> None:
    """Noise of 10 counts on slow waves of 200, with spikes, as int16."""
    rng = np.random.default_rng(0)
    spike = -150.0 * np.hanning(30)
    with open(path, "wb") as file:
        for begin in range(0, n_samples, BLOCK):
            n = min(BLOCK, n_samples - begin)
            times = (begin + np.arange(n)) / RATE
            data = rng.standard_normal((n, n_channels), np.float32)
            data *= 10.0
            data += (200.0 * np.sin(2 * np.pi * 3.0 * times)).astype(np.float32)[:, None]
            for channel in range(n_channels):
                for start in rng.integers(0, max(n - 30, 1), 20):
                    data[start : start + 30, channel] += spike[: n - start]
            data.round().astype(np.int16).tofile(file)


def write_nwb(path: Path, samples: np.ndarray) -> None:
    """The same samples as an electrical series, in one piece."""
    import pynwb

    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    file = pynwb.NWBFile(session_description="noise and spikes", identifier="comparison", session_start_time=start)
    group = file.create_electrode_group("probe", "of the comparison", "cortex", device=file.create_device("device"))
    for _ in range(samples.shape[1]):
        file.add_electrode(group=group, location="cortex")
    electrodes = file.create_electrode_table_region(list(range(samples.shape[1])), "all")
    series = pynwb.ecephys.ElectricalSeries(
        name="Raw", data=samples, electrodes=electrodes, starting_time=0.0, rate=RATE, conversion=1e-6
    )
    file.add_acquisition(series)
    with pynwb.NWBHDF5IO(str(path), "w") as io:
        io.write(file)


def write_input(folder: Path, name: str, options: argparse.Namespace, n_samples: int | None = None) -> Path:
    """The recording, or the first *n_samples* of it, as the way to store it says."""
    samples = np.memmap(folder / "recording.bin", np.int16, "r").reshape(-1, options.channels)[:n_samples]
    path = folder / f"{name}.{'nwb' if options.input == 'nwb' else 'bin'}"
    if options.input == "nwb":
        write_nwb(path, samples)
    elif n_samples is not None:
        samples.tofile(path)
    return path


def checked_channels(n_channels: int) -> np.ndarray:
    """Those whose results are compared, from the first to the last."""
    return np.unique(np.linspace(0, n_channels - 1, MOST_CHECKED).round().astype(int))


def write_references(folder: Path, n_channels: int, references: list[str]) -> None:
    """What one run in float64 gives, for each reference."""
    from scipy import signal

    sos = signal.butter(ORDER, (LOW, HIGH), "bandpass", fs=RATE, output="sos")
    samples = np.memmap(folder / "recording.bin", np.int16, "r").reshape(-1, n_channels)
    checked = checked_channels(n_channels)
    found: dict[str, list[np.ndarray]] = {reference: [] for reference in references}
    zi = np.zeros((len(sos), 2, n_channels))
    for begin in range(0, len(samples), BLOCK):
        filtered, zi = signal.sosfilt(sos, samples[begin : begin + BLOCK].astype(np.float64), axis=0, zi=zi)
        for reference, blocks in found.items():
            function = np.mean if reference == "mean" else np.median
            blocks.append(filtered[:, checked] - function(filtered, axis=1, keepdims=True))
    for reference, blocks in found.items():
        np.save(folder / f"{reference}.npy", np.concatenate(blocks))


def blosc() -> object:
    """The compressor of both."""
    from numcodecs import Blosc

    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.SHUFFLE)


def process_ours(case: Case, options: argparse.Namespace, recording: Path, results: Path) -> None:
    from ezmsg.mlx import ZarrSink, chains, process_recording
    from ezmsg.mlx.offline import open_recording

    layout = {} if options.input == "nwb" else {"sampling_rate": RATE, "n_channels": options.channels}
    source = open_recording(recording, "nwb" if options.input == "nwb" else "rawbinary", **layout)
    compressor = blosc() if case.output == "compressed" else None
    factory = functools.partial(
        chains.band_pass, low=LOW, high=HIGH, order=ORDER, reference=case.reference, dtype=case.dtype
    )
    several = {"workers": case.workers, "checkpoint_seconds": options.piece} if case.workers > 1 else {}
    process_recording(source, factory, ZarrSink(results, compressor=compressor), progress=False, **several)


def process_theirs(case: Case, options: argparse.Namespace, recording: Path, results: Path) -> None:
    from spikeinterface import preprocessing, read_binary

    if options.input == "nwb":
        from spikeinterface.extractors import read_nwb_recording

        read = read_nwb_recording(recording)
    else:
        read = read_binary(recording, sampling_frequency=RATE, dtype="int16", num_channels=options.channels)
    filtered = preprocessing.causal_filter(
        read, direction="forward", band=(LOW, HIGH), filter_order=ORDER, margin_ms=MARGIN_MS, dtype="float32"
    )
    operator = "average" if case.reference == "mean" else "median"
    referenced = preprocessing.common_reference(filtered, reference="global", operator=operator)
    if case.dtype == "int16":
        referenced = preprocessing.astype(referenced, "int16", round=True)
    job = {"n_jobs": case.workers, "chunk_duration": "1s", "progress_bar": False}
    if case.output == "plain":
        referenced.save(folder=results, format="binary", **job)
    else:
        referenced.save(folder=results, format="zarr", compressor=blosc(), **job)


def results_of(case: Case, results: Path, n_channels: int) -> typing.Any:
    """An array that is read by slices."""
    import zarr

    if case.way == OURS:
        return zarr.open_group(str(results), mode="r")["data"]
    if case.output == "compressed":
        return zarr.open_group(str(results), mode="r")["traces_seg0"]
    return np.memmap(results / "traces_cached_seg0.raw", case.dtype, "r").reshape(-1, n_channels)


class Peak:
    """The most memory that this process and its children have at a time, in MiB."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._errors = psutil.Error
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.mib = 0.0
        self.before = self._process.memory_full_info().pss / 2**20

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            total = 0.0
            for process in (self._process, *self._process.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except self._errors:
                    continue
            self.mib = max(self.mib, total / 2**20)
            if self._ended.wait(0.1):
                return


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Run *case* in this process."""
    process = process_ours if case.way == OURS else process_theirs
    if case.way == OURS:
        import mlx.core  # noqa: F401
    else:
        import spikeinterface.preprocessing  # noqa: F401
    extension = "nwb" if options.input == "nwb" else "bin"
    recording, short = (options.work / f"{name}.{extension}" for name in ("recording", "short"))
    # Named as SpikeInterface would name them, if need be.
    results = options.work / "results.zarr"
    # What is compiled and imported on the way is not what is compared.
    process(dataclasses.replace(case, workers=1), options, short, results)
    shutil.rmtree(results)
    with Peak() as peak:
        used, begin = cpu_seconds(), time.monotonic()
        process(case, options, recording, results)
        seconds, used = time.monotonic() - begin, cpu_seconds() - used
    size = sum(file.stat().st_size for file in results.rglob("*") if file.is_file())
    expected = np.load(options.work / f"{case.reference}.npy", mmap_mode="r")
    found = results_of(case, results, options.channels)
    first, checked = min(int(RATE), len(expected) // 2), checked_channels(options.channels)
    difference = max(
        float(np.abs(found[begin : begin + BLOCK][:, checked] - expected[begin : begin + BLOCK]).max())
        for begin in range(first, len(expected), BLOCK)
    )
    shutil.rmtree(results)
    return {
        "seconds": seconds,
        "cpu": used,
        "peak": peak.mib,
        "imported": peak.before,
        "size": size / 1e6,
        "difference": difference,
    }


def run_apart(case: Case, options: argparse.Namespace) -> dict[str, float] | None:
    """Measure *case* in a process of its own; None if this version of a package cannot do it."""
    line = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case)), "--work", str(options.work)]
    for name in ("channels", "samples", "piece", "input"):
        line += [f"--{name}", str(getattr(options, name))]
    shutil.rmtree(options.work / "results.zarr", ignore_errors=True)
    environment = os.environ | {"EZMSG_LOGLEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{case}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def row_of(case: Case, rounds: list[dict[str, float]]) -> dict[str, object]:
    digits = {"seconds": 1, "cpu": 1, "peak": 0, "imported": 0, "size": 1}

    def span(name: str) -> list[float]:
        values = [round(found[name], digits[name]) for found in rounds]
        return [min(values), max(values)]

    row: dict[str, object] = {**dataclasses.asdict(case), **{name: span(name) for name in digits if name != "size"}}
    row["size"] = round(rounds[0]["size"], 1)
    row["difference"] = f"{max(found['difference'] for found in rounds):.2g}"
    row["results"] = f"{case.dtype}, {case.output}"
    return row


def table_of(rows: list[dict[str, object]]) -> None:
    import rich
    from rich.table import Table

    table = Table("way", "reference", "results", box=None)
    for head in ("workers", "seconds", "CPU-seconds", "peak, MiB", "before, MiB", "size, MB", "difference, counts"):
        table.add_column(head, justify="right")
    for row in rows:
        spans = (" to ".join(map(str, dict.fromkeys(row[name]))) for name in ("seconds", "cpu", "peak", "imported"))
        table.add_row(
            row["way"],
            row["reference"],
            row["results"],
            str(row["workers"]),
            *spans,
            str(row["size"]),
            row["difference"],
        )
    rich.print(table)


def as_results(options: argparse.Namespace, rows: list[dict[str, object]]) -> dict[str, object]:
    """A file for docs/results/data."""
    versions = {"Python": platform.python_version()}
    for name in ("ezmsg-mlx", "mlx", "spikeinterface", "zarr", "numpy", "scipy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    heads = {
        "way": "",
        "reference": "reference",
        "results": "results",
        "workers": "workers",
        "seconds": "seconds",
        "cpu": "CPU-seconds",
        "peak": "peak, MiB",
        "imported": "before, MiB",
        "size": "size, MB",
        "difference": "largest difference, counts",
    }
    return {
        "title": "Band-pass and common reference beside SpikeInterface",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": f"python tests/benchmarks/spikeinterface_comparison.py --channels {options.channels} "
        f"--samples {options.samples} --rounds {options.rounds} --input {options.input}",
        "form": "script",
        "state": "from the start",
        "input": "host",
        "spread": f"A range is that of {options.rounds} runs, in turns",
        "columns": [{"head": head, "key": key} for key, head in heads.items()],
        "rows": rows,
        "notes": [
            f"int16 from one {options.input.replace('nwb', 'NWB')} file, {options.samples} samples of "
            f"{options.channels} channels at 30 kHz; causal "
            "band-pass of order 5, 300 to 6000 Hz. The difference is that from one run in float64, after the first "
            "second; of int16 results 0.5 is rounding.",
            f"SpikeInterface goes by chunks of one second with a margin of {MARGIN_MS:.1f} ms; several workers of ours "
            f"by pieces of {options.piece:g} s at most, whose margin follows from the filter.",
            "Before: what the process holds when the clock starts, all of which is libraries and compiled code.",
            "Compressed: Zarr with Blosc, LZ4, level 5, shuffled, in both. Plain: Zarr without a compressor here, a "
            "binary file there.",
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)), options)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        options.work.mkdir(parents=True, exist_ok=True)
        write_recording(options.work / "recording.bin", options.samples, options.channels)
        write_input(options.work, "recording", options)
        write_input(options.work, "short", options, 3000)
        write_references(options.work, options.channels, options.references)
        found: dict[Case, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for case in cases(options):
                measured = run_apart(case, options)
                if measured is not None:
                    found.setdefault(case, []).append(measured)
                    print(json.dumps({**dataclasses.asdict(case), **measured}), flush=True)
    rows = [row_of(case, rounds) for case, rounds in found.items()]
    table_of(rows)
    if options.json:
        options.json.write_text(json.dumps(as_results(options, rows), indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
