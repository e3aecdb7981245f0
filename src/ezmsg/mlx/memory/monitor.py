"""Publish the memory of a process as a signal, and give MLX's cache back when the stream is silent."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis

from ..cache import MIB, release_cache
from ..stream.unit import check_fields, check_number
from .shapes import n_messages, shape_report
from .snapshot import MEMORY_METRICS, PressureGauge, memory_snapshot, pressure_gauge

SECONDS_BETWEEN = 10.0
"""Under pressure that lasts, a stream that runs gives its cache back no more often than this."""


class CacheRelease:
    """When to give MLX's buffer cache back. Asked now and then, by whoever is there anyway: it has no thread.

    Args:
        after_idle: Seconds without a message to a node that converts to MLX, after which the cache is given back; None:
            it is kept.
        pressure: Tells shortage of memory; None: it does not matter, or the system does not tell.
        clock: Seconds.
    """

    def __init__(
        self,
        after_idle: float | None,
        pressure: PressureGauge | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after_idle, self._pressure, self._clock = after_idle, pressure, clock
        self._n_messages, self._since = n_messages(), clock()
        self._is_idle = False
        self._last = -math.inf

    def poll(self) -> float:
        """Give the cache back if it is time to; how many MiB it was."""
        now, n_seen = self._clock(), n_messages()
        # There are fewer where a node is gone.
        if n_seen > self._n_messages:
            self._since, self._is_idle = now, False
        self._n_messages = n_seen
        if self._after_idle is not None and not self._is_idle and now - self._since >= self._after_idle:
            self._is_idle = True
            return self._release(f"no message came for {now - self._since:.0f} s")
        if self._pressure is not None and (reason := self._pressure()) and now - self._last >= SECONDS_BETWEEN:
            return self._release(reason)
        return 0.0

    def _release(self, why: str) -> float:
        released = release_cache() / MIB
        if released:
            self._last = self._clock()
            _trim_heap()
            ez.logger.info(f"MLX's buffer cache is given back, {released:.0f} MiB: {why}.")
        return released


def _trim_heap() -> None:
    """Have the C library of Linux give back what it keeps of freed memory: on the CPU MLX's buffers come from there."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MemoryMonitorSettings(ez.Settings):
    """Settings for :obj:`MemoryMonitor`.

    Raises:
        TypeError: ``interval`` or ``release_after_idle`` is not a number (bool does not count as one), or
            ``release_under_pressure`` is not a bool.
        ValueError: A number is not finite and greater than 0.
    """

    interval: float = 1.0
    """Time from one row to the next, in seconds. May be changed at run time, and counts from the next row on."""

    release_after_idle: float | None = None
    """After so many seconds in which no node has converted a message to MLX, MLX's buffer cache is given back to the
    system, once until messages come again. The first of them allocates one working set. None keeps the cache."""

    release_under_pressure: bool = False
    """Whether the cache is given back, too, when the machine is short of memory: on Linux by its pressure stall
    information and the events of the process's control group, on macOS by its level of memory pressure. Looked at with
    each row, and no more often than every 10 s while it lasts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", check_number("interval", self.interval))
        if self.release_after_idle is not None:
            seconds = check_number("release_after_idle", self.release_after_idle)
            object.__setattr__(self, "release_after_idle", seconds)
        check_fields(self, flags=("release_under_pressure",))


@processor_state
class MemoryMonitorState:
    """State for :obj:`MemoryMonitorProducer`."""

    metric_axis: CoordinateAxis | None = None
    """The names of the metrics, one object for the whole stream: processors recognise it by identity."""

    due: float = 0.0
    """When the next row is due, by ``time.monotonic()``, in seconds."""


class MemoryMonitorProducer(BaseStatefulProducer[MemoryMonitorSettings, AxisArray, MemoryMonitorState]):
    """Produces a row of :func:`memory_snapshot` every ``interval`` seconds, the first at once.

    A message is float64 of shape (time, metric) = (1, 7), in MiB, with the metrics of :obj:`MEMORY_METRICS`. Its offset
    is the ``time.monotonic()`` of the snapshot, in seconds, its gain the interval. ``attrs`` name the unit and the
    process (``pid``), and hold what :func:`shape_report` tells (``shapes``, its summary). Rows that were due while
    the process was busy are left out, not made up for.
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"interval", "release_after_idle", "release_under_pressure"})

    _release: tuple[MemoryMonitorSettings, CacheRelease] | None = None

    def _reset_state(self) -> None:
        self._state.metric_axis = AxisArray.CoordinateAxis(data=np.array(MEMORY_METRICS), dims=["metric"])
        self._state.due = time.monotonic()

    def __call__(self) -> AxisArray:
        """Wait until the next row is due, and return it."""
        if self._hash == -1:
            self._reset_state()
            self._hash = 0
        time.sleep(max(self._state.due - time.monotonic(), 0.0))
        return self._make_row()

    async def _produce(self) -> AxisArray:
        await asyncio.sleep(max(self._state.due - time.monotonic(), 0.0))
        return self._make_row()

    def _make_row(self) -> AxisArray:
        state, interval = self._state, self.settings.interval
        now = time.monotonic()
        n_missed = max((now - state.due) // interval, 0.0)
        state.due += (n_missed + 1.0) * interval
        self._release_cache()
        snapshot = memory_snapshot()
        assert state.metric_axis is not None
        return AxisArray(
            data=np.array([[getattr(snapshot, name) for name in MEMORY_METRICS]]),
            dims=["time", "metric"],
            axes={
                "time": AxisArray.LinearAxis(unit="s", gain=interval, offset=now),
                "metric": state.metric_axis,
            },
            attrs={"unit": "MiB", "pid": os.getpid(), "shapes": shape_report().summary()},
            key="memory",
            stream_dim="time",
        )

    def _release_cache(self) -> None:
        if self._release is None or self._release[0] is not self.settings:
            pressure = pressure_gauge() if self.settings.release_under_pressure else None
            self._release = self.settings, CacheRelease(self.settings.release_after_idle, pressure)
        self._release[1].poll()


class MemoryMonitor(BaseProducerUnit[MemoryMonitorSettings, AxisArray, MemoryMonitorProducer]):
    """Publishes what :obj:`MemoryMonitorProducer` describes, about the process that it lives in.

    Put it into the Collection that is to be watched, so that both run in one process.
    """

    SETTINGS = MemoryMonitorSettings  # type: ignore[assignment]
