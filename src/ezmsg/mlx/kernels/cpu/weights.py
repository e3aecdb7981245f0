"""The weight of the samples that a channel has taken, for the kernels of MLX's CPU device.

It is ``1 - (1 - alpha)**n`` after *n* samples. Nearly always all channels have taken as many, so that one table serves
them all, and no sample of a channel costs a division.
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled

# A multiplication and an addition may be one instruction; what else fastmath allows would break NaN.
_compiled = compiled(fastmath={"contract"})

# Part of the functions that call it, since a function of its own takes longer to compile than it.
_inlined = compiled(fastmath={"contract"}, inline="always")


@_inlined
def pair_at(states: np.ndarray, outer: int, place: int, channel: int) -> float:
    """The value of a pair, from *states* (outer, length, channel)."""
    return np.float64(states[outer, place, channel]) + states[outer, place + 1, channel]


@_compiled
def get_pairs(states: np.ndarray, values: np.ndarray) -> None:
    """The first pairs of *states*, to *values* (outer, channel)."""
    # Loops rather than expressions of arrays, each of which takes a second to compile.
    for outer in range(values.shape[0]):
        for channel in range(values.shape[1]):
            values[outer, channel] = pair_at(states, outer, 0, channel)


@_compiled
def common_weight(weights: np.ndarray) -> float:
    """The weight that all channels have, or -1 where they differ."""
    common = weights[0, 0]
    for outer in range(weights.shape[0]):
        for channel in range(weights.shape[1]):
            if weights[outer, channel] != common:
                return -1.0
    return common


@_compiled
def tables(weight: float, alpha: float, inverse: np.ndarray, share: np.ndarray, keep: np.ndarray) -> float:
    """For each of the next samples: one over the weight after it, its share, and one less its share; the last weight.

    *inverse* may be empty, or *share* and *keep* both.
    """
    beta = 1.0 - alpha
    for n in range(max(inverse.size, share.size)):
        before, weight = weight, weight + alpha * (1.0 - weight)
        if inverse.size:
            inverse[n] = 1.0 / weight
        if share.size:
            share[n], keep[n] = alpha / weight, beta * before / weight
    return weight


@_inlined
def put_pair(value: float, states: np.ndarray, outer: int, place: int, channel: int) -> None:
    """Write *value* as a pair."""
    states[outer, place, channel] = value
    states[outer, place + 1, channel] = value - np.float64(states[outer, place, channel])
