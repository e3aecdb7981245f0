"""What the operating system and the driver say of the memory of this process."""

import ctypes
import math
import os
import re
import struct
import sys
from types import ModuleType


def process_memory() -> tuple[float, float]:
    """Resident set and footprint of this process, in bytes."""
    try:
        if sys.platform == "darwin":
            return _parse_rusage(_read_rusage())
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


def _read_rusage() -> bytes:
    buffer = ctypes.create_string_buffer(_RUSAGE_STRUCT.size)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, buffer):
        raise OSError("proc_pid_rusage failed")
    return buffer.raw


def _parse_rusage(rusage: bytes) -> tuple[float, float]:
    """Resident set and footprint in bytes from a ``struct rusage_info_v0``."""
    fields = _RUSAGE_STRUCT.unpack(rusage)
    return float(fields[7]), float(fields[8])


def device_memory(mx: ModuleType) -> float:
    """Memory in use on the first CUDA device, in bytes."""
    if not mx.cuda.is_available():
        return math.nan
    # MLX asks NVML, which neither waits for the device nor needs a CUDA context.
    info = mx.device_info(mx.gpu)
    return float(info["total_memory"] - info["free_memory"]) if "free_memory" in info else math.nan
