"""Results of any length as a few hundred columns: read chunk by chunk, and of each column a part."""

import typing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..offline.extra import import_extra
from .usage import UsageError

if typing.TYPE_CHECKING:
    import zarr

COLUMNS = 1000
"""At most, which is more than a page shows."""

BLOCK = 256
"""Rows of a column that are looked at, from its start: all of them up to four minutes of bins of 1 ms."""

MOST_GAPS = 200

SIGNAL_RATE = 500.0
"""From so many rows a second on, results are taken for a signal that goes up and down, and not for features."""


@dataclass
class Overview:
    """What a page shows of results."""

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
    """Results that :class:`ezmsg.mlx.ZarrSink` has written, or those from *start* to *stop* (seconds).

    Raises:
        UsageError: There are no results, or none at these times.
    """
    group = _opened(path)
    data = typing.cast("zarr.Array", group["data"])
    dims = list(typing.cast(list[str], data.attrs["_ARRAY_DIMENSIONS"]))
    clock = typing.cast("zarr.Array", group[dims[0] if "time" in dims[1:] else "time"])
    pieces = typing.cast("dict[str, list[int]]", group.attrs.get("pieces") or {})
    first, last, step, gaps, n_gaps, seams = _read_times(clock, start, stop, pieces.get("first_rows", [])[1:])
    if last - first < 2:
        raise UsageError("RESULTS", f"{str(path)!r} has no rows to draw from {start} to {stop} s.")
    edges = np.unique(np.linspace(first, last, COLUMNS + 1).astype(int))
    n_channels = data.shape[1] if data.ndim > 1 else 1
    shape = (len(edges) - 1, n_channels)
    low, high, middle = (np.zeros(shape, np.float32) for _ in range(3))
    times = np.zeros(len(edges))
    is_signal = 1.0 / step >= SIGNAL_RATE
    for column, rows in _blocks(data, edges, BLOCK):
        values = np.asarray(rows, np.float64).reshape(len(rows), n_channels, -1).mean(axis=-1)
        low[column], high[column] = values.min(axis=0), values.max(axis=0)
        middle[column] = np.sqrt(np.mean(values**2, axis=0)) if is_signal else values.mean(axis=0)
    for column, rows in _blocks(clock, edges, 1):
        times[column] = rows[0]
    times[-1] = float(np.asarray(clock[last - 1 : last])[0]) + step
    labels = np.asarray(typing.cast("zarr.Array", group[dims[1]])[:]) if data.ndim > 1 and dims[1] in group else None
    attrs = dict(data.attrs)
    return Overview(
        name=path.name,
        times=times,
        counts=np.diff(edges),
        middle=middle,
        low=low,
        high=high,
        labels=[str(label) for label in (range(n_channels) if labels is None else labels)],
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


def _opened(path: Path) -> "zarr.Group":
    zarr = import_extra("zarr")
    try:
        group = zarr.open_group(str(path), mode="r")
        if "data" in group:
            return group
        problem = "it has no array 'data'"
    except Exception as error:  # each version of Zarr has its own
        problem = str(error)
    raise UsageError("RESULTS", f"{str(path)!r} is not a group of results ({problem}).")


def _blocks(array: "zarr.Array", edges: npt.NDArray[np.int64], block: int) -> typing.Iterator[tuple[int, npt.NDArray]]:
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
    clock: "zarr.Array", start: float | None, stop: float | None, seam_rows: list[int]
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
