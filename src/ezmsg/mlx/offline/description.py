"""What a recording holds, found out from its sources without reading all samples."""

from collections.abc import Sequence

from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from .contracts import RecordingSource, SegmentInfo, StreamInfo


def describe_source(name: str, sources: Sequence[RecordingSource]) -> StreamInfo:
    """What can be said of a stream, from a source for each of its segments.

    Reads the first message of each. A source may have an attribute ``gaps``, the samples in front of which time jumps.
    """
    messages = [next(iter(source.read(0))) for source in sources]
    segments = []
    for source, message in zip(sources, messages, strict=True):
        axis = message.axes.get(resolve_stream_dim(message))
        duration = source.n_samples / float(source.sampling_rate)
        gaps = tuple(int(gap) for gap in getattr(source, "gaps", ()))
        segments.append(SegmentInfo(source.n_samples, float(getattr(axis, "offset", 0.0)), duration, gaps))
    attrs = messages[0].attrs
    return StreamInfo(
        name=name,
        sampling_rate=float(sources[0].sampling_rate),
        labels=_labels(messages[0]),
        dtype=str(messages[0].data.dtype),
        unit=str(attrs.get("nwb_scaling_unit", attrs.get("unit", ""))),
        segments=tuple(segments),
    )


def unreadable(name: str, problem: Exception) -> StreamInfo:
    """A stream of which nothing is known but what is wrong with it."""
    return StreamInfo(name, 0.0, (), "", "", (), str(problem))


def _labels(message: AxisArray) -> tuple[str, ...]:
    data = getattr(message.axes.get("ch"), "data", None)
    return () if data is None else tuple(str(label) for label in data)
