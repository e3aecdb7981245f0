"""Speed of fused chains on a GPU, beside what it is held to: ``python tests/gpu/chain_speed.py --out FOLDER``.

First the bare chain, from int16 on the host to features on the host: fused, stage by stage, and the same work in
PyTorch as one CUDA graph (where PyTorch is installed), in turns and from the start of a stream, while averages are
corrected for it. Then the graph of three processes, as fast as it goes and in real time. Under four minutes.

``--quick`` leaves out the graphs and says where the time of a message goes instead: the upload, the call of the
compiled function, its start on the device, the wait for it, reading the result, and Python around all that; and how
fast it is where MLX makes CUDA graphs, as it does without a chain. Under a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks")]

import latency_graph
from ezmsg.util.messages.axisarray import AxisArray
from helpers import latency
from helpers.speed_messages import messages_of
from results_file import LIVE, write_results

import ezmsg.mlx as mlx

RATE = latency.RATE
HELD_TO = {"30 × 256": 200, "30 × 1024": 200, "300 × 256": 200}
CHANNELS_TIMES_REAL_TIME = {"128 × 1024": 25_000, "3000 × 4096": 80_000}
SHAPES = ((30, 256), (30, 1024), (300, 256), (128, 1024), (3000, 1024), (3000, 4096))
QUICK_SHAPES = ((30, 256), (30, 1024), (300, 256), (128, 1024), (3000, 4096))
TINY_SHAPES = ((30, 8), (300, 8))
Run = Callable[[AxisArray], np.ndarray]


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


def bare(
    shapes: Sequence[tuple[int, int]], n_messages: int, takes_apart: bool = False, is_fused_only: bool = False
) -> list[dict]:
    rows: list[dict] = []
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

        runs: dict[str, Run] = {"fused": lambda message, chain=chain: chain(message).data}
        if takes_apart and not rows and not is_fused_only:
            print(f"without advice for results: {unadvised(make, n_samples, n_channels):.1f} us", flush=True)
        if not is_fused_only:
            runs["stage by stage"] = one_by_one
        if (
            not is_fused_only
            and (torch_run := torch_graph(n_samples, n_channels, max(n_samples // 300, 1))) is not None
        ):
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
        if takes_apart:
            fused = next(row for row in rows if row["shape"] == shape and row["way"] == "fused")
            fused["parts"] = parts_of(chain, messages[-200:], fused["us"])
            print(f"{'':14}{json.dumps(fused['parts'])}", flush=True)
    return rows


def unadvised(make: Callable[[], list], n_samples: int, n_channels: int) -> float:
    """Median of the fused chain where CUDA moves the pages of results; before any have been advised."""
    from ezmsg.mlx.chain import compiledrun

    chain, times = mlx.ChainTransformer(make_chain=make, lengths=(n_samples,)), []
    with mock.patch.object(compiledrun, "keep_on_host", lambda array, least=0: array):
        for message in messages_of(n_samples, n_channels, 300):
            began = time.perf_counter()
            chain(message)
            times.append(1e6 * (time.perf_counter() - began))
    return float(np.median(times[20:]))


def parts_of(chain: mlx.ChainTransformer, messages: list[AxisArray], whole: float) -> dict[str, float]:
    """Medians of the parts of a message in microseconds, each taken by itself; nothing where it is not compiled."""
    import mlx.core as mx

    from ezmsg.mlx.chain.compiledrun import CompiledRun
    from ezmsg.mlx.stream.convert import numpy_to_mlx

    run = chain._runner._found[0][0]
    if not isinstance(run, CompiledRun):
        return {}
    # Not after a message at which an average looks whether it has settled, which goes stage by stage.
    for message in messages:
        chain(message)
        if run.resident is not None and run.resident.ahead is not None:
            break
    resident = run.resident
    assert resident is not None and resident.ahead is not None
    state, steps = resident.arrays, resident.ahead
    function = run._functions[steps.key]
    if function.n_bytes:
        return {}
    block = run._memory.take(messages[0].data.nbytes)
    times: dict[str, list[float]] = {}

    def took(name: str, since: float) -> float:
        now = time.perf_counter()
        times.setdefault(name, []).append(1e6 * (now - since))
        return time.perf_counter()

    for message in messages:
        at = time.perf_counter()
        x = block.filled(message.data, message.data.dtype)
        at = took("upload", at)
        outputs = function.call(x, *state)
        at = took("call", at)
        mx.async_eval(outputs)
        at = took("start", at)
        y = outputs.pop()
        mx.eval(y)
        at = took("wait", at)
        np.array(y)
        took("read", at)
        state = outputs
    # Beside the upload above: what it would be to new memory, and without MLX.
    for message in messages:
        at = time.perf_counter()
        x, _ = numpy_to_mlx(message.data)
        took("upload to new memory", at)
        del x
    for message in messages:
        at = time.perf_counter()
        message.data.copy()
        took("copy on the host", at)
    parts = {name: round(float(np.median(values)), 1) for name, values in times.items()}
    around = whole - sum(parts[name] for name in ("upload", "call", "start", "wait", "read"))
    return {**parts, "Python around": round(around, 1)}


def with_graphs(shapes: str, out: str) -> list[dict]:
    """The fused chain in a process of its own in which MLX makes CUDA graphs; it reads that at its start."""
    name = "chain_speed_with_graphs"
    command = [sys.executable, __file__, "--quick", "--fused", shapes, "--out", out, "--name", name]
    environment = os.environ | {"MLX_USE_CUDA_GRAPHS": "1"}
    try:
        subprocess.run(command, env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)
    except subprocess.SubprocessError as error:
        print(f"with CUDA graphs: {error}")
        return []
    rows = json.loads((Path(out) / f"{name}.json").read_text())["rows"]
    for row in rows:
        row["way"] += ", CUDA graphs in MLX"
        print(json.dumps(row, ensure_ascii=False), flush=True)
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
    parser.add_argument("--quick", action="store_true", help="no graphs, and where the time of a message goes")
    parser.add_argument("--fused", metavar="30x256,...", help="the fused chain only, with these samples x channels")
    parser.add_argument("--name", default="chain_speed", help="of the file, without .json [chain_speed]")
    parser.add_argument("--tiny", action="store_true", help="small shapes and short streams, to see that it runs")
    options = parser.parse_args()
    n_messages = min(options.messages, 600) if options.quick else options.messages
    if options.fused:
        shapes = [(int(n), int(c)) for n, c in (shape.split("x") for shape in options.fused.split(","))]
        write(options, bare(shapes, n_messages, options.quick, is_fused_only=True), [])
    elif options.quick:
        shapes, apart = (TINY_SHAPES, "30x8") if options.tiny else (QUICK_SHAPES, "30x256,300x256")
        rows = bare(shapes, 60 if options.tiny else n_messages, takes_apart=True)
        # At once, in case that the rest does not end.
        write(options, rows, [])
        write(options, rows + with_graphs(apart, options.out), [])
    elif options.tiny:
        write(options, bare(TINY_SHAPES, 60), graphs(1.0, 1 / 60, ((300, 8), (30, 8))))
    else:
        write(options, bare(SHAPES, n_messages), graphs(60.0, options.minutes, ((300, 256), (30, 1024))))
    return 0


def write(options: argparse.Namespace, rows: list[dict], graph_rows: list[dict]) -> None:
    import mlx.core as mx

    path = Path(options.out) / f"{options.name}.json"
    write_results(
        path,
        title="The example chain fused, from int16 on the host to features on the host",
        machine=str(mx.device_info().get("device_name", platform.machine())),
        command="python tests/gpu/chain_speed.py" + (" --quick" if options.quick else ""),
        packages=LIVE,
        form="bare chain",
        spread="One run, all in turns",
        columns=[
            ("samples × channels", "shape", None),
            ("way", "way", None),
            ("median, µs", "us", 0),
            ("p99, µs", "p99", 0),
            {"head": "channels × real time", "derive": "channels_times_real_time", "digits": 0},
        ],
        rows=rows,
        others={"graphs": graph_rows},
    )
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
