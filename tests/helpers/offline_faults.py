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
    """Kills its process before it keeps the last piece, twice; or finds the disk full there, each time."""

    deadly: Path | None = None
    is_full = False

    def piece(self, number, borders):
        """Of which the last is deadly."""
        inner = super().piece(number, borders)
        return DeadlyPiece(inner, self.deadly, self.is_full) if number == len(borders) - 2 else inner


class DeadlyPiece:
    """A piece that is not kept the first times."""

    def __init__(self, inner, deadly: Path | None, is_full: bool) -> None:
        self._inner, self._deadly, self._is_full = inner, deadly, is_full
        self.open, self.append, self.checkpoint, self.close = inner.open, inner.append, inner.checkpoint, inner.close

    def commit(self) -> None:
        """Unless it dies before."""
        if self._deadly is not None:
            die(self._deadly, "writing", times=2)
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inner.commit()


class Marking(MemorySource):
    """Makes a file when it is read, and in its second half waits until another is there."""

    def __init__(self, seed: int, file: Path, other: Path) -> None:
        super().__init__(seed=seed)
        self.file, self.other = file, other

    def message(self, begin: int, end: int) -> AxisArray:
        self.file.write_text(str(os.getpid()))
        deadline = time.monotonic() + 240.0
        while begin > self.n_samples // 2 and not self.other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("Nobody has made the file.")
            time.sleep(0.01)
        return super().message(begin, end)
