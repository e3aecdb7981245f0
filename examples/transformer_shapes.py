"""MLX's buffer cache under a small transformer whose inputs come in many shapes.

Attention scores have the shape (batch, head, length, length), so each length and
batch size of the input has buffers of its own. Two streams of inputs, with two
greedy steps each: every input of another shape, and few shapes that come again
and again. For each of them, limits on the cache and clearing it now and then,
each in a process of its own.

With --decode, one long text instead: the model writes token after token, each
from all before it. As published, the input grows by one at each step, and with
it the cache. A limit bounds the cache, not the time. Inputs of a few lengths
bound the shapes. A ring of keys and values bounds shapes, memory and time.

On the CPU, where matrix products are slow, the default is --quick: fewer shapes,
a smaller model and limits in proportion, in under two minutes on two cores. On
a GPU it is --full.

    pip install "ezmsg-mlx[cpu,examples]"
    python transformer_shapes.py
    python transformer_shapes.py --decode --plot decoding.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from support import checked_options as checked
from support.fresh_process import in_fresh_process, lift_small_default

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import mlx.core as mx

States: TypeAlias = "list[tuple[mx.array, ...]]"
"""Of each layer, the state of a ring of keys and values."""

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
    n_tokens: int
    """Tokens that are written in a row."""

    def with_distinct(self, n_distinct: int) -> Scale:
        """The same with so many distinct shapes, and the other numbers in proportion."""
        n_repeated, n_shapes = (
            max(round(number * n_distinct / self.n_distinct), 1) for number in (self.n_repeated, self.n_shapes)
        )
        return dataclasses.replace(self, n_distinct=n_distinct, n_repeated=n_repeated, n_shapes=n_shapes)


FULL = Scale(
    n_layers=4,
    width=256,
    n_heads=8,
    n_distinct=120,
    n_repeated=2000,
    n_shapes=20,
    limits_mb=(1024.0, 256.0),
    n_tokens=1024,
)
QUICK = Scale(
    n_layers=2, width=64, n_heads=8, n_distinct=40, n_repeated=100, n_shapes=10, limits_mb=(64.0, 16.0), n_tokens=384
)


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
    """A decoder with random weights, of plain MLX operations, and attention that may keep keys and values in a ring."""

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

    def next_tokens(self, tokens: mx.array, n_real: mx.array | None = None) -> mx.array:
        """The likeliest next token for each row of *tokens*, shape (batch, length): shape (batch, 1).

        *n_real*: how many of them are text, where others follow; None: all.
        """
        import mlx.core as mx

        length = tokens.shape[1]
        future = mx.triu(mx.full((length, length), -math.inf), k=1)
        x = self.embedding[tokens] + self.positions[:length]
        for to_heads, from_heads, up, down in self.layers:
            x = x + self._attend(_normalized(x) @ to_heads, future) @ from_heads
            x = x + mx.maximum(_normalized(x) @ up, 0.0) @ down
        # What follows the text is in its future, so nothing of the text sees it.
        last = x[:, -1:] if n_real is None else mx.take(x, n_real - 1, axis=1)[:, None]
        return self._likeliest(last)

    def _likeliest(self, x: mx.array) -> mx.array:
        import mlx.core as mx

        return mx.argmax(_normalized(x) @ self.embedding.T, axis=-1)

    def in_ring(self, size: int) -> tuple[Callable[[mx.array, States], tuple[mx.array, States]], States]:
        """A function of a token, shape (1, 1), and a state, which returns the next of each; and the first state.

        The state has one shape, however long the text is. Each token attends to the last *size* ones.
        """
        import mlx.core as mx

        from ezmsg.mlx.network import RingKVCache

        width = self.embedding.shape[1]
        cache = RingKVCache(size, self.n_heads, width // self.n_heads, positions="learned")

        def step(token: mx.array, states: States) -> tuple[mx.array, States]:
            x = self.embedding[token] + self.positions[cache.places(states[0], 1)]
            after = []
            for (to_heads, from_heads, up, down), state in zip(self.layers, states, strict=True):
                qkv = (_normalized(x) @ to_heads).reshape(1, 1, 3, self.n_heads, -1)
                y, state = cache.attend(*(qkv[:, :, part].swapaxes(1, 2) for part in range(3)), state)
                after.append(tuple(state))
                x = x + y.swapaxes(1, 2).reshape(1, 1, width) @ from_heads
                x = x + mx.maximum(_normalized(x) @ up, 0.0) @ down
            return self._likeliest(x), after

        return step, [tuple(cache.zero_state(1)) for _ in self.layers]

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


@dataclasses.dataclass(frozen=True)
class Way:
    """How a text is written."""

    name: str
    grows: bool = False
    limit_mb: float | None = None
    lengths: tuple[int, ...] = ()
    """Lengths of the input, where it does not grow."""


@dataclasses.dataclass(frozen=True)
class Text:
    """What it took to write a text."""

    tokens: list[int]
    cache_mb: list[float]
    """After each token."""
    seconds: list[float]
    """For each token."""
    default_lifted: bool


def ways(scale: Scale) -> list[Way]:
    n = scale.n_tokens
    limit = scale.limits_mb[1]
    return [
        Way("grows, as published", grows=True),
        Way(f"grows, {limit:g} MiB", grows=True, limit_mb=limit),
        Way("four lengths", lengths=(n // 8, n // 4, n // 2, n)),
        Way("ring"),
    ]


def write(way: Way, scale: Scale) -> Text:
    """Write a text, token by token. For a fresh process."""
    import mlx.core as mx

    lifted = False
    if way.limit_mb is None:
        lifted = lift_small_default()
    else:
        mx.set_cache_limit(int(way.limit_mb * MIB))
    model = Transformer(scale, scale.n_tokens)
    step, states = model.in_ring(scale.n_tokens)
    if mx.default_device().type == mx.gpu:
        step = mx.compile(step)
    tokens, cache_mb, seconds = [1], [], []
    padded = np.zeros((1, scale.n_tokens), np.int32)
    # Kernels are compiled now, and not while the time runs.
    mx.eval(step(mx.array([[1]]), states), model.next_tokens(mx.array(padded[:, : (way.lengths or (2,))[0]])))
    for number in range(1, scale.n_tokens):
        begin = time.perf_counter()
        padded[0, number - 1] = tokens[-1]
        if way.grows:
            token = model.next_tokens(mx.array(padded[:, :number]))
        elif way.lengths:
            length = next(length for length in way.lengths if length >= number)
            token = model.next_tokens(mx.array(padded[:, :length]), mx.array(number))
        else:
            token, states = step(mx.array([[tokens[-1]]]), states)
            mx.eval(token, states)
        tokens.append(int(token.item()))
        seconds.append(time.perf_counter() - begin)
        cache_mb.append(mx.get_cache_memory() / MIB)
    return Text(tokens, cache_mb, seconds, lifted)


def decode(scale: Scale, console: Console) -> dict[str, Text]:
    """Every way, one after the other."""
    texts = {}
    with console.status("") as status:
        for way in ways(scale):
            status.update(f"{way.name}, {scale.n_tokens} tokens")
            texts[way.name] = in_fresh_process(write, way, scale)
    return texts


def show_texts(texts: dict[str, Text], scale: Scale, console: Console) -> None:
    table = Table("\ninput", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("largest\ncache", "\ntime", "tokens\na second", "ms a token\nat first", "\nat last", "same\ntext"):
        table.add_column(head, justify="right")
    first = next(iter(texts.values()))
    for name, text in texts.items():
        tenth = max(len(text.seconds) // 10, 1)
        early, late = (statistics.median(part) * 1e3 for part in (text.seconds[:tenth], text.seconds[-tenth:]))
        total = sum(text.seconds)
        table.add_row(
            name,
            f"{max(text.cache_mb):.0f} MiB",
            f"{total:.1f} s",
            f"{len(text.seconds) / total:.0f}",
            f"{early:.2f}",
            f"{late:.2f}",
            "yes" if text.tokens == first.tokens else "no",
        )
    console.print(table)
    console.print(
        f"{scale.n_tokens} tokens, each from all before it. {scale.n_layers} layers of width {scale.width} with "
        f"{scale.n_heads} heads.",
        highlight=False,
    )


def draw(texts: dict[str, Text], path: str) -> None:
    """The cache and the time of each token, over the length of the text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, text in texts.items():
        window = max(len(text.seconds) // 50, 1)
        smooth = np.convolve(text.seconds, np.ones(window) / window, mode="valid") * 1e3
        memory.plot(text.cache_mb, label=name)
        speed.plot(np.arange(len(smooth)) + window / 2, smooth, label=name)
    memory.set(xlabel="tokens so far", ylabel="MLX's cache, MiB", yscale="symlog")
    speed.set(xlabel="tokens so far", ylabel="ms a token", ylim=(0, None))
    memory.legend(frameon=False)
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


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
    parser.add_argument("--decode", action="store_true", help="write one text, token by token")
    parser.add_argument("--tokens", metavar="N", type=checked.count, help="of that text [384 or 1024]")
    parser.add_argument("--plot", metavar="FILE", type=checked.file, help="where to draw the course of --decode")
    parser.add_argument("--json", metavar="FILE", type=checked.file, help="where to save the numbers")
    options = parser.parse_args()
    checked.require_mlx(parser)
    import mlx.core as mx

    scale = options.scale or (QUICK if mx.default_device().type == mx.cpu else FULL)
    if options.shapes is not None:
        scale = scale.with_distinct(options.shapes)
    console = Console()
    if options.decode:
        if options.tokens is not None:
            scale = dataclasses.replace(scale, n_tokens=max(options.tokens, 16))
        texts = decode(scale, console)
        show_texts(texts, scale, console)
        if options.plot:
            draw(texts, options.plot)
        if options.json:
            found = {"scale": dataclasses.asdict(scale), "texts": {k: dataclasses.asdict(v) for k, v in texts.items()}}
            with open(options.json, "w") as file:
                json.dump(found, file, indent=1)
        return 0
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
