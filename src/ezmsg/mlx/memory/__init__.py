"""The memory that a process uses: MLX's own counters beside those of the operating system.

MLX's buffer cache shows in none of the usual places: on a Mac the resident set misses Metal's buffers, on CUDA it
misses the device. :func:`memory_snapshot` reads everything at once, without waiting for the device, and
:class:`MemoryMonitor` publishes it as a signal that any ezmsg viewer plots. :func:`shape_report` tells which message
lengths fill the cache.
"""

from .monitor import (
    MEMORY_METRICS,
    MemoryMonitor,
    MemoryMonitorProducer,
    MemoryMonitorSettings,
    MemoryMonitorState,
    MemorySnapshot,
    memory_snapshot,
)
from .shapes import LengthUse, NodeShapes, ShapeReport, shape_report

__all__ = [
    "MEMORY_METRICS",
    "LengthUse",
    "MemoryMonitor",
    "MemoryMonitorProducer",
    "MemoryMonitorSettings",
    "MemoryMonitorState",
    "MemorySnapshot",
    "NodeShapes",
    "ShapeReport",
    "memory_snapshot",
    "shape_report",
]
