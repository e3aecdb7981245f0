"""Whole recordings: sources, sinks, checkpoints, and what runs a chain from one to the other.

:func:`open_recording` gives the source for a path: :class:`NWBSource`, :class:`NeoSource` or :class:`RawBinarySource`.
They and :class:`ZarrSink` need the extra ``offline``. Others can take their places: what a source, a format and a sink
have to do is said by :class:`RecordingSource`, :class:`RecordingFormat` and :class:`ResultSink`.
"""

from .contracts import (
    Opened,
    PiecewiseSink,
    RecordingFormat,
    RecordingSource,
    ResultSink,
    SegmentInfo,
    StreamInfo,
)
from .formats import (
    RecordingInfo,
    describe_recording,
    find_recordings,
    open_recording,
    recording_formats,
    register_format,
)
from .neosource import NeoSource, RawBinarySource
from .nwbsource import NWBSource
from .process import ProcessedRecording, process_recording, process_recordings
from .spikeinterfacesource import SpikeInterfaceSource
from .zarrsink import ZarrSink

__all__ = [
    "NWBSource",
    "NeoSource",
    "Opened",
    "PiecewiseSink",
    "ProcessedRecording",
    "RawBinarySource",
    "RecordingFormat",
    "RecordingInfo",
    "RecordingSource",
    "ResultSink",
    "SegmentInfo",
    "SpikeInterfaceSource",
    "StreamInfo",
    "ZarrSink",
    "describe_recording",
    "find_recordings",
    "open_recording",
    "process_recording",
    "process_recordings",
    "recording_formats",
    "register_format",
]
