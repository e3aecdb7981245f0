"""Messages to the GPU and results from it, beside PyTorch: ``python tests/gpu/bus.py --out FOLDER``.

First the chain band-pass of order 4, common reference, z-score, from int16 to float32, host to host, fused and
stage by stage. Then conversions alone: up, one operation, down. Then the chain that ends in features. Each with the
ways of reading that there are, and in turns, so that what else the machine does meets all alike. Medians and 99th
percentiles in microseconds; two minutes.

PyTorch has no such chain; it has the conversions, with pageable memory and through pinned memory, to and from which
the message and the result are copied on the host, and once more without these copies, which is the bus alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks")]

import ezmsg.core as ez
import mlx.core as mx
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers import latency
from helpers.speed_messages import messages_of
from results_file import LIVE, write_results

import ezmsg.mlx as mlx
from ezmsg.mlx.chain import compiledrun
from ezmsg.mlx.stream import convert, hostmemory, sharedcopy
from ezmsg.mlx.stream.device import PAGE, keep_on_host
from ezmsg.mlx.stream.device import bus as bus_of_device

SHAPES = ((30, 256), (30, 1024), (300, 256), (128, 1024), (3000, 4096))
CONVERTED_SHAPES = ((30, 256), (300, 256), (3000, 256), (3000, 4096))
FEATURE_SHAPES = ((30, 256), (30, 1024), (300, 256), (128, 1024))
CPU_SHAPES = ((300, 256), (3000, 256), (3000, 1024))
TINY_SHAPES = ((30, 8), (300, 8))
HELD_TO = {"30 × 256": 160.0, "30 × 1024": 165.0, "300 × 256": 180.0, "128 × 1024": 210.0, "3000 × 4096": 2900.0}
DTYPES = ("int16", "float32", "float64")
Run = Callable[[AxisArray], npt.NDArray]
Way = Callable[[], contextlib.AbstractContextManager[object]]


def moved_by_mlx() -> contextlib.AbstractContextManager[object]:
    """Results are asked for, and MLX moves them; messages are copied to MLX's memory."""
    stack = contextlib.ExitStack()
    for module in (compiledrun, convert):
        stack.enter_context(mock.patch.object(module, "bus", lambda: None))
    return stack


def always_copied() -> contextlib.AbstractContextManager[object]:
    """Results are copied to fresh memory, however large they are."""
    stack = contextlib.ExitStack()
    for name in ("SMALL_RESULT", "LEAST_COMPUTED"):
        stack.enter_context(mock.patch.object(hostmemory, name, 1 << 62))
    return stack


def never_copied() -> contextlib.AbstractContextManager[object]:
    """Results are views, however small they are."""
    return mock.patch.object(hostmemory, "SMALL_RESULT", 0)


@contextlib.contextmanager
def laid_out() -> Iterator[None]:
    """Results are copied on the device to memory of a size that nothing else has, and viewed there."""

    def viewed(values: npt.NDArray, dtype: str | None, rounds: bool) -> npt.NDArray:
        return values

    class Viewing:
        """Takes the place of NumPy in the run's module, where it asks for the memory of the result."""

        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        @staticmethod
        def asarray(y: mx.array) -> npt.NDArray:
            flat = y.reshape(-1)
            flat = mx.concatenate([flat, mx.zeros(4 * PAGE // flat.itemsize, flat.dtype)])
            mx.eval(flat)
            keep_on_host(flat, least=1)
            return np.asarray(flat)[: y.size].reshape(y.shape)

    with moved_by_mlx(), mock.patch.object(compiledrun, "np", Viewing()):
        with mock.patch.object(compiledrun, "copied", viewed), mock.patch.object(compiledrun, "SMALL", 0.0):
            yield


WAYS: dict[str, Way] = {
    "as it is": contextlib.nullcontext,
    "always copied": always_copied,
    "never copied": never_copied,
    "laid out by MLX, viewed": laid_out,
    "moved by MLX": moved_by_mlx,
}


def fused(make: Callable[[], list], n_samples: int) -> Run:
    chain = mlx.ChainTransformer(make_chain=make, lengths=(n_samples,))
    return lambda message: chain(message).data


def one_by_one(make: Callable[[], list]) -> Run:
    stages = make()

    def run(message: AxisArray) -> npt.NDArray:
        for stage in stages:
            message = stage(message)
        return message.data

    return run


def converted() -> Run:
    to_mlx = mlx.AsArrayTransformer(backend="mlx", dtype="float32")
    to_numpy = mlx.AsArrayTransformer(backend="numpy")

    def run(message: AxisArray) -> npt.NDArray:
        message = to_mlx(message)
        return to_numpy(replace(message, data=message.data * 1.0001)).data

    return run


def of_torch(shape: tuple[int, int], dtype: str) -> dict[str, Run]:
    """The same in PyTorch; float64 is narrowed on the host, as AsArray does."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    kind = np.dtype("float32" if dtype == "float64" else dtype)
    host_in = torch.empty(shape, dtype=getattr(torch, kind.name), pin_memory=True)
    host_out = torch.empty(shape, dtype=torch.float32, pin_memory=True)
    device_in = torch.empty(shape, dtype=getattr(torch, kind.name), device="cuda")
    window = host_out.numpy()

    def computed(x: torch.Tensor) -> torch.Tensor:
        return x.float() * 1.0001

    def pageable(message: AxisArray) -> npt.NDArray:
        data = np.asarray(message.data, kind)
        return computed(torch.from_numpy(data).cuda()).cpu().numpy()

    def bus(message: AxisArray) -> npt.NDArray:
        device_in.copy_(host_in, non_blocking=True)
        host_out.copy_(computed(device_in), non_blocking=True)
        torch.cuda.synchronize()
        return window

    def pinned(message: AxisArray) -> npt.NDArray:
        host_in.copy_(torch.from_numpy(np.asarray(message.data, kind)))
        return bus(message)

    return {"PyTorch, pageable": pageable, "PyTorch, through pinned memory": pinned, "PyTorch, the bus alone": bus}


class Table:
    """Rows that are printed when they are there, and again at the end."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, part: str, shape: tuple[int, int], dtype: str, times: dict[str, list[float]]) -> None:
        name = f"{shape[0]} × {shape[1]}"
        for way, collected in times.items():
            if not collected:
                continue
            median, p99 = (round(float(np.percentile(collected, p)), 1) for p in (50, 99))
            row = {"part": part, "shape": name, "samples": shape[0], "channels": shape[1], "dtype": dtype, "way": way}
            row |= {"us": median, "p99": p99, "ratio": round(p99 / median, 2), "n": len(collected)}
            row |= {"gb_s": round(4e-3 * shape[0] * shape[1] / median, 1)}
            row |= {"held_to": HELD_TO.get(name) if part == "samples, fused" and way == "as it is" else None}
            self.rows.append(row)
            print(self.line(row), flush=True)

    @staticmethod
    def line(row: dict) -> str:
        held = f"  held to {row['held_to']:.0f}" if row["held_to"] else ""
        return (
            f"{row['part']:26} {row['shape']:>11} {row['dtype']:8} {row['way']:32} "
            f"{row['us']:9.1f} us  p99 {row['p99']:9.1f} ({row['ratio']:.2f})  {row['gb_s']:5.1f} GB/s{held}"
        )


def in_turns(
    runs: dict[str, tuple[Way, Run]], messages: Sequence[AxisArray], n_first: int, check: bool = True
) -> dict[str, list[float]]:
    """Microseconds of each message in each way; a way that raises is said and left out.

    Each begins as often as the others: a large message is in the processor's cache for all but the first.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, message in enumerate(messages):
        results = {}
        order = tuple(runs.items())
        start = number % max(len(order), 1)
        for name, (way, run) in order[start:] + order[:start]:
            try:
                with way():
                    began = time.perf_counter()
                    result = run(message)
                    took = time.perf_counter() - began
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                runs.pop(name)
                continue
            if number >= n_first:
                times[name].append(1e6 * took)
            if check and number in (n_first, len(messages) - 1):
                results[name] = np.array(result)
            del result
        if len(results) > 1:
            first, *others = results
            for name in others:
                differs = float(np.max(np.abs(results[name] - results[first]), initial=0.0))
                scale = float(np.max(np.abs(results[first]), initial=1e-30))
                if not differs <= 1e-4 * scale:
                    print(f"WRONG: {name} differs from {first} by {differs:.3g} of {scale:.3g}", flush=True)
    return times


def groups_of(runs: dict[str, tuple[Way, Run]]) -> Iterator[dict[str, tuple[Way, Run]]]:
    """Those that may be measured in turns: what MLX moves to the host stays there, in its cache, for the others."""
    apart = [name for name in runs if "MLX" in name]
    yield {name: run for name, run in runs.items() if name not in apart}
    for name in apart:
        mx.clear_cache()
        yield {name: runs[name]}
        mx.clear_cache()


def count_of(shape: tuple[int, int], n: int) -> int:
    return max(n * 300 * 256 // max(shape[0] * shape[1], 300 * 256), 12)


def samples(table: Table, shapes: Sequence[tuple[int, int]], ways: Sequence[str], n: int) -> None:
    for shape in shapes:
        runs: dict[str, tuple[Way, Run]] = {}
        for name in ways:
            runs[name] = (WAYS[name], fused(latency.make_samples_chain, shape[0]))
        runs["stage by stage"] = (contextlib.nullcontext, one_by_one(latency.make_samples_chain))
        messages = messages_of(*shape, count_of(shape, n) + 20)
        for group in groups_of(runs):
            table.add("samples, fused", shape, "int16", in_turns(group, messages, 20))


def conversions(
    table: Table, shapes: Sequence[tuple[int, int]], ways: Sequence[str], dtypes: Sequence[str], n: int
) -> None:
    for shape in shapes:
        for dtype in dtypes:
            n_messages = count_of(shape, n) + 10
            messages = [replace(m, data=m.data.astype(dtype)) for m in messages_of(*shape, min(n_messages, 8))]
            runs: dict[str, tuple[Way, Run]] = {name: (WAYS[name], converted()) for name in ways}
            runs |= {name: (contextlib.nullcontext, run) for name, run in of_torch(shape, dtype).items()}
            turns = [messages[i % len(messages)] for i in range(n_messages)]
            # What it gives is not what it was given.
            alone = {name: runs.pop(name) for name in tuple(runs) if "alone" in name}
            for group in groups_of(runs):
                table.add("conversions", shape, dtype, in_turns(group, turns, 10))
            table.add("conversions", shape, dtype, in_turns(alone, turns, 10, check=False))


def uploads(table: Table, shapes: Sequence[tuple[int, int]], n: int) -> None:
    """What an upload consists of, and other ways of doing it; each is waited for."""
    copies = bus_of_device()
    for shape in shapes:
        for dtype in ("int16", "float32"):
            data = messages_of(*shape, 1)[0].data.astype(dtype)
            kind, block = data.dtype, hostmemory.device_memory().take(data.nbytes)
            staged = block.filled(data, kind)

            def no_helpers(data: npt.NDArray = data) -> mx.array:
                with mock.patch.object(sharedcopy, "HELPERS", 0):
                    return convert.numpy_to_mlx(data, "float32")[0]

            def in_one(data: npt.NDArray = data) -> mx.array:
                with mock.patch.object(convert, "LARGE_MESSAGE", 1 << 62):
                    return convert.numpy_to_mlx(data, "float32")[0]

            def staged_always(data: npt.NDArray = data) -> mx.array:
                with mock.patch.object(convert, "LEAST_STAGED", 0):
                    return convert.numpy_to_mlx(data, "float32")[0]

            calls: dict[str, Callable[[], mx.array | None]] = {
                "as it is": lambda data=data: convert.numpy_to_mlx(data, "float32")[0],
                "by a kernel": staged_always,
                "in one part": in_one,
                "by one thread": no_helpers,
                "new memory of MLX": lambda data=data: keep_on_host(mx.array(data)).astype(mx.float32) * 1.0,
                "new memory of MLX, widened there": lambda data=data: keep_on_host(mx.array(data, mx.float32)) * 1.0,
                "the copy alone": lambda data=data, block=block, kind=kind: block.filled(data, kind),
                "MLX's kernel alone": lambda staged=staged: staged.astype(mx.float32) * 1.0,
            }
            if copies is not None:
                calls["our kernel alone"] = lambda staged=staged: copies.read(staged, mx.float32)[0]
            times: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(count_of(shape, n) + 5):
                for name, call in calls.items():
                    at = time.perf_counter()
                    mx.eval(call())
                    mx.synchronize()
                    if number >= 5:
                        times[name].append(1e6 * (time.perf_counter() - at))
            table.add("up", shape, dtype, times)


def features(table: Table, shapes: Sequence[tuple[int, int]], ways: Sequence[str], n: int) -> None:
    for shape in shapes:
        make = functools.partial(latency.make_chain, min(shape[0], 300) / latency.RATE)
        runs = {name: (WAYS[name], fused(make, shape[0])) for name in ways}
        messages = messages_of(*shape, count_of(shape, n) + 20)
        for group in groups_of(runs):
            table.add("features, fused", shape, "int16", in_turns(group, messages, 20))


def on_cpu(table: Table, shapes: Sequence[tuple[int, int]], n: int) -> None:
    """The fused chain on MLX's CPU device, with memory that is used again and with new memory for each message."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        for shape in shapes:
            ways = {"as it is": contextlib.nullcontext, "new memory": always_copied}
            runs = {name: (way, fused(latency.make_samples_chain, shape[0])) for name, way in ways.items()}
            messages = messages_of(*shape, count_of(shape, n) + 5)
            table.add("samples, fused, on the CPU", shape, "int16", in_turns(runs, messages, 5))
            table.add("its stages", shape, "int16", stages_on_cpu(shape, messages))
    finally:
        mx.set_default_device(device)


def stages_on_cpu(shape: tuple[int, int], messages: Sequence[AxisArray]) -> dict[str, list[float]]:
    """Microseconds in each stage of the fused chain, and of a copy of the result to new memory."""
    chain = mlx.ChainTransformer(make_chain=latency.make_samples_chain)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable) -> Callable:
        def run(*given: object) -> object:
            began = time.perf_counter()
            result = call(*given)
            times.setdefault(name, []).append(1e6 * (time.perf_counter() - began))
            return result

        return run

    wide = np.empty(shape, np.float32)
    for number, message in enumerate(messages):
        result = chain(message).data
        if number == 1:
            for stage in chain._runner._found[0][0].stages:
                name = type(stage).__name__.removeprefix("Fused").lower()
                stage.apply = timed(name, stage.apply)  # type: ignore[method-assign]
        timed("widening of the message", np.copyto)(wide, message.data)
        timed("a copy to new memory, which is not made", result.copy)()
    return times


def kept(table: Table, shape: tuple[int, int]) -> None:
    """What a user who keeps every result costs, and that none of them changes."""
    chain = mlx.ChainTransformer(make_chain=latency.make_samples_chain, lengths=(shape[0],))
    messages, held, sums, times = messages_of(*shape, 400), [], [], []
    for message in messages:
        began = time.perf_counter()
        result = chain(message).data
        times.append(1e6 * (time.perf_counter() - began))
        held.append(result)
        sums.append(float(result.sum(dtype=np.float64)))
    changed = sum(float(result.sum(dtype=np.float64)) != before for result, before in zip(held, sums, strict=True))
    print(f"kept: {len(held)} results, {changed} of them changed; {hostmemory.memory_in_use()}", flush=True)
    del held, result
    print(f"kept: after they are dropped {hostmemory.memory_in_use()}", flush=True)
    table.add("every result kept", shape, "int16", {"as it is": times[20:]})


def write(table: Table, path: Path, seconds: float) -> None:
    write_results(
        path,
        title="From the host to the GPU and back",
        machine=str(mx.device_info().get("device_name", platform.machine())),
        command=" ".join(["python tests/gpu/bus.py", *sys.argv[1:]]),
        packages=LIVE,
        form="bare chain",
        spread="One run, all in turns",
        columns=[
            ("what", "part", None),
            ("samples × channels", "shape", None),
            ("message", "dtype", None),
            ("way", "way", None),
            ("median, µs", "us", 0),
            ("p99, µs", "p99", 0),
        ],
        rows=table.rows,
        others={"seconds": round(seconds, 1)},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for bus.json [$OUT, or here]")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["as it is"], help="of reading [as it is]")
    parser.add_argument("--messages", type=int, default=600, help="of a short shape [600]")
    parser.add_argument("--up", action="store_true", help="only what an upload consists of; under half a minute")
    parser.add_argument("--cpu", action="store_true", help="only the chain on MLX's CPU device, and its stages")
    parser.add_argument("--tiny", action="store_true", help="small shapes and short streams, to see that it runs")
    options = parser.parse_args()
    ez.logger.setLevel("WARNING")
    began, table = time.perf_counter(), Table()
    n = 40 if options.tiny else options.messages
    path = Path(options.out) / "bus.json"
    bare = [way for way in options.ways if way != "laid out by MLX, viewed"]
    parts_of_all = (
        lambda: samples(table, TINY_SHAPES if options.tiny else SHAPES, options.ways, n),
        lambda: conversions(table, TINY_SHAPES if options.tiny else CONVERTED_SHAPES, bare, DTYPES, n // 2),
        lambda: uploads(table, TINY_SHAPES if options.tiny else CONVERTED_SHAPES, n // 2),
        lambda: features(table, TINY_SHAPES if options.tiny else FEATURE_SHAPES, bare, n),
        lambda: on_cpu(table, TINY_SHAPES if options.tiny else CPU_SHAPES, n // 4),
        lambda: kept(table, TINY_SHAPES[1] if options.tiny else (300, 256)),
    )
    only_up = (lambda: uploads(table, TINY_SHAPES if options.tiny else CONVERTED_SHAPES, n // 2),)
    only_cpu = (lambda: on_cpu(table, TINY_SHAPES if options.tiny else CPU_SHAPES, 10 * n),)
    for part in only_up if options.up else only_cpu if options.cpu else parts_of_all:
        part()
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        # At once, in case that the rest does not end.
        write(table, path, time.perf_counter() - began)
    print(f"\nMLX {mx.__version__}, {mx.default_device()}; {time.perf_counter() - began:.0f} s; written to {path}\n")
    for row in table.rows:
        print(Table.line(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
