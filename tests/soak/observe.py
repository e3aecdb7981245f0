"""Watches the processes of the soak test from outside."""

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import psutil
from ezmsg.core.graphcontext import GraphContext

from soak.settings import VISITED

SHARED_MEMORY = pathlib.Path("/dev/shm")
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of one process at one moment, in MiB."""

    seconds: float
    """Since all processes were there."""

    resident_set: float
    shared: float
    """Segments of shared memory that it has open. NaN where the system does not tell."""


def first_and_last(course: Sequence[tuple[float, float]], settled_after: float) -> tuple[float, float]:
    """Median of the first values after the process has settled, and of the last; NaN if there are none.

    Of a sixtieth of the run each, and of ten seconds at least: memory follows the length of the messages.
    """
    settled = [(seconds, value) for seconds, value in course if seconds >= settled_after]
    if not settled:
        return float("nan"), float("nan")
    begin, end = settled[0][0], settled[-1][0]
    span = max(10.0, (end - begin) / 60)
    first = [value for seconds, value in settled if seconds < begin + span]
    last = [value for seconds, value in settled if seconds > end - span]
    return statistics.median(first), statistics.median(last)


class Observer:
    """Memory of all processes of one session, sampled; and what of them is there after the end.

    Args:
        session: Process identifier of the session's leader.
        folder: Where the processes leave their names, ``NAME.pid``.
        settled_after: Seconds after which memory must not grow any more.
    """

    def __init__(self, session: int, folder: pathlib.Path, settled_after: float) -> None:
        self.session = session
        self.folder = folder
        self.settled_after = settled_after
        self.started_at = float("nan")
        """By ``time.monotonic()``, when all processes were there."""

        self.memory: dict[str, list[Memory]] = {}
        self._segments: set[pathlib.Path] = set()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.25):
            running = self.running()
            if math.isnan(self.started_at) and len(running) == 3:
                self.started_at = time.monotonic()
            for name, pid in running.items() if not math.isnan(self.started_at) else ():
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    process = psutil.Process(pid)
                    segments = open_segments(process)
                    self._segments |= segments.keys()
                    shared = sum(segments.values()) / MIB if sys.platform == "linux" else float("nan")
                    memory = Memory(time.monotonic() - self.started_at, process.memory_info().rss / MIB, shared)
                    self.memory.setdefault(name, []).append(memory)

    def stop(self) -> None:
        self.stopped.set()

    def running(self) -> dict[str, int]:
        """Names and identifiers of the processes that have started and do not end yet."""
        pids = {path.stem: int(path.read_text()) for path in self.folder.glob("*.pid")}
        return {name: pid for name, pid in pids.items() if not (self.folder / f"{name}.json").exists()}

    def first_and_last(self, name: str, quantity: str) -> tuple[float, float]:
        """Of one quantity of a process, as :func:`first_and_last` has it."""
        course = [(sample.seconds, getattr(sample, quantity)) for sample in self.memory.get(name, ())]
        return first_and_last(course, self.settled_after)

    def left(self) -> list[str]:
        """Processes and segments that are still there."""
        deadline = time.monotonic() + 30.0
        # A process that has handed on its result may take a moment to end, and so may what removes its segments.
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _found(self) -> list[str]:
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"process {process.pid} ({' '.join(process.cmdline()[:4])})")
        return found + sorted(path.name for path in self._segments if path.exists())

    def show_stacks(self) -> None:
        """Let the processes print the stacks of their threads; see Watch."""
        for pid in self.running().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        # For the stacks to be written.
        time.sleep(1.0)

    def clean_up(self) -> None:
        """End what is left, and remove its segments, which nobody else does then."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in self._segments:
            path.unlink(missing_ok=True)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self.session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def open_segments(process: psutil.Process) -> dict[pathlib.Path, int]:
    """Segments of shared memory that *process* has mapped, and their sizes in bytes."""
    if sys.platform != "linux":
        return {}
    paths = {pathlib.Path(region.path) for region in process.memory_maps()}
    return {path: path.stat().st_size for path in paths if path.parent == SHARED_MEMORY and path.exists()}


class Visitor:
    """Comes to the running graph as a viewer of the monitor does: subscribes, receives for a while, and goes."""

    TOPIC = "CHAIN/MONITOR/OUTPUT_SIGNAL"

    def __init__(self, address: tuple[str, int], folder: pathlib.Path, observer: Observer) -> None:
        self.address = address
        self.folder = folder
        self.observer = observer
        self.rows: list[int] = []
        """Rows that came in each visit."""

        self.errors: list[str] = []
        self._rng = random.Random(0)

    def run(self) -> None:
        while not self.observer.stopped.wait(self._rng.uniform(0.5, 2.0)):
            if len(self.observer.running()) < 3:
                continue
            try:
                asyncio.run(self._visit())
            except OSError:
                # The graph has ended.
                continue
            except Exception as error:
                # While it ends, a connection may break in the middle of an answer.
                if len(self.observer.running()) == 3:
                    self.errors.append(repr(error))

    async def _visit(self) -> None:
        n_rows = 0
        async with GraphContext(self.address, auto_start=False) as context:
            subscriber = await context.subscriber(self.TOPIC)
            ends_at = time.monotonic() + self._rng.uniform(1.0, 3.0)
            # At least until a row has come, which may take longer on a busy machine, or until the graph ends.
            while (not n_rows or time.monotonic() < ends_at) and len(self.observer.running()) == 3:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(subscriber.recv(), 0.25)
                    n_rows += 1
        # Otherwise the graph ended meanwhile.
        if len(self.observer.running()) == 3:
            self.rows.append(n_rows)
            (self.folder / VISITED).touch()
