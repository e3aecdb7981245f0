"""From raw samples to a decoded cursor on a GPU: ``python tests/gpu/raw_to_decoder_speed.py --out FOLDER``.

First whether crossings are found as on the CPU, and whether the chain fused gives what it gives stage by stage. Then
the kernel alone, the bare chain (int16 on the host to positions on the host, each message of 1 ms), and the graph of
three processes in real time. The chain is that of examples/raw_to_decoder.py. About two minutes.

The graphs that the package is held to, one at a time, each in its own process and for its length and some 20 s::

    python tests/gpu/raw_to_decoder_speed.py --graph 1024 --seconds 600 --out FOLDER
    python tests/gpu/raw_to_decoder_speed.py --graph 4096 --seconds 60 --out FOLDER

Every minute the one that runs prints how it went so far.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks"), str(TESTS.parent / "examples")]

from helpers import latency
from helpers.speed_messages import messages_of
from results_file import LIVE, write_results

import ezmsg.mlx as mlx

LATE_MS = 8.0

START_S = 90.0
"""Until the first message has gone through, at the most: kernels are compiled."""


def percentiles(us: np.ndarray) -> dict[str, float]:
    return {"us": round(float(np.median(us)), 1), "p99": round(float(np.percentile(us, 99)), 1)}


def check_kernels() -> None:
    """The kernel for this device beside that for the CPU."""
    from helpers.crossing_cases import KINDS, check_all

    from ezmsg.mlx.kernels import default_path, kernel, proof

    path = default_path()
    print(
        f"path {path}, proof: {proof.trouble_of('crossings', kernel('crossings', path), path) or 'holds'}", flush=True
    )
    check_all(path)
    print(f"crossings: {len(KINDS)} kinds are found alike on {path} and on the CPU", flush=True)


def check_chain(n_channels: int) -> None:
    """The fused chain beside its stages."""
    messages = messages_of(30, n_channels, 130)
    results = []
    for fuse in (True, False):
        make = functools.partial(latency.make_decoder_chain, n_channels)
        chain = mlx.ChainTransformer(make_chain=make, fuse=fuse, lengths=(30,))
        results.append(np.concatenate([chain(message).data for message in messages]))
    largest = np.abs(results[1]).max()
    difference = np.abs(results[0] - results[1]).max() / largest
    print(f"chain of {n_channels} channels, fused beside stage by stage: {difference:.1e} of the largest", flush=True)
    # A crossing more or less, where the last bit decides, is all that may differ.
    assert difference < 0.05 and largest > 0, (difference, largest)


def kernel_alone(shapes: list[tuple[int, int]], n: int) -> list[dict]:
    """One launch and its evaluation, beside ``x + 1``, in turns."""
    import mlx.core as mx

    from ezmsg.mlx.kernels import default_path, kernel
    from ezmsg.mlx.kernels.crossings import Crossings

    rows = []
    for n_samples, n_channels in shapes:
        x = mx.random.normal((n_samples, n_channels))
        thresholds = np.full(n_channels, -4.5, np.float32)
        ways = {
            "absolute thresholds": Crossings(thresholds, refractory=30),
            "running medians": Crossings(thresholds, refractory=30, scale="mad", alpha=1e-5),
            "z-scores": Crossings(thresholds, refractory=30, scale="zscore", alpha=1e-5),
            "x + 1": None,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        run = kernel("crossings", default_path()).run
        for _ in range(n):
            for way, crossings in ways.items():
                began = time.perf_counter()
                if crossings is None:
                    mx.eval(x + 1)
                else:
                    mx.eval(run(x, crossings, mx.zeros((crossings.n_rows, n_channels)), 0, ()))
                times[way].append(1e6 * (time.perf_counter() - began))
        for way, us in times.items():
            rows.append({"shape": f"{n_samples} × {n_channels}", "way": way, **percentiles(np.array(us[n // 5 :]))})
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    return rows


def bare(n_channels: int, n_messages: int) -> dict:
    """Every message of 1 ms, also those at which no bin ends."""
    make = functools.partial(latency.make_decoder_chain, n_channels)
    chain = mlx.ChainTransformer(make_chain=make, lengths=(30,))
    messages = messages_of(30, n_channels, n_messages)
    times, closing = [], []
    for message in messages:
        began = time.perf_counter()
        result = chain(message)
        times.append(1e6 * (time.perf_counter() - began))
        closing.append(len(result.data) > 0)
    n_first = min(200, n_messages // 4)
    us, ends = np.array(times)[n_first:], np.array(closing)[n_first:]
    is_fused = chain.describe().count("fused with stages 1 to 7") == 7
    row = {
        "shape": f"30 × {n_channels}",
        "way": "raw to decoder, fused" if is_fused else "NOT FUSED",
        **percentiles(us),
    }
    row["at the end of a bin"] = percentiles(us[ends])
    print(json.dumps(row, ensure_ascii=False), flush=True)
    if not is_fused:
        print(chain.describe(), flush=True)
    return row


def graph(case: latency.Case) -> dict:
    """The graph in a process of its own, which ends with all that it has started, however that goes."""
    row = {"shape": f"30 × {case.n_channels}", "seconds": case.seconds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case)), "--out", str(path)]
        with subprocess.Popen(command, start_new_session=True) as child:
            try:
                child.wait(1.1 * case.seconds + START_S)
            except subprocess.TimeoutExpired:
                row["failed"] = f"no end after {1.1 * case.seconds + START_S:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if path.exists():
            row = json.loads(path.read_text(encoding="utf-8"))
        elif "failed" not in row:
            row["failed"] = f"ended with {child.returncode}"
    print(f"graph {json.dumps(row, ensure_ascii=False)}", flush=True)
    return row


def row_of(case: latency.Case) -> dict:
    """Measure *case* in this process."""
    measured = latency.measure(case)
    us = measured.latency_us
    later = us[round(1.0 / case.bin) :]
    row = {"shape": f"30 × {case.n_channels}", "way": "raw to decoder, graph in real time", "seconds": case.seconds}
    row |= percentiles(us)
    row |= {"p99 after 1 s": percentiles(later)["p99"], "longest after 1 s": round(float(later.max()), 1)}
    row |= {"late after 1 s": int((later > 1000 * LATE_MS).sum()), "results": len(us), "lost": measured.n_lost}
    return row | {"times real time": round(measured.times_real_time, 3), "cpu_us": measured.cpu_us}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for the figures [$OUT, or here]")
    parser.add_argument("--graph", type=int, metavar="CHANNELS", help="the graph of so many channels alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each graph [20]")
    parser.add_argument("--messages", type=int, default=4000, help="of the bare chain [4000]")
    parser.add_argument("--tiny", action="store_true", help="few channels and short streams, to see that it runs")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        latency.spawn()
        row = row_of(latency.Case(**json.loads(options.case)))
        Path(options.out).write_text(json.dumps(row), encoding="utf-8")
        return 0
    Path(options.out).mkdir(parents=True, exist_ok=True)
    widths, n_messages = ((8, 16), 300) if options.tiny else ((1024, 4096), options.messages)
    shapes = [(30, 8)] if options.tiny else [(30, 1024), (30, 4096), (300, 1024), (3000, 1024), (30000, 256)]
    rows, graphs = [], []
    if options.graph:
        widths = (options.graph,)
    else:
        check_kernels()
        check_chain(widths[0])
        rows = [bare(width, n_messages) for width in widths]
        rows += kernel_alone(shapes, 20 if options.tiny else 100)
    for width in widths:
        seconds = 2.0 if options.tiny else round(options.seconds / 0.02) * 0.02
        case = latency.Case("fused", 30, width, seconds, bin_duration=0.02, chain="raw to decoder")
        graphs.append(graph(case))
        # At once, in case that the rest does not end.
        write(options, rows, graphs)
    print_graphs(graphs)
    return int(any("failed" in row for row in graphs))


def print_graphs(graphs: list[dict]) -> None:
    """What the graphs are held to."""
    print(
        f"{'graph':>12} {'s':>5} {'p50 ms':>7} {'p99 ms':>7} {'longest':>8} {f'> {LATE_MS:.0f} ms':>6} {'lost':>5}",
        end="",
    )
    print("   all but p50 and lost after the first second", flush=True)
    for row in graphs:
        if "failed" in row:
            print(f"{row['shape']:>12} {row['seconds']:5.0f} FAILED: {row['failed']}", flush=True)
            continue
        p99, longest = row["p99 after 1 s"] / 1000, row["longest after 1 s"] / 1000
        print(
            f"{row['shape']:>12} {row['seconds']:5.0f} {row['us'] / 1000:7.2f} {p99:7.2f} {longest:8.2f} "
            f"{row['late after 1 s']:6} {row['lost']:5}",
            flush=True,
        )


def write(options: argparse.Namespace, rows: list[dict], graphs: list[dict]) -> None:
    import mlx.core as mx

    name = f"raw_to_decoder_graph_{options.graph}.json" if options.graph else "raw_to_decoder.json"
    path = Path(options.out) / name
    write_results(
        path,
        title="From raw samples to a decoded cursor, and crossings alone",
        machine=str(mx.device_info().get("device_name", platform.machine())),
        command="python tests/gpu/raw_to_decoder_speed.py",
        packages=LIVE,
        form="bare chain",
        spread="One run; what is beside each other in turns",
        columns=[
            ("samples × channels", "shape", None),
            ("way", "way", None),
            ("median, µs", "us", 0),
            ("p99, µs", "p99", 0),
        ],
        rows=rows,
        others={"graphs": graphs},
    )
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
