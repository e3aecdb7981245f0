# The public names, listed once. The package loads each of them when it is first asked for.
from .__version__ import __version__ as __version__
from .affinetransform import (
    CommonRereference as CommonRereference,
)
from .affinetransform import (
    CommonRereferenceSettings as CommonRereferenceSettings,
)
from .affinetransform import (
    CommonRereferenceTransformer as CommonRereferenceTransformer,
)
from .asarray import (
    ArrayBackend as ArrayBackend,
)
from .asarray import (
    AsArray as AsArray,
)
from .asarray import (
    AsArraySettings as AsArraySettings,
)
from .asarray import (
    AsArrayTransformer as AsArrayTransformer,
)
from .butterworthfilter import (
    ButterworthFilter as ButterworthFilter,
)
from .butterworthfilter import (
    ButterworthFilterSettings as ButterworthFilterSettings,
)
from .butterworthfilter import (
    ButterworthFilterTransformer as ButterworthFilterTransformer,
)
from .cache import (
    CacheLimit as CacheLimit,
)
from .cache import (
    apply_cache_limit as apply_cache_limit,
)
from .cache import (
    cache_limit as cache_limit,
)
from .cache import (
    lifted_cache_limit as lifted_cache_limit,
)
from .cache import (
    withdraw_cache_limit as withdraw_cache_limit,
)
from .chain import (
    BaseChainTransformer as BaseChainTransformer,
)
from .chain import (
    Chain as Chain,
)
from .chain import (
    ChainSettings as ChainSettings,
)
from .chain import (
    ChainTransformer as ChainTransformer,
)
from .chain import (
    StageSettings as StageSettings,
)
from .chain import (
    run_chain as run_chain,
)
from .cheby import (
    ChebyshevFilter as ChebyshevFilter,
)
from .cheby import (
    ChebyshevFilterSettings as ChebyshevFilterSettings,
)
from .cheby import (
    ChebyshevFilterTransformer as ChebyshevFilterTransformer,
)
from .detrend import (
    DetrendTransformer as DetrendTransformer,
)
from .detrend import (
    DetrendUnit as DetrendUnit,
)
from .ewma import (
    EWMASettings as EWMASettings,
)
from .ewma import (
    EWMATransformer as EWMATransformer,
)
from .ewma import (
    EWMAUnit as EWMAUnit,
)
from .filter import (
    Filter as Filter,
)
from .filter import (
    FilterSettings as FilterSettings,
)
from .filter import (
    FilterTransformer as FilterTransformer,
)
from .memory import (
    MEMORY_METRICS as MEMORY_METRICS,
)
from .memory import (
    MemoryMonitor as MemoryMonitor,
)
from .memory import (
    MemoryMonitorProducer as MemoryMonitorProducer,
)
from .memory import (
    MemoryMonitorSettings as MemoryMonitorSettings,
)
from .memory import (
    MemorySnapshot as MemorySnapshot,
)
from .memory import (
    ShapeReport as ShapeReport,
)
from .memory import (
    memory_snapshot as memory_snapshot,
)
from .memory import (
    shape_report as shape_report,
)
from .offline import (
    NeoSource as NeoSource,
)
from .offline import (
    NWBSource as NWBSource,
)
from .offline import (
    Opened as Opened,
)
from .offline import (
    PieceSink as PieceSink,
)
from .offline import (
    PiecewiseSink as PiecewiseSink,
)
from .offline import (
    ProcessedRecording as ProcessedRecording,
)
from .offline import (
    RawBinarySource as RawBinarySource,
)
from .offline import (
    RecordingFormat as RecordingFormat,
)
from .offline import (
    RecordingInfo as RecordingInfo,
)
from .offline import (
    RecordingSource as RecordingSource,
)
from .offline import (
    ResultSink as ResultSink,
)
from .offline import (
    SegmentInfo as SegmentInfo,
)
from .offline import (
    StreamInfo as StreamInfo,
)
from .offline import (
    ZarrSink as ZarrSink,
)
from .offline import (
    describe_recording as describe_recording,
)
from .offline import (
    find_recordings as find_recordings,
)
from .offline import (
    open_recording as open_recording,
)
from .offline import (
    process_recording as process_recording,
)
from .offline import (
    process_recordings as process_recordings,
)
from .offline import (
    recording_formats as recording_formats,
)
from .offline import (
    register_format as register_format,
)
from .plan import (
    CacheRecommendation as CacheRecommendation,
)
from .plan import (
    measure_working_set as measure_working_set,
)
from .plan import (
    recommend_cache_limit as recommend_cache_limit,
)
from .pow import (
    Pow as Pow,
)
from .pow import (
    PowSettings as PowSettings,
)
from .pow import (
    PowTransformer as PowTransformer,
)
from .readlate import (
    ReadLate as ReadLate,
)
from .readlate import (
    ReadLateSettings as ReadLateSettings,
)
from .readlate import (
    ReadLateTransformer as ReadLateTransformer,
)
from .rechunk import (
    Rechunk as Rechunk,
)
from .rechunk import (
    RechunkSettings as RechunkSettings,
)
from .rechunk import (
    RechunkTransformer as RechunkTransformer,
)
from .scaler import (
    AdaptiveStandardScaler as AdaptiveStandardScaler,
)
from .scaler import (
    AdaptiveStandardScalerSettings as AdaptiveStandardScalerSettings,
)
from .scaler import (
    AdaptiveStandardScalerTransformer as AdaptiveStandardScalerTransformer,
)
from .scan import (
    chunked_scan as chunked_scan,
)
from .scan import (
    normalize_chunk_sizes as normalize_chunk_sizes,
)
from .simulate import (
    SimulatedAcquisition as SimulatedAcquisition,
)
from .simulate import (
    SimulatedAcquisitionProducer as SimulatedAcquisitionProducer,
)
from .simulate import (
    SimulatedAcquisitionSettings as SimulatedAcquisitionSettings,
)
from .simulate import (
    message_lengths as message_lengths,
)
from .simulate import (
    simulated_acquisition as simulated_acquisition,
)
