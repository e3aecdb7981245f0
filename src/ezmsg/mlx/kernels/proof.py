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

from .contract import Kernel, Path, Recurrence

Float64 = npt.NDArray[np.float64]

LIMIT = 10.0
"""Seconds after which a kernel counts as one that does not end. Compiling one takes less than a second."""

TOLERANCE = 1e-4
"""Largest difference from float64, relative to the largest value. Kernels are held to a tenth of that; a fault of a
compiler shows in the first digits."""

_ALPHA = 0.01

_SECTIONS = np.array([[0.3, 0.6, 0.3, 1.0, 0.4, 0.2], [1.0, -2.0, 1.0, 1.0, -1.9, 0.91]])
"""One with poles nearer to -1, and one with poles nearer to 1."""

_Sizes = tuple[tuple[int, ...], int]

_SIZES: _Sizes = (350, 50), 9
"""Samples of messages, of more than one tile of a threadgroup and of less; channels, of more than one threadgroup."""

_OTHER_SIZES: dict[Path, _Sizes] = {"cuda": ((20, 600, 30), 33)}
"""The same where others are needed. On CUDA, messages of more than 512 samples have a kernel of their own, and each
kind has to go on from the state of the other; for more than 16 channels, kernels are those that most streams compile.
"""


def _messages(path: Path) -> list[npt.NDArray[np.float32]]:
    lengths, n_channels = _OTHER_SIZES.get(path, _SIZES)
    ends = np.cumsum(lengths)
    x = np.random.default_rng(0).standard_normal((ends[-1], n_channels)).astype(np.float32) + np.float32(5)
    x[[0, 7, ends[-2] - 1, ends[-2] + 1], 2] = np.nan
    return np.split(x, ends[:-1])


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
    """Coefficients, the shape of a channel's state, and what gives the results."""
    if recurrence == "ewma":
        yield _ALPHA, (2,), lambda x: _averages(x, corrected=False)
        yield _ALPHA, (4,), lambda x: _averages(x, corrected=True)
    elif recurrence == "zscore":
        yield _ALPHA, (6,), _scores
    else:
        yield _SECTIONS, (len(_SECTIONS), 4), _sections


def difference_of(recurrence: Recurrence, kernel: Kernel, path: Path) -> float:
    """Largest difference from float64, relative to the largest value; inf where other samples than before are finite.

    Of long and short messages of few channels, as *path* needs them, with samples that are not finite in one channel.
    """
    messages, largest = _messages(path), 0.0
    x = np.concatenate(messages).astype(np.float64)
    for coefficients, of_channel, reference in _cases(recurrence):
        expected, results = reference(x), []
        state = mx.zeros((*of_channel, x.shape[1]))
        for message in messages:
            y, state = kernel.run(mx.array(message), coefficients, state, 0, (512,))
            results.append(np.array(y))
        found = np.concatenate(results)
        if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
            return math.inf
        largest = max(largest, float(np.nanmax(np.abs(found - expected)) / np.nanmax(np.abs(expected))))
    return largest


def _trouble(recurrence: Recurrence, kernel: Kernel, path: Path) -> str | None:
    try:
        difference = difference_of(recurrence, kernel, path)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if difference <= TOLERANCE:
        return None
    return f"differs from float64 by {difference:.1e} of the largest value"


def trouble_of(recurrence: Recurrence, kernel: Kernel, path: Path) -> str | None:
    """What is wrong with *kernel*, as the end of a sentence; None if nothing is.

    On Metal in a thread of its own, which is left behind where a kernel does not end. On CUDA in the thread of the
    caller, whose streams MLX then uses from the start. A limit would not help there: nothing takes a kernel that does
    not end off the GPU, and the process could not end either.
    """
    if path != "metal":
        return _trouble(recurrence, kernel, path)
    found: list[str | None] = []
    name = f"ezmsg-mlx proof of {recurrence}"
    thread = threading.Thread(target=lambda: found.append(_trouble(recurrence, kernel, path)), name=name, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return found[0] if found else f"does not end within {LIMIT:g} s"


def holds(recurrence: Recurrence, path: Path, kernel: Kernel) -> bool:
    """Whether *kernel* computes what it should here. The log warns where it does not."""
    trouble = trouble_of(recurrence, kernel, path)
    if trouble is None:
        return True
    ez.logger.warning(
        f"The kernel {recurrence!r} for {path} {trouble}. Plain MLX operations take its place: results are right, and "
        "take longer. Please report this with what `python -m ezmsg.mlx.selftest` prints."
    )
    return False
