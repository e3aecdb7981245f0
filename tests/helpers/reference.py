"""The example chain in float64, by NumPy and SciPy alone and over the whole recording at once."""

import itertools

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter


def ewma(x: npt.ArrayLike, rate: float, time_constant: float) -> npt.NDArray[np.float64]:
    """Exponentially weighted mean of the samples so far, along the first axis.

    Args:
        x: Data of shape (time, ...).
        rate: Sampling rate in Hz.
        time_constant: In seconds. A sample's weight falls by ``exp(-1 / (rate * time_constant))`` with each later one.
    """
    x = np.asarray(x, np.float64)
    decay = np.exp(-1.0 / (rate * time_constant))
    # The weights of n samples add up to 1 - decay**n: dividing by that makes a mean of them.
    total = 1.0 - decay ** np.arange(1, len(x) + 1)
    return lfilter([1.0 - decay], [1.0, -decay], x, axis=0) / total.reshape(-1, *[1] * (x.ndim - 1))


def log_power(
    counts: npt.ArrayLike, rate: float, *, baseline: float, power: float, bin_duration: float
) -> npt.NDArray[np.float64]:
    """Common reference, ``x - EWMA(x)``, square, EWMA, mean of each bin, decimal logarithm.

    Args:
        counts: The whole recording, shape (time, ch).
        rate: Sampling rate in Hz.
        baseline: Time constant in seconds of the average that is subtracted.
        power: Time constant in seconds of the average of the squares.
        bin_duration: In seconds; bin *m* begins at sample ``int(m * (bin_duration * rate))``.

    Returns:
        Shape (bin, ch). A last bin that is not full is left out.
    """
    x = np.asarray(counts, np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    x = x - ewma(x, rate, baseline)
    x = ewma(x**2, rate, power)
    edges = [int(m * (bin_duration * rate)) for m in range(int(len(x) / (bin_duration * rate)) + 2)]
    bins = [x[start:stop].mean(axis=0) for start, stop in itertools.pairwise(edges) if stop <= len(x)]
    return np.log10(np.maximum(bins, np.finfo(np.float32).smallest_normal))
