"""The picture of spike_band_power.py: channels as recorded, in the band of the spikes, and as z-scores."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx.simulate import MICROVOLTS_PER_COUNT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N_CHANNELS = 4
WINDOW = 0.5
"""Seconds of the recording in the picture."""

SNIPPET = (-0.0008, 0.0016)
"""Seconds around the trough of a spike."""

# Colours that differ for the colour-blind, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class Tail:
    """The last seconds of a stream."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._messages: deque[AxisArray] = deque()

    def add(self, message: AxisArray) -> None:
        # Evaluated and copied now, since the memory of a message is used again.
        if message.data.shape[0]:
            self._messages.append(AxisArray(np.array(message.data), dims=message.dims, axes=message.axes))
        while sum(_duration(kept) for kept in list(self._messages)[1:]) > self.seconds:
            self._messages.popleft()

    def between(self, start: float, stop: float) -> tuple[npt.NDArray[np.float64], npt.NDArray]:
        """Times in seconds, and the data of all channels (time, ch), from *start* to *stop*."""
        times = [message.axes["time"].value(np.arange(message.data.shape[0])) for message in self._messages]
        times, data = np.concatenate(times), np.concatenate([message.data for message in self._messages])
        inside = (times >= start) & (times < stop)
        return times[inside], data[inside]

    @property
    def end(self) -> float:
        return self._messages[-1].axes["time"].offset + _duration(self._messages[-1])


class Recent:
    """The last seconds of the streams that are drawn."""

    def __init__(self, seconds: float) -> None:
        self.raw, self.filtered, self.scores = Tail(seconds), Tail(seconds), Tail(seconds)


def _duration(message: AxisArray) -> float:
    return message.data.shape[0] * message.axes["time"].gain


def _spikes(filtered: npt.NDArray) -> list[npt.NDArray[np.int64]]:
    """Samples of the troughs below 5 standard deviations of the noise, for each channel of (time, ch).

    The noise is estimated from the median, which spikes hardly move (Quian Quiroga et al., Neural Computation 2004).
    """
    threshold = -5.0 * np.median(np.abs(filtered), axis=0) / 0.6745
    inner = filtered[1:-1]
    is_trough = (inner < threshold) & (inner <= filtered[:-2]) & (inner < filtered[2:])
    spikes = []
    for channel in range(filtered.shape[1]):
        troughs = np.flatnonzero(is_trough[:, channel]) + 1
        # The second trough of one spike is no spike.
        spikes.append(troughs[np.diff(troughs, prepend=-60) >= 30])
    return spikes


def save_plot(recent: Recent, path: str) -> None:
    """Draw the last :data:`WINDOW` seconds of the channels that fired most into the picture *path*."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Readable at half the size.
    pyplot.rcParams["font.size"] = 17
    stop = min(recent.raw.end, recent.scores.end)
    start = stop - WINDOW
    times, raw = recent.raw.between(start, stop)
    _, filtered = recent.filtered.between(start, stop)
    bins, scores = recent.scores.between(start, stop)
    raw, filtered = raw * MICROVOLTS_PER_COUNT, filtered * MICROVOLTS_PER_COUNT
    spikes = _spikes(filtered)
    channels = sorted(np.argsort([-len(troughs) for troughs in spikes], kind="stable")[:N_CHANNELS])

    figure = pyplot.figure(figsize=(15, 12), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=(3, 1))
    panels = [figure.add_subplot(grid[row, 0]) for row in range(3)]
    _draw_traces(panels[0], times - start, raw[:, channels], channels, "raw", 200.0, "µV")
    _draw_traces(panels[1], times - start, filtered[:, channels], channels, "300 to 5000 Hz", 200.0, "µV")
    _draw_traces(
        panels[2],
        bins - start,
        scores[:, channels],
        channels,
        "log power, z-score in bins of 10 ms",
        4.0,
        "SD",
        steps=True,
    )
    panels[-1].set_xlabel(f"time after {start:.2f} s (s)")
    snippets = grid[:, 1].subgridspec(len(channels), 1)
    rate = (len(times) - 1) / (times[-1] - times[0])
    for row, place in enumerate(reversed(range(len(channels)))):
        axes = figure.add_subplot(snippets[row])
        _draw_snippets(axes, filtered[:, channels[place]], spikes[channels[place]], rate, COLOURS[place])
        axes.set_title(f"ch {channels[place]}, {len(spikes[channels[place]])} spikes", fontsize=17)
        axes.tick_params(labelbottom=row == len(channels) - 1)
    axes.set_xlabel("from trough (ms)")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_traces(
    axes: "Axes",
    times: npt.NDArray[np.float64],
    data: npt.NDArray,
    channels: Sequence[int],
    title: str,
    bar: float,
    unit: str,
    steps: bool = False,
) -> None:
    """One trace above the other, with a bar of *bar* units for scale."""
    data = data - np.median(data, axis=0)
    spacing = 1.1 * np.ptp(data, axis=0).max()
    for place, colour in zip(range(len(channels)), COLOURS, strict=False):
        trace = data[:, place] + place * spacing
        if steps:
            axes.stairs(trace, np.append(times, WINDOW), baseline=None, color=colour, linewidth=2.5)
        else:
            axes.plot(times, trace, color=colour, linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=19)
    axes.set_yticks(spacing * np.arange(len(channels)), [f"ch {channel}" for channel in channels])
    axes.set_xlim(0, WINDOW)
    axes.spines[["top", "right"]].set_visible(False)
    # To the right of the traces, so that it hides none.
    bottom = -0.3 * spacing
    axes.plot([1.02 * WINDOW] * 2, [bottom, bottom + bar], color="black", linewidth=4, clip_on=False)
    axes.text(1.035 * WINDOW, bottom + bar / 2, f"{bar:g} {unit}", va="center", rotation=90)


def _draw_snippets(
    axes: "Axes", filtered: npt.NDArray, troughs: npt.NDArray[np.int64], rate: float, colour: str
) -> None:
    """All spikes of a channel, aligned to their troughs."""
    before, after = (round(seconds * rate) for seconds in SNIPPET)
    for trough in troughs:
        if trough + before >= 0 and trough + after <= len(filtered):
            milliseconds = 1e3 * np.arange(before, after) / rate
            axes.plot(milliseconds, filtered[trough + before : trough + after], color=colour, linewidth=1.5, alpha=0.6)
    axes.set_ylabel("µV")
    axes.set_xlim(1e3 * SNIPPET[0], 1e3 * SNIPPET[1])
    axes.spines[["top", "right"]].set_visible(False)
