"""A page with a picture of results, which are read chunk by chunk, and of the recording behind them."""

from __future__ import annotations

import itertools
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from ..offline import open_recording
from ..offline.contracts import labels_of
from ..offline.reading import import_extra
from ..stream.segments import linear_axis, value_at
from .options import RecordingOptions, UsageError

if typing.TYPE_CHECKING:
    import zarr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 1000
"""At most, which is more than a page shows."""

BLOCK = 256
"""Rows of a column that are looked at, from its start: all of them up to four minutes of bins of 1 ms."""

MOST_GAPS = 200

SIGNAL_RATE = 500.0
"""From so many rows a second on, results are taken for a signal that goes up and down, and not for features."""


@dataclass
class Overview:
    """The part of results that a page shows."""

    name: str
    times: npt.NDArray[np.float64]
    """When each column begins, in seconds, and as the last entry when the last one ends."""
    counts: npt.NDArray[np.int64]
    """How many rows each column has."""
    middle: npt.NDArray[np.float32]
    """Of shape (column, ch): the mean of each column, or of a signal the root of the mean square."""
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    labels: list[str]
    """Of the channels."""
    kinds: list[str]
    """Of the channels; empty where they are all of one."""
    n_rows: int
    step: float
    """Seconds from row to row."""
    is_signal: bool
    others: tuple[str, ...]
    """Dimensions that were averaged."""
    unit: str
    source: str
    """Name of the recording."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """The first ones: when the last row before and the first row after are."""
    n_gaps: int = 0
    seams: list[float] = field(default_factory=list)
    """Where pieces that were computed apart meet, in seconds."""
    is_partial: bool = False
    """Whether some columns are only looked at in part."""


def read_overview(path: Path, start: float | None = None, stop: float | None = None) -> Overview:
    """Results that :class:`ezmsg.mlx.ZarrSink` has written, or those from *start* to *stop* (seconds)."""
    group = _opened(path)
    data = _array(group, "data")
    dims = list(typing.cast(list[str], data.attrs["_ARRAY_DIMENSIONS"]))
    clock = _array(group, dims[0] if "time" in dims[1:] else "time")
    pieces = typing.cast("dict[str, list[int]]", group.attrs.get("pieces") or {})
    first, last, step, gaps, n_gaps, seams = _read_times(clock, start, stop, pieces.get("first_rows", [])[1:])
    if last - first < 1:
        between = "" if start is None and stop is None else f" from {start} to {stop} s"
        raise UsageError("RESULTS", f"{str(path)!r} has no rows to draw{between}.")
    edges = np.unique(np.linspace(first, last, COLUMNS + 1).astype(int))
    n_channels = data.shape[1] if data.ndim > 1 else 1
    if not n_channels:
        raise UsageError("RESULTS", f"{str(path)!r} has no channels to draw.")
    shape = (len(edges) - 1, n_channels)
    low, high, middle = (np.zeros(shape, np.float32) for _ in range(3))
    times = np.zeros(len(edges))
    is_signal = 1.0 / step >= SIGNAL_RATE
    with warnings.catch_warnings():
        # A column without a finite value is NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        for column, rows in _blocks(data, edges, BLOCK):
            values = np.asarray(rows, np.float64).reshape(len(rows), n_channels, -1).mean(axis=-1)
            values[~np.isfinite(values)] = np.nan
            low[column], high[column] = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
            middle[column] = np.sqrt(np.nanmean(values**2, axis=0)) if is_signal else np.nanmean(values, axis=0)
    for column, rows in _blocks(clock, edges, 1):
        times[column] = rows[0]
    times[-1] = float(np.asarray(clock[last - 1 : last])[0]) + step
    labels, kinds = (_coordinate(group, dims, suffix) for suffix in ("", "_kind"))
    attrs = dict(data.attrs)
    return Overview(
        name=path.name,
        times=times,
        counts=np.diff(edges),
        middle=middle,
        low=low,
        high=high,
        labels=labels or [str(number) for number in range(n_channels)],
        kinds=kinds,
        n_rows=last - first,
        step=step,
        is_signal=is_signal,
        others=tuple(dims[2:]),
        unit=str(attrs.get("unit", "")),
        source=str(group.attrs.get("recipe", "")).partition("\n")[0].partition(" ")[0],
        gaps=gaps,
        n_gaps=n_gaps,
        seams=seams,
        is_partial=bool(np.max(np.diff(edges)) > BLOCK),
    )


def _coordinate(group: zarr.Group, dims: list[str], suffix: str) -> list[str]:
    """The values along the channels; empty if there are none of that name."""
    name = "".join(dims[1:2]) + suffix
    values = np.asarray(_array(group, name)[:]) if dims[1:] and name in group else np.zeros(0)
    return [str(value) for value in values]


def _opened(path: Path) -> zarr.Group:
    zarr = import_extra("zarr")
    try:
        group = zarr.open_group(str(path), mode="r")
        if "data" in group:
            return group
        problem = "it has no array 'data'"
    except Exception as error:  # each version of Zarr has its own
        problem = str(error)
    raise UsageError("RESULTS", f"{str(path)!r} is not a group of results ({problem}).")


def _array(group: zarr.Group, name: str) -> zarr.Array:
    return typing.cast("zarr.Array", group[name])


def _blocks(array: zarr.Array, edges: npt.NDArray[np.int64], block: int) -> typing.Iterator[tuple[int, npt.NDArray]]:
    """The first *block* rows of each column; each chunk is decompressed once, and only if a column begins there."""
    size = array.chunks[0]
    held, rows = -1, np.zeros(0)
    for column, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        chunk = begin // size
        if chunk != held:
            held, rows = chunk, np.asarray(array[chunk * size : (chunk + 1) * size])
        inside = begin - chunk * size
        yield column, rows[inside : inside + min(block, end - begin)]


def _read_times(
    clock: zarr.Array, start: float | None, stop: float | None, seam_rows: list[int]
) -> tuple[int, int, float, list[tuple[float, float]], int, list[float]]:
    """First row, row after the last, seconds from row to row, the first gaps, how many there are, and seams."""
    begin, end = -np.inf if start is None else start, np.inf if stop is None else stop
    first = last = n_gaps = 0
    step, before = 0.0, np.nan
    gaps: list[tuple[float, float]] = []
    seams: list[float] = []
    for position in range(0, clock.shape[0], clock.chunks[0]):
        times = np.asarray(clock[position : position + clock.chunks[0]], np.float64)
        if not step and len(times) > 1:
            step = float(np.median(np.diff(times)))
        seams += [float(times[row - position]) for row in seam_rows if 0 <= row - position < len(times)]
        inside = np.flatnonzero((times >= begin) & (times < end))
        if len(inside):
            first = first if last else position + int(inside[0])
            last = position + int(inside[-1]) + 1
            part = np.concatenate([[before], times[inside]])
            # NaN in front of the first row compares as no gap.
            jumps = np.flatnonzero(np.abs(np.diff(part) - step) > 0.5 * step)
            n_gaps += len(jumps)
            gaps += [(part[jump], part[jump + 1]) for jump in jumps[: MOST_GAPS - len(gaps)].tolist()]
            before = times[inside[-1]]
    return first, last, step or 1.0, gaps, n_gaps, [seam for seam in seams if begin < seam < end]


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
    """Draw a page into the file *path*, with traces of some *channels*, recorded and as results, and a map of all.

    *chosen* says in words which channels those are.
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


def _draw(figure: Figure, found: Overview, channels: Sequence[int], chosen: str, raw: Traces | None) -> None:
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


def _draw_map(axes: Axes, found: Overview) -> typing.Any:
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


def _draw_profile(axes: Axes, found: Overview) -> None:
    """The middle of each channel and the range of half of its columns."""
    low, middle, high = _percentiles(found.middle, (25, 50, 75))
    places = np.arange(len(found.labels))
    axes.barh(places, high - low, left=low, height=1.0, color=COLOURS[0], alpha=0.3, linewidth=0)
    axes.stairs(middle, np.arange(len(middle) + 1) - 0.5, orientation="horizontal", baseline=None, color=COLOURS[0])
    axes.tick_params(labelleft=False)
    axes.locator_params(axis="x", nbins=3)
    axes.set_xlabel("median, quartiles")
    axes.set_title("over time", loc="left", fontsize=11)


def _percentiles(values: npt.NDArray, percents: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Of each channel; NaN where nothing is finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.atleast_2d(np.nanpercentile(values, percents, axis=0))


def _draw_traces(axes: Axes, traces: Traces, title: str, found: Overview) -> None:
    """One above the other, each from its lowest to its highest value at a time; a scale to the right."""
    (bottom,), (top,) = _percentiles(traces.low, (0.2,)), _percentiles(traces.high, (99.8,))
    low, high = traces.low - (bottom + top) / 2, traces.high - (bottom + top) / 2
    spacing = 1.15 * float(np.nan_to_num(top - bottom).max()) or 1.0
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


def _mark_gaps(axes: Axes, found: Overview) -> None:
    for before, after in found.gaps:
        axes.axvspan(min(before + found.step, after), after, color=GAP, linewidth=0, zorder=0)


def _mark_seams(axes: Axes, found: Overview, colour: str = SEAM, width: float = 0.8) -> None:
    for seam in found.seams:
        axes.axvline(seam, color=colour, linewidth=width, linestyle=(0, (1, 2)))


def _draw_legend(axes: Axes, found: Overview) -> None:
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


PLACES = 400
"""Where a long recording is looked at."""

WHOLE_MB = 64.0
"""A shorter part is read as a whole."""

PIECE_MB = 0.25


def read_traces(
    path: Path, options: RecordingOptions, labels: list[str], times: npt.NDArray[np.float64]
) -> Traces | None:
    """The lowest and highest values of channels of these *labels* over *times*; None if the recording has none."""
    source = open_recording(path, **{"chunk_mb": PIECE_MB, **options})
    first = next(iter(source.read(0)))
    ch = first.axes.get("ch")
    known = list(labels_of(first)) if isinstance(ch, CoordinateAxis) else ["0"]
    channels = [known.index(label) for label in labels if label in known]
    if not channels:
        return None
    rate, origin = source.sampling_rate, _time(first).offset
    begin, end = ((time - origin) * rate for time in (times[0], times[-1]))
    begin, end = max(round(begin), 0), min(round(end), source.n_samples)
    n_bytes = (end - begin) * first.data[:1].nbytes
    found: list[tuple[float, npt.NDArray, npt.NDArray]] = []
    if n_bytes <= WHOLE_MB * 2**20:
        length = max((end - begin) // PLACES, 1)
        for message in source.read(begin):
            axis, data = _time(message), message.data[: end - begin]
            for place in range(0, len(data), length):
                part = data[place : place + length].reshape(-1, len(known))[:, channels]
                found.append((value_at(axis, place) + len(part) / rate / 2, part.min(axis=0), part.max(axis=0)))
            begin += len(data)
            if begin == end:
                break
    else:
        for start in np.linspace(begin, end - 1, PLACES).astype(int).tolist():
            message = next(iter(source.read(start)))
            part = message.data.reshape(-1, len(known))[:, channels]
            found.append((_time(message).offset, part.min(axis=0), part.max(axis=0)))
    when, low, high = (np.array(part, np.float64) for part in zip(*found, strict=True))
    gain = np.asarray(first.attrs.get("nwb_scaling_gain", 1.0), np.float64)
    gain = gain[channels] if gain.ndim else gain
    unit = str(first.attrs.get("nwb_scaling_unit", ""))
    if unit in ("volts", "V"):
        gain, unit = gain * 1e6, "µV"
    return Traces(when, low * gain, high * gain, [known[channel] for channel in channels], unit)


def _time(message: AxisArray) -> LinearAxis:
    return linear_axis(message.axes, "time")
