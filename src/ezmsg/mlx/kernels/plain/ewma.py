"""Kernels of plain MLX operations, for any device: a scan in log2(chunk size) steps inside each chunk."""

from __future__ import annotations

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...scan import chunked_scan
from ..contract import Proof
from ..layout import LARGEST_SAMPLE, decays_and_gains, two_sum


def split_state(zi: mx.array, alpha: float, axis: int) -> tuple[mx.array, mx.array]:
    """The average as a float32 pair, from the state ``zi = (1 - alpha) * average`` as one."""
    high, low = mx.split(zi, 2, axis=axis)
    # average = zi + zi * alpha / (1 - alpha): the small term alone is rounded to float32, not the whole.
    ratio = alpha / (1.0 - alpha) if alpha < 1.0 else 0.0
    return two_sum(high, low + ratio * high + ratio * low)


def join_state(average: tuple[mx.array, mx.array], alpha: float, axis: int) -> mx.array:
    """The inverse of :func:`split_state`."""
    high, low = average
    return mx.concatenate([*two_sum(high, low - alpha * high - alpha * low)], axis=axis)


@dataclasses.dataclass(frozen=True)
class Tables:
    """By the number of samples: what is left of what was before, and their weight. In float32, from float64."""

    decays: mx.array
    gains: mx.array

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(alpha: float, n_samples: int) -> Tables:
        """Of up to *n_samples*; uploaded once."""
        tables = Tables(*(mx.array(table.astype(np.float32)) for table in decays_and_gains(alpha, n_samples)))
        mx.eval(tables.decays, tables.gains)
        return tables


def steps_of(size: int) -> list[int]:
    """How far back each step of a scan looks (Hillis and Steele, Comm. ACM 29, 1170, 1986)."""
    return [1 << i for i in range((size - 1).bit_length())]


def _scan(deviation: mx.array, alpha: float, axis: int) -> mx.array:
    """The moving average from zero along *axis*, in log2 steps."""
    lead = (slice(None),) * axis
    size = deviation.shape[axis]
    average = alpha * deviation
    for step in steps_of(size):
        earlier = (1.0 - alpha) ** step * average[(*lead, slice(size - step))]
        average = mx.concatenate(
            [average[(*lead, slice(step))], average[(*lead, slice(step, size))] + earlier], axis=axis
        )
    return average


def _scan_taken(
    deviation: mx.array, taken: mx.array, alpha: float, tables: Tables, axis: int
) -> tuple[mx.array, mx.array]:
    """The moving average from zero over the samples that are *taken*, and how many these are."""
    lead = (slice(None),) * axis
    size = deviation.shape[axis]
    average, count = alpha * mx.where(taken, deviation, 0.0), taken.astype(mx.int32)
    for step in steps_of(size):
        first, early, late = ((*lead, part) for part in (slice(step), slice(size - step), slice(step, size)))
        linked = average[late] + tables.decays[count[late]] * average[early]
        average = mx.concatenate([average[first], linked], axis=axis)
        count = mx.concatenate([count[first], count[late] + count[early]], axis=axis)
    return average, count


def _plain(
    x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """The average, chunk by chunk, of the deviation from the average at the start of the chunk.

    That keeps a constant constant and needs no more of ``1 - alpha`` than float32 has.
    """

    def launch(
        chunk: mx.array, average: tuple[mx.array, mx.array], size: int, valid_length: mx.array
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        high, low = average
        taken = mx.abs(chunk) <= LARGEST_SAMPLE
        moved = _scan(mx.where(taken, (chunk - high) - low, 0.0), alpha, axis)
        y = mx.where(taken, high + (low + moved), chunk)
        return y, two_sum(high, low + mx.take(moved, valid_length - 1, axis=axis))

    y, average = chunked_scan(x, x.shape[axis], chunk_sizes, split_state(zi, alpha, axis), launch, axis=axis)
    return y, join_state(average, alpha, axis)


def _corrected(
    x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """The same, divided by the weight of the samples so far."""
    tables = Tables.of(alpha, max(chunk_sizes))
    places = mx.arange(max(chunk_sizes), dtype=mx.uint32).reshape(-1, *[1] * (x.ndim - axis - 1))
    last = (*(slice(None),) * axis, slice(-1, None))

    def launch(
        chunk: mx.array, state: tuple[mx.array, ...], size: int, valid_length: mx.array
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        high, low, weight, rest_of_weight = state
        # A sample that is not taken has no weight, and neither has padding: the state is that of the last entry.
        taken = (mx.abs(chunk) <= LARGEST_SAMPLE) & (places[:size] < valid_length)
        moved, count = _scan_taken((chunk - high) - low, taken, alpha, tables, axis)
        gained = ((1.0 - weight) - rest_of_weight) * tables.gains[count]
        y = (high + (low + moved)) / (weight + (rest_of_weight + gained))
        after = (*two_sum(high, low + moved[last]), *two_sum(weight, rest_of_weight + gained[last]))
        return mx.where(taken, y, chunk), after

    state, weights = mx.split(zi, 2, axis=axis)
    before = (*split_state(state, alpha, axis), *mx.split(weights, 2, axis=axis))
    y, (high, low, *after) = chunked_scan(x, x.shape[axis], chunk_sizes, before, launch, axis=axis)
    return y, mx.concatenate([join_state((high, low), alpha, axis), *after], axis=axis)


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""
    average = _corrected if zi.shape[axis] == 4 else _plain
    return average(x, alpha, zi, axis, chunk_sizes)


def proofs() -> list[Proof[float]]:
    """See :class:`~ezmsg.mlx.kernels.contract.PlainKernel`: averages, and averages of the samples so far."""
    return [Proof(0.01, (2,), averages), Proof(0.01, (4,), functools.partial(averages, corrected=True))]


def averages(x: npt.NDArray[np.float64], alpha: float, corrected: bool = False) -> npt.NDArray[np.float64]:
    """``y[n] = y[n-1] + alpha * (x[n] - y[n-1])`` in float64; *corrected*: divided by ``1 - (1 - alpha)**(n + 1)``."""
    y, average, weight = x.copy(), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        average[taken] += alpha * (sample[taken] - average[taken])
        weight[taken] += (1.0 - weight[taken]) * alpha
        result[taken] = average[taken] / (weight[taken] if corrected else 1.0)
    return y
