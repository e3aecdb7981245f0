"""NWB files as a format of recordings."""

import typing
from pathlib import Path

from .contracts import RecordingFormat, StreamInfo
from .description import describe_source, unreadable
from .nwbsource import NWBSource, series_names


def _locate(path: Path) -> Path | None:
    return path if path.suffix.lower() == ".nwb" and path.is_file() else None


def _open(
    path: Path, *, stream: str | None = None, segment: int | str | None = None, **options: typing.Any
) -> NWBSource:
    if segment not in (None, 0, "all"):
        raise ValueError(f"segment is {segment!r}; allowed is 0, since a series of an NWB file is one segment.")
    return NWBSource(path, stream, **options)


def _describe(path: Path) -> tuple[StreamInfo, ...]:
    found = []
    for name in series_names(path):
        try:
            found.append(describe_source(name, [NWBSource(path, name, chunk_mb=2**-6)]))
        except (OSError, ValueError) as error:
            found.append(unreadable(name, error))
    return tuple(found)


NWB_FORMAT = RecordingFormat("nwb", "Neurodata Without Borders, in HDF5", _locate, _open, _describe)
