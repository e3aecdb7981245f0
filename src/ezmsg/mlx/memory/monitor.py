"""The memory of this process, as MLX and the operating system count it: read, published as a signal, and given back.

:func:`memory_snapshot` reads it, and :class:`MemoryMonitor` publishes it. :class:`CacheRelease` gives MLX's cache back
when the stream is silent or the machine is short of memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import math
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis

from ..cache import MIB, cache_limit, release_cache
from ..stream.hostmemory import memory_in_use
from ..stream.unit import check_fields, check_number
from .shapes import n_messages, shape_report


def process_memory() -> tuple[float, float]:
    """Resident set and footprint of this process, in bytes."""
    try:
        if sys.platform == "darwin":
            return _memory_on_macos()
        # smaps_rollup, from which psutil has its USS, walks the page tables, which takes long in a process
        # of several GiB.
        with open("/proc/self/status", "rb", buffering=0) as status:
            return _parse_status(status.read())
    except OSError:
        return math.nan, math.nan


_STATUS_FIELDS = re.compile(rb"^(VmRSS|RssAnon|VmSwap):\s+(\d+) kB$", re.MULTILINE)


def _parse_status(status: bytes) -> tuple[float, float]:
    """Resident set and footprint in bytes from the text of ``/proc/self/status`` (see proc_pid_status(5))."""
    sizes = {name: int(kib) * 1024.0 for name, kib in _STATUS_FIELDS.findall(status)}
    return sizes.get(b"VmRSS", math.nan), sizes.get(b"RssAnon", math.nan) + sizes.get(b"VmSwap", 0.0)


# struct rusage_info_v0 of macOS (sys/resource.h): a UUID, then ri_user_time, ri_system_time, ri_pkg_idle_wkups,
# ri_interrupt_wkups, ri_pageins, ri_wired_size, ri_resident_size, ri_phys_footprint and two times, all uint64.
_RUSAGE_INFO_V0 = 0
_RUSAGE_STRUCT = struct.Struct("=16s10Q")


def _memory_on_macos() -> tuple[float, float]:
    buffer = ctypes.create_string_buffer(_RUSAGE_STRUCT.size)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, buffer):
        raise OSError("proc_pid_rusage failed")
    fields = _RUSAGE_STRUCT.unpack(buffer.raw)
    return float(fields[7]), float(fields[8])


def device_memory(mx: ModuleType) -> float:
    """Memory in use on the first CUDA device, in bytes."""
    if not mx.cuda.is_available():
        return math.nan
    # MLX asks NVML, which neither waits for the device nor needs a CUDA context.
    info = mx.device_info(mx.gpu)
    return float(info["total_memory"] - info["free_memory"]) if "free_memory" in info else math.nan


@dataclasses.dataclass(frozen=True)
class MemorySnapshot:
    """Memory of this process at one moment, in MiB. NaN: this platform does not give it, or not yet."""

    mlx_active: float
    """In live MLX arrays. 0 as long as MLX is not loaded, as for the next two."""

    mlx_cache: float
    """In MLX's buffer cache: freed by arrays and kept for reuse."""

    mlx_peak: float
    """The most that ``mlx_active`` has been, since the start or the last ``mx.reset_peak_memory()``."""

    mlx_cache_limit: float
    """The limit on ``mlx_cache`` that :func:`ezmsg.mlx.cache.cache_limit` knows of. NaN for MLX's own default."""

    result_memory: float
    """In memory on the host that results are given in and messages uploaded from: in arrays that users hold, and kept
    for the next ones. With a GPU that is a part of ``mlx_active``."""

    resident_set: float
    """In RAM, shared memory and mapped files included: RSS."""

    footprint: float
    """Memory that the process costs the machine. On macOS ``phys_footprint``, which Activity Monitor shows and which
    has Metal's buffers; it trails a release by up to 2 s. On Linux anonymous memory, in RAM or swapped out, without
    shared memory and files."""

    device_memory: float
    """In use on the first CUDA device by all processes together, once MLX is loaded. NaN without CUDA."""


MEMORY_METRICS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(MemorySnapshot))
"""Names of the metrics, in the order of the ``metric`` axis of :obj:`MemoryMonitor`."""

_SOURCES = {
    "resident_set": "this system has neither /proc nor proc_pid_rusage",
    "footprint": "this system has neither RssAnon in /proc nor proc_pid_rusage",
    "device_memory": "MLX runs on no CUDA device here",
}
"""Reasons for which a metric may be missing."""

_told: set[str] = set()


def memory_snapshot() -> MemorySnapshot:
    """The memory of this process now.

    Never waits for the device, never loads MLX, and leaves MLX's cache limit alone. It is cheap enough for every
    message, also on CUDA while the device is busy, but for the first call there, which has to reach the driver. A
    metric that the platform cannot give is NaN, which is logged once (INFO).
    """
    # Not imported: what has not been loaded uses nothing, and loading it is not the business of an observer.
    mx = sys.modules.get("mlx.core")
    limit = cache_limit().limit_mb
    resident_set, footprint = process_memory()
    snapshot = MemorySnapshot(
        mlx_active=0.0 if mx is None else mx.get_active_memory() / MIB,
        mlx_cache=0.0 if mx is None else mx.get_cache_memory() / MIB,
        mlx_peak=0.0 if mx is None else mx.get_peak_memory() / MIB,
        mlx_cache_limit=math.nan if limit is None else float(limit),
        result_memory=memory_in_use().kept / MIB,
        resident_set=resident_set / MIB,
        footprint=footprint / MIB,
        device_memory=math.nan if mx is None else device_memory(mx) / MIB,
    )
    for name, source in _SOURCES.items():
        is_missing = math.isnan(getattr(snapshot, name)) and (mx is not None or name != "device_memory")
        if is_missing and name not in _told:
            _told.add(name)
            ez.logger.info(f"The memory metric {name} is NaN: {source}.")
    return snapshot


STALLED_SHARE = 0.05
"""On Linux memory is short when tasks wait for it in this share of the time (``Documentation/accounting/psi.rst``)."""


PressureGauge: TypeAlias = Callable[[], str]
"""Says why memory is short since the call before, for the log; nothing where it is not."""


class LinuxPressure:
    """Pressure stall information of the machine, and the events of the control group that this process belongs to.

    Args:
        stalls: The file with the stalls, as ``/proc/pressure/memory``.
        events: The ``memory.events`` of the control group; None without one.
        clock: Seconds.
    """

    def __init__(self, stalls: Path, events: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stalls, self._events, self._clock = stalls, events, clock
        self._last = self._now()

    def _now(self) -> tuple[float, float, int]:
        stalled = re.search(r"^some .*total=(\d+)", _text(self._stalls), re.MULTILINE)
        events = _text(self._events) if self._events is not None else ""
        # "high": reclaim was forced on the group; "max": it was at its limit.
        n_events = sum(int(number) for number in re.findall(r"^(?:high|max) (\d+)$", events, re.MULTILINE))
        return self._clock(), int(stalled[1]) / 1e6 if stalled else math.nan, n_events

    def __call__(self) -> str:
        """See :data:`PressureGauge`."""
        (before, stalled_before, n_before), self._last = self._last, self._now()
        now, stalled, n_events = self._last
        if n_events > n_before:
            return "the control group of this process is at its memory limit"
        share = (stalled - stalled_before) / (now - before) if now > before else 0.0
        return f"tasks of this machine waited for memory {share:.0%} of the time" if share >= STALLED_SHARE else ""


def _mac_level() -> int:
    level, size = ctypes.c_int(1), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    libc = ctypes.CDLL("/usr/lib/libSystem.dylib")
    name = b"kern.memorystatus_vm_pressure_level"
    if libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)):
        return 1
    return level.value


def mac_pressure(level: Callable[[], int] = _mac_level) -> str:
    """See :data:`PressureGauge`; *level* gives 1 (normal), 2 (warning) or 4 (critical), as macOS publishes it."""
    found = level()
    return f"macOS reports memory pressure at level {found}" if found > 1 else ""


def pressure_gauge() -> PressureGauge | None:
    """The gauge of this system; None where it has none."""
    if sys.platform == "darwin":
        return mac_pressure
    stalls, events = Path("/proc/pressure/memory"), _events_of_group(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return LinuxPressure(stalls, events) if stalls.exists() or events is not None else None


def _events_of_group(membership: Path, root: Path) -> Path | None:
    """``memory.events`` of the control group (version 2) that the process belongs to; None without one."""
    group = re.search(r"^0::/(.*)$", _text(membership), re.MULTILINE)
    events = root / group[1] / "memory.events" if group else None
    return events if events is not None and events.exists() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
