"""The events of a run, as a bar and lines on a terminal or as lines of JSON, and Ctrl-C that is not lost.

A line is an object with ``event``, the name below in lower case, and the fields. Times are in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from .options import on_terminal

if typing.TYPE_CHECKING:
    from rich.progress import TaskID


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
    """Part of it that is done."""
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
    """Part of it that this run has processed: less than all after a checkpoint, and 0 where results were there."""
    wall: float
    """The time that took."""


@dataclass(frozen=True)
class Failed(Event):
    """A recording that could not be processed. The others go on."""

    recording: str
    """Its path."""
    error: str
    """Description of the fault."""


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
    """Estimates of ``--dry-run`` for a recording, or, with ``recording`` empty, of all of them."""

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
    """Free space where the results go, in bytes."""
    measured: float
    """Seconds of recording that were measured; 0 for one that is like another that was."""


EVENTS = (Started, Progress, Finished, Failed, Ended, Estimate)


class View(typing.Protocol):
    """Takes events."""

    def take(self, event: Event) -> None:
        """Show one."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class JsonLines:
    """Each event as a line of JSON on stdout."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, event: Event) -> None:
        """See :class:`View`."""
        if isinstance(event, Progress):
            now = time.monotonic()
            if now < self._last.get(event.recording, now - 1.0) + 1.0:
                return
            self._last[event.recording] = now
        # At once, for whoever reads a pipe.
        print(event.line(), flush=True)

    def close(self) -> None:
        """See :class:`View`."""


class Terminal:
    """A bar for all recordings and one for each at work; a line for each that has ended."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        # The bar takes what the others leave of the width, and a long name loses its end.
        of_name = Column(no_wrap=True, overflow="ellipsis", ratio=2)
        # A name may look like rich's markup.
        name = TextColumn("{task.description}", markup=False, table_column=of_name)
        bar = BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1))
        note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True))
        # Drawn from here alone: a thread that draws while a line is printed may eat the line.
        columns = (name, bar, TaskProgressColumn(), TimeRemainingColumn(), note)
        self._bar = Bar(*columns, auto_refresh=False, expand=True)
        self._all = self._bar.add_task("starting", total=None, note="")
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, tuple[float, float]] = {}
        """Of each recording, the part that was done when this run came to it, and the part that is done now."""
        self._shares: dict[str, float] = {}
        self._total = self._ended = 0
        self._begin = self._drawn_at = time.monotonic()
        self._bar.start()

    def take(self, event: Event) -> None:
        """See :class:`View`."""
        if isinstance(event, Started):
            self._total = event.recordings
            self._print(f"{_recordings(event.recordings)}, {event.chain}, into {event.output}")
            self._update()
        elif isinstance(event, Progress):
            self._go_on(event)
        elif isinstance(event, (Finished, Failed)):
            self._end(event)
        elif isinstance(event, Ended):
            for task in self._tasks.values():
                self._bar.remove_task(task)
            self.close()
            self._print(summary(event))

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _go_on(self, event: Progress) -> None:
        name = event.recording
        if name not in self._tasks and self._total > 1:
            self._tasks[name] = self._bar.add_task(f"  {os.path.basename(name)}", total=event.of, note="")
        if name in self._tasks:
            self._bar.update(self._tasks[name], completed=event.seconds)
        self._done[name] = self._done.get(name, (event.seconds, 0.0))[0], event.seconds
        self._shares[name] = event.seconds / event.of
        self._update()

    def _end(self, event: Finished | Failed) -> None:
        name = event.recording
        if name in self._tasks:
            self._bar.remove_task(self._tasks.pop(name))
            self._draw(after=0.0)
        self._shares[name] = 1.0
        self._ended += 1
        said = what_was_done(event) if isinstance(event, Finished) else event.error
        self._print(f"{os.path.basename(name)}: {said}")
        self._update()

    def _update(self) -> None:
        done = sum(now - first for first, now in self._done.values())
        speed = done / max(time.monotonic() - self._begin, 1e-9)
        self._bar.update(
            self._all,
            description=f"{self._ended} of {_recordings(self._total)}",
            total=self._total,
            completed=sum(self._shares.values()),
            note=f"{two_digits(speed)}x real time" if done else "",
        )
        self._draw(after=0.1 if done else 0.0)

    def _draw(self, after: float) -> None:
        if time.monotonic() >= self._drawn_at + after:
            self._bar.refresh()
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        """See :class:`View`."""
        self._bar.stop()


def view_for(as_json: bool) -> View:
    """The one for where the output goes."""
    return JsonLines() if as_json or not on_terminal() else Terminal()


def what_was_done(event: Finished) -> str:
    """In some words."""
    if not event.processed:
        return "was there already"
    text = f"{event.processed:.1f} s in {event.wall:.1f} s"
    return text if event.processed == event.seconds else f"{text}, the rest was there"


def _recordings(number: int) -> str:
    return f"{number} recording{'s' * (number != 1)}"


def summary(event: Ended) -> str:
    """In one or two sentences."""
    done = event.finished - event.there
    text = f"{_recordings(done)} done: {event.seconds:.1f} s in {event.wall:.1f} s"
    if event.seconds:
        text += f", {two_digits(event.seconds / event.wall)}x real time"
    if event.there:
        text += f"; {event.there} there already"
    if event.failed:
        text += f"; {event.failed} failed"
    if event.left:
        text += f".\nInterrupted: {event.left} are left; the same command goes on with them at their last checkpoints"
    return text + "."


def show_estimates(estimates: Sequence[Estimate | Failed], as_json: bool) -> None:
    """Estimates of ``--dry-run``: a table on a terminal, lines of JSON elsewhere."""
    if as_json or not on_terminal():
        for event in estimates:
            print(event.line(), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("recording", box=None)
    for head in ("length", "time", "start", "read", "chain", "write", "size"):
        table.add_column(head, justify="right")
    for event in estimates:
        name = os.path.basename(event.recording) or "all"
        if isinstance(event, Failed):
            console.print(f"{name}: {event.error}", markup=False, highlight=False, soft_wrap=True)
            continue
        times = (event.seconds, event.wall, event.start, event.read, event.chain, event.write)
        table.add_row(name, *map(duration, times), size(event.size))
    console.print(table)
    for event in estimates[-1:]:
        if isinstance(event, Estimate):
            text = f"From {event.measured:.1f} s of recording that were measured; nothing is left of the results."
            text += f" Free where results go: {size(event.free)}."
            if event.size > event.free:
                text += " That is too little."
            console.print(text, highlight=False)


def two_digits(value: float) -> str:
    """A number above 0 with two digits that count: 0.38, 5.6, 56, 130."""
    rounded = float(f"{value:.1e}")
    n_behind = max(1 - math.floor(math.log10(rounded)), 0) if rounded > 0 else 0
    return f"{rounded:.{n_behind}f}"


def duration(seconds: float) -> str:
    """In the unit that fits."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def size(n_bytes: float) -> str:
    """In the unit that fits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" or n_bytes >= 99.5 else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt, and :meth:`check` raises it again if it was swallowed.

    NumPy and MLX's bindings swallow whatever is raised while they call Python. In another thread than the main one the
    context does nothing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: object = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """To be called now and then; does nothing in another thread than the main one."""
        if self._asked and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
