"""Reading of results from a GPU in two halves: one that the thread of the chain begins, and one for another thread.

What begins is asynchronous: the device may be some results behind. What ends waits for the device, and copies.

On CUDA a result is first copied to memory of a size of its own. MLX's cache gives the memory of a result to whatever
needs as much next; a buffer that the host has read lies on the host, and a device that computes in it does so over the
bus. With a size that nothing else has, the same few buffers are used for results only, and stay on the host: the
device writes each result once over the bus, and the host reads it at the speed of its own memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .convert import MLX_DTYPES, refuse_real
from .device import gpu_backend
from .hostpages import PAGE, keep_on_host
from .integers import is_integer, mlx_to_integers, numpy_to_integers

_PADDING = 4 * PAGE
"""Bytes behind a result. MLX's cache takes a buffer for what needs up to two pages less."""


class Unread(NamedTuple):
    """A result that the device may still be computing."""

    array: mx.array
    """Its values in a row, and perhaps others behind them."""
    shape: tuple[int, ...]
    dtype: str | None
    """Of the NumPy array that it is to become; None for that of *array*."""
    rounds: bool

    @property
    def nbytes(self) -> int:
        """The size of *array*."""
        return self.array.nbytes

    def read(self) -> npt.NDArray:
        """The result, in memory of its own, as :func:`ezmsg.mlx.stream.convert.mlx_to_numpy` gives it; waits for it.

        In any thread.
        """
        # By itself, since this wait lets other threads run.
        mx.eval(self.array)
        if gpu_backend() == "cuda":
            keep_on_host(self.array, least=1)
        values = np.asarray(self.array)[: math.prod(self.shape)].reshape(self.shape)
        if self.rounds and self.dtype is not None and is_integer(self.dtype) and values.dtype != self.dtype:
            return numpy_to_integers(values, self.dtype)
        return np.array(values, dtype=self.dtype)


def begin_reading(data: mx.array, dtype: str | None = None, *, rounds: bool = False) -> Unread:
    """Have the device compute *data* as what is to be read of it, without waiting for it.

    Args:
        data: Of any shape and dtype. To be called in the thread that made it.
        dtype: Name of a NumPy dtype, or None to keep the dtype (bfloat16 becomes float32).
        rounds: As in :func:`ezmsg.mlx.stream.convert.mlx_to_numpy`. What is rounded is so on the device.

    Raises:
        TypeError: Complex data with a real *dtype*.
    """
    if dtype is not None:
        refuse_real(data, dtype)
    integer = dtype if rounds and dtype in MLX_DTYPES and is_integer(dtype) else None
    laid_out = _laid_out(data, integer)
    mx.async_eval(laid_out)
    return Unread(laid_out, tuple(data.shape), dtype, rounds)


def _laid_out(data: mx.array, integer: str | None) -> mx.array:
    """The values of *data* in a row, as integers of this type; None: as they are."""
    if integer is not None:
        data = mlx_to_integers(data, integer)
    elif data.dtype == mx.bfloat16:
        data = data.astype(mx.float32)
    flat = data.reshape(-1)
    if gpu_backend() != "cuda":
        return flat
    return mx.concatenate([flat, mx.zeros(_PADDING // flat.itemsize, flat.dtype)])
