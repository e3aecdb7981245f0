"""What a kernel has to offer, so that units, tests and other kernels need not know which one they use.

A kernel is a module ``ezmsg.mlx.kernels.<path>.<recurrence>``. Data is float32, with the scanned axis anywhere. A state
is float32, too, with *pairs* along an axis in the place of the scanned one: a value rounded to float32, and what that
rounding lost. Their sum has some 48 bits, which long time constants need: at 30 kHz and 300 s a sample moves the
average by a ten-millionth of its distance, far below the resolution of float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mlx.core as mx

Recurrence = Literal["ewma", "sosfilt"]
"""Names of the recurrences that kernels compute."""

Path = Literal["cpu", "cuda", "metal", "plain"]
"""Kernels of a recurrence: numba's, those written for CUDA, those for Metal, and plain MLX operations."""

CoefficientsT = TypeVar("CoefficientsT", float, npt.NDArray[np.float64], contravariant=True)
"""``alpha`` of an average; the sections, ``(n_sections, 6)``, of a filter."""


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
            The results, float32, of the shape of *x*; and the state after the last sample, of the form of *zi*.
        """
        ...

    def compile_ahead(self, coefficients: CoefficientsT, n_channels: int) -> None:
        """Compile what streams of *n_channels* channels need, for short messages and for long ones.

        For the start of a stream, which would otherwise stop at its first message of the other kind, after a stall.
        """
        ...
