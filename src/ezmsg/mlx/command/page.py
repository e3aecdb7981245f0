"""A page with a picture of results."""

import itertools
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .overview import Overview

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ for the colour-blind, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")

GAP = "0.8"
SEAM = "0.35"


class Traces(typing.NamedTuple):
    """Some channels of a recording, as their lowest and highest values over time."""

    times: npt.NDArray[np.float64]
    low: npt.NDArray
    """Of shape (place, ch)."""
    high: npt.NDArray
    labels: list[str]
    unit: str


def draw(found: Overview, channels: Sequence[int], chosen: str, raw: Traces | None, path: Path) -> None:
    """Draw a page into the file *path*, with traces of some *channels* and a map of all.

    Args:
        found: What is shown.
        channels: Numbers of the channels that are drawn as traces.
        chosen: Which ones those are, in words.
        raw: The same as recorded, if that is at hand.
        path: The file, whose suffix says which kind of picture it is.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(11.0, 8.5), layout="constrained")
        try:
            _draw(figure, found, channels, chosen, raw)
            figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


def _draw(figure: "Figure", found: Overview, channels: Sequence[int], chosen: str, raw: Traces | None) -> None:
    heights = ([1.3] if raw is not None else []) + [1.6, 2.4]
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights, width_ratios=(6, 1))
    figure.suptitle(f"{found.name}\n", x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.01, 0.953, _what_is_shown(found), fontsize=10, color="0.3")
    axes = figure.add_subplot(grid[-1, 0])
    image = _draw_map(axes, found)
    profile = figure.add_subplot(grid[-1, 1], sharey=axes)
    _draw_profile(profile, found)
    bar = figure.colorbar(image, ax=profile, pad=0.08, fraction=0.18, aspect=18)
    bar.outline.set_visible(False)
    bar.set_label(_of_values(found))
    traces = figure.add_subplot(grid[-2, 0], sharex=axes)
    traces.tick_params(labelbottom=False)
    own = Traces(
        _centres(found),
        found.low[:, channels],
        found.high[:, channels],
        [found.labels[channel] for channel in channels],
        found.unit,
    )
    what = "signal" if found.is_signal else "features"
    _draw_traces(traces, own, f"{what} of the channels {chosen}", found)
    if raw is not None:
        above = figure.add_subplot(grid[0, 0], sharex=axes)
        above.tick_params(labelbottom=False)
        _draw_traces(above, raw, f"as recorded: {found.source}", found)
    axes.set_xlim(found.times[0], found.times[-1])
    axes.set_xlabel("time (s)")
    _draw_legend(figure.add_subplot(grid[-2, 1]), found)


def _what_is_shown(found: Overview) -> str:
    seconds = found.n_rows * found.step
    every = f"{1e3 * found.step:.4g} ms" if found.step >= 0.001 else f"{1e6 * found.step:.4g} µs"
    parts = [f"{found.source or 'recording not known'}", f"{seconds:.4g} s", f"{len(found.labels)} channels"]
    parts.append(f"{found.n_rows:,} rows".replace(",", "\u202f") + f", one every {every}")
    if found.others:
        parts.append(f"averaged over {', '.join(found.others)}")
    if found.is_partial:
        parts.append("a part of each column was read")
    return ", ".join(parts)


def _of_values(found: Overview) -> str:
    what = "root mean square" if found.is_signal else "mean" if found.n_rows > len(found.middle) else "value"
    return f"{what} ({found.unit})" if found.unit else what


def _centres(found: Overview) -> npt.NDArray[np.float64]:
    # From the rows in it, since there may be a gap in front of the next column.
    return found.times[:-1] + found.counts * found.step / 2


def _draw_map(axes: "Axes", found: Overview) -> typing.Any:
    """Channels from top to bottom, time from left to right; where there is a gap, nothing."""
    edges, columns = [found.times[0]], []
    waiting = list(found.gaps)
    for begin, end, values in zip(found.times[:-1], found.times[1:], found.middle, strict=True):
        while waiting and begin <= waiting[0][0] < end and waiting[0][1] > waiting[0][0]:
            before, after = waiting.pop(0)
            edges += [min(before + found.step, after), after]
            columns += [values, np.full_like(values, np.nan)]
        if edges[-1] < end:
            edges.append(end)
            columns.append(values)
    values = np.array(columns).T
    finite = found.middle[np.isfinite(found.middle)]
    low, high = np.percentile(finite, (1, 99)) if len(finite) else (0.0, 1.0)
    axes.set_facecolor(GAP)
    image = axes.pcolormesh(
        np.array(edges),
        np.arange(len(found.labels) + 1) - 0.5,
        values,
        vmin=low,
        vmax=high if high > low else low + 1.0,
        cmap="viridis",
        rasterized=True,
    )
    # White, since most of a map is dark.
    _mark_seams(axes, found, "white", 1.2)
    every = max(len(found.labels) // 12, 1)
    ticks = range(0, len(found.labels), every)
    axes.set_yticks(list(ticks), [found.labels[tick] for tick in ticks])
    axes.set_ylim(len(found.labels) - 0.5, -0.5)
    axes.set_ylabel("channel")
    axes.set_title("all channels", loc="left", fontsize=11)
    return image


def _draw_profile(axes: "Axes", found: Overview) -> None:
    """The middle of each channel and the range of half of its columns."""
    low, middle, high = np.nanpercentile(found.middle, (25, 50, 75), axis=0)
    places = np.arange(len(found.labels))
    axes.barh(places, high - low, left=low, height=1.0, color=COLOURS[0], alpha=0.3, linewidth=0)
    axes.stairs(middle, np.arange(len(middle) + 1) - 0.5, orientation="horizontal", baseline=None, color=COLOURS[0])
    axes.tick_params(labelleft=False)
    axes.locator_params(axis="x", nbins=3)
    axes.set_xlabel("median, quartiles")
    axes.set_title("over time", loc="left", fontsize=11)


def _draw_traces(axes: "Axes", traces: Traces, title: str, found: Overview) -> None:
    """One above the other, each from its lowest to its highest value at a time; a scale to the right."""
    bottom, top = np.nanpercentile(traces.low, 0.2, axis=0), np.nanpercentile(traces.high, 99.8, axis=0)
    low, high = traces.low - (bottom + top) / 2, traces.high - (bottom + top) / 2
    spacing = 1.15 * float(np.nanmax(top - bottom)) or 1.0
    n = low.shape[1]
    for place, colour in zip(range(n), COLOURS, strict=False):
        up = (n - 1 - place) * spacing
        for begin, end in _runs(traces.times, found):
            times = traces.times[begin:end]
            axes.fill_between(times, low[begin:end, place] + up, high[begin:end, place] + up, color=colour, linewidth=0)
            centre = (low[begin:end, place] + high[begin:end, place]) / 2 + up
            axes.plot(times, centre, color=colour, linewidth=0.8)
    axes.set_yticks([(n - 1 - place) * spacing for place in range(n)], traces.labels)
    axes.set_ylim(-0.55 * spacing, (n - 0.45) * spacing)
    axes.set_title(title, loc="left", fontsize=11)
    _mark_gaps(axes, found)
    _mark_seams(axes, found)
    length = _round(spacing / 2)
    axes.plot([1.008] * 2, [0, length], transform=axes.get_yaxis_transform(), color="black", linewidth=2, clip_on=False)
    text = f"{length:g} {traces.unit}".strip()
    axes.text(1.013, length / 2, text, transform=axes.get_yaxis_transform(), va="center", rotation=90, fontsize=9)


def _runs(times: npt.NDArray[np.float64], found: Overview) -> list[tuple[int, int]]:
    """Parts of *times* without a gap."""
    cuts = np.searchsorted(times, [min(before + found.step, after) for before, after in found.gaps])
    bounds = sorted({0, *cuts.tolist(), len(times)})
    return list(itertools.pairwise(bounds))


def _round(value: float) -> float:
    """1, 2 or 5 times a power of ten, at most *value*."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(max(step for step in (1, 2, 5) if step * power <= value * (1 + 1e-9)) * power)


def _mark_gaps(axes: "Axes", found: Overview) -> None:
    for before, after in found.gaps:
        axes.axvspan(min(before + found.step, after), after, color=GAP, linewidth=0, zorder=0)


def _mark_seams(axes: "Axes", found: Overview, colour: str = SEAM, width: float = 0.8) -> None:
    for seam in found.seams:
        axes.axvline(seam, color=colour, linewidth=width, linestyle=(0, (1, 2)))


def _draw_legend(axes: "Axes", found: Overview) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_axis_off()
    gaps = f"{found.n_gaps} gap{'s' * (found.n_gaps != 1)}"
    if found.n_gaps > len(found.gaps):
        gaps += f", the first {len(found.gaps)} drawn"
    seams = f"{len(found.seams)} seam{'s' * (len(found.seams) != 1)}"
    handles: list[typing.Any] = [
        Patch(color=GAP, label=gaps),
        Line2D([], [], color=SEAM, linewidth=1.2, linestyle=(0, (1, 2)), label=seams),
    ]
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=9, borderaxespad=0.0)
