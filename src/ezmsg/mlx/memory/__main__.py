"""Show the memory of a running graph, live: ``ezmsg-mlx memory``.

It attaches to the topic of a MemoryMonitor in that graph and leaves the graph as it is.
"""

import argparse
import asyncio
import importlib
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from ezmsg.core.graphcontext import GraphContext
from ezmsg.core.netprotocol import Address
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from .monitor import MemoryMonitor
from .snapshot import MemorySnapshot

_LINES_ELSEWHERE = 200
"""Lines of lengths where the output is no terminal."""

_DEFAULT_ADDRESS = "127.0.0.1:25978"


def main(arguments: list[str] | None = None, prog: str = "python -m ezmsg.mlx.memory") -> int:
    """Run the command with *arguments*, by default those of the process; its exit code."""
    options = _parse(prog, arguments)
    rows: list[tuple[float, MemorySnapshot]] = []
    try:
        asyncio.run(_show(options, rows))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        print(f"There is no graph at {options.address}: {error}.", file=sys.stderr)
        return 1
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    if options.plot and rows:
        from .view import save_plot

        save_plot(rows, options.plot)
    return 0


def _parse(prog: str, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    text = f"of the graph, as host:port [{_DEFAULT_ADDRESS}]"
    parser.add_argument("--address", type=_address, default=_DEFAULT_ADDRESS, help=text)
    text = "output of a MemoryMonitor, for example SYSTEM/MONITOR/OUTPUT_SIGNAL [the first that is found]"
    parser.add_argument("--topic", help=text)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for how long [until Ctrl-C]")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the memory over time into this file at the end")
    options = parser.parse_args(arguments)
    for name in ("rich", *(["matplotlib"] if options.plot else [])):
        try:
            importlib.import_module(name)
        except ImportError:
            parser.exit(1, f'This needs {name}: pip install "ezmsg-mlx[examples]".\n')
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
        async for message in _rows(options.address, options.topic, options.seconds):
            metrics, stamps = message.axes.get("metric"), message.axes.get("time")
            if not (isinstance(metrics, CoordinateAxis) and isinstance(stamps, LinearAxis)):
                raise LookupError(f"{options.topic} is not the output of a MemoryMonitor.")
            snapshot = MemorySnapshot(**dict(zip(metrics.data.tolist(), message.data[0].tolist(), strict=True)))
            rows.append((stamps.offset, snapshot))
            # With two lines of memory and an empty one; the last line of a terminal is the cursor's.
            room = console.height - 4 if console.is_terminal else _LINES_ELSEWHERE
            lengths = lengths_table(message.attrs["shapes"], console.width, room)
            live.update(Group(memory_table(snapshot), "", lengths), refresh=True)
        if rows and not console.is_terminal:
            console.print(live.renderable)


async def _rows(address: Address, topic: str | None, seconds: float) -> AsyncIterator[AxisArray]:
    """The rows of the monitor, for so many seconds or until the graph ends."""
    ends_at = time.monotonic() + seconds
    async with GraphContext(address, auto_start=False) as context:
        topic = topic or await _topic_of_a_monitor(context)
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
