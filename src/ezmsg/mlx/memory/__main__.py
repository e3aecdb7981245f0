"""Show the memory of a running graph, live: ``ezmsg-mlx memory``.

It attaches to the topic of a MemoryMonitor in that graph and leaves the graph as it is.
"""

import argparse
import asyncio
import importlib
import math
import os
import sys
import time
import typing
from collections.abc import AsyncIterator
from contextlib import suppress

from ezmsg.core.graphcontext import GraphContext
from ezmsg.core.graphserver import GraphService
from ezmsg.core.netprotocol import DEFAULT_HOST, SERVER_PORT_START_DEFAULT, SERVER_PORT_START_ENV, Address
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from .monitor import MemoryMonitor
from .snapshot import MemorySnapshot

_LINES_ELSEWHERE = 200
"""Lines of lengths where the output is no terminal."""

_N_PORTS = 10
"""Graphs on one machine that are looked for: each takes the next port that is free."""

_SECONDS_TO_ANSWER = 2.0
"""Whatever else listens at a port may never answer."""

_DESCRIPTION = """\
Show the memory of a running graph, live.

It attaches to the topic of a MemoryMonitor in that graph, and leaves the graph
as it is.
"""

ParserClass: typing.TypeAlias = type[argparse.ArgumentParser]


def main(
    arguments: list[str] | None = None,
    prog: str = "python -m ezmsg.mlx.memory",
    parser_class: ParserClass = argparse.ArgumentParser,
) -> int:
    """Run the command with *arguments*, by default those of the process; its exit code."""
    options = _parse(prog, arguments, parser_class)
    rows: list[tuple[float, MemorySnapshot]] = []
    try:
        asyncio.run(_show(options, rows))
    except KeyboardInterrupt:
        pass
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    if options.plot and rows:
        from .view import save_plot

        save_plot(rows, options.plot)
    return 0


def parser(prog: str, parser_class: ParserClass = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser of the options."""
    text = _DESCRIPTION
    parser = parser_class(prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "of the graph, as host:port [where ez.run starts one]"
    parser.add_argument("--address", type=_address, help=text)
    text = "output of a MemoryMonitor, for example SYSTEM/MONITOR/OUTPUT_SIGNAL [the first that is found]"
    parser.add_argument("--topic", help=text)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for how long [until Ctrl-C]")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the memory over time into this file at the end")
    parser.epilog = f"examples:\n  {prog}\n  {prog} --address 127.0.0.1:10000 --seconds 60 --plot memory.png"
    return parser


def _parse(prog: str, arguments: list[str] | None, parser_class: ParserClass) -> argparse.Namespace:
    reader = parser(prog, parser_class)
    options = reader.parse_args(arguments)
    for name in ("rich", *(["matplotlib"] if options.plot else [])):
        try:
            importlib.import_module(name)
        except ImportError:
            reader.exit(1, f'This needs {name}: pip install "ezmsg-mlx[examples]".\n')
    return options


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"must be host:port, got {text!r}")
    return Address(host, int(port))


async def _show(options: argparse.Namespace, rows: list[tuple[float, MemorySnapshot]]) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from .view import lengths_table, memory_table

    console = Console()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        address, topic = await _found(options.address, options.topic)
        async for message in _rows(address, topic, options.seconds):
            metrics, stamps = message.axes.get("metric"), message.axes.get("time")
            if not (isinstance(metrics, CoordinateAxis) and isinstance(stamps, LinearAxis)):
                raise LookupError(f"{topic} is not the output of a MemoryMonitor.")
            snapshot = MemorySnapshot(**dict(zip(metrics.data.tolist(), message.data[0].tolist(), strict=True)))
            rows.append((stamps.offset, snapshot))
            # With two lines of memory and an empty one; the last line of a terminal is the cursor's.
            room = console.height - 4 if console.is_terminal else _LINES_ELSEWHERE
            lengths = lengths_table(message.attrs["shapes"], console.width, room)
            live.update(Group(memory_table(snapshot), "", lengths), refresh=True)
        if rows and not console.is_terminal:
            console.print(live.renderable)


async def _found(asked: Address | None, topic: str | None) -> tuple[Address, str]:
    """The first graph with a monitor, and the topic of that.

    Raises:
        LookupError: There is none; the message says where one was looked for.
    """
    problem = ""
    first = int(os.environ.get(SERVER_PORT_START_ENV, SERVER_PORT_START_DEFAULT))
    default = GraphService.default_address()
    # Where "ezmsg serve" has its server, and where ez.run starts one if there is none.
    places = [default, *(Address(DEFAULT_HOST, port) for port in range(first, first + _N_PORTS))]
    for address in places if asked is None else [asked]:
        try:
            return address, await asyncio.wait_for(_topic_at(address, topic), _SECONDS_TO_ANSWER)
        except LookupError as error:
            problem = f"{error.args[0]} It is at {address}."
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            told = asked is not None and f": {error or 'no answer'}"
            problem = problem or (told and f"There is no graph at {address}{told}.") or ""
    ports = f"{DEFAULT_HOST}:{first} to {first + _N_PORTS - 1}"
    raise LookupError(problem or f"There is no graph at {default} or at {ports}; --address says where it is.")


async def _topic_at(address: Address, topic: str | None) -> str:
    found = topic
    async with GraphContext(address, auto_start=False) as context:
        found = topic or await _topic_of_a_monitor(context)
    return typing.cast(str, found)


async def _rows(address: Address, topic: str, seconds: float) -> AsyncIterator[AxisArray]:
    """The rows of the monitor, for so many seconds or until the graph ends."""
    ends_at = time.monotonic() + seconds
    async with GraphContext(address, auto_start=False) as context:
        subscriber = await context.subscriber(topic)
        while (left := ends_at - time.monotonic()) > 0:
            with suppress(asyncio.TimeoutError):
                yield await asyncio.wait_for(subscriber.recv(), min(left, 1e6))


async def _topic_of_a_monitor(context: GraphContext) -> str:
    snapshot = await context.snapshot()
    for session in snapshot.sessions.values():
        for address, component in (session.metadata.components if session.metadata else {}).items():
            if component.component_type.rpartition(".")[2].rpartition(":")[2] == MemoryMonitor.__name__:
                return f"{address}/{MemoryMonitor.OUTPUT_SIGNAL.name}"
    raise LookupError("The graph has no MemoryMonitor; put one into the Collection that is to be watched.")


if __name__ == "__main__":
    sys.exit(main())
