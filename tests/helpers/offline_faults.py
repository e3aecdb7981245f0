"""What goes wrong while a worker is at a piece of a recording: it is killed in each phase, or the disk is full."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import ezmsg.core as ez
from ezmsg.baseproc import BaseTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import ZarrSink

from .offline_memory import MemorySource


def die(folder: Path, phase: str, times: int = 1) -> None:
    """Kill this process, a worker, unless that has been done so often in this phase."""
    if multiprocessing.parent_process() is None:
        return
    for marker in (folder / f"{phase}-{number}" for number in range(1, times + 1)):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlySource(MemorySource):
    """Kills its process once, in the middle of the second piece."""

    def __init__(self, folder: Path, **options: float) -> None:
        super().__init__(n_samples=4000, chunk=170, **options)
        self.folder = folder

    def message(self, begin: int, end: int) -> AxisArray:
        if 1200 <= begin < 1500:
            die(self.folder, "reading")
        return super().message(begin, end)


class DeadlySettings(ez.Settings):
    folder: str = ""


class DeadlyTransformer(BaseTransformer[DeadlySettings, AxisArray, AxisArray]):
    """Kills its process once, in the middle of the third piece."""

    def _process(self, message: AxisArray) -> AxisArray:
        if 2.2 <= message.axes["time"].offset < 2.5:
            die(Path(self.settings.folder), "computing")
        return message


def deadly_chain(folder: str) -> DeadlyTransformer:
    """For :func:`functools.partial`."""
    return DeadlyTransformer(folder=folder)


class DeadlySink(ZarrSink):
    """Kills its process before it writes some of the last piece, twice; or finds the disk full there, each time."""

    deadly: Path | None = None
    is_full = False

    def _write(self, when, rows):
        if when[-1] > 3.5:
            if self.deadly is not None:
                die(self.deadly, "writing", times=2)
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._write(when, rows)


class Endless:
    """A task that only reports."""

    n_samples = 2

    def steps(self):
        """Does not end."""
        while True:
            yield 1


class Marking:
    """A task that makes a file."""

    n_samples = 1000

    def __init__(self, file: Path) -> None:
        self.file = file

    def steps(self):
        """Returns the process that did it."""
        yield 0
        self.file.touch()
        return os.getpid()


class WaitingForAnother(Marking):
    """A task that goes on until there is a file."""

    def steps(self):
        """Returns the process that did it."""
        deadline = time.monotonic() + 240.0
        while not self.file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("Nobody has made the file.")
            yield 1
        return os.getpid()
