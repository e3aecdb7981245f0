"""The memory of this process at one moment, as MLX and the operating system count it."""

from __future__ import annotations

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

from ..cache import MIB, cache_limit
from ..stream.hostmemory import memory_in_use

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
