"""What each process of the soak test tells about itself: who it is, and what was logged there."""

import dataclasses
import faulthandler
import json
import logging
import os
import pathlib
import re
import signal
import sys

import ezmsg.core as ez

REFUSED = re.compile(r"refused samples (\d+) to (\d+)")


class WatchSettings(ez.Settings):
    folder: str
    """Where ``NAME.pid`` appears when the process starts and ``NAME.json`` when it ends."""

    name: str = ""


@dataclasses.dataclass
class LogReport:
    refused: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """First sample, and the one after the last, of each refused message, once for each time that it is logged."""

    lengths: list[str] = dataclasses.field(default_factory=list)
    """Warnings of many message lengths, of which there are to be no more than one."""

    n_released: int = 0
    """How often MLX's cache has been given back."""

    others: list[str] = dataclasses.field(default_factory=list)
    """Whatever else is logged at WARNING and above."""


class _Handler(logging.Handler):
    def __init__(self, report: LogReport) -> None:
        super().__init__(logging.INFO)
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            self.report.n_released += text.startswith("MLX's buffer cache is given back")
            return
        if text.startswith("Exception in Task"):
            # The traceback is the next record.
            return
        # Only the last line of a traceback: the others show the source.
        last_line = text.strip().rpartition("\n")[2]
        if text.startswith("Timed out waiting for Subscriber") and text.endswith("MONITOR/OUTPUT_SIGNAL"):
            # A visitor on a busy machine, for a second; it gets its rows later.
            pass
        elif "message lengths, " in text and "RechunkSettings" in text:
            self.report.lengths.append(text)
        elif found := REFUSED.search(last_line):
            self.report.refused.append((int(found[1]), int(found[2])))
        else:
            self.report.others.append(text)


class Watch(ez.Unit):
    """One in each process."""

    SETTINGS = WatchSettings

    async def initialize(self) -> None:
        self.folder = pathlib.Path(self.SETTINGS.folder)
        self.log = LogReport()
        self.handler = _Handler(self.log)
        ez.logger.addHandler(self.handler)
        # For the stacks of all threads, where the graph hangs.
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
        self._write(f"{self.SETTINGS.name}.pid", str(os.getpid()))

    async def shutdown(self) -> None:
        ez.logger.removeHandler(self.handler)
        self._write(f"{self.SETTINGS.name}.json", json.dumps(dataclasses.asdict(self.log) | self.report()))

    def report(self) -> dict[str, object]:
        """What else to tell, JSON-serialisable."""
        return {}

    def _write(self, name: str, text: str) -> None:
        # Renamed when it is complete, since somebody looks for it.
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.rename(self.folder / name)
