"""The picture of the raw_to_decoder examples: the cursor, true and decoded, spikes, and how long a message took."""

import numpy as np
import numpy.typing as npt

TRUE, DECODED, BAR = "#999999", "#0072B2", "#009E73"


def save_plot(
    path: str,
    times: npt.NDArray,
    true: npt.NDArray,
    decoded: npt.NDArray,
    spikes: tuple[npt.NDArray, npt.NDArray],
    latencies: npt.NDArray,
    what: str,
) -> None:
    """Draw the cursor above spikes, and beside them how often *what* took how many of *latencies*, in milliseconds.

    Args:
        path: Of the picture.
        times: In seconds, of *true* and *decoded*, (time, 2).
        true: Where the cursor was.
        decoded: Where it was decoded.
        spikes: Times in seconds and numbers of channels.
        latencies: In milliseconds.
        what: What took as long.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.size"] = 15
    figure = pyplot.figure(figsize=(15, 10), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=(3, 1))
    first = None
    for row, name in enumerate("xy"):
        axes = figure.add_subplot(grid[row, 0], sharex=first)
        first = first or axes
        axes.plot(times, true[:, row], color=TRUE, linewidth=4, label="true")
        axes.plot(times, decoded[:, row], color=DECODED, linewidth=1.5, label="decoded")
        axes.set_ylabel(f"cursor {name}")
        axes.tick_params(labelbottom=False)
    first.legend(loc="upper right", ncols=2)
    axes = figure.add_subplot(grid[2, 0], sharex=first)
    axes.plot(*spikes, "|", color="black", markersize=3, alpha=0.5)
    axes.set(xlabel="time (s)", ylabel="channel", title="crossings")
    axes = figure.add_subplot(grid[:, 1])
    middle, late = np.percentile(latencies, [50, 99])
    # A few of a busy machine's are far beyond.
    axes.hist(latencies, bins=40, range=(0, 4 * middle), color=BAR)
    axes.set(xlabel=f"{what} (ms)", ylabel="messages", title=f"median {middle:.2f} ms\n99 % {late:.2f} ms")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
