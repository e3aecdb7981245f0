"""neo's readers: which one reads a path, what it is given, and what streams and segments it finds there."""

import inspect
import math
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .extra import import_extra
from .faults import fault, faults_of

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO

_CLASSES = {"rawbinary": "RawBinarySignalRawIO"}
"""Readers that go by another name here than neo's."""

_BESIDE = {
    "intan": lambda name: not name.endswith("amplifier channel"),
    "openephys": lambda name: name != "Signals CH",
    "openephysbinary": lambda name: name.endswith(("SYNC", "_ADC")),
    "spikeglx": lambda name: name.endswith("-SYNC"),
}
"""By format: whether a stream holds what was recorded beside the electrodes."""


class Stream(typing.NamedTuple):
    """Channels that were sampled together."""

    number: int
    """Its index in neo's header."""

    name: str
    id: str
    is_beside: bool
    """Whether it holds no electrodes, but what was recorded beside them: synchronization lines, auxiliary inputs."""


class Piece(typing.NamedTuple):
    """A segment of a recording: samples without a pause, as far as the format says."""

    block: int
    segment: int


class Channels(typing.NamedTuple):
    """What the header says of the channels of a stream."""

    labels: npt.NDArray[np.str_]
    rate: float
    gains: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.float64]
    units: list[str]


def reader_names() -> dict[str, type["BaseRawIO"]]:
    """All readers by the names of their formats: those of neo's classes without ``RawIO``, in lower case."""
    rawio = import_extra("neo.rawio")
    found = {each.__name__.removesuffix("RawIO").lower(): each for each in rawio.rawiolist}
    return found | {name: getattr(rawio, class_name) for name, class_name in _CLASSES.items()}


def open_reader(path: Path, format: str, options: Mapping[str, object]) -> "BaseRawIO":
    """The reader of *path*, with its header read.

    Raises:
        OSError: The system cannot open or read a file.
        ValueError: neo has no reader of that name, or it cannot read the files.
        TypeError: The reader takes no such option.
    """
    readers = reader_names()
    if format not in readers:
        raise ValueError(f"format is {format!r}; allowed are {', '.join(sorted(readers))}.")
    reader_class = readers[format]
    with faults_of(path):
        arguments = _ARGUMENTS[format](path) if format in _ARGUMENTS else _arguments(path, reader_class)
    try:
        inspect.signature(reader_class).bind(**{**arguments, **options})
    except TypeError as error:
        raise TypeError(f"{path} cannot be read as {format} with {dict(options)!r} ({error}).") from error
    with faults_of(path):
        reader = reader_class(**{**arguments, **options})
        reader.parse_header()
    return reader


def _arguments(path: Path, reader_class: type["BaseRawIO"]) -> dict[str, object]:
    if reader_class.rawmode != "one-dir":
        return {"filename": str(path)}
    return {"dirname": str(path if path.is_dir() else path.parent)}


def _of_intan(path: Path) -> dict[str, object]:
    if path.is_dir():
        headers = [path / name for name in ("info.rhd", "info.rhs") if (path / name).is_file()]
        if len(headers) != 1:
            raise fault(path, None, "is a folder without an info.rhd or info.rhs.")
        path = headers[0]
    # Gaps in the time stamps are followed, so neo need not refuse them.
    return {"filename": str(path), "ignore_integrity_checks": True}


def _of_blackrock(path: Path) -> dict[str, object]:
    number = path.suffix.lower().removeprefix(".ns")
    arguments: dict[str, object] = {"filename": str(path), "gap_tolerance_ms": math.inf}
    # Gaps in time stamps are followed, so neo need not make segments of them. Pauses are segments all the same.
    if number.isdigit():
        arguments["nsx_to_load"] = int(number)
        with open(path, "rb") as file:
            # Only the oldest files have the scale of their samples in the file of events, which may be large.
            arguments["load_nev"] = file.read(8) == b"NEURALSG"
    return arguments


_ARGUMENTS = {"blackrock": _of_blackrock, "intan": _of_intan}


def streams_of(reader: "BaseRawIO", format: str) -> list[Stream]:
    """All streams that *reader* has found."""
    is_beside = _BESIDE.get(format, lambda name: False)
    return [
        Stream(number, str(name), str(id), is_beside(str(name)))
        for number, (name, id) in enumerate(reader.header["signal_streams"][["name", "id"]].tolist())
    ]


def pieces_of(reader: "BaseRawIO") -> list[Piece]:
    """All segments of all blocks, in order."""
    blocks = range(reader.block_count())
    return [Piece(block, segment) for block in blocks for segment in range(reader.segment_count(block))]


def found_in(reader: "BaseRawIO", format: str, path: Path) -> tuple[list[Stream], list[Piece]]:
    """All streams and segments; of a file that is part of a folder's recording, its own.

    Raises:
        ValueError: neo finds no recording in a file of a folder.
    """
    streams, pieces = streams_of(reader, format), pieces_of(reader)
    if format == "spikeglx" and path.is_file():
        return _of_file(reader, path, streams, pieces)
    return streams, pieces


def choose(
    reader: "BaseRawIO", format: str, path: Path, stream: str | None, segment: int | str | None
) -> tuple[Stream, list[Piece]]:
    """The stream and the segments that are asked for.

    Raises:
        ValueError: There is none, or there are several and it is not said which.
    """
    streams, pieces = found_in(reader, format, path)
    return _chosen_stream(streams, stream, path), _chosen_pieces(pieces, segment, path)


def _of_file(
    reader: typing.Any, path: Path, streams: list[Stream], pieces: list[Piece]
) -> tuple[list[Stream], list[Piece]]:
    own = [
        key
        for key, info in reader.signals_info_dict.items()
        if path in (Path(info["bin_file"]), Path(info["meta_file"]))
    ]
    if not own:
        raise fault(path, None, "has no file of samples and no meta file with its name beside it.")
    number, name = own[0]
    return (
        [each for each in streams if each.name.removesuffix("-SYNC") == name],
        [each for each in pieces if each.segment == number],
    )


def _chosen_stream(streams: list[Stream], wanted: str | None, path: Path) -> Stream:
    if wanted is not None:
        matching = [each for each in streams if wanted == each.name] or [each for each in streams if wanted == each.id]
    else:
        matching = [each for each in streams if not each.is_beside] or streams
    if len(matching) == 1:
        return matching[0]
    if not streams:
        raise fault(path, None, "has no signals.")
    problem = "several streams" if matching else f"no stream {wanted!r}"
    raise fault(path, None, f"has {problem}; allowed as stream are {', '.join(each.name for each in streams)}.")


def _chosen_pieces(pieces: list[Piece], wanted: int | str | None, path: Path) -> list[Piece]:
    if wanted == "all" or (wanted is None and len(pieces) == 1):
        return pieces
    if isinstance(wanted, int) and 0 <= wanted < len(pieces):
        return [pieces[wanted]]
    allowed = f"allowed as segment are 0 to {len(pieces) - 1} and 'all'"
    problem = f"{len(pieces)} segments" if wanted is None else f"no segment {wanted!r}"
    raise fault(path, None, f"has {problem}; {allowed}.")


def channels_of(reader: "BaseRawIO", stream: Stream) -> Channels:
    """What the header says of the channels of *stream*."""
    header = reader.header["signal_channels"]
    header = header[header["stream_id"] == stream.id]
    return Channels(
        labels=np.array([str(name).strip("\0 ") for name in header["name"]]),
        rate=reader.get_signal_sampling_rate(stream.number),
        gains=header["gain"].astype(np.float64),
        offsets=header["offset"].astype(np.float64),
        units=[str(unit).strip("\0 ") for unit in header["units"]],
    )
