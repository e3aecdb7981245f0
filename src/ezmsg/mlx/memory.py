"""What memory a process uses: MLX's own counters beside what the operating system says.

MLX's buffer cache shows in none of the usual places: on a Mac the resident set misses Metal's buffers, on CUDA it
misses the device. :func:`memory_snapshot` reads everything at once, without waiting for the device, and
:obj:`MemoryMonitor` publishes it as a signal that any ezmsg viewer plots.
"""

import asyncio
import ctypes
import dataclasses
import math
import numbers
import os
import re
import struct
import sys
import time
from types import ModuleType

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray

from .cache import MIB, cache_limit


@dataclasses.dataclass(frozen=True)
class MemorySnapshot:
    """Memory of this process at one moment, in MiB. NaN: this platform does not tell, or not yet."""

    mlx_active: float
    """In live MLX arrays. 0 as long as MLX is not loaded, as for the next two."""

    mlx_cache: float
    """In MLX's buffer cache: freed by arrays and kept for reuse."""

    mlx_peak: float
    """The most that ``mlx_active`` has been, since the start or the last ``mx.reset_peak_memory()``."""

    mlx_cache_limit: float
    """The limit on ``mlx_cache`` that :func:`ezmsg.mlx.cache.cache_limit` knows of. NaN for MLX's own default."""

    resident_set: float
    """In RAM, shared memory and mapped files included: RSS."""

    footprint: float
    """What the process costs the machine. On macOS ``phys_footprint``, which Activity Monitor shows and which has
    Metal's buffers; it trails a release by up to 2 s. On Linux anonymous memory, in RAM or swapped out, without
    shared memory and files."""

    device_memory: float
    """In use on the first CUDA device by all processes together, once MLX is loaded. NaN without CUDA."""


MEMORY_METRICS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(MemorySnapshot))
"""Names of the metrics, in the order of the ``metric`` axis of :obj:`MemoryMonitor`."""

_told: set[str] = set()


def memory_snapshot() -> MemorySnapshot:
    """The memory of this process now.

    Never waits for the device, never loads MLX, and leaves MLX's cache limit alone. Takes some 60 us, also on CUDA
    while the device is busy; once 16 ms there, to reach the driver. A metric that the platform cannot give is NaN,
    which is logged once (INFO).
    """
    # Not imported: what has not been loaded uses nothing, and loading it is not the business of an observer.
    mx = sys.modules.get("mlx.core")
    limit = cache_limit().limit_mb
    resident_set, footprint = _process_memory()
    snapshot = MemorySnapshot(
        mlx_active=0.0 if mx is None else mx.get_active_memory() / MIB,
        mlx_cache=0.0 if mx is None else mx.get_cache_memory() / MIB,
        mlx_peak=0.0 if mx is None else mx.get_peak_memory() / MIB,
        mlx_cache_limit=math.nan if limit is None else float(limit),
        resident_set=resident_set / MIB,
        footprint=footprint / MIB,
        device_memory=math.nan if mx is None else _device_memory(mx) / MIB,
    )
    _tell_missing("resident_set", snapshot.resident_set, "this system has neither /proc nor proc_pid_rusage")
    _tell_missing("footprint", snapshot.footprint, "this system has neither RssAnon in /proc nor proc_pid_rusage")
    if mx is not None:
        _tell_missing("device_memory", snapshot.device_memory, "MLX runs on no CUDA device here")
    return snapshot


def _tell_missing(name: str, value: float, reason: str) -> None:
    if math.isnan(value) and name not in _told:
        _told.add(name)
        ez.logger.info(f"The memory metric {name} is NaN: {reason}.")


def _process_memory() -> tuple[float, float]:
    """Resident set and footprint of this process, in bytes."""
    try:
        if sys.platform == "darwin":
            return _parse_rusage(_read_rusage())
        # smaps_rollup, from which psutil has its USS, walks the page tables: 45 ms in a process of 3 GiB.
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


def _read_rusage() -> bytes:
    buffer = ctypes.create_string_buffer(_RUSAGE_STRUCT.size)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, buffer):
        raise OSError("proc_pid_rusage failed")
    return buffer.raw


def _parse_rusage(rusage: bytes) -> tuple[float, float]:
    """Resident set and footprint in bytes from a ``struct rusage_info_v0``."""
    fields = _RUSAGE_STRUCT.unpack(rusage)
    return float(fields[7]), float(fields[8])


def _device_memory(mx: ModuleType) -> float:
    """Memory in use on the first CUDA device, in bytes."""
    if not mx.cuda.is_available():
        return math.nan
    # MLX asks NVML, which neither waits for the device nor needs a CUDA context.
    info = mx.device_info(mx.gpu)
    return float(info["total_memory"] - info["free_memory"]) if "free_memory" in info else math.nan


class MemoryMonitorSettings(ez.Settings):
    """Settings for :obj:`MemoryMonitor`.

    Raises:
        TypeError: ``interval`` is no number (bool is none).
        ValueError: ``interval`` is not finite and greater than 0.
    """

    interval: float = 1.0
    """Time from one row to the next, in seconds. May be changed at run time, and counts from the next row on."""

    def __post_init__(self) -> None:
        interval = self.interval
        if isinstance(interval, (bool, np.bool_)) or not isinstance(interval, numbers.Real):
            raise TypeError(f"interval must be a number of seconds, got {interval!r}.")
        try:
            seconds = float(interval)
        except OverflowError:
            seconds = math.inf
        if not 0 < seconds < math.inf:
            raise ValueError(f"interval must be finite and greater than 0, got {interval!r}.")
        object.__setattr__(self, "interval", seconds)


@processor_state
class MemoryMonitorState:
    """State for :obj:`MemoryMonitorProducer`."""

    metric_axis: AxisArray.CoordinateAxis | None = None
    """The names of the metrics, one object for the whole stream: processors recognise it by identity."""

    due: float = 0.0
    """When the next row is due, by ``time.monotonic()``, in seconds."""


class MemoryMonitorProducer(BaseStatefulProducer[MemoryMonitorSettings, AxisArray, MemoryMonitorState]):
    """Produces a row of :func:`memory_snapshot` every ``interval`` seconds, the first at once.

    A message is float64 of shape (time, metric) = (1, 7), in MiB, with the metrics of :obj:`MEMORY_METRICS`. Its offset
    is the ``time.monotonic()`` of the snapshot, in seconds, its gain the interval; ``attrs`` name the unit and the
    process (``pid``). Rows that were due while the process was busy are left out, not made up for.
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"interval"})

    def _reset_state(self) -> None:
        self._state.metric_axis = AxisArray.CoordinateAxis(data=np.array(MEMORY_METRICS), dims=["metric"])
        self._state.due = time.monotonic()

    def __call__(self) -> AxisArray:
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
        snapshot = memory_snapshot()
        return AxisArray(
            data=np.array([[getattr(snapshot, name) for name in MEMORY_METRICS]]),
            dims=["time", "metric"],
            axes={
                "time": AxisArray.LinearAxis(unit="s", gain=interval, offset=now),
                "metric": state.metric_axis,
            },
            attrs={"unit": "MiB", "pid": os.getpid()},
            key="memory",
            stream_dim="time",
        )


class MemoryMonitor(BaseProducerUnit[MemoryMonitorSettings, AxisArray, MemoryMonitorProducer]):
    """Publishes what :obj:`MemoryMonitorProducer` describes, about the process that it lives in.

    Put it into the Collection that is to be watched, so that both run in one process.
    """

    SETTINGS = MemoryMonitorSettings
