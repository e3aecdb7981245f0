"""What kernels that compute in float32 look up instead of computing it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def decays_and_gains(alpha: float, n: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """``(1 - alpha)**k`` for k from 0 to *n*, and 1 minus that, in which nothing cancels."""
    if alpha == 1.0:
        gains = np.minimum(np.arange(n + 1.0), 1.0)
        return 1.0 - gains, gains
    exponents = np.arange(n + 1) * math.log1p(-alpha)
    return np.exp(exponents), -np.expm1(exponents)
