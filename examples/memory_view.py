"""What MemoryMonitor measures in a process, as a table for the terminal and as a picture."""

import dataclasses
import math
from collections.abc import Sequence

from rich.table import Table

from ezmsg.mlx import MemorySnapshot

HEADS = {
    "mlx_active": "MLX active",
    "mlx_cache": "MLX cache",
    "mlx_peak": "MLX peak",
    "mlx_cache_limit": "cache limit",
    "resident_set": "RSS",
    "footprint": "footprint",
    "device_memory": "device",
}
# Colours that differ for the colour-blind, too. The limit is drawn on top of the cache, which runs along it for long.
CURVES = {
    "footprint": ("footprint of the process", "#0072B2", "-"),
    "mlx_cache": ("MLX cache", "#D55E00", "-"),
    "mlx_cache_limit": ("limit on the cache", "black", "--"),
    "mlx_active": ("MLX active", "#009E73", "-"),
}


def memory_table(memory: MemorySnapshot) -> Table:
    """One row, in MiB; "-" for what the platform does not tell."""
    table = Table(box=None, pad_edge=False)
    for head in HEADS.values():
        # Wide enough for any process, so that the columns stay where they are.
        table.add_column(head, justify="right", min_width=7)
    table.add_column("")
    values = [getattr(memory, name) for name in HEADS]
    table.add_row(*("-" if math.isnan(value) else f"{value:.0f}" for value in values), "MiB")
    return table


def save_plot(rows: Sequence[tuple[float, MemorySnapshot]], path: str) -> None:
    """Draw *rows*, each a time in seconds and the memory then, into the picture *path*."""
    # Not at the top: the processes of a graph import this module, too.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Readable at half the size.
    pyplot.rcParams["font.size"] = 18
    seconds = [time - rows[0][0] for time, _ in rows]
    memory = [dataclasses.asdict(snapshot) for _, snapshot in rows]

    figure, axes = pyplot.subplots(figsize=(12, 7), layout="constrained")
    for name, (label, color, style) in CURVES.items():
        values = [row[name] for row in memory]
        if not all(map(math.isnan, values)):
            axes.plot(seconds, values, style, color=color, linewidth=2.5, label=label)
    axes.set_xlabel("wall time (s)")
    axes.set_ylabel("memory (MiB)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, handlelength=1.5, columnspacing=1.2)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
