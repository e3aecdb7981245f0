"""MLX's buffer cache under a small transformer whose inputs come in many shapes.

Attention scores have the shape (batch, head, length, length), so each length and
batch size of the input has buffers of its own. Two streams of inputs, with two
greedy steps each: every input of another shape, and few shapes that come again
and again. For each of them, limits on the cache and clearing it now and then,
each in a process of its own.

On the CPU, where matrix products are slow, the default is --quick: fewer shapes,
a smaller model and limits in proportion, in under two minutes on two cores. On
a GPU it is --full.

    pip install "ezmsg-mlx[cpu,examples]"
    python transformer_shapes.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from support import checked_options as checked
from support.fresh_process import in_fresh_process, lift_small_default

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import mlx.core as mx

MIB = 1 << 20

VOCABULARY = 256
SHORTEST = 16
N_STEPS = 2
CLEAR_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much there is to do."""

    n_layers: int
    width: int
    n_heads: int
    n_distinct: int
    """Inputs that all have different shapes."""
    n_repeated: int
    """Inputs whose shapes come again and again."""
    n_shapes: int
    """Different shapes among those."""
    limits_mb: tuple[float, float]

    def with_distinct(self, n_distinct: int) -> Scale:
        """The same with so many distinct shapes, and the other numbers in proportion."""
        n_repeated, n_shapes = (
            max(round(number * n_distinct / self.n_distinct), 1) for number in (self.n_repeated, self.n_shapes)
        )
        return dataclasses.replace(self, n_distinct=n_distinct, n_repeated=n_repeated, n_shapes=n_shapes)


FULL = Scale(n_layers=4, width=256, n_heads=8, n_distinct=120, n_repeated=2000, n_shapes=20, limits_mb=(1024.0, 256.0))
QUICK = Scale(n_layers=2, width=64, n_heads=8, n_distinct=40, n_repeated=100, n_shapes=10, limits_mb=(64.0, 16.0))


@dataclasses.dataclass(frozen=True)
class Lever:
    name: str
    limit_mb: float | None = None
    clear_every: int | None = None
    """Inputs from one ``mx.clear_cache()`` to the next; None: never."""


@dataclasses.dataclass(frozen=True)
class Run:
    largest_cache_mb: float
    seconds: float
    default_lifted: bool


def shapes(n_inputs: int, n_shapes: int) -> Iterator[tuple[int, int]]:
    """Shapes (batch, length) of the inputs: lengths from 16 up, batches of 4 to 16."""
    for number in range(n_inputs):
        index = number % n_shapes
        yield 4 + index % 13, SHORTEST + index


class Transformer:
    """A decoder with random weights, of plain MLX operations."""

    def __init__(self, scale: Scale, longest: int) -> None:
        import mlx.core as mx

        width = scale.width
        mx.random.seed(0)

        def random(*shape: int) -> mx.array:
            return mx.random.normal(shape) / math.sqrt(shape[0])

        self.n_heads = scale.n_heads
        self.embedding = random(VOCABULARY, width)
        self.positions = random(longest, width)
        self.layers = [
            (random(width, 3 * width), random(width, width), random(width, 4 * width), random(4 * width, width))
            for _ in range(scale.n_layers)
        ]
        mx.eval(self.embedding, self.positions, self.layers)

    def next_tokens(self, tokens: mx.array) -> mx.array:
        """The likeliest next token for each row of *tokens*, shape (batch, length): shape (batch, 1)."""
        import mlx.core as mx

        length = tokens.shape[1]
        future = mx.triu(mx.full((length, length), -math.inf), k=1)
        x = self.embedding[tokens] + self.positions[:length]
        for to_heads, from_heads, up, down in self.layers:
            x = x + self._attend(_normalized(x) @ to_heads, future) @ from_heads
            x = x + mx.maximum(_normalized(x) @ up, 0.0) @ down
        return mx.argmax(_normalized(x[:, -1:]) @ self.embedding.T, axis=-1)

    def _attend(self, qkv: mx.array, future: mx.array) -> mx.array:
        import mlx.core as mx

        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        heads = qkv.reshape(batch, length, 3, self.n_heads, width // self.n_heads)
        queries, keys, values = (heads[:, :, part].swapaxes(1, 2) for part in range(3))
        scores = queries @ keys.swapaxes(2, 3) / math.sqrt(width // self.n_heads) + future
        weights = mx.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return (weights @ values).swapaxes(1, 2).reshape(batch, length, width)


def _normalized(x: mx.array) -> mx.array:
    import mlx.core as mx

    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def run(lever: Lever, scale: Scale, n_inputs: int, n_shapes: int) -> Run:
    """Let the transformer see the inputs. For a fresh process."""
    import mlx.core as mx

    lifted = False
    if lever.limit_mb is None:
        lifted = lift_small_default()
    else:
        mx.set_cache_limit(int(lever.limit_mb * MIB))
    model = Transformer(scale, SHORTEST + n_shapes + N_STEPS)
    # Kernels are compiled now, and not while the time runs.
    mx.eval(model.next_tokens(mx.zeros((4, SHORTEST - 1), dtype=mx.int32)))

    largest = 0
    started_at = time.perf_counter()
    for number, shape in enumerate(shapes(n_inputs, n_shapes), start=1):
        tokens = mx.random.randint(0, VOCABULARY, shape)
        for _ in range(N_STEPS):
            tokens = mx.concatenate([tokens, model.next_tokens(tokens).astype(tokens.dtype)], axis=1)
            mx.eval(tokens)
        largest = max(largest, mx.get_cache_memory())
        if lever.clear_every and number % lever.clear_every == 0:
            mx.clear_cache()
    return Run(largest / MIB, time.perf_counter() - started_at, lifted)


def levers(scale: Scale) -> list[Lever]:
    return [
        Lever("no limit"),
        *(Lever(f"{limit / 1024:g} GiB" if limit >= 1024 else f"{limit:g} MiB", limit) for limit in scale.limits_mb),
        Lever("0 (no cache)", 0.0),
        Lever(f"clear every {CLEAR_EVERY}", clear_every=CLEAR_EVERY),
    ]


def compare(scale: Scale, console: Console) -> dict[str, dict[str, Run]]:
    """Every lever on both streams of inputs, one after the other."""
    streams = {
        "distinct": (scale.n_distinct, scale.n_distinct),
        "repeated": (scale.n_repeated, scale.n_shapes),
    }
    results: dict[str, dict[str, Run]] = {}
    with console.status("") as status:
        for lever in levers(scale):
            results[lever.name] = {}
            for stream, (n_inputs, n_shapes) in streams.items():
                status.update(f"{lever.name}, {n_inputs} inputs of {n_shapes} shapes")
                results[lever.name][stream] = in_fresh_process(run, lever, scale, n_inputs, n_shapes)
    return results


def show(results: dict[str, dict[str, Run]], scale: Scale, console: Console) -> None:
    distinct = f"{scale.n_distinct} shapes\nonce each"
    repeated = f"{scale.n_repeated} inputs\nof {scale.n_shapes} shapes"
    table = Table("\ncache", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in (distinct, "\ntime", repeated, "\ntime"):
        table.add_column(head, justify="right")
    for name, runs in results.items():
        cells = [(f"{run.largest_cache_mb:.0f} MiB", f"{run.seconds:.1f} s") for run in runs.values()]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    console.print(table)
    console.print(
        f"Largest cache and time. {scale.n_layers} layers of width {scale.width} with {scale.n_heads} heads, "
        f"{N_STEPS} greedy steps an input.",
        highlight=False,
    )
    if scale != FULL:
        limits = " and ".join(lever.name for lever in levers(FULL) if lever.limit_mb)
        console.print(
            f"Scaled down (--full: {FULL.n_distinct} shapes, {FULL.n_repeated} inputs of {FULL.n_shapes} shapes, "
            f"{FULL.n_layers} layers of width {FULL.width}, limits of {limits}).",
            highlight=False,
        )
    if any(run.default_lifted for runs in results.values() for run in runs.values()):
        console.print("No limit: MLX's own limit on the CPU, 32 MiB, is lifted out of the way.", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="scale", action="store_const", const=QUICK, help="fewer shapes, smaller model")
    size.add_argument("--full", dest="scale", action="store_const", const=FULL, help="the default on a GPU")
    text = f"distinct shapes, with the other numbers in proportion [{QUICK.n_distinct} or {FULL.n_distinct}]"
    parser.add_argument("--shapes", metavar="N", type=checked.count, help=text)
    parser.add_argument("--json", metavar="FILE", type=checked.file, help="where to save the numbers")
    options = parser.parse_args()
    checked.require_mlx(parser)
    import mlx.core as mx

    scale = options.scale or (QUICK if mx.default_device().type == mx.cpu else FULL)
    if options.shapes is not None:
        scale = scale.with_distinct(options.shapes)
    console = Console()
    results = compare(scale, console)
    show(results, scale, console)
    if options.json:
        runs = {lever: {stream: dataclasses.asdict(r) for stream, r in rs.items()} for lever, rs in results.items()}
        with open(options.json, "w") as file:
            json.dump({"scale": dataclasses.asdict(scale), "runs": runs}, file, indent=1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
