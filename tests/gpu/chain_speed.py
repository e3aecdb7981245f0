"""Speed of fused chains on a GPU, beside what it is held to: ``python tests/gpu/chain_speed.py --out FOLDER``.

First the bare chain, from int16 on the host to features on the host: fused, stage by stage, and the same work in
PyTorch as one CUDA graph (where PyTorch is installed), in turns and from the start of a stream, while averages are
corrected for it. Then the graph of three processes, as fast as it goes and in real time. Under four minutes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks")]

import latency_graph
from ezmsg.util.messages.axisarray import AxisArray
from helpers import latency

import ezmsg.mlx as mlx

RATE = latency.RATE
HELD_TO = {"30 × 256": 200, "30 × 1024": 200, "300 × 256": 200}
CHANNELS_TIMES_REAL_TIME = {"128 × 1024": 25_000, "3000 × 4096": 80_000}
SHAPES = ((30, 256), (30, 1024), (300, 256), (128, 1024), (3000, 1024), (3000, 4096))
Run = Callable[[AxisArray], np.ndarray]


def messages_of(n_samples: int, n_channels: int, n: int) -> list[AxisArray]:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(0.0, 200.0, (n_samples, n_channels)).astype(np.int16) for _ in range(8)]
    channels = AxisArray.CoordinateAxis(data=np.array([f"ch{i}" for i in range(n_channels)]), dims=["ch"])
    return [
        AxisArray(
            blocks[i % 8],
            ["time", "ch"],
            {"time": AxisArray.TimeAxis(fs=RATE, offset=i * n_samples / RATE), "ch": channels},
            key="speed",
            stream_dim="time",
        )
        for i in range(n)
    ]


def torch_graph(n_samples: int, n_channels: int, n_bins: int) -> Run | None:
    """The same chain as one CUDA graph; averages as products with a matrix, which is what PyTorch has for them."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or n_samples > 1000:
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    host_in = torch.empty((n_samples, n_channels), dtype=torch.int16, pin_memory=True)
    host_out = torch.empty((n_bins, n_channels), dtype=torch.float32, pin_memory=True)
    x16 = torch.empty((n_samples, n_channels), dtype=torch.int16, device=device)

    class Average:
        def __init__(self, time_constant: float) -> None:
            alpha = -np.expm1(-1.0 / (RATE * time_constant))
            steps = torch.arange(n_samples, dtype=torch.float64, device=device)
            lag = steps[:, None] - steps[None, :]
            self.matrix = torch.where(lag >= 0, alpha * (1 - alpha) ** lag, 0.0).float()
            self.decay = ((1 - alpha) ** (steps + 1)).float()[:, None]
            self.exponent = (steps + 1)[:, None]
            self.state = torch.zeros((1, n_channels), device=device)
            self.seen = torch.zeros((), dtype=torch.float64, device=device)
            self.rest = 1 - alpha

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.addmm(self.decay * self.state, self.matrix, x)
            weight = (1 - self.rest ** (self.exponent + self.seen)).float()
            self.state.copy_(y[-1:])
            self.seen += n_samples
            return y / weight

    baseline, power = Average(1.0), Average(0.1)

    def step() -> None:
        x16.copy_(host_in, non_blocking=True)
        x = x16.float()
        x = x - x.mean(dim=1, keepdim=True)
        x = x - baseline(x)
        y = power(x * x).reshape(n_bins, n_samples // n_bins, n_channels).mean(dim=1)
        host_out.copy_(torch.log10(y.clamp_min(torch.finfo(torch.float32).tiny)), non_blocking=True)

    host_in.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def run(message: AxisArray) -> np.ndarray:
        host_in.numpy()[...] = message.data
        graph.replay()
        torch.cuda.synchronize()
        return host_out.numpy().copy()

    return run


def bare(shapes: list[tuple[int, int]], n_messages: int) -> list[dict]:
    rows = []
    for n_samples, n_channels in shapes:
        bin_duration = min(n_samples, 300) / RATE
        make = functools.partial(latency.make_chain, bin_duration)
        begun = time.perf_counter()
        chain = mlx.ChainTransformer(make_chain=make, lengths=(n_samples,))
        stages = make()

        def one_by_one(message: AxisArray, stages: list = stages) -> np.ndarray:
            for stage in stages:
                message = stage(message)
            return message.data

        runs: dict[str, Run] = {"fused": lambda message, chain=chain: chain(message).data, "stage by stage": one_by_one}
        if (torch_run := torch_graph(n_samples, n_channels, max(n_samples // 300, 1))) is not None:
            runs["PyTorch, one CUDA graph"] = torch_run
        n = max(n_messages * 300 * 256 // max(n_samples * n_channels, 300 * 256), 40)
        messages = messages_of(n_samples, n_channels, n + 20)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number, message in enumerate(messages):
            for name, run in runs.items():
                began = time.perf_counter()
                run(message)
                if number >= 20:
                    times[name].append(1e6 * (time.perf_counter() - began))
                elif name == "fused" and number == 1:
                    print(f"{n_samples} x {n_channels}: start {time.perf_counter() - begun:.1f} s", flush=True)
        shape = f"{n_samples} × {n_channels}"
        for name, collected in times.items():
            median, p99 = (float(np.percentile(collected, p)) for p in (50, 99))
            row = {"shape": shape, "way": name, "samples": n_samples, "channels": n_channels, "rate": RATE}
            row |= {"us": round(median, 1), "p99": round(p99, 1), "ratio": round(p99 / median, 2), "n": len(collected)}
            row |= {"channels_times_real_time": round(n_channels * n_samples / RATE / (median * 1e-6))}
            row |= {"held_to": HELD_TO.get(shape) if name == "fused" else None}
            rows.append(row)
            target = CHANNELS_TIMES_REAL_TIME.get(shape)
            held = f"held to {HELD_TO[shape]} us" if shape in HELD_TO else f"held to {target}" if target else ""
            print(
                f"{shape:>12}  {name:24} median {median:8.1f} us  p99 {p99:8.1f}  ratio {p99 / median:5.2f}  "
                f"channels x real time {row['channels_times_real_time']:8}  {held if name == 'fused' else ''}",
                flush=True,
            )
    return rows


def graphs(fast_seconds: float, minutes: float, shapes: tuple[tuple[int, int], tuple[int, int]]) -> list[dict]:
    (n_fast, c_fast), (n_live, c_live) = shapes
    cases = [
        latency.Case("fused", n_fast, c_fast, fast_seconds, real_time=False),
        latency.Case("unit by unit", n_fast, c_fast, fast_seconds / 4, real_time=False),
        latency.Case("fused", n_live, c_live, 60.0 * minutes, stall_every=5.0),
    ]
    rows = []
    for case in cases:
        row = latency_graph.run_apart(case)
        row = {key: value for key, value in row.items() if key not in ("histogram", "edges")}
        row["pace"] = "real time" if case.real_time else "as fast as it goes"
        rows.append(row)
        print(f"graph {json.dumps(row, ensure_ascii=False)}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for chain_speed.json [$OUT, or here]")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the graph in real time [1]")
    parser.add_argument("--messages", type=int, default=2000, help="of a short shape, for the bare chain [2000]")
    parser.add_argument("--tiny", action="store_true", help="small shapes and short streams, to see that it runs")
    options = parser.parse_args()
    if options.tiny:
        rows = bare([(30, 8), (300, 8)], 60)
        graph_rows = graphs(1.0, 1 / 60, ((300, 8), (30, 8)))
    else:
        rows = bare(list(SHAPES), options.messages)
        graph_rows = graphs(60.0, options.minutes, ((300, 256), (30, 1024)))
    import mlx.core as mx

    packages = {"ezmsg-mlx": "ezmsg-mlx", "MLX": "mlx", "ezmsg": "ezmsg", "ezmsg-sigproc": "ezmsg-sigproc"}
    versions = {name: version(package) for name, package in packages.items()}
    made = {
        "title": "The example chain fused, from int16 on the host to features on the host",
        "machine": str(mx.device_info().get("device_name", platform.machine())),
        "versions": {**versions, "NumPy": np.__version__, "Python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": "python tests/gpu/chain_speed.py",
        "form": "bare chain",
        "state": "from the start",
        "input": "host",
        "spread": "One run, all in turns",
        "columns": [
            {"head": "samples × channels", "key": "shape"},
            {"head": "way", "key": "way"},
            {"head": "median, µs", "key": "us", "digits": 0},
            {"head": "p99, µs", "key": "p99", "digits": 0},
            {"head": "channels × real time", "derive": "channels_times_real_time", "digits": 0},
        ],
        "rows": rows,
        "graphs": graph_rows,
    }
    path = Path(options.out) / "chain_speed.json"
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
