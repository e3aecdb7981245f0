"""Which recordings there are, and where their results go."""

import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from . import resultoptions
from .usage import UsageError

if typing.TYPE_CHECKING:
    from ..offline import RecordingSource, ZarrSink


@dataclass(frozen=True)
class Job:
    """A recording and where its results go."""

    recording: str
    results: str
    options: Mapping[str, typing.Any]
    """How it is read: keyword arguments of :func:`ezmsg.mlx.offline.open_recording`."""

    kept: resultoptions.Asked = field(default_factory=dict)
    """How its results are kept."""

    def sink(self, path: str | os.PathLike | None = None) -> "ZarrSink":
        """What writes its results, to *path* instead if that is given."""
        from ..offline import ZarrSink

        return ZarrSink(path or self.results, **resultoptions.for_sink(self.kept))

    def open(self) -> "RecordingSource":
        """The recording as a source."""
        from ..offline import open_recording

        return open_recording(self.recording, **self.options)


def find_jobs(
    given: Iterable[str],
    output: Path,
    options: Mapping[str, typing.Any],
    kept: resultoptions.Asked = MappingProxyType({}),
) -> list[Job]:
    """The recordings that are given, and those in folders that are, by name.

    The results of a recording in a folder below the one that is given go into a folder of the same name.

    Raises:
        UsageError: One is not there, a folder has none, or two have results of one name.
    """
    places: dict[Path, Path] = {}
    for text in given:
        for recording in _found(Path(text), options.get("format")):
            place = output.absolute() / _name(recording, Path(text))
            if places.setdefault(place, recording) != recording:
                both = f"{str(places[place])!r} and {str(recording)!r}"
                raise UsageError("RECORDING", f"{both} have one name, and so would their results")
    return [Job(os.path.abspath(recording), str(place), options, kept) for place, recording in places.items()]


def _found(path: Path, format: str | None) -> list[Path]:
    from ..offline import find_recordings

    if not path.exists():
        raise UsageError("RECORDING", f"there is no {str(path)!r}")
    if not path.is_dir():
        return [path]
    try:
        recordings = find_recordings(path, format)
    except ValueError as error:
        raise UsageError("--format", str(error)) from error
    if not recordings:
        raise UsageError("RECORDING", f"{str(path)!r} has no recordings of a format that is known")
    return recordings


def _name(recording: Path, given: Path) -> Path:
    """Of the results, in the folder of all results."""
    name = recording.name if recording.is_dir() else recording.stem
    below = Path() if recording == given or given.is_file() else recording.relative_to(given).parent
    return below / f"{name or 'results'}.zarr"
