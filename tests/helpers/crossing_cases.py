"""Crossings that kernels of all paths have to find alike."""

import itertools

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from ezmsg.mlx.kernels import kernel
from ezmsg.mlx.kernels.crossings import OPEN_ROWS, SCALE, Crossings

N_CHANNELS = 9


def signal(n_samples: int = 700, n_channels: int = N_CHANNELS) -> npt.NDArray[np.float32]:
    """Noise that stays over a threshold for some samples, with values at it and samples that are not finite."""
    rng = np.random.default_rng(0)
    x = lfilter([0.3], [1, -0.7], rng.standard_normal((n_samples, n_channels)), axis=0).astype(np.float32)
    x[:, 0] = np.round(2 * x[:, 0]) / 2
    x[rng.random(x.shape) < 0.01] = np.nan
    x[100:110, 3 % n_channels], x[:50, 5 % n_channels], x[:, 6 % n_channels] = np.inf, np.nan, 0
    x[300:380, 1 % n_channels] = 2
    # Longer than any window, and across the ends of messages; and a sample that no scale takes.
    x[200:201, 7 % n_channels] = 1.1e15
    return x


THRESHOLDS = np.where(np.arange(N_CHANNELS) % 2, 0.5, -0.5).astype(np.float32)

KINDS = {
    "dense": Crossings(THRESHOLDS, refractory=30),
    "no refractory period": Crossings(THRESHOLDS),
    "sparse": Crossings(THRESHOLDS, refractory=3, is_sparse=True),
    "scores": Crossings(2 * THRESHOLDS, refractory=3, scale="zscore", alpha=0.02),
    "root mean squares": Crossings(2 * THRESHOLDS, refractory=3, scale="rms", alpha=0.02),
    "medians": Crossings(2 * THRESHOLDS, refractory=3, scale="mad", alpha=0.02),
    "lasting": Crossings(THRESHOLDS, refractory=3, shortest=3, window=3),
    "peaks": Crossings(THRESHOLDS, refractory=5, shortest=2, window=7, at_peak=True, gives_values=True),
    "values": Crossings(THRESHOLDS, refractory=9, window=40, gives_values=True),
    "sparse peaks": Crossings(THRESHOLDS, window=40, at_peak=True, is_sparse=True),
    "sparse values of scores": Crossings(
        2 * THRESHOLDS, refractory=3, scale="zscore", alpha=0.02, window=7, gives_values=True, is_sparse=True
    ),
}
"""All that a kernel tells apart."""

CUTS = (1, 2, 3, 33, 60, 300)


def found(crossings: Crossings, path: str, cuts: tuple[int, ...] = CUTS) -> tuple[list[npt.NDArray], npt.NDArray]:
    """The results of each message, and the last state with what matters of it."""
    x = signal()
    zi, results = mx.zeros((crossings.n_rows, x.shape[1])), []
    for piece in np.split(x, cuts):
        y, zi = kernel("crossings", path).run(mx.array(piece), crossings, zi, 0, ())
        results.append(np.array(y))
    state = np.array(zi)
    if crossings.has_window:
        row = crossings.open_row
        state[row + 1 : row + OPEN_ROWS] *= state[row] > 0
    pairs = range(SCALE, crossings.open_row, 2)
    for row in pairs:
        state[row] += state[row + 1]
    return results, np.delete(state, [row + 1 for row in pairs], axis=0)


def check(kind: str, path: str) -> None:
    """The kernel of *path* finds what that for the CPU finds."""
    (expected, last), (results, state) = found(KINDS[kind], "cpu"), found(KINDS[kind], path)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(state, last, rtol=2e-5, atol=1e-5)
    assert any(np.any(other > 0) for other in expected)


def check_all(path: str) -> None:
    """The same of all kinds, and of more channels than a block has."""
    for kind in KINDS:
        check(kind, path)
    x = signal(40, 70)
    for n_channels in (1, 33, 70):
        crossings = Crossings(np.full(n_channels, 0.25, np.float32), refractory=3)
        zi = mx.zeros((crossings.n_rows, n_channels))
        data = mx.array(np.ascontiguousarray(x[:, :n_channels]))
        results = [kernel("crossings", each).run(data, crossings, zi, 0, ()) for each in ("cpu", path)]
        for one, other in itertools.pairwise(results):
            np.testing.assert_array_equal(np.array(one[0]), np.array(other[0]))
            np.testing.assert_array_equal(np.array(one[1]), np.array(other[1]))
