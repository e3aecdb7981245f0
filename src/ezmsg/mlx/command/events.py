"""What the command tells while it runs; elsewhere than on a terminal, each is a line of JSON.

A line is an object with ``event``, the name below in lower case, and the fields. Times are in seconds.
"""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    def line(self) -> str:
        """It as JSON."""
        fields = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps({"event": type(self).__name__.lower(), **fields}, allow_nan=False)


@dataclass(frozen=True)
class Started(Event):
    """The first event of a run."""

    recordings: int
    """How many there are."""
    chain: str
    """Its name, with the parameters that were given."""
    output: str
    """Folder of the results."""


@dataclass(frozen=True)
class Progress(Event):
    """How far a recording has got, once a second at most."""

    recording: str
    """Its path."""
    seconds: float
    """What of it is done."""
    of: float
    """Its length."""


@dataclass(frozen=True)
class Finished(Event):
    """The results of a recording are complete."""

    recording: str
    """Its path."""
    results: str
    """Path of its results."""
    seconds: float
    """Its length."""
    processed: float
    """What of it this run has processed: all; less where it went on at a checkpoint; 0 where results were there."""
    wall: float
    """The time that took."""


@dataclass(frozen=True)
class Failed(Event):
    """A recording that could not be processed. The others go on."""

    recording: str
    """Its path."""
    error: str
    """What is wrong."""


@dataclass(frozen=True)
class Ended(Event):
    """The last event of a run."""

    finished: int
    """Recordings whose results are complete, those that were there before included."""
    there: int
    """Those of them that were there before."""
    failed: int
    """Recordings that failed."""
    left: int
    """Recordings that an interrupted run has not finished. The same command goes on with them."""
    seconds: float
    """Seconds of recording that this run has processed."""
    wall: float
    """The time that took."""
    status: int
    """The exit status."""


@dataclass(frozen=True)
class Estimate(Event):
    """What ``--dry-run`` says of a recording, or, with ``recording`` empty, of all of them."""

    recording: str
    """Its path."""
    seconds: float
    """Its length."""
    wall: float
    """How long it will take."""
    read: float
    """The part of ``wall`` for reading."""
    chain: float
    """The part of ``wall`` for the chain, without ``start``."""
    write: float
    """The part of ``wall`` for writing."""
    start: float
    """The part of ``wall`` until the first results are there: what is compiled and imported, once a process."""
    size: int
    """How large the results will be, in bytes on disk."""
    free: int
    """What is free where the results go, in bytes."""
    measured: float
    """Seconds of recording that were measured; 0 for one that is like another that was."""


EVENTS = (Started, Progress, Finished, Failed, Ended, Estimate)
