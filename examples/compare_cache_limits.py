"""Compare what can be done about MLX's buffer cache, on the chain of ewma_chain_offline.py.

Every message length that MLX has not seen before leaves buffers in its cache
which nothing reuses, and stalls make messages of ever new lengths. Compared are
MLX as it comes, limits on the cache, clearing it now and then, and cutting the
messages to a few lengths first (Rechunk), each in a process of its own, one
after the other.

By default the stream is short (9 s, a stall every 20 messages), so that all of
it ends in under two minutes on two CPU cores. The long form:

    pip install "ezmsg-mlx[cpu,examples]"
    python compare_cache_limits.py --minutes 20 --stall-every 300

Whether "auto" finds the limit that a search would find, in MiB:

    python compare_cache_limits.py --minutes 3 --repeats 3 --limits auto,none,4,16,64,512
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Literal

from support import checked_options as checked
from support.cache_limits_report import Comparison, Course, Run, draw, print_report, search_of
from support.ewma_chain import end_of, to_mlx
from support.fresh_process import in_fresh_process, lift_small_default

import numpy as np
from ewma_chain_offline import make_chain
from rich.console import Console

from ezmsg.mlx import RechunkTransformer, SimulatedAcquisitionSettings, message_lengths, simulated_acquisition
from ezmsg.mlx.memory import memory_snapshot
from ezmsg.mlx.plan import recommend_cache_limit

SIZES = (300, 1200, 4800)

WARM_UP = 3.0
"""The first seconds of stream, in which kernels are compiled, do not count for the times."""

N_INTERVALS = 400
"""Points of the curve of the cache over time."""


NO_LIMIT_ON_CPU = (
    "No limit: MLX's own limit on the CPU, 32 MiB, is lifted out of the way. A full cache turns away there what is "
    "freed; on a GPU it drops what was used least recently."
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    name: str
    limit_mb: float | str | None = None
    clear_every: float | None = None
    """Seconds of stream from one ``mx.clear_cache()`` to the next; None: never."""
    rechunk: Literal["carry", "emit"] | None = None
    """What Rechunk does with samples that fill no piece; None: no Rechunk."""
    as_it_comes: bool = False
    """Whether MLX keeps its own limit where that is small: 32 MiB on the CPU."""


CONFIGURATIONS = {
    "mlx": Configuration("MLX as it comes", as_it_comes=True),
    "none": Configuration("no limit"),
    "512": Configuration("512 MiB", limit_mb=512.0),
    "256": Configuration("256 MiB", limit_mb=256.0),
    "128": Configuration("128 MiB", limit_mb=128.0),
    "0": Configuration("0 (no cache)", limit_mb=0.0),
    "clear60": Configuration("clear every 60 s", clear_every=60.0),
    "clear6": Configuration("clear every 6 s", clear_every=6.0),
    "clear1": Configuration("clear every 1 s", clear_every=1.0),
    "rechunk": Configuration("Rechunk", rechunk="carry"),
    "rechunkemit": Configuration("Rechunk, emit", rechunk="emit"),
    "rechunk512": Configuration("Rechunk, 512 MiB", limit_mb=512.0, rechunk="carry"),
    "recommended": Configuration("recommended"),
    "auto": Configuration("auto", limit_mb="auto"),
}


def limits(text: str) -> dict[str, Configuration]:
    """Configurations with the limits of an option, like "auto,none,64,512"."""
    found = {}
    for name in text.split(","):
        limit = checked.mib(name)
        found[name] = CONFIGURATIONS.get(name) or Configuration(f"{limit:g} MiB", limit_mb=limit)
    return found


def run(configuration: Configuration, stream: SimulatedAcquisitionSettings) -> Run:
    """Run the chain over the stream. For a fresh process."""
    import mlx.core as mx

    lifted = configuration.limit_mb is None and not configuration.as_it_comes and lift_small_default()
    chain = make_chain(to_mlx(configuration.limit_mb))
    rechunk = RechunkTransformer(sizes=SIZES, remainder=configuration.rechunk) if configuration.rechunk else None
    warm_up = min(WARM_UP, stream.duration / 4)
    next_clear = configuration.clear_every
    lengths: set[int] = set()
    timed: list[tuple[int, float]] = []
    curve: list[tuple[float, float]] = []
    snapshots = []
    cache = 0

    for message in simulated_acquisition(stream):
        now = end_of(message)
        started_at = time.perf_counter()
        for piece in rechunk(message) if rechunk else [message]:
            lengths.add(piece.data.shape[0])
            for stage in chain:
                piece = stage(piece)
        cache = max(cache, mx.get_cache_memory())
        if next_clear is not None and now >= next_clear:
            mx.clear_cache()
            next_clear += configuration.clear_every
        seconds = time.perf_counter() - started_at
        if now > warm_up:
            timed.append((message.data.shape[0], seconds))
        if now >= len(curve) * stream.duration / N_INTERVALS:
            curve.append((now, cache / 2**20))
            snapshots.append(memory_snapshot())
            cache = 0

    snapshots.append(memory_snapshot())
    lengths_timed, times = np.array(timed).T
    steady = 1e3 * times[lengths_timed == stream.samples_per_message]
    return Run(
        device=str(mx.default_device().type).rpartition(".")[2],
        default_lifted=lifted,
        n_lengths=len(lengths),
        speed=float(lengths_timed.sum() / stream.sampling_rate / times.sum()),
        steady_ms_median=float(np.median(steady)),
        steady_ms_p99=float(np.percentile(steady, 99)),
        live_most=snapshots[-1].mlx_peak,
        cache=Course.of([*(most for _, most in curve), snapshots[-1].mlx_cache]),
        footprint=Course.of(snapshot.footprint for snapshot in snapshots),
        resident_set=Course.of(snapshot.resident_set for snapshot in snapshots),
        device_memory=Course.of(snapshot.device_memory for snapshot in snapshots),
        curve=curve,
    )


def recommended_limits(stream: SimulatedAcquisitionSettings) -> tuple[float, float]:
    """Recommended limits in MiB for the stream as it comes, and behind Rechunk. For a fresh process."""
    chain = make_chain(to_mlx(None))
    rechunk = RechunkTransformer(sizes=SIZES)
    pieces = (piece for message in simulated_acquisition(stream) for piece in rechunk(message))
    messages = simulated_acquisition(stream)
    return recommend_cache_limit(chain, messages).limit_mb, recommend_cache_limit(chain, pieces).limit_mb


def stalls_of(stream: SimulatedAcquisitionSettings) -> list[float]:
    """When stalls end, in seconds of stream."""
    ends = itertools.accumulate(message_lengths(stream))
    longer = (length > stream.samples_per_message for length in message_lengths(stream))
    return [end / stream.sampling_rate for end, is_longer in zip(ends, longer) if is_longer]


def compare(
    configurations: dict[str, Configuration],
    stream: SimulatedAcquisitionSettings,
    repeats: int,
    console: Console,
    save: Callable[[Comparison], None],
) -> Comparison:
    """Measure the configurations one after the other, and all of them again; *save* what there is after each run."""
    configurations = dict(configurations)
    notes = []
    for name, configuration in list(configurations.items()):
        if configuration.clear_every is not None and configuration.clear_every >= stream.duration:
            del configurations[name]
            notes.append(f"{configuration.name}: left out, for the stream is shorter.")
    runs: dict[str, list[Run]] = {name: [] for name in configurations}
    with console.status("") as status:
        if "recommended" in configurations:
            status.update("measuring the recommended limit")
            limit, behind_rechunk = in_fresh_process(recommended_limits, stream)
            configurations["recommended"] = Configuration("recommended", limit_mb=limit)
            notes.append(f"Recommended: {limit:.0f} MiB for these messages, {behind_rechunk:.0f} MiB behind Rechunk.")
        comparison = Comparison(
            names={key: configuration.name for key, configuration in configurations.items()},
            limits_mb={key: configuration.limit_mb for key, configuration in configurations.items()},
            runs=runs,
            notes=notes,
            stalls=stalls_of(stream),
        )
        for repeat in range(repeats):
            for number, (name, configuration) in enumerate(configurations.items(), start=1):
                status.update(f"{configuration.name} ({repeat * len(runs) + number} of {repeats * len(runs)})")
                runs[name].append(in_fresh_process(run, configuration, stream))
                save(comparison)
    if any(run.default_lifted for run in itertools.chain(*runs.values())):
        notes.append(NO_LIMIT_ON_CPU)
    return comparison


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = SimulatedAcquisitionSettings(duration=9.0, stall_every=20)
    numbers = {
        "--minutes": ("M", checked.positive, default.duration / 60, "length of the stream in minutes"),
        "--stall-every": ("N", checked.whole, default.stall_every, "messages from one stall to the next, 0: none"),
        "--channels": ("N", checked.count, default.n_channels, "number of channels"),
        "--repeats": ("N", checked.count, 1, "how often to run each configuration, in turn; medians are shown"),
    }
    for option, (metavar, kind, value, text) in numbers.items():
        parser.add_argument(option, metavar=metavar, type=kind, default=value, help=f"{text} [{value}]")
    text = f"which ones, of {', '.join(CONFIGURATIONS)} [all]"
    names = list(CONFIGURATIONS)
    parser.add_argument("--configurations", metavar="NAME", nargs="+", choices=names, default=names, help=text)
    text = "only these limits in MiB, like auto,none,64,512: is auto as small as the smallest that is as fast?"
    parser.add_argument("--limits", metavar="MIB,...", type=limits, help=text)
    parser.add_argument("--json", metavar="FILE", type=checked.file, help="where to save the numbers, after each run")
    text = "where to draw the cache over time, and speed against memory"
    parser.add_argument("--plot", metavar="FILE.png", type=checked.picture, help=text)
    options = parser.parse_args()
    checked.require_mlx(parser)
    options.compared = options.limits or {name: CONFIGURATIONS[name] for name in options.configurations}
    if options.stall_every == 1:
        parser.error("argument --stall-every: at 1 there are no ordinary messages")
    try:
        options.stream = dataclasses.replace(
            default,
            duration=60 * options.minutes,
            stall_every=options.stall_every,
            n_channels=options.channels,
        )
    except ValueError as error:
        parser.error(str(error))
    if options.stream.n_samples < options.stream.samples_per_message:
        parser.error(
            f"argument --minutes: got {options.minutes:g}; allowed are at least "
            f"{options.stream.samples_per_message / options.stream.sampling_rate / 60:.2g}, which hold one message"
        )
    return options


def main() -> int:
    options = parse_options()
    # INFO lines of the processes would run into the table.
    os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING")
    console = Console()

    def save(comparison: Comparison) -> None:
        if options.json:
            numbers = {"stream": dataclasses.asdict(options.stream), **dataclasses.asdict(comparison)}
            if (search := search_of(comparison)) is not None:
                numbers["search"] = dataclasses.asdict(search)
            with open(options.json, "w") as file:
                json.dump(numbers, file, indent=1)

    comparison = compare(options.compared, options.stream, options.repeats, console, save)
    save(comparison)
    print_report(comparison, console)
    if options.plot:
        draw(comparison, options.plot)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
