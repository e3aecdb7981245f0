"""Apple's MLX inside ezmsg streaming graphs, with bounded memory, on Metal, CUDA and CPU.

Importing this package neither loads MLX nor compiles anything; the first message does. The function
:func:`ezmsg.mlx.ewma.ewma` is not re-exported, since its name here is that of its module.
"""

from .__version__ import __version__ as __version__
from .asarray import ArrayBackend, AsArray, AsArraySettings, AsArrayTransformer
from .cache import CacheLimit, apply_cache_limit, cache_limit, withdraw_cache_limit
from .detrend import DetrendTransformer, DetrendUnit
from .ewma import EWMASettings, EWMATransformer, EWMAUnit
from .memory import (
    MEMORY_METRICS,
    MemoryMonitor,
    MemoryMonitorProducer,
    MemoryMonitorSettings,
    MemorySnapshot,
    memory_snapshot,
)
from .plan import CacheRecommendation, measure_working_set, recommend_cache_limit
from .pow import Pow, PowSettings, PowTransformer
from .readlate import ReadLate, ReadLateSettings, ReadLateTransformer
from .rechunk import Rechunk, RechunkSettings, RechunkTransformer
from .scan import chunked_scan, normalize_chunk_sizes
from .simulate import (
    SimulatedAcquisition,
    SimulatedAcquisitionProducer,
    SimulatedAcquisitionSettings,
    message_lengths,
    simulated_acquisition,
)

__all__ = [
    "ArrayBackend",
    "AsArray",
    "AsArraySettings",
    "AsArrayTransformer",
    "CacheLimit",
    "CacheRecommendation",
    "DetrendTransformer",
    "DetrendUnit",
    "EWMASettings",
    "EWMATransformer",
    "EWMAUnit",
    "MEMORY_METRICS",
    "MemoryMonitor",
    "MemoryMonitorProducer",
    "MemoryMonitorSettings",
    "MemorySnapshot",
    "Pow",
    "PowSettings",
    "PowTransformer",
    "ReadLate",
    "ReadLateSettings",
    "ReadLateTransformer",
    "Rechunk",
    "RechunkSettings",
    "RechunkTransformer",
    "SimulatedAcquisition",
    "SimulatedAcquisitionProducer",
    "SimulatedAcquisitionSettings",
    "apply_cache_limit",
    "cache_limit",
    "chunked_scan",
    "measure_working_set",
    "memory_snapshot",
    "message_lengths",
    "normalize_chunk_sizes",
    "recommend_cache_limit",
    "simulated_acquisition",
    "withdraw_cache_limit",
]
