"""Kernels of MLX's CPU device, for data that is NumPy's and stays so."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ...kernels.cpu.ewma import _ewma
from ...kernels.cpu.sosfilt import filter_into
from ...kernels.cpu.zscore import _zscore

Samples = npt.NDArray[np.float32]


def average(x: Samples, alpha: float, zi: Samples, axis: int) -> tuple[Samples, Samples]:
    """As :meth:`ezmsg.mlx.kernels.contract.Kernel.run` of moving averages, without a copy to MLX and back."""
    y, zf = np.empty(x.shape, np.float32), np.empty(zi.shape, np.float32)
    samples, results, before, after = _flat((x, y, zi, zf), axis)
    _ewma(samples, results, False, before, after, alpha)
    return y, zf


def scores(x: Samples, alpha: float, zi: Samples, axis: int) -> tuple[Samples, Samples]:
    """The same of z-scores."""
    y, zf = np.empty(x.shape, np.float32), np.empty(zi.shape, np.float32)
    samples, results, before, after = _flat((x, y, zi, zf), axis)
    _zscore(samples, samples, results, before, after, alpha)
    return y, zf


def sections(x: Samples, sos: npt.NDArray[np.float64], zi: Samples, axis: int) -> tuple[Samples, Samples]:
    """The same of second-order sections."""
    x, zi = np.ascontiguousarray(x), np.ascontiguousarray(zi)
    y, zf = np.empty_like(x), np.empty_like(zi)
    samples, results = _flat((x, y), axis)
    before, after = (state.reshape(len(sos), samples.shape[0], 4, samples.shape[2]) for state in (zi, zf))
    filter_into(samples, samples, results, before, after, sos)
    return y, zf


def _flat(arrays: tuple[Samples, ...], axis: int) -> list[Samples]:
    shape = arrays[0].shape
    if axis == 0 and len(shape) == 2:
        return [array[None] for array in arrays]
    n_before, n_after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return [array.reshape(n_before, array.shape[axis], n_after) for array in arrays]
