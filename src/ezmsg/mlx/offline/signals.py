"""Contents of the files of a recording, whichever code reads them: streams, their segments and their channels.

Whatever knows a format gives a list of :class:`Sampled`. Here it is decided which part of it is meant. Channels of
another kind are another stream, so that an analog input never gets into the common reference of electrodes unasked.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis
from ezmsg.util.messages.util import replace

from ..stream.unit import check_number
from .contracts import RecordingSource, SegmentInfo, StreamInfo, labels_of, unreadable
from .reading import Runs, Scaling, Unfit, fault, faults_of, one_gain, volts_of

ELECTRODE, ANALOG, AUXILIARY, DIGITAL, SYNC, OTHER = "electrode", "analog", "auxiliary", "digital", "sync", "other"
"""Kinds of channels."""

ChannelChoice: typing.TypeAlias = str | Sequence[str | int]
"""Labels, indices and kinds, in a sequence or with commas between them."""


class Channels(typing.NamedTuple):
    """The header of channels that were sampled together."""

    labels: list[str]
    rate: float
    """In Hz."""

    gains: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.float64]
    units: list[str]
    kinds: list[str]
    more: Mapping[str, npt.NDArray] = {}
    """Further properties of each channel, by name: locations and groups."""

    def of(self, columns: Sequence[int]) -> Channels:
        """Those of some columns."""
        where = np.asarray(columns, np.int64)
        labels, units, kinds = ([values[n] for n in columns] for values in (self.labels, self.units, self.kinds))
        more = {name: values[where] for name, values in self.more.items()}
        return Channels(labels, self.rate, self.gains[where], self.offsets[where], units, kinds, more)

    def axis(self) -> npt.NDArray:
        """The labels; as records, if there is more than one kind or more is known of them."""
        fields: dict[str, npt.NDArray] = {"label": np.array(self.labels, np.str_)}
        if len(set(self.kinds)) > 1:
            fields["kind"] = np.array(self.kinds, np.str_)
        fields |= self.more
        if len(fields) == 1:
            return fields["label"]
        records = np.zeros(len(self.labels), [(name, values.dtype) for name, values in fields.items()])
        for name, values in fields.items():
            records[name] = values
        return records


@dataclass
class Segment(abc.ABC):
    """Samples of a stream without a pause, as far as the format says; its header is the one of these very samples."""

    channels: Channels
    """All that were sampled together, of whatever kind."""

    n_samples: int
    place: str
    """Which one it is, in the words of the format."""

    @abc.abstractmethod
    def runs(self) -> Runs:
        """Where time jumps in it; ValueError if files are not as long as announced, or numbers follow no rate."""

    @abc.abstractmethod
    def samples(self, begin: int, end: int, columns: Sequence[int]) -> npt.NDArray:
        """A copy of the samples from *begin* to *end* of some channels, of shape (time, ch)."""


@dataclass
class FlatSegment(Segment):
    """Samples that are in a file as they are in memory, channel after channel for each time."""

    file: Path
    dtype: np.dtype
    offset: int
    """Bytes in front of the first sample."""

    find_runs: Callable[[FlatSegment], Runs]

    def runs(self) -> Runs:
        """See :class:`Segment`."""
        check_size(self.file, self.offset, self.n_samples, len(self.channels.labels), self.dtype)
        return self.find_runs(self)

    def samples(self, begin: int, end: int, columns: Sequence[int]) -> npt.NDArray:
        """See :class:`Segment`."""
        shape = (self.n_samples, len(self.channels.labels))
        mapped = np.memmap(self.file, self.dtype, "r", self.offset, shape)
        return np.array(mapped[begin:end, as_slice(columns)])


def whole_samples(file: Path, offset: int, n_channels: int, dtype: np.dtype) -> int:
    """How many whole samples of all channels a file holds."""
    return max(file.stat().st_size - offset, 0) // (n_channels * dtype.itemsize)


def check_size(file: Path, offset: int, n_samples: int, n_channels: int, dtype: np.dtype) -> None:
    """Raise ValueError unless a file holds so many samples of all channels, and nothing more."""
    size = file.stat().st_size - offset
    if rest := size - n_samples * n_channels * dtype.itemsize:
        problem = f"has {size} bytes of samples, which is {rest} more than whole samples of {n_channels} channels in"
        raise fault(file, None, f"{problem} {dtype}: it is truncated, or has another number of channels.")


def as_slice(columns: Sequence[int]) -> slice | list[int]:
    """The same columns as a slice if they follow one another, which is copied faster."""
    first, last = columns[0], columns[-1]
    return slice(first, last + 1) if list(columns) == list(range(first, last + 1)) else list(columns)


@dataclass
class Sampled:
    """Channels that were sampled together, of whatever kind, in all segments that they have."""

    name: str
    id: str
    segments: list[Segment]
    is_beside: bool = False
    """Whether it has no electrodes, but what was recorded beside them."""

    suffixes: Mapping[str, str] | None = None
    """Suffix of the name for channels of a kind; a space and the kind where it does not say."""

    problem: Exception | None = None
    """Why nothing is known of it but its name."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of its channels; that of the stream which has its name comes first."""
        found = list(dict.fromkeys(kind for segment in self.segments for kind in segment.channels.kinds))
        return sorted(found, key=lambda kind: kind != ELECTRODE)


class Stream(typing.NamedTuple):
    """Channels of one kind that were sampled together."""

    name: str
    id: str
    kind: str
    sampled: Sampled
    is_first: bool
    """Whether it is the first kind of those that were sampled together."""

    @property
    def is_beside(self) -> bool:
        """Whether it holds what was recorded beside the electrodes."""
        return self.sampled.is_beside or not self.is_first

    def columns(self, segment: Segment) -> list[int]:
        """Its channels among those of a segment."""
        return [number for number, kind in enumerate(segment.channels.kinds) if kind == self.kind]


def streams_of(recorded: Sequence[Sampled]) -> list[Stream]:
    """All streams, those that were recorded beside the first ones at the end."""
    found = []
    for sampled in recorded:
        for number, kind in enumerate(sampled.kinds or [OTHER]):
            added = "" if not number else (sampled.suffixes or {}).get(kind, f" {kind}")
            found.append(Stream(sampled.name + added, sampled.id + added, kind, sampled, not number))
    return sorted(found, key=lambda stream: not stream.is_first)


class Chosen(typing.NamedTuple):
    """The part of a recording that is meant."""

    name: str
    segments: list[Segment]
    columns: list[list[int]]
    """Of each segment."""

    channels: Channels
    """The headers of all these segments for these columns."""


def choose(
    recorded: Sequence[Sampled],
    path: Path,
    stream: str | None,
    segment: int | str | None,
    channels: ChannelChoice | None,
) -> Chosen:
    """The part that is asked for; ValueError if there is none or not only one, or if segments of it differ."""
    chosen = _chosen_stream(streams_of(recorded), stream, path)
    if chosen.sampled.problem is not None:
        raise chosen.sampled.problem
    segments = _chosen_segments(chosen.sampled.segments, segment, path)
    columns = [_chosen_columns(chosen, each, channels, path) for each in segments]
    headers = [each.channels.of(some) for each, some in zip(segments, columns, strict=True)]
    for number, header in enumerate(headers):
        if what := differing_entries(headers[0], header):
            problem = f"has other {' and '.join(what)} in segment {segments[number].place} than in {segments[0].place}"
            raise fault(path, chosen.name, f"{problem}; allowed is to read them one at a time.")
    return Chosen(chosen.name, segments, columns, headers[0])


def differing_entries(one: Channels, other: Channels) -> list[str]:
    """The differences of two headers."""
    same = {"labels": one.labels == other.labels, "rates": one.rate == other.rate}
    if len(one.labels) == len(other.labels):
        same["gains"] = np.array_equal(one.gains, other.gains, equal_nan=True)
        same["offsets"] = np.array_equal(one.offsets, other.offsets, equal_nan=True)
        same["units"] = one.units == other.units
    return [name for name, is_same in same.items() if not is_same]


def _chosen_stream(streams: list[Stream], wanted: str | None, path: Path) -> Stream:
    if wanted is not None:
        matching = [each for each in streams if wanted == each.name] or [each for each in streams if wanted == each.id]
    else:
        matching = [each for each in streams if not each.is_beside] or [each for each in streams if each.is_first]
    if len(matching) == 1:
        return matching[0]
    if not streams:
        raise fault(path, None, "has no signals.")
    problem = "several streams" if matching else f"no stream {wanted!r}"
    raise fault(path, None, f"has {problem}; allowed as stream are {', '.join(each.name for each in streams)}.")


def _chosen_segments(segments: list[Segment], wanted: int | str | None, path: Path) -> list[Segment]:
    if wanted == "all" or (wanted is None and len(segments) == 1):
        return segments
    if isinstance(wanted, int) and 0 <= wanted < len(segments):
        return [segments[wanted]]
    allowed = f"allowed as segment are 0 to {len(segments) - 1} and 'all'"
    problem = f"{len(segments)} segments" if wanted is None else f"no segment {wanted!r}"
    raise fault(path, None, f"has {problem}; {allowed}.")


def _chosen_columns(stream: Stream, segment: Segment, wanted: ChannelChoice | None, path: Path) -> list[int]:
    columns, channels = stream.columns(segment), segment.channels
    if not columns:
        raise fault(path, stream.name, f"has no channels in segment {segment.place}.")
    if wanted is None:
        return columns
    numbered = [(label, number) for number, label in enumerate(channels.labels)]
    own = [numbered[number] for number in columns]
    kinds = {kind: [n for n, each in enumerate(channels.kinds) if each == kind] for kind in channels.kinds}
    return channels_of_choice(wanted, own, numbered, kinds)


Labelled: typing.TypeAlias = Sequence[tuple[str, int]]
"""Labels and numbers of channels."""


def channels_of_choice(
    wanted: ChannelChoice,
    own: Labelled,
    others: Labelled = (),
    kinds: Mapping[str, Sequence[int]] | None = None,
) -> list[int]:
    """Numbers of the channels that are asked for; ValueError if one is not there, or asked for twice.

    Text is a label of *own* or of *others*, or else a kind, or a range of Python (``"0:32"``), which counts *own*, as
    an index does. *kinds* has the numbers of all channels by their kinds.
    """
    items = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else wanted
    if not isinstance(items, Sequence) or not all(isinstance(item, (str, int, np.integer)) for item in items):
        raise TypeError(f"'channels' must be labels, indices and kinds, got {wanted!r}")
    found: list[int] = []
    for item in items:
        found += _numbers_of(item, own, others, kinds or {})
    if not found:
        raise ValueError(f"'channels' must be at least one, got {wanted!r}")
    if len(set(found)) < len(found):
        raise ValueError(f"'channels' must have each channel once, got {wanted!r}")
    return found


def _numbers_of(item: str | int, own: Labelled, others: Labelled, kinds: Mapping[str, Sequence[int]]) -> list[int]:
    if isinstance(item, str):
        of_label = ([number for label, number in listed if label == item] for listed in (own, others))
        if matching := next(filter(None, of_label), kinds.get(item)):
            return list(matching)
    first, colon, last = str(item).partition(":")
    if all(part.isdecimal() for part in (first, last) if part) and (first or colon):
        begin, end = int(first or 0), int(last or len(own)) if colon else int(first) + 1
        if begin < end <= len(own):
            return [number for _, number in own[begin:end]]
    known = ", ".join(label for label, _ in own[:8]) + (", ..." if len(own) > 8 else "")
    of_kind = f", kinds ({', '.join(kinds)})" if len(kinds) > 1 else ""
    raise ValueError(f"'channels' must be labels ({known}){of_kind} or indices below {len(own)}, got {item!r}")


_COMPARED = 32
"""Samples at the beginning and at the end of a segment that tell it from others."""


class _Part(typing.NamedTuple):
    """A segment that is read."""

    place: str
    n_samples: int
    before: int
    """Samples of the segments before it."""

    runs: Runs


class SampledSource(abc.ABC):
    """A source of some channels and segments of what :meth:`_sampled` finds; see :class:`ezmsg.mlx.NeoSource`."""

    n_samples: int
    sampling_rate: float
    identity: str

    def __init__(
        self,
        path: Path,
        stream: str | None,
        segment: int | typing.Literal["all"] | None,
        channels: ChannelChoice | None,
        chunk_mb: float,
    ) -> None:
        if not isinstance(stream, (str, type(None))):
            raise TypeError(f"'stream' must be a name or None, got {stream!r}")
        if not (segment is None or segment == "all" or (isinstance(segment, int) and not isinstance(segment, bool))):
            raise TypeError(f"'segment' must be a number, 'all' or None, got {segment!r}")
        check_number("chunk_mb", chunk_mb)
        self.path, self._asked = path, (stream, segment, channels)
        chosen = self._chosen()
        self._stream = chosen.name
        with faults_of(self.path, self._stream):
            self._parts = _parts_of(chosen)
            self.n_samples = sum(part.n_samples for part in self._parts)
            self.sampling_rate = chosen.channels.rate
            scaling, digest = scaling_of(chosen.channels)
            ends, dtype = _ends(chosen)
        n_channels = len(chosen.channels.labels)
        self._chunk = max(int(chunk_mb * 2**20 / (n_channels * dtype.itemsize)), 1)
        self._template = AxisArray(
            data=np.zeros((0, n_channels), dtype),
            dims=["time", "ch"],
            axes={
                "time": AxisArray.TimeAxis(fs=self.sampling_rate),
                "ch": AxisArray.CoordinateAxis(data=chosen.channels.axis(), dims=["ch"]),
            },
            attrs=scaling,
            key=self._stream,
            stream_dim="time",
        )
        places = " ".join(part.place for part in self._parts)
        times = hashlib.sha256(b"".join(array.tobytes() for part in self._parts for array in part.runs)).hexdigest()
        # Everything that results depend on but the samples, and enough of those to tell recordings apart.
        self.identity = (
            f"{self._stream}, segments {places}, {self.n_samples} samples of ({n_channels},) {dtype} at "
            f"{self.sampling_rate!r} Hz, times {times[:16]}, labels and scaling {digest}, ends {ends}, read "
            f"{self._chunk} samples at a time"
        )

    @abc.abstractmethod
    def _sampled(self) -> list[Sampled]:
        """All that there is."""

    @property
    def gaps(self) -> list[int]:
        """The samples in front of which time jumps, counted from the first sample that is read."""
        firsts = [part.before + int(first) for part in self._parts for first in part.runs.firsts]
        return firsts[1:]

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """The samples from number *start* on, see :obj:`ezmsg.mlx.RecordingSource`."""
        chosen = self._chosen()
        for part, segment, columns in zip(self._parts, chosen.segments, chosen.columns, strict=False):
            if segment.n_samples != part.n_samples:
                raise fault(self.path, self._stream, f"has {segment.n_samples} samples now, not {part.n_samples}.")
            skipped = max(start - part.before, 0)
            for chunk in range(skipped - skipped % self._chunk, part.n_samples, self._chunk):
                begin, end = max(chunk, skipped), min(chunk + self._chunk, part.n_samples)
                samples = self._samples(segment, begin, end, columns)
                for first, last, time in _runs_between(part.runs, begin, end, self.sampling_rate):
                    axes = {**self._template.axes, "time": replace(self._template.axes["time"], offset=time)}
                    yield replace(self._template, data=samples[first - begin : last - begin], axes=axes)

    def _chosen(self) -> Chosen:
        return choose(self._sampled(), self.path, *self._asked)

    def _samples(self, segment: Segment, begin: int, end: int, columns: list[int]) -> npt.NDArray:
        with faults_of(self.path, self._stream):
            samples, dtype = _checked_samples(segment, begin, end, columns), self._template.data.dtype
            if samples.dtype != dtype:
                raise Unfit(f"gives samples {begin} to {end} in {samples.dtype}; allowed is {dtype}, as at its ends.")
            return samples


def _parts_of(chosen: Chosen) -> list[_Part]:
    parts: list[_Part] = []
    before = 0
    for segment in chosen.segments:
        runs = segment.runs()
        if segment.n_samples < 1:
            raise Unfit(f"has no samples in segment {segment.place}.")
        parts.append(_Part(segment.place, segment.n_samples, before, runs))
        before += segment.n_samples
    return parts


def _ends(chosen: Chosen) -> tuple[str, np.dtype]:
    """A digest of the first and the last samples of each segment, and the dtype of all.

    The last ones are there only if the file is as long as it has to be.
    """
    digest, dtypes = hashlib.sha256(), set()
    for segment, columns in zip(chosen.segments, chosen.columns, strict=True):
        n = segment.n_samples
        for begin, end in ((0, min(_COMPARED, n)), (max(n - _COMPARED, 0), n)):
            found = _checked_samples(segment, begin, end, columns)
            digest.update(found.tobytes())
            dtypes.add(found.dtype)
    if len(dtypes) > 1 or next(iter(dtypes)).kind not in "iuf":
        raise Unfit(f"has samples of dtype {', '.join(sorted(map(str, dtypes)))}; allowed are integers and floats.")
    return digest.hexdigest()[:16], dtypes.pop()


def _checked_samples(segment: Segment, begin: int, end: int, columns: list[int]) -> npt.NDArray:
    found, expected = segment.samples(begin, end, columns), (end - begin, len(columns))
    if found.shape != expected:
        raise Unfit(f"gives samples {begin} to {end} with shape {found.shape}; its header says {expected}.")
    return found


def _runs_between(runs: Runs, begin: int, end: int, rate: float) -> Iterator[tuple[int, int, float]]:
    """The runs of regular samples from *begin* to *end*, with the time at which each begins."""
    first, last = np.searchsorted(runs.firsts, [begin, end])
    inner = [int(start) for start in runs.firsts[first:last] if begin < start < end]
    for one, other in itertools.pairwise([begin, *inner, end]):
        number = int(np.searchsorted(runs.firsts, one, side="right")) - 1
        yield one, other, float(runs.times[number] + (one - runs.firsts[number]) / rate)


class ChosenChannels:
    """Some channels of a source of messages with a dimension ``ch``, whose format does not choose them."""

    def __init__(self, source: RecordingSource, channels: ChannelChoice) -> None:
        first = next(iter(source.read(0)))
        if "ch" not in first.dims:
            raise ValueError(f"{source.identity} has no channels to choose from.")
        n_channels = first.data.shape[first.dims.index("ch")]
        labels = labels_of(first) or tuple(map(str, range(n_channels)))
        self._source = source
        self._columns = channels_of_choice(channels, [(label, number) for number, label in enumerate(labels)])
        self.n_samples, self.sampling_rate = source.n_samples, source.sampling_rate
        self.identity = f"{source.identity}, channels {self._columns}"

    @property
    def gaps(self) -> list[int]:
        """See :class:`ezmsg.mlx.NeoSource`."""
        return list(getattr(self._source, "gaps", ()))

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """See :obj:`ezmsg.mlx.RecordingSource`."""
        for message in self._source.read(start):
            yield self._of(message)

    def _of(self, message: AxisArray) -> AxisArray:
        axis = message.axes.get("ch")
        axes = dict(message.axes)
        if isinstance(axis, CoordinateAxis):
            axes["ch"] = replace(axis, data=np.asarray(axis.data)[self._columns])
        gain = message.attrs.get("nwb_scaling_gain")
        gains = {} if gain is None or np.ndim(gain) == 0 else {"nwb_scaling_gain": np.asarray(gain)[self._columns]}
        data = np.take(message.data, self._columns, axis=message.dims.index("ch"))
        return replace(message, data=data, axes=axes, attrs={**message.attrs, **gains})


def scaling_of(channels: Channels) -> tuple[dict[str, object], str]:
    """The scaling in the words of ezmsg-nwb's attrs, and a digest of it and of the labels."""
    if not 0 < channels.rate < math.inf:
        raise Unfit(f"has a rate of {channels.rate} Hz; allowed is a finite number above 0.")
    if not (np.isfinite(channels.gains).all() and np.isfinite(channels.offsets).all()):
        raise Unfit(f"has gains {channels.gains} and offsets {channels.offsets}; allowed are finite numbers.")
    gains, offsets, units = channels.gains, channels.offsets, set(channels.units)
    volts = np.array([volts_of(unit) or np.nan for unit in channels.units])
    is_voltage = bool(np.isfinite(volts).all())
    if is_voltage:
        gains, offsets, units = gains * volts, offsets * volts, {"volts"}
    if len(units) > 1:
        raise Unfit(f"has channels in the units {sorted(units)}; allowed is one unit, or voltages.")
    if not np.all(offsets == offsets[0]):
        raise Unfit(f"has channels with the offsets {sorted(set(offsets))}; allowed is one for all.")
    scaling = Scaling(one_gain(gains), float(offsets[0]), units.pop(), is_voltage).as_attrs()
    parts = [repr(channels.labels), repr(channels.kinds)]
    parts += [f"{key}={value.tolist()!r}" for key, value in channels.more.items()]
    parts += [f"{key}={np.asarray(value).tolist()!r}" for key, value in scaling.items()]
    return scaling, hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def describe(recorded: Sequence[Sampled], path: Path) -> tuple[StreamInfo, ...]:
    """Description of each stream."""
    found = []
    for stream in streams_of(recorded):
        try:
            if stream.sampled.problem is not None:
                raise stream.sampled.problem
            with faults_of(path, stream.name):
                found.append(_described(stream))
        except (OSError, ValueError) as error:
            found.append(unreadable(stream.name, error))
    return tuple(found)


def _described(stream: Stream) -> StreamInfo:
    headers = [segment.channels.of(stream.columns(segment)) for segment in stream.sampled.segments]
    scaling, _ = scaling_of(headers[0])
    segments = []
    for segment, header in zip(stream.sampled.segments, headers, strict=True):
        runs, n = segment.runs(), segment.n_samples
        gaps, other = tuple(runs.firsts[1:].tolist()), tuple(differing_entries(headers[0], header))
        segments.append(SegmentInfo(n, float(runs.times[0]), n / header.rate, gaps, other))
    first = stream.sampled.segments[0]
    sample = first.samples(0, min(first.n_samples, 1), stream.columns(first))
    gains = np.atleast_1d(np.asarray(scaling["nwb_scaling_gain"], np.float64))
    return StreamInfo(
        name=stream.name,
        sampling_rate=headers[0].rate,
        labels=tuple(headers[0].labels),
        dtype=str(sample.dtype),
        unit=str(scaling["nwb_scaling_unit"]),
        segments=tuple(segments),
        kind=stream.kind,
        gains=tuple(gains.tolist()),
        offset=float(typing.cast(float, scaling["nwb_scaling_offset"])),
    )
