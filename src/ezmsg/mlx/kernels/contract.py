"""The contract of kernels, so that units, tests and other kernels need not know which one they use.

A kernel is a module ``ezmsg.mlx.kernels.<path>.<recurrence>``. Data is float32, with the scanned axis anywhere. A state
is float32, too, with *pairs* along an axis in the place of the scanned one: a value rounded to float32, and what that
rounding lost. Their sum has some 48 bits, which long time constants need: at 30 kHz and 300 s a sample moves the
average by a ten-millionth of its distance, far below the resolution of float32.

The forms of a state, by the length of that axis. *alpha* is the weight of the newest sample in the long run:

- ``"ewma"``, 2: ``[z_hi, z_lo]`` with ``z = (1 - alpha) * y[-1]``, as scipy's ``lfilter`` has it. The results are the
  plain averages, which begin at zero.
- ``"ewma"``, 4: ``[z_hi, z_lo, w_hi, w_lo]``. The results are the averages of the samples so far: the plain ones
  divided by ``w = 1 - (1 - alpha)**n``, where *n* counts the samples that the channel has taken; 0 at the start, 1 in
  the long run. After *k* more it is ``w + (1 - w) * (1 - (1 - alpha)**k)``, in which nothing cancels.
- ``"zscore"``, 6: ``[mean_hi, mean_lo, var_hi, var_lo, w_hi, w_lo]``, the mean and the variance of the samples so far,
  with the weights of the moving average, and *w* as above. With ``share = alpha / w[n]`` and
  ``delta = x[n] - mean[n-1]``::

      mean[n] = mean[n-1] + share * delta
      var[n] = (1 - share) * (var[n-1] + share * delta**2)
      score[n] = (x[n] - mean[n]) / sqrt(var[n])

  (West, Comm. ACM 22, 532, 1979). The score is 0 where the channel does not vary, which is ``var[n]`` of no more than
  ``SMALLEST_VARIANCE`` or ``(RESOLUTION * mean[n])**2`` (:mod:`ezmsg.mlx.kernels.layout`). All zeros is the start.

  Two stretches *a* and *b*, the later one, each from zero, make one with ``w = (1 - w_b) * w_a + w_b``,
  ``r = w_b / w``, ``delta = mean_b - mean_a``, ``mean = mean_a + r * delta`` and
  ``var = (1 - r) * var_a + r * var_b + r * (1 - r) * delta**2`` (Chan, Golub, LeVeque, The American Statistician 37,
  242, 1983). That holds for one sample, too (``w_b = alpha``, ``var_b = 0``), and is what parallel kernels link by.
  With ``1 - r`` taken as ``(1 - w_b) * w_a / w``, ``1 - w_b`` as the product that it is, and the mean as
  ``mean_b - (1 - r) * delta`` where *r* is above a half, a first sample of any size is forgotten as fast as its weight.
- ``"sosfilt"``, 4: ``[z0_hi, z1_hi, z0_lo, z1_lo]``, the states of scipy's ``sosfilt``, with sections along a first
  axis.

A sample that is not finite, or larger than ``LARGEST_SAMPLE`` (z-scores: ``LARGEST_SCORED``), comes out as it is and
leaves the state of its channel alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .crossings import Crossings

if TYPE_CHECKING:
    import mlx.core as mx

Recurrence = Literal["ewma", "zscore", "sosfilt", "recurrentcell", "crossings"]
"""Names of the recurrences that kernels compute. That of a recurrent cell has a form of its own, described in
:mod:`ezmsg.mlx.kernels.cells`."""

Path = Literal["cpu", "cuda", "metal", "plain"]
"""Kernels of a recurrence: numba's, those written for CUDA, those for Metal, and plain MLX operations."""

CoefficientsT = TypeVar("CoefficientsT", float, npt.NDArray[np.float64], Crossings, contravariant=True)
"""``alpha`` of an average or of z-scores; the sections, ``(n_sections, 6)``, of a filter; what is a crossing."""


@dataclasses.dataclass(frozen=True)
class Proof(Generic[CoefficientsT]):
    """A recurrence in float64, that kernels are compared with before their first use."""

    coefficients: CoefficientsT

    state_shape: tuple[int, ...]
    """Of the state of one channel; the last axis is that of the pairs, and all zeros is the start."""

    reference: Callable[[npt.NDArray[np.float64], CoefficientsT], npt.NDArray[np.float64]]
    """The results for data ``(time, channel)`` in float64, sample by sample."""


STATE_LENGTHS: dict[Recurrence, tuple[int, ...]] = {"ewma": (2, 4), "zscore": (6,), "sosfilt": (4,)}
"""Lengths that the axis of a state in the place of the scanned one may have; a recurrence with a state of another form
looks at it by itself."""


def check_state(
    recurrence: Recurrence, shape: tuple[int, ...], state_shape: tuple[int, ...], axis: int, n_sections: int | None
) -> None:
    """Check that a state is one of data of *shape*: a kernel reads as many values as the data has channels.

    Args:
        recurrence: Which the state is of.
        shape: Of the data.
        state_shape: Of the state.
        axis: The axis of the data to go along.
        n_sections: Of a filter, which the state has along a first axis; None where there is none.

    Raises:
        ValueError: It is not.
    """
    lead = () if n_sections is None else (n_sections,)
    before, after = (*lead, *shape[:axis]), shape[axis + 1 :]
    if (lengths := STATE_LENGTHS.get(recurrence)) is None:
        return
    n = state_shape[len(before)] if len(state_shape) > len(before) else 0
    if n not in lengths or state_shape != (*before, n, *after):
        allowed = " or ".join(str((*before, length, *after)) for length in lengths)
        raise ValueError(
            f"'zi' must have shape {allowed} with 'x' of shape {shape} along axis {axis}, got {state_shape}"
        )


class Kernel(Protocol[CoefficientsT]):
    """A recurrence on one backend. Any module with these two functions is one."""

    def run(
        self, x: mx.array, coefficients: CoefficientsT, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
    ) -> tuple[mx.array, mx.array]:
        """Run the recurrence along one axis.

        Args:
            x: Data, float32, with one sample or more.
            coefficients: Those of the recurrence, in float64.
            zi: State, float32 pairs. The length of its axis in the place of *axis* tells of which form it is.
            axis: The axis of *x* to go along, 0 or more.
            chunk_sizes: Samples a launch, where a kernel is compiled for fixed sizes; others ignore them.

        Returns:
            The results, float32, of the shape of *x* (crossings: as they say); and the state after the last sample, of
            the form of *zi*.
        """
        ...

    def compile_ahead(self, coefficients: CoefficientsT, n_channels: int) -> None:
        """Compile what streams of *n_channels* channels need, for short messages and for long ones.

        For the start of a stream, which would otherwise stop at its first message of the other kind, after a stall.
        """
        ...


class PlainKernel(Kernel[CoefficientsT], Protocol[CoefficientsT]):
    """A recurrence in plain MLX operations, the one form that each has, with what all others are compared with."""

    def proofs(self) -> Sequence[Proof[CoefficientsT]]:
        """The cases that a kernel of this recurrence is compared with, one for each form of its state."""
        ...


def schedule_before(path: Path, *states: mx.array | None) -> None:
    """Start computing the states of the last message, before that of the next is made of them.

    Otherwise they would hold the graph of every message whose output is not read. On CUDA here and not after the
    message, because a kernel makes the state together with the output: where that has been read, this is free.
    """
    if path == "cuda":
        _schedule(states)


def schedule_after(path: Path, *states: mx.array | None, first: bool) -> None:
    """Start computing the states of this message, on the paths on which this is the place for it.

    On CUDA only for the *first* message, so that a transformer can be warmed up in one thread and used in another.
    """
    if path in ("metal", "plain") or (path == "cuda" and first):
        _schedule(states)


def _schedule(states: tuple[mx.array | None, ...]) -> None:
    import mlx.core as mx

    mx.async_eval(*(state for state in states if state is not None))
