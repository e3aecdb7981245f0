"""Which source reads a path: formats by name, or by what is there.

::

    source = open_recording("run_g0_t0.imec0.ap.bin")
    for stream in describe_recording("session.nwb").streams:
        print(stream.name, len(stream.labels), stream.sampling_rate)

Another package adds a format with an entry point in the group ``ezmsg.mlx.formats`` whose value is a
:class:`RecordingFormat`; a script calls :func:`register_format`.
"""

from __future__ import annotations

import importlib.metadata
import os
import typing
from collections.abc import Iterator
from pathlib import Path

import ezmsg.core as ez

from ..stream.unit import check_path, one_of
from .contracts import RecordingFormat, RecordingSource, StreamInfo, describe_source
from .neosource import NEO_FORMATS, guessed_format, named_format
from .nwbsource import NWB_FORMAT
from .reading import existing
from .signals import ChannelChoice, ChosenChannels

ENTRY_POINTS = "ezmsg.mlx.formats"
"""The group of entry points that other packages add formats with."""

_formats: dict[str, RecordingFormat] = {}
"""By name; the last one is asked first what a path is."""

_entry_points_are_loaded = False

_SKIPPED = (".zarr", ".partial")
"""Folders of results."""


class RecordingInfo(typing.NamedTuple):
    """Contents of a recording."""

    path: Path
    """The recording that the path belongs to: the folder, where a file in it was given."""

    format: str
    streams: tuple[StreamInfo, ...]


def register_format(format: RecordingFormat) -> None:
    """Add a format, or replace the one of that name. The one added last is asked first what a path is.

    Raises:
        TypeError: *format* is not a :class:`RecordingFormat`.
    """
    if not isinstance(format, RecordingFormat):
        raise TypeError(f"'format' must be a RecordingFormat, got {format!r}")
    _formats.pop(format.name, None)
    _formats[format.name] = format


for _each in (*NEO_FORMATS, NWB_FORMAT):
    register_format(_each)


def recording_formats() -> dict[str, RecordingFormat]:
    """All formats by name, those of other packages included, in the order in which they are asked what a path is.

    neo's other readers are not among them: they are found by the name of their class without ``RawIO``, in lower case.
    """
    global _entry_points_are_loaded
    if not _entry_points_are_loaded:
        _entry_points_are_loaded = True
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            try:
                register_format(entry.load())
            except Exception as error:  # whatever another package does wrong
                ez.logger.warning(f"The format {entry.name!r} of {entry.value} cannot be loaded ({error}).")
    return dict(reversed(_formats.items()))


def open_recording(
    path: str | os.PathLike,
    format: str | None = None,
    *,
    stream: str | None = None,
    segment: int | typing.Literal["all"] | None = None,
    channels: ChannelChoice | None = None,
    **options: typing.Any,
) -> RecordingSource:
    """A source for the recording at *path*, for :func:`ezmsg.mlx.process_recording`.

    Args:
        path: A file or folder.
        format: Name of the format, see :func:`recording_formats`. None or ``"auto"``: told by the name of the file, or
            by the names in the folder.
        stream: Name of the stream, in NWB of the series. None: the only one.
        segment: Number of the segment, from 0; ``"all"`` for all of them. None: the only one.
        channels: Labels, indices and, where the format knows them, kinds of channels, to read no others:
            ``["A-001", "A-002"]``, or as text with commas ``"0:32,analog"``. None: all of the stream.
        options: Further arguments of the source: ``chunk_mb``, for raw binary ``sampling_rate`` and ``n_channels``.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is nothing at *path*.
        OSError: It cannot be opened or read.
        ValueError: There is no such format, or none that *path* is of; what the source raises, which see.
        TypeError: An argument is not of its type, or the source takes no such option.
    """
    found, located = _recognised(path, format)
    options |= {name: value for name, value in (("stream", stream), ("segment", segment)) if value is not None}
    if channels is None:
        return found.open(located, **options)
    if found.chooses_channels:
        return found.open(located, channels=channels, **options)
    return ChosenChannels(found.open(located, **options), channels)


def describe_recording(path: str | os.PathLike, format: str | None = None, **options: typing.Any) -> RecordingInfo:
    """Describe the recording at *path*: streams, channels, rates, durations and gaps.

    Time stamps are read as a whole, samples are not. A stream that cannot be processed says why in ``problem``.

    Args:
        path: A file or folder.
        format: As in :func:`open_recording`.
        options: Further arguments of the source that belong to the file.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        OSError: There is nothing at *path*, or it cannot be opened.
        ValueError: There is no such format, or none that *path* is of; the recording as a whole is damaged.
    """
    found, located = _recognised(path, format)
    if found.describe is not None:
        streams = found.describe(located, **options)
    else:
        streams = (describe_source(located.name, [found.open(located, **options)]),)
    return RecordingInfo(located, found.name, streams)


def find_recordings(folder: str | os.PathLike, format: str | None = None) -> list[Path]:
    """The recordings in a folder and in the folders below it, in alphabetical order.

    Raw binary files are only looked for if *format* says so. Hidden folders and folders of results (``.zarr``,
    ``.partial``) are left out.

    Args:
        folder: A folder, or a recording.
        format: As in :func:`open_recording`; with one, only recordings of this format.

    Raises:
        FileNotFoundError: There is nothing at *folder*.
        ValueError: There is no such format.
    """
    check_path("path", folder)
    root = existing(Path(folder))
    if format in (None, "auto"):
        formats = [each for each in recording_formats().values() if each.in_search]
    else:
        formats = [_named(format)]
    return sorted(set(_search(root, formats)))


def _search(path: Path, formats: list[RecordingFormat]) -> Iterator[Path]:
    """Each recording once: folders before links to folders, and no folder twice, however links lead to it."""
    seen: set[tuple[int, int]] = set()
    todo, linked = [path], list[Path]()
    while todo or linked:
        place = todo.pop() if todo else linked.pop()
        located = next((found for each in formats if (found := _located(each, place)) is not None), None)
        if located is not None:
            yield located
        elif place.is_dir() and (about := place.stat()) and (about.st_dev, about.st_ino) not in seen:
            seen.add((about.st_dev, about.st_ino))
            try:
                entries = list(place.iterdir())
            except PermissionError as error:
                ez.logger.warning(f"{place} is left out: {error.strerror}.")
                continue
            entries = [entry for entry in entries if not entry.name.startswith(".") and entry.suffix not in _SKIPPED]
            for entry in entries:
                (linked if entry.is_symlink() and entry.is_dir() else todo).append(entry)


def _located(format: RecordingFormat, path: Path) -> Path | None:
    return format.locate(path) if format.in_folder or path.is_file() else None


def _recognised(path: str | os.PathLike, format: str | None) -> tuple[RecordingFormat, Path]:
    """The format, and the recording that *path* belongs to."""
    check_path("path", path)
    place = existing(Path(path))
    if not isinstance(format, (str, type(None))):
        raise TypeError(f"'format' must be a name or None, got {format!r}")
    if format not in (None, "auto"):
        found = _named(format)
        return found, found.locate(place) or place
    for found in recording_formats().values():
        located = found.locate(place)
        if located is not None:
            return found, located
    guess = guessed_format(place)
    if guess is not None:
        return guess, place
    raise ValueError(f"{place} is of no format that is known; 'format' may be {one_of(recording_formats())}.")


def _named(name: str) -> RecordingFormat:
    formats = recording_formats()
    found = formats.get(name) or named_format(name)
    if found is None:
        raise ValueError(f"'format' must be {one_of(['auto', *formats])} or the name of a reader of neo, got {name!r}")
    return found
