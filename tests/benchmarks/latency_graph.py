"""Latency of a graph, from a message's last sample to its feature in the sink, across three processes.

    python tests/benchmarks/latency_graph.py --seconds 600 --json latency.json --plot latency.png

Unit by unit on MLX, fused in one unit, and with ezmsg-sigproc's units on NumPy, each in real time and with a stall now
and then. A message gives one feature of each channel. Late is a feature that comes more than ``--late`` ms after its
last sample, lost one that does not come.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import latency

SHAPES = ((30, 256), (30, 1024), (300, 256))


def run_apart(case: latency.Case) -> dict:
    """Measure *case* in a process of its own."""
    fields = json.dumps(dataclasses.asdict(case))
    done = subprocess.run(
        [sys.executable, __file__, "--case", fields], stdout=subprocess.PIPE, text=True, timeout=case.seconds * 20 + 120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{case} ended with {done.returncode}: {done.stdout[-500:]}")
    return json.loads(lines[-1])


def row_of(case: latency.Case, late_ms: float) -> dict:
    """Measure *case* in this process."""
    measured = latency.measure(case)
    us = measured.latency_us
    row = {"way": case.way, "shape": f"{case.n_samples} × {case.n_channels}", "samples": case.n_samples}
    row |= {"channels": case.n_channels, "rate": latency.RATE, "seconds": case.seconds}
    row |= {f"p{str(p).replace('.', '')}": round(float(np.percentile(us, p)), 1) for p in (50, 99, 99.9) if len(us)}
    late = int((us > 1000.0 * late_ms).sum())
    row |= {"messages": measured.n_expected, "lost": measured.n_lost, "late": late}
    row |= {"times_real_time": round(measured.times_real_time, 3), "cpu_us": measured.cpu_us}
    counts, edges = np.histogram(np.log10(np.maximum(us, 1.0)), bins=np.linspace(1.5, 6.5, 101))
    return row | {"histogram": counts.tolist(), "edges": [round(float(edge), 2) for edge in edges]}


def report(rows: list[dict], command: str, title: str) -> dict:
    """The figures in the form of ``docs/results/render.py``."""
    packages = {"ezmsg-mlx": "ezmsg-mlx", "MLX": "mlx", "ezmsg": "ezmsg", "ezmsg-sigproc": "ezmsg-sigproc"}
    head = ["samples × channels", "way", "p50, µs", "p99, µs", "p99.9, µs", "messages", "lost", "late", "× real time"]
    head.append("CPU time a message of source, chain and sink, µs")
    keys = ["shape", "way", "p50", "p99", "p999", "messages", "lost", "late", "times_real_time", "cpu_us"]
    return {
        "title": title,
        "machine": f"{platform.machine()} under {platform.system()}",
        "versions": {name: version(package) for name, package in packages.items()}
        | {"Python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": command,
        "form": "graph",
        "state": "from the start",
        "input": "host",
        "spread": "One run",
        "columns": [{"head": name, "key": key} for name, key in zip(head, keys, strict=True)],
        "rows": [{key: value for key, value in row.items() if key not in ("histogram", "edges")} for row in rows],
    }


def plot(rows: list[dict], path: str) -> None:
    """Draw what share of the messages took longer than a time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.2), sharey=True, squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for row in (row for row in rows if row["shape"] == shape):
            counts = np.array(row["histogram"])
            longer = 1.0 - np.cumsum(counts) / max(counts.sum(), 1)
            axis.loglog(10.0 ** np.array(row["edges"][1:]), np.maximum(longer, 1e-7), label=row["way"])
        axis.set(title=f"{shape} a message", xlabel="µs from last sample to sink", ylim=(5e-5, 1.2))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of messages that take longer")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream [10]")
    parser.add_argument("--stall-every", type=float, default=5.0, help="seconds from stall to stall, 0: none [5]")
    parser.add_argument("--late", type=float, default=8.0, help="when a feature counts as late, in ms [8]")
    parser.add_argument("--ways", nargs="+", choices=latency.WAYS, default=latency.WAYS)
    parser.add_argument("--chain", choices=latency.CHAINS, default="features", help="[features]")
    parser.add_argument("--fast", action="store_true", help="as fast as the chain takes it, not in real time")
    parser.add_argument("--shapes", nargs="+", metavar="SAMPLESxCHANNELS", default=[f"{n}x{c}" for n, c in SHAPES])
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    parser.add_argument("--plot", metavar="FILE.png", help="where to draw them")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        latency.spawn()
        print(json.dumps(row_of(latency.Case(**json.loads(options.case)), options.late)), flush=True)
        return 0
    rows = []
    for shape in options.shapes:
        n_samples, n_channels = map(int, shape.split("x"))
        for way in options.ways:
            case = latency.Case(
                way,
                n_samples,
                n_channels,
                options.seconds,
                real_time=not options.fast,
                stall_every=options.stall_every,
                chain=options.chain,
            )
            row = run_apart(case)
            rows.append(row)
            figures = "  ".join(f"{key} {row.get(key)}" for key in ("p50", "p99", "p999", "lost", "late"))
            pace = f"{row['times_real_time']}x  CPU us a message {row['cpu_us']}"
            print(f"{row['shape']:>10}  {way:12}  {figures}  {pace}", flush=True)
    if options.json:
        made = report(
            rows, " ".join(["python", "tests/benchmarks/latency_graph.py", *sys.argv[1:]]), "Latency of a graph"
        )
        Path(options.json).write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
