"""Kernels of MLX's CPU device, for data that is NumPy's and stays so."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ...kernels.cpu.ewma import _ewma

Samples = npt.NDArray[np.float32]


def average(x: Samples, alpha: float, zi: Samples, axis: int) -> tuple[Samples, Samples]:
    """As :meth:`ezmsg.mlx.kernels.contract.Kernel.run` of moving averages, without a copy to MLX and back."""
    n_before, n_after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    y, zf = np.empty_like(x), np.empty_like(zi)
    flat = (array.reshape(n_before, array.shape[axis], n_after) for array in (x, y))
    states = (array.reshape(n_before, array.shape[axis], n_after) for array in (zi, zf))
    _ewma(*flat, None, *states, alpha)
    return y, zf
