"""Formats that neo reads: how to tell them by their names, and what is in them."""

import typing
from collections.abc import Callable
from pathlib import Path

from .contracts import RecordingFormat, SegmentInfo, StreamInfo
from .description import unreadable
from .extra import import_extra
from .faults import faults_of
from .neochecks import runs_of
from .neoreaders import Piece, Stream, channels_of, found_in, open_reader, reader_names
from .neoscaling import scaling_of
from .neosource import NeoSource
from .rawbinarysource import RawBinarySource

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO


def _is_file(path: Path, *suffixes: str) -> bool:
    return path.suffix.lower() in suffixes and path.is_file()


def _has(folder: Path, *patterns: str) -> bool:
    return folder.is_dir() and any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _spikeglx(path: Path) -> Path | None:
    if _is_file(path, ".bin", ".meta"):
        both = path.with_suffix(".bin"), path.with_suffix(".meta")
        return both[0] if all(each.is_file() for each in both) else None
    return path if _has(path, *(f"{above}*.{kind}.meta" for above in ("", "*/", "*/*/") for kind in _KINDS)) else None


_KINDS = ("ap", "lf", "nidq", "obx")


def _open_ephys_binary(path: Path) -> Path | None:
    if path.name == "structure.oebin" and path.is_file():
        return path.parent
    levels = ("", "recording*/", "experiment*/recording*/", "Record Node*/experiment*/recording*/")
    return path if _has(path, *(f"{level}structure.oebin" for level in levels)) else None


def _open_ephys(path: Path) -> Path | None:
    if _is_file(path, ".continuous"):
        return path.parent
    return path if _has(path, "*.continuous") else None


def _intan(path: Path) -> Path | None:
    if path.name in ("info.rhd", "info.rhs") and path.is_file():
        return path.parent
    return path if _is_file(path, ".rhd", ".rhs") or _has(path, "info.rhd", "info.rhs") else None


def _blackrock(path: Path) -> Path | None:
    return path if _is_file(path, *(f".ns{number}" for number in range(1, 7))) else None


def _raw_binary(path: Path) -> Path | None:
    return path if _is_file(path, ".bin", ".dat", ".raw") else None


def _open_raw_binary(
    path: Path, *, stream: str | None = None, segment: int | str | None = None, **options: typing.Any
) -> RawBinarySource:
    missing = [name for name in ("sampling_rate", "n_channels") if options.get(name) is None]
    if missing:
        raise ValueError(f"{path} has no header; needed to read it as raw binary: {' and '.join(missing)}.")
    if stream is not None or segment not in (None, 0, "all"):
        raise ValueError(f"{path} is raw binary; allowed are no stream and segment 0, not {stream!r} and {segment!r}.")
    return RawBinarySource(path, **options)


def neo_format(
    name: str, description: str = "", locate: Callable[[Path], Path | None] | None = None
) -> RecordingFormat:
    """The format that neo's reader *name* reads; told by the suffixes of neo's class where there is no *locate*."""

    def open_neo(path: Path, **options: typing.Any) -> NeoSource:
        return NeoSource(path, format=name, **options)

    def describe_neo(path: Path, **options: typing.Any) -> tuple[StreamInfo, ...]:
        return _describe(path, name, **options)

    def by_suffix(path: Path) -> Path | None:
        suffixes = {f".{suffix.lower()}" for suffix in reader_names()[name].extensions}
        return path if path.suffix.lower() in suffixes and path.exists() else None

    return RecordingFormat(
        name=name,
        description=description or f"neo's reader {name}",
        locate=locate or by_suffix,
        open=open_neo,
        describe=describe_neo,
        in_folder=name in ("intan", "openephys", "openephysbinary"),
    )


NEO_FORMATS = (
    RecordingFormat("rawbinary", "samples without a header", _raw_binary, _open_raw_binary, in_search=False),
    neo_format("blackrock", "Blackrock .ns1 to .ns6", _blackrock),
    neo_format("intan", "Intan .rhd and .rhs, with the samples in one file or beside it", _intan),
    neo_format("openephys", "Open Ephys, legacy: a folder of .continuous files", _open_ephys),
    neo_format("openephysbinary", "Open Ephys, binary: a folder with structure.oebin", _open_ephys_binary),
    neo_format("spikeglx", "SpikeGLX .bin and .meta", _spikeglx),
)


def guessed_format(path: Path) -> RecordingFormat | None:
    """The format of the only reader of neo that claims *path* by its suffix; None if there is none, or several."""
    try:
        found = import_extra("neo.rawio").get_rawio(path)
    except ImportError:
        return None
    return neo_format(found.__name__.removesuffix("RawIO").lower()) if found else None


def named_format(name: str) -> RecordingFormat | None:
    """The format of neo's reader *name*."""
    try:
        return neo_format(name) if name in reader_names() else None
    except ImportError:
        return None


def _describe(path: Path, format: str, **options: typing.Any) -> tuple[StreamInfo, ...]:
    import_extra("neo.rawio")
    reader = open_reader(path, format, options)
    with faults_of(path):
        streams, pieces = found_in(reader, format, path)
    found = []
    for stream in streams:
        try:
            with faults_of(path, stream.name):
                found.append(_described(reader, format, path, stream, pieces))
        except (OSError, ValueError) as error:
            found.append(unreadable(stream.name, error))
    return tuple(found)


def _described(reader: "BaseRawIO", format: str, path: Path, stream: Stream, pieces: list[Piece]) -> StreamInfo:
    channels = channels_of(reader, stream)
    scaling, _ = scaling_of(channels, path, stream.name)
    segments = []
    for piece in pieces:
        n = int(reader.get_signal_size(piece.block, piece.segment, stream.number))
        runs = runs_of(reader, format, path, stream, piece)
        gaps = tuple(int(first) for first in runs.firsts[1:])
        segments.append(SegmentInfo(n, float(runs.times[0]), n / channels.rate, gaps))
    sample = reader.get_analogsignal_chunk(*pieces[0], 0, 1, stream.number)
    return StreamInfo(
        name=stream.name,
        sampling_rate=channels.rate,
        labels=tuple(channels.labels.tolist()),
        dtype=str(sample.dtype),
        unit=str(scaling["nwb_scaling_unit"]),
        segments=tuple(segments),
    )
