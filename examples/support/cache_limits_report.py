"""The table, the ratios and the picture of compare_cache_limits.py."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Course:
    """How much memory it was in the course of a run, in MiB. None: the platform does not tell."""

    first: float | None
    last: float | None
    most: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Course":
        known = [value for value in values if not math.isnan(value)]
        return cls(known[0], known[-1], max(known)) if known else cls(None, None, None)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of one configuration gave."""

    device: str
    """MLX's default device, ``"cpu"`` or ``"gpu"``."""
    default_lifted: bool
    """Whether MLX's own limit was so small that it was lifted for "no limit"."""
    n_lengths: int
    """Distinct message lengths that the chain saw."""
    speed: float
    """Seconds of stream in a second, in the chain alone: making the messages does not count."""
    steady_ms_median: float
    steady_ms_p99: float
    """Time for an ordinary message, from its counts to its features in NumPy."""
    live_most: float
    """MLX's peak of live memory, in MiB."""
    cache: Course
    footprint: Course
    resident_set: Course
    device_memory: Course
    curve: list[tuple[float, float]]
    """Stream time in seconds, and the largest cache in MiB since the point before."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    names: dict[str, str]
    """What each configuration is called in the table and the picture, in their order."""
    limits_mb: dict[str, float | str | None]
    """The limit on the cache in MiB, or ``"auto"``; None: no limit."""
    runs: dict[str, list[Run]]
    """The runs of each configuration, in the order in which they were made."""
    notes: list[str]
    stalls: list[float]
    """When stalls ended, in seconds of stream."""

    def median(self, configuration: str, number: Callable[[Run], float | None]) -> float:
        """Median of a number over the runs of a configuration; NaN if the platform does not tell it."""
        values = [number(run) for run in self.runs[configuration]]
        return math.nan if None in values else statistics.median(values)

    def ratios(self, configuration: str, number: Callable[[Run], float]) -> list[float]:
        """A number as a multiple of that without a limit, for each round of runs."""
        rounds = zip(self.runs[configuration], self.runs["none"])
        return [number(run) / number(unlimited) for run, unlimited in rounds]

    @property
    def on_device(self) -> bool:
        """Whether the buffers are in the memory of a device of its own, where the footprint misses them."""
        return any(run.device_memory.last is not None for runs in self.runs.values() for run in runs)


KEEPS, MEMORY = 0.98, 1.3
"""What "auto" is held to: times the cache of the smallest limit that keeps so much of the speed."""


@dataclasses.dataclass(frozen=True)
class Search:
    """The limit that finds itself beside what a search among fixed limits finds."""

    fastest: str
    """The fixed limit, or none at all, at which the median speed was the highest."""
    speeds: dict[str, tuple[float, float, float]]
    """Of the speed at that limit, within a round: the median, the lowest and the highest."""
    caches: dict[str, float]
    """What the cache held at most, in MiB."""
    smallest: str
    """Of those that keep :data:`KEEPS` of the speed, the one with the smallest cache."""

    @property
    def memory(self) -> float:
        """Cache at "auto", times that of the smallest; below 1 MiB counts as 1 MiB."""
        return self.caches["auto"] / max(self.caches[self.smallest], 1.0)

    @property
    def is_good(self) -> bool:
        """Whether "auto" is as fast, and as small."""
        return self.speeds["auto"][0] >= KEEPS and self.memory <= MEMORY


def search_of(comparison: Comparison) -> Search | None:
    """What the fixed limits and "auto" say together; None where one of both was not compared, or has not run yet."""
    # Without those that do something else besides.
    limits = [key for key in comparison.names if key in ("auto", "none") or key.replace(".", "", 1).isdecimal()]
    n_rounds = min((len(comparison.runs[key]) for key in limits), default=0)
    if "auto" not in limits or len(limits) < 2 or not n_rounds:
        return None
    fixed = [key for key in limits if key != "auto"]
    fastest = max(fixed, key=lambda key: comparison.median(key, lambda run: run.speed))
    speeds = {}
    for key in limits:
        rounds = zip(comparison.runs[key], comparison.runs[fastest])
        ratios = [run.speed / other.speed for run, other in rounds]
        speeds[key] = statistics.median(ratios), min(ratios), max(ratios)
    caches = {key: max(run.cache.most for run in comparison.runs[key]) for key in limits}
    smallest = min((key for key in fixed if speeds[key][0] >= KEEPS), key=caches.__getitem__)
    return Search(fastest, speeds, caches, smallest)


def _process_memory(comparison: Comparison) -> tuple[str, Callable[[Run], Course]]:
    if comparison.on_device:
        return "device memory", lambda run: run.device_memory
    return "footprint", lambda run: run.footprint


def _pair(*numbers: float) -> str:
    return " / ".join("-" if math.isnan(number) else f"{number:.0f}" for number in numbers)


def print_report(comparison: Comparison, console: Console) -> None:
    memory_name, memory = _process_memory(comparison)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("\nmemory in MiB", no_wrap=True)
    for head in ("\nlengths", "cache\nlast / most", "live\nmost", f"{memory_name}\nfirst / last", "x real\ntime"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ms/message\n50 % / 99 %", justify="right", no_wrap=True)

    for key, name in comparison.names.items():

        def median(number: Callable[[Run], float | None], key: str = key) -> float:
            return comparison.median(key, number)

        table.add_row(
            name,
            f"{median(lambda run: run.n_lengths):.0f}",
            _pair(median(lambda run: run.cache.last), median(lambda run: run.cache.most)),
            _pair(median(lambda run: run.live_most)),
            _pair(median(lambda run: memory(run).first), median(lambda run: memory(run).last)),
            f"{median(lambda run: run.speed):.2f}",
            f"{median(lambda run: run.steady_ms_median):.3g} / {median(lambda run: run.steady_ms_p99):.3g}",
        )
    console.print(table)
    for line in (*comparison.notes, *_targets(comparison), *_verdict(comparison)):
        console.print(line, highlight=False)


def _targets(comparison: Comparison) -> Iterable[str]:
    if "none" not in comparison.runs:
        return
    if "rechunk" in comparison.runs:
        cache = statistics.median(comparison.ratios("rechunk", lambda run: run.cache.last))
        yield f"Rechunk: {100 * cache:.1f} % of the cache without a limit (target: at most 10 %)"
    for key, name, target in (
        ("rechunk", "Rechunk", "0.95"),
        ("rechunkemit", "Rechunk, emit", "0.95"),
        ("recommended", "Recommended limit", "1"),
        ("auto", "auto", "0.98"),
    ):
        if key in comparison.runs:
            ratios = comparison.ratios(key, lambda run: run.speed)
            spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
            yield f"{name}: {statistics.median(ratios):.2f} of the speed without a limit{spread} (target: {target})"


def _verdict(comparison: Comparison) -> Iterable[str]:
    search = search_of(comparison)
    if search is None:
        return
    names = comparison.names
    spread = ", ".join(
        f"{names[key]} {median:.2f}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")
        for key, (median, low, high) in search.speeds.items()
    )
    yield f"Of the speed at the fastest fixed limit, {names[search.fastest]}: {spread}"
    yield (
        f"auto: {search.speeds['auto'][0]:.2f} of that speed (target: {KEEPS}); its cache, {search.caches['auto']:.1f} "
        f"MiB at most, is {search.memory:.2f} times that of the smallest fixed limit with {KEEPS} of the speed, "
        f"{names[search.smallest]} with {search.caches[search.smallest]:.1f} MiB (target: at most {MEMORY}). "
        f"{'Both are met.' if search.is_good else 'NOT MET.'}"
    )


# Colours of Okabe and Ito, which colour-blind readers can tell apart; within a panel they all differ.
STYLES = {
    "none": ("#000000", "-", "o"),
    "512": ("#0072B2", "-", "v"),
    "256": ("#56B4E9", "--", "<"),
    "128": ("#000000", ":", "^"),
    "0": ("#CC79A7", "-", "s"),
    "clear60": ("#E69F00", "-", "P"),
    "clear6": ("#E69F00", "--", "X"),
    "clear1": ("#E69F00", ":", "*"),
    "rechunk": ("#009E73", "-", "D"),
    "rechunkemit": ("#CC79A7", "-", "P"),
    "rechunk512": ("#0072B2", "--", "d"),
    "recommended": ("#D55E00", "-.", "h"),
    "auto": ("#009E73", "--", "p"),
}
OTHER_STYLE = ("0.5", "-", ".")
"""Of limits that the command line names."""

PANELS = {
    "limits": ("512", "256", "128", "0", "recommended", "auto"),
    "clearing": ("clear60", "clear6", "clear1"),
    "Rechunk": ("rechunk", "rechunkemit", "rechunk512"),
}
"""What is drawn together, each time beside the cache without a limit."""


def draw(comparison: Comparison, path: str) -> None:
    """Save a picture: the cache over time, and speed against memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Readable at half the size.
    pyplot.rcParams["font.size"] = 14

    panels = {title: keys for title, keys in PANELS.items() if comparison.names.keys() & set(keys)} or {"": ()}
    figure = pyplot.figure(figsize=(14, max(3.2 * len(panels), 6.5)), layout="constrained")
    grid = figure.add_gridspec(len(panels), 2, width_ratios=(3, 2))
    first = None
    for row, (title, keys) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[row, 0], sharex=first, sharey=first)
        first = first or axes
        _draw_cache(comparison, [key for key in comparison.names if key in keys], axes)
        axes.set_title(title, loc="left", fontsize=15)
        axes.tick_params(labelbottom=row == len(panels) - 1)
    axes.set_xlabel("stream time (s)")
    _draw_speed(comparison, figure.add_subplot(grid[:, 1]))
    handles = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    order = [name for name in comparison.names.values() if name in handles]
    order += [label for label in handles if label not in order]
    figure.legend(
        [handles[label] for label in order],
        order,
        loc="outside lower center",
        ncols=5,
        handlelength=3,
        frameon=False,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_cache(comparison: Comparison, keys: list[str], axes: "Axes") -> None:
    if "none" in comparison.runs:
        # An area, and not one more line where lines coincide.
        seconds, cache = zip(*comparison.runs["none"][0].curve)
        axes.fill_between(seconds, cache, color="0.85", label=comparison.names["none"])
    for number, key in enumerate(keys):
        color, line, marker = STYLES.get(key, OTHER_STYLE)
        seconds, cache = zip(*comparison.runs[key][0].curve)
        n_points = len(seconds)
        axes.plot(
            seconds,
            cache,
            color=color,
            linestyle=line,
            # From thick to thin, with markers at different places: of lines that coincide all are seen.
            linewidth=2 + 2 * (len(keys) - 1 - number),
            marker=marker,
            markersize=9,
            markeredgecolor="white",
            markevery=(number * n_points // 30, max(n_points // 5, 1)),
            label=comparison.names[key],
        )
    # Linear up to 10 MiB, so that an empty cache has its place.
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylim(bottom=-1)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_ylabel("cache (MiB)")
    axes.grid(alpha=0.3)
    if comparison.stalls:
        top = axes.get_xaxis_transform()
        axes.vlines(comparison.stalls, 0.94, 1.0, transform=top, color="black", linewidth=1)
        axes.plot([], [], "|", color="black", markersize=12, label="stalls")


def _draw_speed(comparison: Comparison, axes: "Axes") -> None:
    memory_name, memory = _process_memory(comparison)
    for key in comparison.names:
        # "No limit" is an area in the other panels, and has its marker here alone.
        color, _, marker = STYLES.get(key, OTHER_STYLE)
        most = comparison.median(key, lambda run: memory(run).most)
        speeds = [run.speed for run in comparison.runs[key]]
        axes.vlines(most, min(speeds), max(speeds), color=color)
        axes.plot(most, statistics.median(speeds), color=color, marker=marker, markersize=11, linestyle="none")
        if key == "none":
            axes.annotate(
                "no limit",
                (most, statistics.median(speeds)),
                (-10, 0),
                ha="right",
                va="center",
                textcoords="offset points",
            )
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"largest {memory_name} (MiB)")
    axes.set_ylabel("speed (times real time)")
    axes.grid(alpha=0.3)
