"""The first process of the soak test: the stream, with pauses."""

import asyncio
import subprocess
import time
from collections.abc import AsyncGenerator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from soak.settings import AWAITED_FOR, TAKEN, VISITED, SoakSettings
from soak.stream import LONGEST, N_CHANNELS, RATE, Stream
from soak.watch import Watch, WatchSettings


class Source(ez.Unit):
    SETTINGS = SoakSettings
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        self.left: list[SharedMemory] = []

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        stream = Stream(self.SETTINGS.seed)
        ch = AxisArray.CoordinateAxis(data=np.arange(N_CHANNELS), dims=["ch"])
        started_at = time.monotonic()
        start = number = 0
        last = False
        while not last:
            await asyncio.sleep(stream.pause(number))
            last = self._is_over(time.monotonic() - started_at, number)
            stop = start + (stream.length(number) or last)
            fault = self.SETTINGS.fault if number % 250 == 249 else ""
            if fault == "skip":
                start, stop = stop, stop + 300
            data = stream.samples(start, stop)
            if fault == "lose":
                data = np.concatenate([data[1:], data[-1:]])
            elif fault == "segment":
                self.left.append(leave_segment())
            elif fault == "process":
                subprocess.Popen(["sleep", "300"])
            axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=start / RATE), "ch": ch}
            attrs = {"n_samples": stop if last else None}
            message = AxisArray(data, ["time", "ch"], axes, attrs, key="soak", stream_dim="time")
            yield self.OUTPUT_SIGNAL, message
            if fault == "repeat":
                yield self.OUTPUT_SIGNAL, message
            start, number = stop, number + 1

    def _is_over(self, seconds: float, number: int) -> bool:
        """Whether all that was asked for has been sent, and what has to happen meanwhile has happened."""
        settings = self.SETTINGS
        if number < settings.n_messages or (not settings.n_messages and seconds < settings.seconds):
            return False
        is_late = not settings.n_messages and seconds >= settings.seconds + AWAITED_FOR
        return is_late or all((Path(settings.folder) / name).exists() for name in (VISITED, TAKEN))


def leave_segment() -> SharedMemory:
    """A segment of shared memory of 1 MiB that nobody unlinks."""
    segment = SharedMemory(create=True, size=1 << 20)
    segment.buf[:] = bytes(1 << 20)
    resource_tracker.unregister(segment._name, "shared_memory")
    return segment


class Acquisition(ez.Collection):
    SETTINGS = SoakSettings
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)
    SOURCE = Source()
    WATCH = Watch()

    def configure(self) -> None:
        self.SOURCE.apply_settings(self.SETTINGS)
        self.WATCH.apply_settings(WatchSettings(self.SETTINGS.folder, "source"))
        # Room for the longest message from the start: a ring that is too small is made anew, and never shrinks.
        self.SOURCE.OUTPUT_SIGNAL.num_buffers = 4
        self.SOURCE.OUTPUT_SIGNAL.buf_size = LONGEST * N_CHANNELS * 2 + 2**16

    def network(self) -> ez.NetworkDefinition:
        return ((self.SOURCE.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),)
