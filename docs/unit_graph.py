"""Run units of ezmsg-sigproc in a graph, and see what they publish: for ``make_unit_table.py``."""

import asyncio
import logging
import socket
import time
import typing
from collections.abc import Sequence
from importlib import import_module

import ezmsg.core as ez
from ezmsg.util.messages.axisarray import AxisArray

LONGEST = 120.0
"""Seconds after which a graph ends, whatever has come. Only a unit that says nothing takes that long."""

INPUTS = ("INPUT_SIGNAL", "INPUT_SIGNAL_A", "INPUT_SIGNAL_B")


class Planned(typing.NamedTuple):
    """A unit that is to run."""

    unit: str
    """Module and name, below ezmsg.sigproc."""
    settings: ez.Settings | None
    messages: Sequence[AxisArray]
    """What each of its inputs gets."""
    n_values: int
    """How many values it gives when it is called bare."""
    inputs: tuple[str, ...] = INPUTS


class SourceSettings(ez.Settings):
    messages: Sequence[AxisArray]


class Source(ez.Unit):
    SETTINGS = SourceSettings
    OUTPUT = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT)
    async def send(self) -> typing.AsyncGenerator:
        for message in self.SETTINGS.messages:
            yield self.OUTPUT, message


class SinkSettings(ez.Settings):
    number: int
    received: dict[int, int]


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT = ez.InputStream(object)

    @ez.subscriber(INPUT)
    async def take(self, message: object) -> None:
        size = getattr(getattr(message, "data", None), "size", 0)
        self.SETTINGS.received[self.SETTINGS.number] += size


class Refusals(logging.Handler):
    """What the log says of units that have raised an error, by their names."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: dict[str, str] = {}
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Exception in Task: "):
            self._last = text.rpartition(" ")[2].partition(":")[0]
        elif self._last:
            self.errors.setdefault(self._last, text.strip().splitlines()[-1].partition(":")[0].rpartition(".")[2])
            self._last = ""


class WatchSettings(ez.Settings):
    wanted: dict[int, int]
    received: dict[int, int]
    errors: dict[str, str]


class Watch(ez.Unit):
    """Ends the graph as soon as each unit has published all or has raised an error."""

    SETTINGS = WatchSettings

    @ez.task
    async def wait(self) -> None:
        settings, end = self.SETTINGS, time.monotonic() + LONGEST
        while time.monotonic() < end and any(
            settings.received[number] < n and f"UNIT{number}" not in settings.errors
            for number, n in settings.wanted.items()
        ):
            await asyncio.sleep(0.02)
        raise ez.NormalTermination


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_a_graph(planned: Sequence[Planned]) -> list[str]:
    """What each of the units does in a graph, all of them in one: "the same", or what it does not."""
    wanted = {number: plan.n_values for number, plan in enumerate(planned)}
    received, refusals = dict.fromkeys(wanted, 0), Refusals()
    units: dict[str, ez.Unit] = {}
    connections = []
    for number, plan in enumerate(planned):
        module, _, name = plan.unit.rpartition(".")
        kind = getattr(import_module(f"ezmsg.sigproc.{module}"), name)
        unit = kind() if plan.settings is None else kind(plan.settings)
        source = Source(SourceSettings(messages=plan.messages))
        sink = Sink(SinkSettings(number=number, received=received))
        units |= {f"SOURCE{number}": source, f"UNIT{number}": unit, f"SINK{number}": sink}
        connections += [(source.OUTPUT, getattr(unit, topic)) for topic in plan.inputs if hasattr(unit, topic)]
        connections += [
            (getattr(unit, topic), sink.INPUT)
            for topic in ("OUTPUT_SIGNAL", "OUTPUT_SIGNAL_A", "OUTPUT_SIGNAL_B")
            if hasattr(unit, topic)
        ]
    units["WATCH"] = Watch(WatchSettings(wanted=wanted, received=received, errors=refusals.errors))
    ez.logger.addHandler(refusals)
    level = ez.logger.level
    try:
        # What is expected of some of them would fill the screen.
        others = [handler for handler in ez.logger.handlers if handler is not refusals]
        for handler in others:
            ez.logger.removeHandler(handler)
        ez.run(
            components=units,
            connections=connections,
            graph_address=("127.0.0.1", _free_port()),
            auto_start=True,
        )
    finally:
        ez.logger.removeHandler(refusals)
        for handler in others:
            ez.logger.addHandler(handler)
        ez.logger.setLevel(level)
    return [_said(wanted[number], received[number], refusals.errors.get(f"UNIT{number}")) for number in wanted]


def _said(n_wanted: int, n_received: int, error: str | None) -> str:
    if n_received == n_wanted:
        return "the same"
    because = f": `{error}`" if error else ""
    return (
        f"**never publishes**{because}"
        if not n_received
        else f"**publishes {n_received} of {n_wanted} values**{because}"
    )
