"""The memory of this process at one moment."""

import dataclasses
import math
import sys

import ezmsg.core as ez

from ..cache import MIB, cache_limit
from .system import device_memory, process_memory


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
        resident_set=resident_set / MIB,
        footprint=footprint / MIB,
        device_memory=math.nan if mx is None else device_memory(mx) / MIB,
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
