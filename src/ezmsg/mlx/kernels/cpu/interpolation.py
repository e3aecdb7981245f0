"""Linear interpolation on MLX's CPU device: one pass over a view of MLX's memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .compiled import compiled

Samples = npt.NDArray[np.float32]


@compiled()
def interpolate(x: Samples, places: npt.NDArray[np.float64], before: float, after: float, y: Samples) -> None:
    """Values between two samples each, along the second axis.

    Args:
        x: Samples, (n_outer, n_samples, n_inner), two or more of them.
        places: Where each result lies, in samples. Outside of the samples it is on the line through the last two.
        before: The result where the place is minus infinity.
        after: The same for infinity.
        y: The results, (n_outer, n_results, n_inner).
    """
    for i in range(y.shape[0]):
        for k in range(y.shape[1]):
            if math.isinf(places[k]):
                for j in range(y.shape[2]):
                    y[i, k, j] = after if places[k] > 0.0 else before
                continue
            place = min(max(math.floor(places[k]), 0), x.shape[1] - 2)
            share = np.float32(places[k] - place)
            if share == np.float32(1.0):
                # The last sample, which the line through it gives up to rounding.
                for j in range(y.shape[2]):
                    y[i, k, j] = x[i, place + 1, j]
                continue
            for j in range(y.shape[2]):
                low = x[i, place, j]
                y[i, k, j] = low + share * (x[i, place + 1, j] - low)
