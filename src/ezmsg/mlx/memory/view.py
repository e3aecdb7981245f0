"""The memory of a process as tables for the terminal (rich) and as a picture (matplotlib)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .snapshot import MemorySnapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    table = Table(box=None, pad_edge=False)
    values = {head: getattr(memory, name) for name, head in HEADS.items()}
    known = {head: value for head, value in values.items() if not math.isnan(value)}
    for head in known:
        # Wide enough for any process, so that the columns stay where they are.
        table.add_column(head, justify="right", min_width=7)
    table.add_column("")
    table.add_row(*(f"{value:.0f}" for value in known.values()), "MiB")
    return table


def lengths_table(shapes: Mapping[str, Any], width: int = 80, most_lines: int = 40) -> Group:
    """The usual length of each node, and those that take most of the cache.

    A name that is too long loses its beginning, since its end tells nodes apart.

    Args:
        shapes: The summary of a :class:`~ezmsg.mlx.memory.ShapeReport`, which :obj:`~ezmsg.mlx.memory.MemoryMonitor`
            sends as ``attrs["shapes"]``.
        width: Columns of the terminal.
        most_lines: Lines that there is room for; 4 at least are used.
    """
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


def _lengths_of(node: Mapping[str, Any], n_shown: int, with_head: bool) -> Table:
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
    # Not at the top: the processes of a graph import this module, too.
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
