r"""The limit that finds itself beside fixed ones on the CPU, over lengths and channels, in turns.

One process for each limit runs the example chain stage by stage, with a stall of a new length now and then. The
processes take turns, from stall to stall, so that what else the machine does weighs on all alike. Fixed limits are
512 MiB, MLX's own 32, and a half, one and two working sets, as "auto" has measured it.

CPU seconds scatter by some percent, page faults hardly: what a limit costs on the CPU is that buffers are allocated
anew, and their pages zeroed. So "auto" is judged by them. *Speed by faults* is that at 512 MiB with the faults of
another limit, where one costs what touching new memory costs in the same process. Memory is by how much the resident
set has grown at most, from after a tiny message on, and what MLX's cache has held at most.

    python tests/benchmarks/auto_limit_grid.py --json auto_limit_cpu.json

takes seven minutes on two cores.
"""

import argparse
import mmap
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from results_file import LIVE, write_results

RATE = 30000.0
SAMPLES, CHANNELS = (30, 300, 3000, 9000), (64, 256, 1024)
FIXED = (32.0, 512.0)
"""In MiB; 32 is MLX's own on the CPU."""

OF_WORKING_SET = (0.5, 1.0, 2.0)
"""Fixed limits, too."""

STALL_EVERY = 0.75
"""Seconds of stream."""

LEAST_BETWEEN = 20
"""Messages from one stall to the next, at least."""

FIRST = 19
"""Messages before the first stall in which "auto" measures the working set."""

KEEPS, MEMORY = 0.97, 1.3
"""What "auto" is held to: of the speed at 512 MiB, and times the least memory that gives it."""

SMALL = 8.0
"""MiB of growth that count at least: a resident set scatters by one or two."""

MIB = 1 << 20

Limit: TypeAlias = float | str


@dataclass(frozen=True)
class Turn:
    """What one process used from one stall to the next."""

    cpu: float
    """In seconds."""

    faults: int
    """Pages that were touched for the first time."""

    faults_stall: int
    """Of these, in the message after the stall."""

    cached: float
    """By MLX at most, in MiB."""

    grown: float
    """The resident set at most, in MiB."""


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


def work(limit: Limit, shape: tuple[int, int], connection: Connection) -> None:
    """One process: for each number, that many messages."""
    from support.ewma_chain import to_mlx

    import mlx.core as mx
    from ewma_chain_offline import make_chain

    from ezmsg.mlx import cache_limit

    mx.set_default_device(mx.cpu)
    # Kernels are loaded, and what MLX and NumPy need once.
    tiny = make_chain(to_mlx(limit))
    for message, _ in zip(stream(30, 4), range(3), strict=False):
        run(tiny, message)
    del tiny, message
    chain, messages = make_chain(to_mlx(limit)), stream(*shape)
    before = resident_set()
    connection.send(None)
    while (asked := connection.recv()) is not None:
        cached, faults_stall = 0, 0
        cpu, faults = time.process_time(), n_faults()
        for _ in range(asked):
            message, so_far = next(messages), n_faults()
            run(chain, message)
            if message.data.shape[0] != shape[0]:
                faults_stall += n_faults() - so_far
            cached = max(cached, mx.get_cache_memory())
        turn = Turn(
            cpu=time.process_time() - cpu,
            faults=n_faults() - faults,
            faults_stall=faults_stall,
            cached=cached / MIB,
            grown=most_resident() - before,
        )
        connection.send((turn, cache_limit().limit_mb))
    # Last, for it makes the resident set larger.
    connection.send(seconds_a_fault())


def run(chain: list, message: AxisArray) -> None:
    for stage in chain:
        message = stage(message)


def n_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_set() -> float:
    """In MiB."""
    from ezmsg.mlx import memory_snapshot

    return memory_snapshot().resident_set


def most_resident() -> float:
    """In MiB, in the life of the process."""
    # In KiB, but for macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB


def seconds_a_fault() -> float:
    """CPU time of touching a page of new memory, beside that of touching it again."""
    n_bytes = 64 * MIB
    memory = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    times, faults = [], n_faults()
    for _ in range(2):
        began = time.process_time()
        memory[::4096] = 1
        times.append(time.process_time() - began)
    return max(times[0] - times[1], 0.0) / max(n_faults() - faults, 1)


class Worker:
    """A process with one limit."""

    def __init__(self, limit: Limit, shape: tuple[int, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(limit, shape, other), daemon=True)
        self.process.start()
        self.turns: list[Turn] = []
        self.seconds_a_fault = 0.0
        self.limit_mb: float | None = None

    def is_ready(self) -> None:
        self.connection.recv()

    def take_turn(self, n_messages: int) -> None:
        self.connection.send(n_messages)
        turn, self.limit_mb = self.connection.recv()
        self.turns.append(turn)

    def stop(self) -> None:
        self.connection.send(None)
        self.seconds_a_fault = self.connection.recv()
        self.process.join(30)


def measure(n_samples: int, n_channels: int, n_rounds: int, most_seconds: float) -> dict:
    """One row of the table."""
    from ezmsg.mlx.cache.auto import MARGIN

    shape, every = (n_samples, n_channels), stall_after(n_samples)
    workers = {"auto": Worker("auto", shape)} | {f"{limit:g}": Worker(limit, shape) for limit in FIXED}
    workers["auto"].is_ready()
    # Before the first stall.
    workers["auto"].take_turn(FIRST)
    working_set = workers["auto"].limit_mb / MARGIN
    workers |= {f"{share:g} working sets": Worker(share * working_set, shape) for share in OF_WORKING_SET}
    for name, worker in workers.items():
        if name != "auto":
            worker.is_ready()
            worker.take_turn(FIRST)
        # To the end of the second stall: the first may have changed what the steady message needs.
        worker.take_turn(every - FIRST)
        worker.take_turn(every)
        worker.turns.clear()
    ends_at = time.monotonic() + most_seconds
    for number in range(n_rounds):
        if number >= 2 and time.monotonic() > ends_at:
            break
        order = list(workers)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            workers[name].take_turn(every)
    for worker in workers.values():
        worker.stop()
    return row_of(shape, working_set, {name: worker.turns for name, worker in workers.items()}, _cost(workers))


def _cost(workers: Mapping[str, Worker]) -> float:
    return statistics.median(worker.seconds_a_fault for worker in workers.values())


def row_of(shape: tuple[int, int], working_set: float, turns: Mapping[str, list[Turn]], seconds_a_fault: float) -> dict:
    """The row of one shape, from the turns of each limit."""
    every = stall_after(shape[0])
    base = turns["512"]
    cpu = {name: statistics.median(turn.cpu for turn in found) for name, found in turns.items()}
    faults = {name: statistics.mean(turn.faults for turn in found) for name, found in turns.items()}
    speed = {
        name: statistics.median(other.cpu / turn.cpu for other, turn in zip(base, found, strict=True))
        for name, found in turns.items()
    }
    by_faults = {
        name: cpu["512"] / max(cpu["512"] + (faults[name] - faults["512"]) * seconds_a_fault, 1e-9) for name in turns
    }
    grown = {name: max(turn.grown for turn in found) for name, found in turns.items()}
    cached = {name: max(turn.cached for turn in found) for name, found in turns.items()}
    least = min((name for name in turns if name != "auto" and by_faults[name] >= KEEPS), key=grown.__getitem__)
    memory = max(grown["auto"], SMALL) / max(grown[least], SMALL)

    def steady(name: str) -> int:
        return round(statistics.mean(turn.faults - turn.faults_stall for turn in turns[name]) / (every - 1))

    def stall(name: str) -> int:
        return round(statistics.mean(turn.faults_stall for turn in turns[name]))

    return {
        "samples": shape[0],
        "channels": shape[1],
        "ms": round(1e3 * cpu["512"] / every, 2),
        "working_set": round(working_set, 1),
        "speed_cpu": round(speed["auto"], 2),
        "speed": round(by_faults["auto"], 2),
        **{f"steady_{name}": steady(name) for name in ("auto", "512")},
        **{f"stall_{name}": stall(name) for name in ("auto", "512")},
        **{f"cached_{name}": round(cached[name], 1) for name in ("auto", "512")},
        **{f"grown_{name}": round(grown[name]) for name in ("auto", "512")},
        "least": f"{grown[least]:.0f}, at {least}" + ("" if "sets" in least else " MiB"),
        "memory": round(memory, 2),
        "held_to": "yes" if by_faults["auto"] >= KEEPS and memory <= MEMORY else "no",
        "n_stalls": len(base),
        "us_a_fault": round(1e6 * seconds_a_fault, 2),
        "all": {
            name: {
                "cpu": round(speed[name], 3),
                "by_faults": round(by_faults[name], 3),
                "steady": steady(name),
                "stall": stall(name),
                "cached": round(cached[name], 1),
                "grown": round(grown[name], 1),
            }
            for name in turns
        },
    }


COLUMNS = (
    ("samples", "samples", None),
    ("channels", "channels", None),
    ("CPU ms a message at 512 MiB", "ms", 1),
    ("working set, MiB", "working_set", 1),
    ("speed at auto, by page faults", "speed", 2),
    ("by CPU seconds", "speed_cpu", 2),
    ("page faults of a steady message at auto", "steady_auto", None),
    ("at 512", "steady_512", None),
    ("of a stall at auto", "stall_auto", None),
    ("at 512", "stall_512", None),
    ("cache at most at auto, MiB", "cached_auto", 0),
    ("at 512", "cached_512", 0),
    ("growth of the resident set at auto, MiB", "grown_auto", None),
    ("at 512", "grown_512", None),
    ("least at a fixed limit that keeps 0.97", "least", None),
    ("auto, times that", "memory", 2),
)
NOTE = (
    "A page fault is a page of new memory that is touched first. By page faults, a limit is as fast as 512 MiB but for "
    "what they cost, measured in the same processes; CPU seconds scatter by some percent. Fixed limits are 32 and "
    "512 MiB and 0.5, 1 and 2 working sets, as measured before the first stall."
)


def save(path: str, rows: list[dict]) -> None:
    """*rows* in the form of docs/results/data."""
    write_results(
        path,
        title="The limit that finds itself beside fixed ones on the CPU, by the speed at 512 MiB",
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        command="python tests/benchmarks/auto_limit_grid.py",
        packages=LIVE,
        form="bare chain",
        state="settled",
        spread="Page faults are means, ratios of CPU seconds medians, from one stall to the next, in turns",
        columns=COLUMNS,
        rows=rows,
        notes=[NOTE],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the table into this file, after each row")
    parser.add_argument("--rounds", metavar="N", type=int, default=6, help="stalls for each limit, at most [6]")
    text = "for the turns of one row, after those of two stalls [30]"
    parser.add_argument("--seconds", metavar="S", type=float, default=30.0, help=text)
    parser.add_argument("--samples", metavar="N", type=int, nargs="+", default=SAMPLES, help="only these rows")
    parser.add_argument("--channels", metavar="N", type=int, nargs="+", default=CHANNELS, help="only these rows")
    parser.add_argument("--tiny", action="store_true", help="one small shape and few rounds, to see that it runs")
    options = parser.parse_args()
    # What a limit does is told in the table.
    os.environ["EZMSG_LOGLEVEL"] = "ERROR"
    shapes = [(300, 8)] if options.tiny else [(n, c) for n in options.samples for c in options.channels]
    rows = []
    for n_samples, n_channels in shapes:
        rows.append(measure(n_samples, n_channels, 2 if options.tiny else options.rounds, options.seconds))
        print(rows[-1], flush=True)
        if options.json:
            save(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
