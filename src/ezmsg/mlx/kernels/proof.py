"""Whether a kernel computes what it should on the machine that it runs on: looked at once, before its first use.

A kernel that is compiled by the driver of a GPU may fail there and nowhere else. So it is run on a little data, whose
results are known in float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .contract import Kernel, Recurrence

Float64 = npt.NDArray[np.float64]

LIMIT = 10.0
"""Seconds after which a kernel counts as one that does not end. Compiling one takes less than a second."""

TOLERANCE = 1e-4
"""Largest difference from float64, relative to the largest value. Kernels are held to a tenth of that; a fault of a
compiler shows in the first digits."""

_ALPHA = 0.01

_SECTIONS = np.array([[0.3, 0.6, 0.3, 1.0, 0.4, 0.2], [1.0, -2.0, 1.0, 1.0, -1.9, 0.91]])
"""One with poles nearer to -1, and one with poles nearer to 1."""

_LENGTHS = (350, 50)
"""Samples of two messages: of more than one tile of a threadgroup, and of less."""

_N_CHANNELS = 9
"""Channels: of more than one threadgroup."""


def _samples() -> npt.NDArray[np.float32]:
    x = np.random.default_rng(0).standard_normal((sum(_LENGTHS), _N_CHANNELS)).astype(np.float32) + np.float32(5)
    x[[0, 7, 349, 351], 2] = np.nan
    return x


def _averages(x: Float64, corrected: bool) -> Float64:
    y, state, weight = x.copy(), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        result[taken] = _ALPHA * sample[taken] + state[taken]
        state[taken] = (1.0 - _ALPHA) * result[taken]
        weight[taken] += (1.0 - weight[taken]) * _ALPHA
        if corrected:
            result[taken] /= weight[taken]
    return y


def _scores(x: Float64) -> Float64:
    y, mean, variance, weight = x.copy(), *np.zeros((3, x.shape[1]))
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        rest = (1.0 - _ALPHA) * weight[taken]
        weight[taken] = rest + _ALPHA
        share, rest = _ALPHA / weight[taken], rest / weight[taken]
        delta = sample[taken] - mean[taken]
        mean[taken] += share * delta
        variance[taken] = rest * (variance[taken] + share * delta**2)
        result[taken] = rest * delta / np.sqrt(np.maximum(variance[taken], np.finfo(float).tiny))
    return y


def _sections(x: Float64) -> Float64:
    y, z = x.copy(), np.zeros((len(_SECTIONS), 2, x.shape[1]))
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        for (b0, b1, b2, _, a1, a2), state in zip(_SECTIONS, z, strict=True):
            value = b0 * result[taken] + state[0, taken]
            state[0, taken] = b1 * result[taken] - a1 * value + state[1, taken]
            state[1, taken] = b2 * result[taken] - a2 * value
            result[taken] = value
    return y


def _cases(recurrence: Recurrence) -> Iterator[tuple[Any, tuple[int, ...], Callable[[Float64], Float64]]]:
    """Coefficients, the shape of a state, and what gives the results."""
    if recurrence == "ewma":
        yield _ALPHA, (2, _N_CHANNELS), lambda x: _averages(x, corrected=False)
        yield _ALPHA, (4, _N_CHANNELS), lambda x: _averages(x, corrected=True)
    elif recurrence == "zscore":
        yield _ALPHA, (6, _N_CHANNELS), _scores
    else:
        yield _SECTIONS, (len(_SECTIONS), 4, _N_CHANNELS), _sections


def difference_of(recurrence: Recurrence, kernel: Kernel) -> float:
    """Largest difference from float64, relative to the largest value; inf where other samples than before are finite.

    Of two messages of nine channels, with samples that are not finite in one of them.
    """
    x, largest = _samples(), 0.0
    for coefficients, state_shape, reference in _cases(recurrence):
        expected, results = reference(x.astype(np.float64)), []
        state = mx.zeros(state_shape)
        for message in np.split(x, np.cumsum(_LENGTHS)[:-1]):
            y, state = kernel.run(mx.array(message), coefficients, state, 0, (512,))
            results.append(np.array(y))
        found = np.concatenate(results)
        if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
            return math.inf
        largest = max(largest, float(np.nanmax(np.abs(found - expected)) / np.nanmax(np.abs(expected))))
    return largest


def _trouble(recurrence: Recurrence, kernel: Kernel) -> str | None:
    difference = difference_of(recurrence, kernel)
    if difference <= TOLERANCE:
        return None
    return f"differs from float64 by {difference:.1e} of the largest value"


def trouble_of(recurrence: Recurrence, kernel: Kernel) -> str | None:
    """What is wrong with *kernel*, as the end of a sentence; None if nothing is.

    In a thread of its own, which is left behind where a kernel does not end.
    """
    found: list[str | None] = []

    def look() -> None:
        try:
            found.append(_trouble(recurrence, kernel))
        except Exception as error:
            found.append(f"raises {type(error).__name__}: {error}")

    thread = threading.Thread(target=look, name=f"ezmsg-mlx proof of {recurrence}", daemon=True)
    thread.start()
    thread.join(LIMIT)
    return found[0] if found else f"does not end within {LIMIT:g} s"


def holds(recurrence: Recurrence, path: str, kernel: Kernel) -> bool:
    """Whether *kernel* computes what it should here. The log warns where it does not."""
    trouble = trouble_of(recurrence, kernel)
    if trouble is None:
        return True
    ez.logger.warning(
        f"The kernel {recurrence!r} for {path} {trouble}. Plain MLX operations take its place: results are right, and "
        "take longer. Please report this with what `python -m ezmsg.mlx.selftest` prints."
    )
    return False
