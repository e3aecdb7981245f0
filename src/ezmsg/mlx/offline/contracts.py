"""Contracts of sources of recordings, of their formats and of sinks of results, so that others can be added."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray


class RecordingSource(typing.Protocol):
    """A recording that can be read from any sample on."""

    n_samples: int
    """Its length in samples."""

    sampling_rate: float
    """Samples a second."""

    identity: str
    """Tells this recording, read in this way, from all others, in one line.

    Everything that results depend on but the samples is part of it: times, labels and conversion. After one of them was
    corrected in the file, finished results are those of another recording, and an interrupted run starts over.
    """

    def read(self, start: int) -> Iterator[AxisArray]:
        """The samples from number *start* on, in order, as messages of bounded length.

        Where *start* is 0, or a place where a message of an earlier reading ended, the messages from there on must be
        the same ones. Where it is inside a message, the samples from there on come in messages of any length. Several
        may read at a time. With several workers, a source is pickled.

        Raises:
            OSError: The system cannot read it (a lock, no permission, an I/O error).
            ValueError: What is read is damaged or makes no sense. Both name the recording.
        """


class SegmentInfo(typing.NamedTuple):
    """One segment of a stream."""

    n_samples: int
    start: float
    """When its first sample is, in seconds on the clock of the file."""

    duration: float
    """Seconds of samples: gaps do not count."""

    gaps: tuple[int, ...]
    """Samples in front of which time jumps, counted from the first one of the segment."""

    differs: tuple[str, ...] = ()
    """Differences of its own header from that of the first segment: labels, rates, gains, offsets, units."""


class StreamInfo(typing.NamedTuple):
    """Channels that were sampled together."""

    name: str
    sampling_rate: float
    """In Hz."""

    labels: tuple[str, ...]
    """Names of the channels."""

    dtype: str
    unit: str
    """Of the values that gain and offset make of samples; empty if it is not known."""

    segments: tuple[SegmentInfo, ...]
    problem: str | None = None
    """Why it cannot be processed. What is not known then is 0 or empty."""

    kind: str = ""
    """Of its channels: electrode, analog, auxiliary, digital, sync or other; empty if it is not known."""

    gains: tuple[float, ...] = ()
    """Value of one count, in :attr:`unit`: one number for all channels, or one for each."""

    offset: float = 0.0
    """Offset that is added then, in :attr:`unit`."""


@dataclass(frozen=True)
class RecordingFormat:
    """A way to store recordings, see :func:`ezmsg.mlx.open_recording`."""

    name: str
    """Name for users, in lower case."""

    description: str
    """One line."""

    locate: Callable[[Path], Path | None]
    """The recording that a path belongs to, usually the path itself; None if it is not of this format. Looks at names,
    or at the first bytes of a file at most, and does not raise."""

    open: Callable[..., RecordingSource]
    """Called with the path and, where the user has given them, the keywords ``stream`` and ``segment`` and others."""

    describe: Callable[..., tuple[StreamInfo, ...]] | None = None
    """Called with the path and the keywords of the user. None: what :attr:`open` gives is looked at."""

    in_folder: bool = False
    """Whether a folder may be a recording when :func:`ezmsg.mlx.find_recordings` comes upon it."""

    chooses_channels: bool = False
    """Whether :attr:`open` takes the keyword ``channels``. If not, channels are chosen by label and index alone."""

    in_search: bool = True
    """Whether :func:`ezmsg.mlx.find_recordings` looks for it where no format is named."""


class Opened(typing.NamedTuple):
    """State of a sink when it was opened."""

    is_complete: bool
    """The results of this very recipe are there already. Nothing else will be called but ``close``."""

    checkpoint: bytes | None
    """The last checkpoint of an interrupted run with this fingerprint, to whose results the next ones are appended. Of
    a complete piece, the one that was kept with it."""


class ResultSink(typing.Protocol):
    """Takes results, and shows them under their final name when they are complete, not before."""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """Begin, or go on.

        Args:
            recipe: The recording and the settings of the chain, as text whose first line is the recording. Complete
                results of another recipe are not to be replaced: FileExistsError.
            fingerprint: The recipe and what else bits depend on. A checkpoint of another one is not to be used.
        """

    def append(self, message: AxisArray) -> None:
        """Take the next results."""

    def checkpoint(self, state: bytes) -> None:
        """Keep *state* together with all results so far, or, if it is interrupted, the last checkpoint as it was."""

    def restart(self) -> None:
        """Forget the checkpoint that :meth:`open` gave, and all results: the run begins anew."""

    def commit(self) -> None:
        """Show the results under their final name."""

    def close(self) -> None:
        """Let go. Without a commit, what the last checkpoint needs stays, and nothing under the final name."""


class PiecewiseSink(ResultSink, typing.Protocol):
    """A sink that several workers write to, each the results of one piece of the recording."""

    def piece(self, number: int, borders: Sequence[int]) -> ResultSink:
        """The sink of a piece, once this one is open. It is pickled, and used on a worker.

        It keeps results and the last checkpoint when it is committed, and nothing before. Opened again after that, it
        is complete, and gives that checkpoint. What it keeps is kept until this sink is committed.

        Args:
            number: Of the piece, from 0.
            borders: Number of the first result of each piece, and of all results. All pieces but the last have the same
                length.
        """

    def about_pieces(self, about: Mapping[str, object]) -> None:
        """Keep how the pieces were made, under the name ``pieces``, once all of them are complete."""


def describe_source(name: str, sources: Sequence[RecordingSource]) -> StreamInfo:
    """Describe a stream, from a source for each of its segments.

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
        labels=labels_of(messages[0]),
        dtype=str(messages[0].data.dtype),
        unit=str(attrs.get("nwb_scaling_unit", attrs.get("unit", ""))),
        segments=tuple(segments),
        gains=tuple(np.atleast_1d(np.asarray(attrs.get("nwb_scaling_gain", ()), np.float64)).tolist()),
        offset=float(attrs.get("nwb_scaling_offset", 0.0)),
    )


def unreadable(name: str, problem: Exception) -> StreamInfo:
    """A stream of which nothing is known but what is wrong with it."""
    return StreamInfo(name, 0.0, (), "", "", (), str(problem))


def labels_of(message: AxisArray) -> tuple[str, ...]:
    """The names of the channels of a message; empty if it has none."""
    data = getattr(message.axes.get("ch"), "data", None)
    if data is None:
        return ()
    records = np.asarray(data)
    return tuple(str(label) for label in (records["label"] if "label" in (records.dtype.names or ()) else records))
