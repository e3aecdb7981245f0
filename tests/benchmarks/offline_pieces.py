"""What a recording costs in pieces on workers, beside one run in this process: seconds and CPU-seconds, in turns.

    python tests/benchmarks/offline_pieces.py --samples 2000000 --channels 64 --workers 1 2

CPU-seconds are those of this process and of its workers, whose start is part of them. The last column is the largest
difference between the results and those of one run, as a share of the largest.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import zarr
from offline_overlap import RATE, RawSource
from offline_overlap import make_stages as make_chain
from results_file import write_results

from ezmsg.mlx import ProcessedRecording, ZarrSink, process_recording


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a piece [10]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", help="what it is called in the file [the kind of processor]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file for docs/results/data")
    options = parser.parse_args()
    os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING")
    cases = {"one run": None} | {f"{n} workers": n for n in options.workers}
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    done: dict[str, ProcessedRecording] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.raw"
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:
            for begin in range(0, options.samples, 100_000):
                n = min(100_000, options.samples - begin)
                file.write(rng.normal(0.0, 30.0, (n, options.channels)).astype(np.int16).tobytes())
        source = RawSource(path, options.channels, np.inf)
        kept = {name: Path(tempfile.mkdtemp(dir=folder)) / "results.zarr" for name in cases}
        for number in range(options.rounds):
            for name, workers in cases.items():
                results = kept[name] if not number else Path(tempfile.mkdtemp(dir=folder)) / "results.zarr"
                begin, used = time.perf_counter(), cpu_seconds()
                done[name] = process_recording(
                    source,
                    make_chain,
                    ZarrSink(results),
                    workers=workers,
                    checkpoint_seconds=options.seconds,
                    progress=False,
                )
                wall[name].append(time.perf_counter() - begin)
                cpu[name].append(cpu_seconds() - used)
        groups = {name: zarr.open_group(str(results), mode="r")["data"] for name, results in kept.items()}
        expected = groups["one run"][:]
        off = {name: np.abs(group[:] - expected).max() / np.abs(expected).max() for name, group in groups.items()}
    print(f"{options.samples} samples x {options.channels} channels, {options.rounds} rounds, medians in seconds")
    print(f"{'':12}{'wall':>8}{'CPU':>8}{'pieces':>8}{'at seams':>10}{'off':>10}")
    rows: list[dict[str, object]] = []
    for name in cases:
        seams = done[name].largest_difference
        row: dict[str, object] = {
            "case": name,
            "wall": round(statistics.median(wall[name]), 3),
            "cpu": round(statistics.median(cpu[name]), 3),
            "of one": round(statistics.median(a / b for a, b in zip(wall[name], wall["one run"], strict=True)), 2),
            "pieces": done[name].n_pieces,
            "seams": None if seams is None else f"{seams:.1g}",
            "off": f"{off[name]:.1g}",
        }
        rows.append(row)
        print(f"{name:12}{row['wall']:8}{row['cpu']:8}{row['pieces']:8}{row['seams'] or '-':>10}{row['off']:>10}")
    if options.json:
        write_results(
            options.json,
            title=f"{options.samples / RATE:.0f} s of {options.channels} channels in pieces, on workers",
            command="python tests/benchmarks/offline_pieces.py "
            f"--samples {options.samples} --channels {options.channels} --rounds {options.rounds}",
            spread=f"Medians of {options.rounds} rounds, in turns",
            columns=[
                ("", "case", None),
                ("seconds", "wall", 1),
                ("of one run", "of one", 2),
                ("CPU-seconds", "cpu", 1),
                ("pieces", "pieces", None),
                ("largest difference at a seam", "seams", None),
                ("largest difference from one run", "off", None),
            ],
            rows=rows,
            notes=["Differences are shares of the largest result. The start of workers is part of the figures."],
            machine=options.machine,
        )


if __name__ == "__main__":
    main()
