"""Whole recordings: sources, sinks, checkpoints, and what runs a chain from one to the other.

:class:`NWBSource` and :class:`ZarrSink` need the extra ``offline``. Others can take their places: what a source and a
sink have to do is said by :class:`RecordingSource` and :class:`ResultSink`.
"""

from .contracts import Opened, RecordingSource, ResultSink
from .nwbsource import NWBSource
from .process import ProcessedRecording, process_recording, process_recordings
from .zarrsink import ZarrSink

__all__ = [
    "NWBSource",
    "Opened",
    "ProcessedRecording",
    "RecordingSource",
    "ResultSink",
    "ZarrSink",
    "process_recording",
    "process_recordings",
]
