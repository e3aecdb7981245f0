"""The chain in float64 by NumPy and SciPy, message by message."""

import math

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from soak.stream import N_CHANNELS, RATE

Array = npt.NDArray[np.float64]


class Average:
    """Exponentially weighted mean of the samples so far, along the first axis."""

    def __init__(self, time_constant: float) -> None:
        self.decay = math.exp(-1.0 / (RATE * time_constant))
        self.state = np.zeros((1, N_CHANNELS))
        self.n_seen = 0

    def __call__(self, x: Array) -> Array:
        y, self.state = lfilter([1.0 - self.decay], [1.0, -self.decay], x, axis=0, zi=self.state)
        # The weights of n samples add up to 1 - decay**n.
        total = 1.0 - self.decay ** np.arange(self.n_seen + 1, self.n_seen + len(x) + 1)
        self.n_seen += len(x)
        return y / total[:, None]


class Bins:
    """Decimal logarithms of the means of bins; bin *m* begins at sample ``int(m * (bin_duration * RATE))``."""

    def __init__(self, bin_duration: float) -> None:
        self.samples_per_bin = bin_duration * RATE
        self.rest = np.zeros((0, N_CHANNELS))
        self.n_seen = 0
        self.n_bins = 0

    def __call__(self, x: Array) -> Array:
        first = self.n_seen - len(self.rest)
        self.n_seen += len(x)
        x = np.concatenate([self.rest, x])
        means, start = [np.zeros((0, N_CHANNELS))], 0
        while (stop := int((self.n_bins + 1) * self.samples_per_bin) - first) <= len(x):
            means.append(x[start:stop].mean(axis=0, keepdims=True))
            self.n_bins += 1
            start = stop
        self.rest = x[start:]
        return np.log10(np.concatenate(means))


def is_close(y: npt.NDArray, expected: Array, tolerance: float) -> bool:
    """Whether *y* is within *tolerance* of the largest expected value."""
    if y.shape != expected.shape:
        return False
    return y.size == 0 or bool(np.abs(y - expected).max() <= tolerance * np.abs(expected).max())
