"""Second-order sections in the form in which float32 is enough for them, for kernels that have no float64.

scipy's ``z0`` and ``z1`` nearly cancel where a pole ``p`` is next to 1, and what is left of them is all that counts. In
``s = (z0, z0 + z1)`` a sample changes the state by ``|1 - p|`` times itself, a number that float32 holds to 24 bits.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class DifferenceForm:
    """``s += change @ s + inputs * x`` and ``y = b0 * x + s[0]`` with ``s[0]`` before the change; in float64."""

    mirrored: bool
    """Whether the poles are nearer to -1 than to 1. Then the other fields describe the section with mirrored poles and
    zeros. With every other sample negated, in the input and in the result, it computes the same."""

    b0: float
    inputs: npt.NDArray[np.float64]
    change: npt.NDArray[np.float64]

    @classmethod
    def of(cls, row: npt.NDArray[np.float64]) -> DifferenceForm:
        """Of a section as scipy gives it, ``b0, b1, b2, 1, a1, a2``."""
        b0, b1, b2, _, a1, a2 = row.tolist()
        if mirrored := a1 > 0.0:
            b1, a1 = -b1, -a1
        # (1 - p) * (1 - q) of the poles p and q.
        kappa = math.fsum([1.0, a1, a2])
        inputs = np.array([b1 - a1 * b0, math.fsum([b0, b1, b2]) - kappa * b0])
        return cls(mirrored, b0, inputs, np.array([[-2.0 - a1, 1.0], [-kappa, 0.0]]))

    @property
    def transition(self) -> npt.NDArray[np.float64]:
        """The state after a sample of 0."""
        return np.eye(2) + self.change
