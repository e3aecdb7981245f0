"""z-scores in plain MLX operations, for any device: a scan in log2(chunk size) steps inside each chunk.

What the scan links are stretches of samples, each with its weight, mean and variance, as
:mod:`ezmsg.mlx.kernels.contract` says. A mean is a float32 pair, so that nothing need be subtracted from the data
beforehand, which a first sample of any size could spoil.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...scan import chunked_scan
from ..contract import Proof
from ..layout import LARGEST_SCORED, RESOLUTION, SMALLEST_VARIANCE, time_back, time_first, two_sum
from .ewma import Tables, steps_of


class _Moments(NamedTuple):
    """Of a stretch of samples for each entry (time, channel)."""

    mean: mx.array
    rest_of_mean: mx.array
    var: mx.array

    def part(self, start: int | None, stop: int | None) -> _Moments:
        return _Moments(*(array[start:stop] for array in self))

    def after(self, earlier: _Moments, share: mx.array, other: mx.array) -> tuple[_Moments, mx.array]:
        """This stretch and the one before it as one, and what their distance adds to the variance.

        Args:
            earlier: The stretch before.
            share: That of this one in the weight of both.
            other: That of the earlier one.
        """
        delta = (self.mean - earlier.mean) + (self.rest_of_mean - earlier.rest_of_mean)
        # From whichever mean is the nearer one: what rounding takes is then small beside the deviation.
        is_near = share > 0.5
        mean = two_sum(
            mx.where(is_near, self.mean, earlier.mean),
            mx.where(is_near, self.rest_of_mean - other * delta, earlier.rest_of_mean + share * delta),
        )
        between = (other * delta) * (share * delta)
        return _Moments(*mean, other * earlier.var + share * self.var + between), between


def _shares(weight: mx.array, decay: mx.array, earlier: mx.array) -> tuple[mx.array, mx.array]:
    """Of a stretch of *weight*, after which *decay* is left of what was before, and of one of weight *earlier*."""
    before = decay * earlier
    whole = mx.maximum(before + weight, 2.0**-100)
    return weight / whole, before / whole


def _scan(samples: _Moments, taken: mx.array, tables: Tables) -> tuple[_Moments, mx.array]:
    """The stretch from the first sample to each, and how many of its samples are *taken*."""
    count = taken.astype(mx.int32)
    size = count.shape[0]
    for step in steps_of(size):
        late, early = count[step:], count[: size - step]
        shares = _shares(tables.gains[late], tables.decays[late], tables.gains[early])
        linked, _ = samples.part(step, None).after(samples.part(None, size - step), *shares)
        samples = _Moments(*(mx.concatenate([a[:step], b]) for a, b in zip(samples, linked, strict=True)))
        count = mx.concatenate([count[:step], late + early])
    return samples, count


def compile_ahead(coefficients: float, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        mean, rest_of_mean, var, rest_of_var, weight, rest_of_weight = mx.split(state, 6)
        # A sample that is not taken has no weight, and neither has padding: the state is that of the last entry.
        taken = (mx.abs(chunk) <= LARGEST_SCORED) & (mx.arange(size, dtype=mx.uint32)[:, None] < valid_length)
        nothing = mx.zeros_like(chunk)
        so_far, count = _scan(_Moments(mx.where(taken, chunk, 0.0), nothing, nothing), taken, tables)
        before = _Moments(mean, rest_of_mean, var + rest_of_var)
        share, other = _shares(tables.gains[count], tables.decays[count], weight + rest_of_weight)
        after, between = so_far.after(before, share, other)
        rounding = RESOLUTION * after.mean
        varies = after.var > mx.maximum(rounding * rounding, SMALLEST_VARIANCE)
        score = mx.where(varies, ((chunk - after.mean) - after.rest_of_mean) * mx.rsqrt(after.var), 0.0)

        last, of_chunk = after.part(-1, None), so_far.part(-1, None)
        share, between = share[-1:], between[-1:]
        # Small changes go into the second halves. A large one leaves little of what those hold.
        gained = two_sum(var, rest_of_var + (share * (of_chunk.var - before.var) + between))
        is_large = share > 0.5
        state = mx.concatenate(
            [
                last.mean,
                last.rest_of_mean,
                mx.where(is_large, last.var, gained[0]),
                mx.where(is_large, 0.0, gained[1]),
                *two_sum(weight, rest_of_weight + ((1.0 - weight) - rest_of_weight) * tables.gains[count[-1:]]),
            ]
        )
        return mx.where(taken, score, chunk), state

    tables = Tables.of(alpha, max(chunk_sizes))
    flat, state = time_first(x, axis), time_first(zi, axis)
    y, zf = chunked_scan(flat, x.shape[axis], chunk_sizes, state, launch, axis=0)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis)


def proofs() -> list[Proof[float]]:
    """See :class:`~ezmsg.mlx.kernels.contract.PlainKernel`."""
    return [Proof(0.01, (6,), scores)]


def scores(x: npt.NDArray[np.float64], alpha: float) -> npt.NDArray[np.float64]:
    """The scores of :mod:`ezmsg.mlx.kernels.contract`, sample by sample in float64."""
    y, mean, variance, weight = x.copy(), *np.zeros((3, x.shape[1]))
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        rest = (1.0 - alpha) * weight[taken]
        weight[taken] = rest + alpha
        share, rest = alpha / weight[taken], rest / weight[taken]
        delta = sample[taken] - mean[taken]
        mean[taken] += share * delta
        variance[taken] = rest * (variance[taken] + share * delta**2)
        result[taken] = rest * delta / np.sqrt(np.maximum(variance[taken], np.finfo(float).tiny))
    return y
