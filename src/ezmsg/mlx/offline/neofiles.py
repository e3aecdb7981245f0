"""neo's readers: which one reads a path, how its samples become volts, and where it is wrong or checks nothing.

neo computes the number of samples from the size of a file, so that a truncated one, or one with another number of
channels than its header says, gives samples all the same. What is corrected here is in docs/explanation/neo-reports.md.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import tempfile
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..stream.unit import one_of
from .reading import RecordingError, Runs, Unfit, fault, faults_of, import_extra, one_run, runs_in, volts_of
from .signals import (
    ANALOG,
    AUXILIARY,
    DIGITAL,
    ELECTRODE,
    OTHER,
    Channels,
    FlatSegment,
    Sampled,
    Segment,
    as_slice,
    check_size,
    whole_samples,
)

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO

_CLASSES = {"rawbinary": "RawBinarySignalRawIO"}
"""Readers that go by another name here than neo's."""

_BESIDE = {
    "intan": lambda name: not name.endswith("amplifier channel"),
    "openephys": lambda name: name != "Signals CH",
}
"""By format: whether a stream holds what was recorded beside the electrodes."""

_KINDS = {
    "amplifier channel": ELECTRODE,
    "Amplifier channel": AUXILIARY,
    "auxiliary input channel": AUXILIARY,
    "supply voltage channel": AUXILIARY,
    "ADC input channel": ANALOG,
    "ADC output channel": ANALOG,
    "digital input channel": DIGITAL,
    "digital output channel": DIGITAL,
    "Stim channel": OTHER,
    "Signals CH": ELECTRODE,
    "Signals AUX": AUXILIARY,
    "Signals ADC": ANALOG,
}
"""By the end of the name of a stream, what its channels are. Of other streams the unit decides."""


def reader_names() -> dict[str, type[BaseRawIO]]:
    """All readers by the names of their formats: those of neo's classes without ``RawIO``, in lower case."""
    rawio = import_extra("neo.rawio")
    found = {each.__name__.removesuffix("RawIO").lower(): each for each in rawio.rawiolist}
    return found | {name: getattr(rawio, class_name) for name, class_name in _CLASSES.items()}


class _Opened(typing.NamedTuple):
    """A reader whose header was read, and what it reads."""

    reader: typing.Any
    path: Path
    format: str
    links: tempfile.TemporaryDirectory[str] | None
    """The folder that it was given, which is to go with it."""


def sampled_in(path: Path, format: str, options: Mapping[str, object]) -> list[Sampled]:
    """All streams that neo's reader *format* finds in *path*."""
    opened = _open(path, format, options)
    reader, is_beside = opened.reader, _BESIDE.get(format, lambda name: False)
    with faults_of(path):
        found = [
            _sampled(opened, number, str(name), str(id), is_beside(str(name)))
            for number, (name, id) in enumerate(reader.header["signal_streams"][["name", "id"]].tolist())
        ]
        return _whole_blackrock(path, found) if format == "blackrock" else found


def _sampled(opened: _Opened, number: int, name: str, id: str, is_beside: bool) -> Sampled:
    reader = opened.reader
    try:
        with faults_of(opened.path, name):
            header = reader.header["signal_channels"]
            header = header[header["stream_id"] == id]
            channels = _channels(header, opened.format, name, float(reader.get_signal_sampling_rate(number)))
            if getattr(reader, "file_format", None) == "one-file-per-channel":
                _order_channel_files(reader, opened.path, name, header["id"].tolist())
            segments: list[Segment] = []
            for piece in _pieces(reader):
                n_samples, place = int(reader.get_signal_size(*piece, number)), f"{piece[0]}.{piece[1]}"
                segments.append(NeoSegment(channels, n_samples, place, opened, number, piece))
    except (OSError, ValueError) as error:
        return Sampled(name, id, [], is_beside, problem=error)
    return Sampled(name, id, segments, is_beside)


def _pieces(reader: typing.Any) -> list[tuple[int, int]]:
    """All segments of all blocks, in order."""
    return [(block, number) for block in range(reader.block_count()) for number in range(reader.segment_count(block))]


def _open(path: Path, format: str, options: Mapping[str, object]) -> _Opened:
    readers = reader_names()
    if format not in readers:
        raise ValueError(f"'format' must be {one_of(sorted(readers))}, got {format!r}")
    reader_class = readers[format]
    with faults_of(path):
        arguments, links = _ARGUMENTS[format](path) if format in _ARGUMENTS else (_arguments(path, reader_class), None)
    try:
        inspect.signature(reader_class).bind(**{**arguments, **options})
    except TypeError as error:
        raise TypeError(f"{path} cannot be read as {format} with {dict(options)!r} ({error}).") from error
    with faults_of(path), _without_links(path, links):
        reader = reader_class(**{**arguments, **options})
        reader.parse_header()
    return _Opened(reader, path, format, links)


Arguments: typing.TypeAlias = tuple[dict[str, object], "tempfile.TemporaryDirectory[str] | None"]


def _arguments(path: Path, reader_class: type[BaseRawIO]) -> dict[str, object]:
    if reader_class.rawmode != "one-dir":
        return {"filename": str(path)}
    return {"dirname": str(path if path.is_dir() else path.parent)}


def _linked(files: Mapping[str, Path]) -> tempfile.TemporaryDirectory[str]:
    """A folder of links to *files*, under names that neo takes, so that it sees nothing else."""
    folder = tempfile.TemporaryDirectory(prefix="ezmsg-mlx-")
    for name, file in files.items():
        Path(folder.name, name).symlink_to(file.absolute())
    return folder


@contextlib.contextmanager
def _without_links(path: Path, links: tempfile.TemporaryDirectory[str] | None) -> typing.Iterator[None]:
    """Give errors that are raised inside the ``with`` block the names of files, not of links to them."""
    try:
        yield
    except OSError as error:
        if error.errno is not None or links is None:
            raise
        raise RecordingError(str(error).replace(links.name, str(path.parent))) from error
    except Exception as error:
        if links is None or links.name not in str(error):
            raise
        text = str(error).strip("'\" \n").splitlines()[0].replace(links.name, str(path.parent))
        raise fault(path, None, f"cannot be read ({type(error).__name__}: {text}).") from error


def _of_intan(path: Path) -> Arguments:
    # Gaps in the time stamps are followed, so neo need not refuse them.
    return_of = {"ignore_integrity_checks": True}
    if path.is_file() and path.stem.lower() != "info":
        links = _linked({f"recording{path.suffix.lower()}": path})
        return {"filename": f"{links.name}/recording{path.suffix.lower()}", **return_of}, links
    folder = path if path.is_dir() else path.parent
    headers = [file for file in folder.iterdir() if file.name.lower() in ("info.rhd", "info.rhs")]
    if len(headers) != 1:
        raise fault(path, None, "is a folder without an info.rhd or info.rhs, or with both.")
    # neo would take those in folders below, too.
    files = {file.name: file for file in folder.iterdir() if file.suffix == ".dat"}
    links = _linked({headers[0].name.lower(): headers[0], **files})
    return {"filename": f"{links.name}/{headers[0].name.lower()}", **return_of}, links


def _of_blackrock(path: Path) -> Arguments:
    number = path.suffix.lower().removeprefix(".ns")
    # Gaps in time stamps are followed, so neo need not make segments of them. Pauses are segments all the same.
    arguments: dict[str, object] = {"gap_tolerance_ms": math.inf}
    if not number.isdigit():
        return {"filename": str(path), **arguments}, None
    with open(path, "rb") as file:
        # Only the oldest files have the scale of their samples in the file of events, which may be large.
        is_old = file.read(8) == b"NEURALSG"
    files = {f"recording.ns{number}": path}
    for events in (path.with_suffix(".nev"), path.with_suffix(".NEV")):
        if is_old and events.is_file():
            files["recording.nev"] = events
    links = _linked(files)
    arguments |= {"filename": f"{links.name}/recording", "nsx_to_load": int(number), "load_nev": len(files) > 1}
    return arguments, links


_ARGUMENTS = {"blackrock": _of_blackrock, "intan": _of_intan}


def _channels(header: npt.NDArray, format: str, stream: str, rate: float) -> Channels:
    """The header of neo for the channels of a stream, corrected."""
    # A text of a fixed length ends at its first zero byte; behind it may be anything.
    labels, units = ([str(text).split("\0")[0].strip() for text in header[name]] for name in ("name", "units"))
    gains, offsets = header["gain"].astype(np.float64), header["offset"].astype(np.float64)
    if format == "intan" and stream.startswith("DC Amplifier"):
        # By Intan's description of the format it is -19.23 mV * (count - 512); neo leaves the sign out.
        gains, offsets = -np.abs(gains), np.abs(offsets)
    kinds = [_kind(stream, label, unit) for label, unit in zip(labels, units, strict=True)]
    return Channels(labels, rate, gains, offsets, units, kinds)


def _kind(stream: str, label: str, unit: str) -> str:
    known = next((kind for end, kind in _KINDS.items() if stream.endswith(end)), None)
    if known is not None:
        return known
    volts = volts_of(unit)
    if volts is None:
        return ANALOG if label.startswith("ainp") else ELECTRODE if not unit else OTHER
    return ELECTRODE if volts <= 1e-6 and not label.startswith("ainp") else ANALOG


def _order_channel_files(reader: typing.Any, path: Path, stream: str, ids: Sequence[str]) -> None:
    """Put the files of Intan's format with a file a channel in the order of the header; ValueError if they are others.

    neo takes those that there are by their names, and of some streams as the folder lists them.
    """
    wanted = [each.removesuffix("_DC").removesuffix("_STIM") for each in ids]
    # No public name gives the files of a stream; tests/unit/test_offline_files.py notices when this one goes.
    files = {Path(each.filename).stem.partition("-")[2]: each for each in reader._raw_data[stream]}
    if set(files) != set(wanted) or len(files) != len(wanted):
        raise fault(path, stream, f"has the channels {wanted} in its header, and files for {sorted(files)}.")
    reader._raw_data[stream] = [files[each] for each in wanted]


def _whole_blackrock(path: Path, found: list[Sampled]) -> list[Sampled]:
    """The same, with files of specification 2.1 read as what they are: neo leaves out their last sample."""
    with open(path, "rb") as file:
        header = file.read(32)
    if header[:8] != b"NEURALSG":
        return found
    for sampled in found:
        if sampled.problem is not None:
            continue
        channels = sampled.segments[0].channels
        offset, dtype = 32 + 4 * len(channels.labels), np.dtype("<i2")
        n_samples = whole_samples(path, offset, len(channels.labels), dtype)
        sampled.segments = [FlatSegment(channels, n_samples, "0.0", path, dtype, offset, lambda segment: one_run(0.0))]
    return found


@dataclass
class NeoSegment(Segment):
    """A segment of a stream as neo reads it."""

    opened: _Opened
    stream: int
    piece: tuple[int, int]
    """Numbers of its block and segment."""

    def samples(self, begin: int, end: int, columns: Sequence[int]) -> npt.NDArray:
        """See :class:`Segment`."""
        found = self.opened.reader.get_analogsignal_chunk(*self.piece, begin, end, self.stream)
        if found.ndim != 2 or found.shape[1] != len(self.channels.labels):
            raise Unfit(f"has {len(self.channels.labels)} channels in its header, and samples of shape {found.shape}.")
        # A copy, since this may be a view of a file that is mapped into memory.
        return np.array(found[:, as_slice(columns)])

    def runs(self) -> Runs:
        """See :class:`Segment`."""
        self._check_buffer()
        check = _CHECKS.get(self.opened.format, lambda segment: None)
        if (runs := check(self)) is not None:
            return runs
        start = float(self.opened.reader.get_signal_t_start(*self.piece, self.stream))
        if not math.isfinite(start):
            raise Unfit(f"begins at {start} s; allowed is a finite number.")
        return one_run(start)

    def _check_buffer(self) -> None:
        reader = self.opened.reader
        if not reader.has_buffer_description_api():
            return
        buffer_id = reader.header["signal_streams"]["buffer_id"][self.stream]
        buffer = reader.get_analogsignal_buffer_description(*self.piece, buffer_id)
        if buffer["type"] == "raw":
            n_samples, n_channels = buffer["shape"][:: -1 if buffer.get("time_axis", 0) else 1]
            dtype = np.dtype(buffer["dtype"])
            check_size(Path(buffer["file_path"]), buffer["file_offset"], n_samples, n_channels, dtype)


_HEADER, _RECORD, _SAMPLES = 1024, 2070, 1024
"""Bytes of the header and of a record of a ``.continuous`` file, and samples in a record."""


def _check_open_ephys(segment: NeoSegment) -> None:
    # neo fills gaps with zeros, and cuts channels of different lengths to the shortest.
    lengths = set(_sizes(segment))
    records = {
        file: divmod(file.stat().st_size - _HEADER, _RECORD)
        for file in sorted(Path(segment.opened.reader.dirname).rglob("*.continuous"))
    }
    for file, (_, rest) in records.items():
        if rest:
            raise fault(file, None, "is truncated: it ends in the middle of a record.")
    for file, (n_records, _) in records.items():
        if (n := n_records * _SAMPLES) not in lengths:
            problem = f"has {n} samples where the recording is {sorted(lengths)} long"
            raise fault(file, None, f"{problem}: channels have different lengths, or there are gaps.")


def _sizes(segment: NeoSegment) -> list[int]:
    """The samples of all segments of a stream."""
    reader = segment.opened.reader
    return [int(reader.get_signal_size(*piece, segment.stream)) for piece in _pieces(reader)]


_PTP_TOLERANCE = 0.9
"""Time stamps of a clock are not as even as numbers; a single sample that is missing makes 1."""


def _check_blackrock(segment: NeoSegment) -> Runs | None:
    """The runs in a file with a time stamp for each sample (Precision Time Protocol); None for others."""
    path = segment.opened.path
    with open(path, "rb") as file:
        header = file.read(314)
    in_headers, resolution = (int.from_bytes(header[begin : begin + 4], "little") for begin in (10, 290))
    if not path.suffix.lower().startswith(".ns") or header[:8] == b"NEURALSG" or resolution != 10**9:
        return None
    n_channels = int.from_bytes(header[310:314], "little")
    packet = np.dtype([("reserved", "u1"), ("stamp", "<u8"), ("n", "<u4"), ("samples", "<i2", n_channels)])
    n, rest = divmod(path.stat().st_size - in_headers, packet.itemsize)
    packets = np.memmap(path, packet, "r", in_headers, n)
    if packets["n"][0] != 1:
        return None
    if rest:
        raise fault(path, None, "is truncated: it ends in the middle of a packet.")
    first, period = sum(_sizes(segment)[: segment.piece[1]]), 1e9 / segment.channels.rate
    stamps = packets["stamp"][first : first + segment.n_samples]
    return runs_in(stamps, period, 1e-9, path, tolerance=_PTP_TOLERANCE)


def _check_intan(segment: NeoSegment) -> Runs:
    reader, n, rate = segment.opened.reader, segment.n_samples, segment.channels.rate
    numbers = reader.get_intan_timestamps()
    main_rate = max(reader.get_signal_sampling_rate(each) for each in range(reader.signal_streams_count()))
    ratio = round(main_rate / rate)
    if n * ratio != len(numbers):
        raise Unfit(
            f"has {n} samples at {rate} Hz, and {len(numbers)} time stamps at {main_rate} Hz: a file is truncated, or "
            "has another number of channels than the header says."
        )
    runs = runs_in(numbers, 1, 1 / main_rate, segment.opened.path)
    return Runs(-(-runs.firsts // ratio), runs.times)


_CHECKS: Mapping[str, typing.Callable[[NeoSegment], Runs | None]] = {
    "blackrock": _check_blackrock,
    "intan": _check_intan,
    "openephys": _check_open_ephys,
}
