r"""The limit that finds itself beside fixed ones on the CPU, over lengths and channels, in turns.

One process for each limit runs the example chain stage by stage, with a stall of a new length after each 1.5 s of
stream. The processes take turns, round by round, so that what else the machine does weighs on all alike; compared are
CPU seconds, as ratios within a round, and the most that MLX's cache has held.

    python tests/benchmarks/auto_limit_grid.py --json auto_limit_cpu.json
"""

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

RATE = 30000.0
SAMPLES, CHANNELS = (30, 300, 3000, 9000), (64, 256, 1024)
LIMITS = {"auto": "auto", "32": 32.0, "128": 128.0, "512": 512.0, "512 again": 512.0}
"""In MiB, by their names; 32 is MLX's own on the CPU. The last one says by its speed how far to trust the others."""

STALL_EVERY = 1.5
"""Seconds of stream."""

LEAST_BETWEEN = 20
"""Messages from one stall to the next, at least."""

TURNS_A_STALL = 5
"""Turns of a limit from one stall to the next."""

WARM_UP = 2 * LEAST_BETWEEN

MOST_WARM_UP = 120
"""Messages in which "auto" has doubled its limit as often as it may."""

KEEPS, MEMORY = 0.97, 1.3
"""What "auto" is held to: of the speed at 512 MiB, and times the least cache that gives it."""


def stream(n_samples: int, n_channels: int) -> Iterator[AxisArray]:
    """Messages of counts without an end, one in so many after a stall of 20 to 500 ms."""
    rng = np.random.default_rng(0)
    counts = rng.integers(-500, 500, (n_samples + 15000, n_channels)).astype(np.int16)
    channels = AxisArray.CoordinateAxis(data=np.arange(n_channels), dims=["ch"])
    every = stall_after(n_samples)
    start = number = 0
    while True:
        number += 1
        length = n_samples + (int(rng.integers(600, 15001)) if number % every == 0 else 0)
        axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=start / RATE), "ch": channels}
        yield AxisArray(counts[:length], ["time", "ch"], axes, key="grid", stream_dim="time")
        start += length


def stall_after(n_samples: int) -> int:
    return max(round(STALL_EVERY * RATE / n_samples), LEAST_BETWEEN)


def work(limit: float | str, connection: Connection) -> None:
    """One process: for each message ``(samples, channels)`` a new chain, for each ``n`` that many messages of it."""
    from support.ewma_chain import to_mlx

    import mlx.core as mx
    from ewma_chain_offline import make_chain

    mx.set_default_device(mx.cpu)
    chain, messages = [], iter(())
    while (asked := connection.recv()) is not None:
        if isinstance(asked, tuple):
            chain, messages = [], iter(())
            gc.collect()
            mx.clear_cache()
            chain, messages = make_chain(to_mlx(limit)), stream(*asked)
            connection.send(None)
            continue
        most = 0
        started_at, wall = time.process_time(), time.perf_counter()
        for _ in range(asked):
            message = next(messages)
            for stage in chain:
                message = stage(message)
            most = max(most, mx.get_cache_memory())
        connection.send((time.process_time() - started_at, time.perf_counter() - wall, most / 2**20))


def measure(n_samples: int, n_channels: int, workers: dict, n_rounds: int, most_seconds: float) -> dict:
    """One row of the table."""
    # Short turns, so that the machine is the same for all of one round.
    n_messages = max(stall_after(n_samples) // TURNS_A_STALL, 4)
    for connection in workers.values():
        connection.send((n_samples, n_channels))
        connection.recv()
    # Kernels are compiled, stalls have been, and "auto" has found its limit.
    for limit, connection in workers.items():
        connection.send(MOST_WARM_UP if limit == "auto" else WARM_UP)
        connection.recv()
    rounds: dict[str, list[tuple[float, float, float]]] = {limit: [] for limit in workers}
    ends_at = time.monotonic() + most_seconds
    for number in range(n_rounds):
        if number >= 2 * TURNS_A_STALL and time.monotonic() > ends_at:
            break
        order = list(workers)
        for limit in order[number % len(order) :] + order[: number % len(order)]:
            workers[limit].send(n_messages)
            rounds[limit].append(workers[limit].recv())
    # From one stall to the next.
    spent = {
        limit: [sum(cpu for cpu, _, _ in found[start : start + TURNS_A_STALL]) for start in _starts(len(found))]
        for limit, found in rounds.items()
    }
    base = spent["512"]
    speed = {
        limit: statistics.median(most / cpu for most, cpu in zip(base, found, strict=True))
        for limit, found in spent.items()
    }
    held = {limit: max(most for _, _, most in found) for limit, found in rounds.items()}
    least = min(held[limit] for limit in workers if limit != "auto" and speed[limit] >= KEEPS)
    keeps = speed["auto"] >= KEEPS and held["auto"] <= max(MEMORY * least, 1.0)
    return {
        "samples": n_samples,
        "channels": n_channels,
        "ms": round(1e3 * statistics.median(base) / (n_messages * TURNS_A_STALL), 2),
        **{f"speed_{limit}": round(value, 2) for limit, value in speed.items()},
        **{f"held_{limit}": round(value, 1) for limit, value in held.items()},
        "memory": round(held["auto"] / max(least, 1.0), 2),
        "n_stalls": len(base),
        "held_to": "yes" if keeps else "no",
    }


def _starts(n_rounds: int) -> range:
    return range(0, n_rounds - TURNS_A_STALL + 1, TURNS_A_STALL)


def results(rows: list[dict], command: str) -> dict:
    """*rows* in the form of docs/results/data."""
    packages = {"ezmsg-mlx": "ezmsg-mlx", "MLX": "mlx", "ezmsg": "ezmsg", "ezmsg-sigproc": "ezmsg-sigproc"}
    versions = {name: version(package).partition("+")[0] for name, package in packages.items()}
    speeds = [{"head": f"speed at {name}", "key": f"speed_{name}", "digits": 2} for name in LIMITS if name != "512"]
    held = [
        {"head": f"cache at {name}, MiB", "key": f"held_{name}", "digits": 0} for name in LIMITS if name != "512 again"
    ]
    return {
        "title": "The limit that finds itself beside fixed ones on the CPU, by the speed at 512 MiB",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} shared cores",
        "versions": {**versions, "NumPy": np.__version__, "Python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": command,
        "form": "bare chain",
        "state": "settled",
        "input": "host",
        "spread": "Medians of ratios of CPU seconds from one stall to the next, in turns; the most that was cached",
        "columns": [
            {"head": "samples", "key": "samples"},
            {"head": "channels", "key": "channels"},
            {"head": "CPU ms a message at 512", "key": "ms", "digits": 1},
            *speeds,
            *held,
            {"head": "cache at auto, times the least that keeps 0.97", "key": "memory", "digits": 2},
        ],
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the table into this file, after each row")
    parser.add_argument("--rounds", metavar="N", type=int, default=60, help="turns of each limit, at most [60]")
    text = "for the turns of one row, after those of two stalls [60]"
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help=text)
    parser.add_argument("--samples", metavar="N", type=int, nargs="+", default=SAMPLES, help="only these rows")
    parser.add_argument("--tiny", action="store_true", help="two small shapes and few rounds, to see that it runs")
    options = parser.parse_args()
    # What a limit does is told in the table.
    os.environ["EZMSG_LOGLEVEL"] = "ERROR"
    shapes = [(30, 64), (300, 64)] if options.tiny else [(n, c) for n in options.samples for c in CHANNELS]
    context = multiprocessing.get_context("spawn")
    workers, processes = {}, []
    for name, limit in LIMITS.items():
        workers[name], other = context.Pipe()
        processes.append(context.Process(target=work, args=(limit, other), daemon=True))
        processes[-1].start()
    rows = []
    for n_samples, n_channels in shapes:
        n_rounds = TURNS_A_STALL if options.tiny else options.rounds
        row = measure(n_samples, n_channels, workers, n_rounds, options.seconds)
        rows.append(row)
        print(row, flush=True)
        if options.json:
            made = results(rows, "python tests/benchmarks/auto_limit_grid.py")
            Path(options.json).write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    for connection, process in zip(workers.values(), processes, strict=True):
        connection.send(None)
        process.join(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
