"""Apple's MLX inside ezmsg streaming graphs, with bounded memory, on Metal, CUDA and CPU.

Importing this package neither loads MLX nor compiles anything; the first message does. Names are loaded when they are
asked for, so that a process that converts need not wait for the filters. The functions
:func:`ezmsg.mlx.ewma.ewma` and :func:`ezmsg.mlx.sosfilt.sosfilt` are not among them, since their names here are those
of their modules.
"""

import importlib
from typing import TYPE_CHECKING

from .__version__ import __version__ as __version__

if TYPE_CHECKING:
    from .asarray import (  # noqa: F401
        ArrayBackend,
        AsArray,
        AsArraySettings,
        AsArrayTransformer,
    )
    from .butterworth import (  # noqa: F401
        ButterworthFilter,
        ButterworthFilterSettings,
        ButterworthFilterTransformer,
    )
    from .cache import (  # noqa: F401
        CacheLimit,
        apply_cache_limit,
        cache_limit,
        lifted_cache_limit,
        withdraw_cache_limit,
    )
    from .chebyshev import (  # noqa: F401
        ChebyshevFilter,
        ChebyshevFilterSettings,
        ChebyshevFilterTransformer,
    )
    from .detrend import (  # noqa: F401
        DetrendTransformer,
        DetrendUnit,
    )
    from .ewma import (  # noqa: F401
        EWMASettings,
        EWMATransformer,
        EWMAUnit,
    )
    from .filter import (  # noqa: F401
        Filter,
        FilterSettings,
        FilterTransformer,
    )
    from .memory import (  # noqa: F401
        MEMORY_METRICS,
        MemoryMonitor,
        MemoryMonitorProducer,
        MemoryMonitorSettings,
        MemorySnapshot,
        memory_snapshot,
    )
    from .nwbsource import (  # noqa: F401
        NWBSource,
    )
    from .offline import (  # noqa: F401
        Opened,
        ProcessedRecording,
        RecordingSource,
        ResultSink,
        process_recording,
    )
    from .plan import (  # noqa: F401
        CacheRecommendation,
        measure_working_set,
        recommend_cache_limit,
    )
    from .pow import (  # noqa: F401
        Pow,
        PowSettings,
        PowTransformer,
    )
    from .readlate import (  # noqa: F401
        ReadLate,
        ReadLateSettings,
        ReadLateTransformer,
    )
    from .rechunk import (  # noqa: F401
        Rechunk,
        RechunkSettings,
        RechunkTransformer,
    )
    from .scaler import (  # noqa: F401
        AdaptiveStandardScaler,
        AdaptiveStandardScalerSettings,
        AdaptiveStandardScalerTransformer,
    )
    from .scan import (  # noqa: F401
        chunked_scan,
        normalize_chunk_sizes,
    )
    from .simulate import (  # noqa: F401
        SimulatedAcquisition,
        SimulatedAcquisitionProducer,
        SimulatedAcquisitionSettings,
        message_lengths,
        simulated_acquisition,
    )
    from .zarrsink import (  # noqa: F401
        ZarrSink,
    )

_MODULE_OF = {
    name: module
    for module, names in {
        "asarray": "ArrayBackend AsArray AsArraySettings AsArrayTransformer",
        "cache": "CacheLimit apply_cache_limit cache_limit lifted_cache_limit withdraw_cache_limit",
        "detrend": "DetrendTransformer DetrendUnit",
        "ewma": "EWMASettings EWMATransformer EWMAUnit",
        "memory": "MEMORY_METRICS MemoryMonitor MemoryMonitorProducer "
        "MemoryMonitorSettings MemorySnapshot memory_snapshot",
        "nwbsource": "NWBSource",
        "offline": "Opened ProcessedRecording RecordingSource ResultSink process_recording",
        "plan": "CacheRecommendation measure_working_set recommend_cache_limit",
        "pow": "Pow PowSettings PowTransformer",
        "readlate": "ReadLate ReadLateSettings ReadLateTransformer",
        "rechunk": "Rechunk RechunkSettings RechunkTransformer",
        "scan": "chunked_scan normalize_chunk_sizes",
        "simulate": "SimulatedAcquisition SimulatedAcquisitionProducer "
        "SimulatedAcquisitionSettings message_lengths simulated_acquisition",
        "butterworth": "ButterworthFilter ButterworthFilterSettings ButterworthFilterTransformer",
        "chebyshev": "ChebyshevFilter ChebyshevFilterSettings ChebyshevFilterTransformer",
        "filter": "Filter FilterSettings FilterTransformer",
        "scaler": "AdaptiveStandardScaler AdaptiveStandardScalerSettings AdaptiveStandardScalerTransformer",
        "zarrsink": "ZarrSink",
    }.items()
    for name in names.split()
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
