"""How MLX's buffer cache behaves on this machine, in four small tables.

    python cache_behaviour.py              # all four
    python cache_behaviour.py --only reuse,lengths

reuse     up to which size difference a freed buffer serves the next request
lengths   the cache after the example chain has seen few and many message lengths
rare      the speed of the steady message before and after rare ones went past a limit of 128 MiB
concat    chunked_scan, which joins padded chunks and trims once, against trimming each chunk

Each row is measured in a fresh spawned process, with MLX's limit lifted out of the way where none is named. Beside
them stand the figures that ezmsg-sigproc has published for Metal, where there are any.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable

from support import checked_options as checked
from support import ewma_chain as shared
from support.fresh_process import in_fresh_process

import ezmsg.core as ez
import numpy as np
from ewma_chain_offline import make_chain
from ezmsg.util.messages.axisarray import AxisArray
from rich.console import Console
from rich.table import Table

from ezmsg.mlx import SimulatedAcquisitionSettings, chunked_scan
from ezmsg.mlx.stream.convert import import_mlx

MIB = 1 << 20
LIFTED = 1 << 50
N_CHANNELS = 256
STALL_LENGTHS = SimulatedAcquisitionSettings().stall_lengths


def counts(n_samples: int, first: int = 0) -> AxisArray:
    """A message of int16 counts (time, ch) that starts at sample *first*."""
    data = np.random.default_rng(n_samples).integers(-500, 500, (n_samples, N_CHANNELS), np.int16)
    axes = {"time": AxisArray.TimeAxis(fs=30000.0, offset=first / 30000.0)}
    return AxisArray(data, ["time", "ch"], axes=axes, key="counts", stream_dim="time")


def run_chain(messages: Iterable[AxisArray], limit_mb: float | None) -> list[float]:
    """Run the example chain; the seconds that each message took."""
    if limit_mb is None:
        import_mlx().set_cache_limit(LIFTED)
    chain = make_chain(shared.to_mlx(limit_mb))
    seconds = []
    for message in messages:
        begin = time.perf_counter()
        for stage in chain:
            message = stage(message)
        seconds.append(time.perf_counter() - begin)
    return seconds


def stream(lengths: Iterable[int]) -> Iterable[AxisArray]:
    first = 0
    for n in lengths:
        yield counts(n, first)
        first += n


def reuse(difference_kib: int) -> bool:
    """Whether a freed buffer of 3000 x 256 float32 serves a request for *difference_kib* more."""
    mx = import_mlx()
    mx.set_cache_limit(LIFTED)
    size = 3000 * N_CHANNELS * 4
    freed = mx.array(np.ones(size, np.int8))
    del freed
    before = mx.get_cache_memory()
    kept = mx.array(np.ones(size + difference_kib * 1024, np.int8))
    return mx.get_cache_memory() < before and kept.size > size


def lengths(kind: str) -> float:
    """MiB in the cache after a stream of 300-sample messages with *kind* in it."""
    seen = {
        "300 samples": [300] * 60,
        "9000 samples": [9000] * 20,
        **{f"300 and {n} rare lengths": [m for k in STALL_LENGTHS[:n] for m in (300, 300, k)] for n in (10, 30, 40)},
    }[kind]
    run_chain(stream(seen), None)
    return import_mlx().get_cache_memory() / MIB


def rare(_: str) -> tuple[float, float, float]:
    """Median milliseconds of the steady message before and after 39 rare lengths, and the MiB then in the cache."""
    n = 150
    seconds = run_chain(stream([300] * 2 * n + list(STALL_LENGTHS[:39]) + [300] * 2 * n), 128.0)
    cached = import_mlx().get_cache_memory() / MIB
    before, after = seconds[n : 2 * n], seconds[-n:]
    return statistics.median(before) * 1e3, statistics.median(after) * 1e3, cached


def concat(how: str) -> float:
    """MiB in the cache after a scan of 40 lengths; inputs and results stay alive, so that only the rest is cached."""
    mx = import_mlx()
    mx.set_cache_limit(LIFTED)
    data = [mx.array(np.ones((n, N_CHANNELS), np.float32)) for n in STALL_LENGTHS]
    sizes = (32, 1024)

    def launch(chunk, state, size, valid_length):
        return chunk + state, state

    def trimmed(x):
        parts = []
        for first in range(0, x.shape[0], sizes[-1]):
            part = x[first : first + sizes[-1]]
            n = part.shape[0]
            size = next(size for size in sizes if size >= n)
            padded = mx.pad(part, [(0, size - n), (0, 0)]) if n < size else part
            parts.append(launch(padded, 1.0, size, None)[0][:n] * 1.0)
        return mx.concatenate(parts, axis=0)

    results = []
    for x in data:
        y = chunked_scan(x, x.shape[0], sizes, 1.0, launch, axis=0)[0] if how == "joined" else trimmed(x)
        mx.eval(y)
        results.append(y)
    return mx.get_cache_memory() / MIB


PUBLISHED = "published for Metal"


def measured(function: Callable, *arguments: object) -> list:
    """``function(argument)`` for each argument, each in a fresh spawned process."""
    return [in_fresh_process(function, argument) for argument in arguments]


def tables(only: list[str]) -> Iterable[Table]:
    if "reuse" in only:
        table = Table("size difference", "reused", PUBLISHED, title="A freed buffer of 3000 x 256 float32 (2.9 MiB)")
        differences = (4, 8, 16, 24, 32, 300)
        for difference, reused in zip(differences, measured(reuse, *differences)):
            table.add_row(f"+{difference} KiB", "yes" if reused else "no", "yes" if difference < 16 else "no")
        yield table
    if "lengths" in only:
        table = Table("messages", "cache, MiB", PUBLISHED, title="The example chain, 256 channels, no limit")
        kinds = ["300 samples", "9000 samples", *(f"300 and {n} rare lengths" for n in (10, 30, 40))]
        published = {"300 samples": "20 (67 x the message)", "300 and 40 rare lengths": "6015 (another chain)"}
        for kind, cached in zip(kinds, measured(lengths, *kinds)):
            table.add_row(kind, f"{cached:.0f}", published.get(kind, "-"))
        yield table
    if "rare" in only:
        table = Table("", "this machine", PUBLISHED, title="39 rare lengths past a limit of 128 MiB, steady message")
        (before, after, cached) = measured(rare, "")[0]
        table.add_row("median before", f"{before:.2f} ms", "-")
        table.add_row("median after", f"{after:.2f} ms", "-")
        table.add_row("after / before", f"{after / before:.2f}", "0.97")
        table.add_row("cache", f"{cached:.0f} MiB", "-")
        yield table
    if "concat" in only:
        table = Table("chunks", "cache, MiB", "of trimming each", PUBLISHED, title="A scan of 40 lengths")
        each, joined = measured(concat, "each", "joined")
        table.add_row("each trimmed", f"{each:.0f}", "1.00", "1.00")
        table.add_row("joined, trimmed once", f"{joined:.0f}", f"{joined / each:.2f}", "0.69")
        yield table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["reuse", "lengths", "rare", "concat"]
    parser.add_argument("--only", default=",".join(names), help="tables, separated by commas")
    only = parser.parse_args().only.split(",")
    if unknown := set(only) - set(names):
        parser.error(f"argument --only: got {', '.join(map(repr, sorted(unknown)))}; allowed are {', '.join(names)}")
    checked.require_mlx(parser)
    mx = import_mlx()
    ez.logger.setLevel("WARNING")
    console = Console()
    console.print(f"MLX {mx.__version__ if hasattr(mx, '__version__') else ''}, {mx.default_device()}")
    for table in tables(only):
        console.print(table)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
