"""Conversion to integers that rounds to the nearest one and saturates, between NumPy and MLX in all directions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mlx.core as mx

# Samples that are rounded at a time, so that they stay in the processor's cache.
_BLOCK = 1 << 17


Rounding: TypeAlias = Literal["truncate", "nearest"]
"""How a conversion gets to integers: as the array library does it, or to the nearest one, with saturation."""

ROUNDINGS = get_args(Rounding)


def is_integer(dtype: str) -> bool:
    """Whether *dtype* is the name of a type of integers."""
    return dtype != "bfloat16" and np.dtype(dtype.rstrip("_")).kind in "iu"


def numpy_to_integers(data: npt.ArrayLike, dtype: str) -> npt.NDArray[np.integer]:
    """Round to the nearest integer, to the even one of two, as ``numpy.rint`` does, and saturate.

    Args:
        data: Real numbers of any dtype, shape, byte order and strides. NaN becomes 0, infinities the ends of the range.
        dtype: Name of a type of integers.

    Returns:
        New memory, in C order.
    """
    samples, target = np.asarray(data), np.dtype(dtype.rstrip("_"))
    result = np.empty(samples.shape, target)
    if samples.dtype.kind == "b" or np.can_cast(samples.dtype, target):
        np.copyto(result, samples, casting="unsafe")
        return result
    source = np.dtype(np.float32) if samples.dtype == np.float16 else samples.dtype.newbyteorder("=")
    flat, into = np.ascontiguousarray(samples, source).reshape(-1), result.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        _round(flat[start : start + _BLOCK], into[start : start + _BLOCK])
    return result


def _round(x: npt.NDArray, y: npt.NDArray[np.integer]) -> None:
    """Write *x* to *y* as :func:`numpy_to_integers` does."""
    least, most, is_exact = _ends(x.dtype, y.dtype)
    # Looking whether all samples are in range takes a third of the time of clipping them and looking for NaN, with
    # which both comparisons are false.
    if np.minimum.reduce(x) >= least and np.maximum.reduce(x) <= most:
        np.rint(x, out=y, casting="unsafe") if x.dtype.kind == "f" else np.copyto(y, x, casting="unsafe")
        return
    if x.dtype.kind != "f":
        np.copyto(y, np.clip(x, least, most), casting="unsafe")
        return
    rounded = np.rint(x)
    rounded[np.isnan(rounded)] = 0.0
    # Above the largest value of the source's type that the integers hold, where that is not their largest.
    above = None if is_exact else rounded > most
    np.copyto(y, np.clip(rounded, least, most, out=rounded), casting="unsafe")
    if above is not None:
        y[above] = np.iinfo(y.dtype).max


def mlx_to_integers(data: mx.array, dtype: str) -> mx.array:
    """As :func:`numpy_to_integers`, of an MLX array on its device; lazy."""
    import mlx.core as mx

    target = getattr(mx, dtype)
    # Only MLX's CPU device knows float64.
    stream = mx.cpu if data.dtype == mx.float64 else None
    if data.dtype in (mx.bfloat16, mx.float16):
        data = data.astype(mx.float32)
    name = str(data.dtype).rpartition(".")[2].rstrip("_")
    if name == "bool" or np.can_cast(name, dtype):
        return data.astype(target, stream=stream)
    least, most, is_exact = _ends(np.dtype(name), np.dtype(dtype))
    # As arrays of NumPy: MLX takes no integer of Python that int64 does not hold.
    low, high = (mx.array(np.asarray(end), data.dtype) for end in (least, most))
    if np.dtype(name).kind != "f":
        return mx.minimum(mx.maximum(data, low), high).astype(target)
    rounded = mx.round(data, stream=stream)
    rounded = mx.where(mx.isnan(rounded, stream=stream), mx.array(0.0, data.dtype), rounded, stream=stream)
    clipped = mx.minimum(mx.maximum(rounded, low, stream=stream), high, stream=stream)
    result = clipped.astype(target, stream=stream)
    if is_exact:
        return result
    top = mx.array(np.array(np.iinfo(dtype).max, dtype))
    return mx.where(mx.greater(rounded, high, stream=stream), top, result, stream=stream)


@functools.lru_cache(maxsize=64)
def _ends(source: np.dtype, target: np.dtype) -> tuple[np.generic, np.generic, bool]:
    """The least and the largest value of *source* that *target* holds, and whether the latter is that of *target*."""
    info = np.iinfo(target)
    if source.kind != "f":
        own = np.iinfo(source)
        return source.type(max(own.min, info.min)), source.type(min(own.max, info.max)), True
    # The least one is 0 or a power of two.
    most = source.type(info.max)
    if int(most) > info.max:
        most = np.nextafter(most, source.type(0))
    return source.type(info.min), most, int(most) == info.max
