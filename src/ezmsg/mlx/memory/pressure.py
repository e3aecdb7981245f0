"""Whether the operating system is short of memory, asked now and then."""

import ctypes
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

STALLED_SHARE = 0.05
"""On Linux memory is short when tasks wait for it in this share of the time (``Documentation/accounting/psi.rst``)."""


class PressureGauge(Protocol):
    """Tells shortage of memory."""

    def reason(self) -> str:
        """Why memory is short since the call before, for the log; empty where it is not."""


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

    def reason(self) -> str:
        """Why memory is short since the call before; empty where it is not."""
        (before, stalled_before, n_before), self._last = self._last, self._now()
        now, stalled, n_events = self._last
        if n_events > n_before:
            return "the control group of this process is at its memory limit"
        share = (stalled - stalled_before) / (now - before) if now > before else 0.0
        return f"tasks of this machine waited for memory {share:.0%} of the time" if share >= STALLED_SHARE else ""


class MacPressure:
    """The level that macOS publishes, and of which it notifies its own applications.

    Args:
        level: Gives 1 (normal), 2 (warning) or 4 (critical).
    """

    def __init__(self, level: Callable[[], int]) -> None:
        self._level = level

    def reason(self) -> str:
        """Why memory is short; empty where it is not."""
        level = self._level()
        return f"macOS reports memory pressure at level {level}" if level > 1 else ""


class NoPressure:
    """For systems that tell nothing."""

    def reason(self) -> str:
        """Always empty."""
        return ""


def pressure_gauge() -> PressureGauge:
    """The gauge of this system."""
    if sys.platform == "darwin":
        return MacPressure(_mac_level)
    stalls, events = Path("/proc/pressure/memory"), _events_of_group(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return LinuxPressure(stalls, events) if stalls.exists() or events is not None else NoPressure()


def _events_of_group(membership: Path, root: Path) -> Path | None:
    """``memory.events`` of the control group (version 2) that the process belongs to; None without one."""
    group = re.search(r"^0::/(.*)$", _text(membership), re.MULTILINE)
    events = root / group[1] / "memory.events" if group else None
    return events if events is not None and events.exists() else None


def _mac_level() -> int:
    level, size = ctypes.c_int(1), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    libc = ctypes.CDLL("/usr/lib/libSystem.dylib")
    name = b"kern.memorystatus_vm_pressure_level"
    if libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)):
        return 1
    return level.value


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
