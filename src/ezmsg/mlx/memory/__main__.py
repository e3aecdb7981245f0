"""Show the memory of a running graph, live, as tables and as a picture: ``ezmsg-mlx memory``.

It attaches to the topic of a MemoryMonitor in that graph and leaves the graph as it is. What draws (rich, matplotlib)
is imported where it is used: the processes of a graph may import this module, too.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import math
import os
import sys
import time
import typing
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from ezmsg.core.graphcontext import GraphContext
from ezmsg.core.graphserver import GraphService
from ezmsg.core.netprotocol import DEFAULT_HOST, SERVER_PORT_START_DEFAULT, SERVER_PORT_START_ENV, Address
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from .monitor import MemoryMonitor, MemorySnapshot

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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
        save_plot(rows, options.plot)
    return 0


def parser(prog: str, parser_class: ParserClass = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser of the options."""
    parser = parser_class(prog, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--address", type=_address, help="of the graph, as host:port [where ez.run starts one]")
    topic = "output of a MemoryMonitor, for example SYSTEM/MONITOR/OUTPUT_SIGNAL [the first that is found]"
    add("--topic", help=topic)
    add("--seconds", type=float, default=math.inf, help="for how long [until Ctrl-C]")
    add("--plot", metavar="FILE.png", help="draw the memory over time into this file at the end")
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
    async with GraphContext(address, auto_start=False) as context:
        found = topic or await _topic_of_a_monitor(context)
    return found


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


HEADS = {
    "mlx_active": "MLX active",
    "mlx_cache": "MLX cache",
    "mlx_peak": "MLX peak",
    "mlx_cache_limit": "cache limit",
    "result_memory": "results",
    "resident_set": "RSS",
    "footprint": "footprint",
    "device_memory": "device",
}
MOST_LENGTHS = 6
"""Lengths that are shown of each node."""

# Colours that differ for the colour-blind, too. In each panel from thick to thin, so that of curves that coincide all
# are seen: the cache runs along its limit for long.
PANELS: tuple[dict[str, tuple[str, str, str, float]], ...] = (
    {"footprint": ("footprint of the process", "#0072B2", "-", 2.5)},
    {
        "mlx_cache": ("MLX cache", "#D55E00", "-", 4.0),
        "mlx_active": ("MLX active", "#009E73", "-", 2.0),
    },
)


def memory_table(memory: MemorySnapshot) -> Table:
    """One row, in MiB; without what the platform does not tell."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    values = {head: getattr(memory, name) for name, head in HEADS.items()}
    known = {head: value for head, value in values.items() if not math.isnan(value)}
    for head in known:
        # Wide enough for any process, so that the columns stay where they are.
        table.add_column(head, justify="right", min_width=7)
    table.add_column("")
    table.add_row(*(f"{value:.0f}" for value in known.values()), "MiB")
    return table


def lengths_table(shapes: Mapping[str, typing.Any], width: int = 80, most_lines: int = 40) -> Group:
    """The usual length of each node, and those that take most of the cache.

    A name that is too long loses its beginning, since its end tells nodes apart.

    Args:
        shapes: The summary of a :class:`~ezmsg.mlx.memory.ShapeReport`, which :obj:`~ezmsg.mlx.memory.MemoryMonitor`
            sends as ``attrs["shapes"]``.
        width: Columns of the terminal.
        most_lines: Lines that there is room for; 4 at least are used.
    """
    from rich.console import Group
    from rich.text import Text

    nodes, plans = shapes["nodes"], shapes.get("plans", {})
    n_lines = max(most_lines - len(plans) - 1, 3)
    # A line for its name, one for its usual length and one for all others, at least.
    shown = nodes[: max(n_lines // 3, 1)] if 3 * len(nodes) > n_lines else nodes
    n_lengths = max(min(n_lines // max(len(shown), 1) - 2, MOST_LENGTHS), 1)
    found: list[Table | Text] = []
    for number, node in enumerate(shown):
        text = f"{node['n_lengths']} lengths, {node['n_once']} of them once"
        found.append(Text(f"{_end_of(node['node'], width - len(text) - 2)}: {text}", no_wrap=True))
        found.append(_lengths_of(node, n_lengths, with_head=number == 0))
    if n_more := len(nodes) - len(shown):
        found.append(Text(f"{n_more} more nodes"))
    for name, plan in plans.items():
        found.append(Text(f"{name}: {plan['at_most']} of {plan['capacity']} by each stage with one, at most"))
    return Group(*found)


def _lengths_of(node: Mapping[str, typing.Any], n_shown: int, with_head: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=with_head)
    for head, n_columns in (("samples", 12), ("messages", 10), ("share", 7), ("MiB (estimate)", 14)):
        table.add_column(head, justify="right", min_width=n_columns)
    n_others = node["n_messages"]
    shown = node["lengths"][:n_shown]
    for use in shown:
        n_others -= use["n_messages"]
        share = _share(use["n_messages"], node["n_messages"])
        table.add_row(str(use["length"]), str(use["n_messages"]), share, f"{use['estimate_mb']:.1f}")
    if n_more := node["n_lengths"] - len(shown):
        table.add_row(f"{n_more} more", str(n_others), _share(n_others, node["n_messages"]), "")
    return table


def _share(n: int, n_all: int) -> str:
    return "<0.1%" if 0 < n < 0.0005 * n_all else f"{n / n_all:.1%}"


def _end_of(name: str, n_columns: int) -> str:
    n_columns = max(n_columns, 8)
    return name if len(name) <= n_columns else f"…{name[1 - n_columns :]}"


def save_plot(rows: Sequence[tuple[float, MemorySnapshot]], path: str, stalls: Sequence[float] = ()) -> None:
    """Draw *rows*, each a time in seconds and the memory then, into the picture *path*.

    *stalls* are the times, on the same clock, at which the message after a stall had gone through.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Readable at half the size.
    pyplot.rcParams["font.size"] = 18
    start = rows[0][0]
    seconds = [time - start for time, _ in rows]
    memory = [dataclasses.asdict(snapshot) for _, snapshot in rows]

    # Two panels: beside the footprint of a process the curves of MLX would be flat.
    figure, panels = pyplot.subplots(2, sharex=True, figsize=(12, 8), layout="constrained")
    for axes, curves in zip(panels, PANELS, strict=True):
        for name, (label, color, style, width) in curves.items():
            values = [row[name] for row in memory]
            if not all(map(math.isnan, values)):
                axes.plot(seconds, values, style, color=color, linewidth=width, label=label)
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _draw_limit(panels[1], seconds, [row["mlx_cache_limit"] for row in memory])
    if stalls:
        for axes in panels:
            times = [time - start for time in stalls if time > start]
            axes.vlines(times, 0.95, 1.0, transform=axes.get_xaxis_transform(), color="black", linewidth=1.5)
        panels[1].plot([], [], "|", color="black", markersize=14, markeredgewidth=1.5, label="after a stall")
    panels[1].set_xlabel("wall time (s)")
    panels[1].set_xlim(left=0)
    figure.align_ylabels(panels)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, handlelength=1.5, columnspacing=1.2)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_limit(axes: Axes, seconds: Sequence[float], limits: Sequence[float]) -> None:
    """The limit, as a line where it has a place beside the curves, otherwise in words."""
    _, top = axes.get_ylim()
    known = [limit for limit in limits if not math.isnan(limit)]
    if known and max(known) <= 1.5 * top:
        axes.plot(seconds, limits, "--", color="black", linewidth=2, label="limit on the cache")
        axes.set_ylim(0, max(top, 1.1 * max(known)))
    elif known:
        text = f"limit on the cache: {known[-1]:.0f} MiB, above this picture"
        axes.text(0.99, 0.9, text, transform=axes.transAxes, ha="right", va="top", fontsize=15)


if __name__ == "__main__":
    sys.exit(main())
