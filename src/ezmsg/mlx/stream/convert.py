"""Copies between NumPy and MLX arrays whose values are right, or that are refused.

MLX itself answers byte-swapped, structured, object, text, datetime and extended-precision arrays, and the fields
of packed records, with ``std::bad_cast``; it refuses negative strides, and cannot hand bfloat16 to NumPy at all.

What begins is asynchronous: the device may be some results behind. What ends waits for the device.

On CUDA a kernel writes each result over the bus, to memory of the host that is used for results only. MLX itself would
move the memory of a result to the host where the host asks for it, page by page, and back where the device computes in
it next.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
import numpy.typing as npt

from .device import Bus, bus, keep_on_host, uses_gpu
from .hostmemory import Block, device_memory, mlx_name, used_again
from .sharedcopy import SharedCopy

if TYPE_CHECKING:
    import mlx.core as mx
    from ezmsg.sigproc.util.buffer import HybridBuffer

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
    result = used_again(samples.shape, target)
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


MLX_DTYPES = (
    "bool_",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
)
"""Names of MLX's dtypes, as attributes of ``mlx.core``; kept here so that settings are checked without MLX."""

NUMPY_DTYPES = tuple(
    name
    for name, dtype in np.sctypeDict.items()
    if np.dtype(dtype).kind in "biufc" and getattr(np, name, None) is dtype
)
"""Names of NumPy's number dtypes, as attributes of ``numpy``."""

# The dtypes that MLX takes as they are, whatever the device.
_SAME_IN_MLX = frozenset(map(np.dtype, "? u1 u2 u4 u8 i1 i2 i4 i8 f2 f4 c8".split()))

# Both are rounded to half the width where MLX or its device has no wider type.
_NARROWED = {"float64": "float32", "complex128": "complex64"}


def import_mlx() -> ModuleType:
    """Return ``mlx.core``.

    Raises:
        ImportError: No MLX backend is installed (``pip install mlx`` alone brings none on Linux).
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise ImportError(
            'Converting to MLX needs one of its backends: pip install "ezmsg-mlx[cpu]", "ezmsg-mlx[cuda12]" or '
            '"ezmsg-mlx[cuda13]" (one of them; on Apple silicon "mlx" itself).'
        ) from error
    return mx


def let_states_be_copied() -> None:
    """Have ``copy`` and ``pickle`` take what states of transformers hold and what does not say how.

    These are MLX's dtypes, and ezmsg-sigproc's buffers, which hold the module of their array library.
    """
    if (library := sys.modules.get("mlx.core")) is not None:
        copyreg.pickle(library.Dtype, _reduced_dtype)
    if (buffers := sys.modules.get("ezmsg.sigproc.util.buffer")) is not None:
        copyreg.pickle(buffers.HybridBuffer, _reduced_buffer)


def _reduced_buffer(buffer: HybridBuffer) -> tuple[Callable[[str], HybridBuffer], tuple[str], dict[str, object]]:
    return _buffer_of, (buffer.xp.__name__,), {name: held for name, held in vars(buffer).items() if name != "xp"}


def _buffer_of(library: str) -> HybridBuffer:
    """A buffer for arrays of the module *library*, which has nothing in it yet."""
    from ezmsg.sigproc.util.buffer import HybridBuffer

    buffer = HybridBuffer.__new__(HybridBuffer)
    buffer.xp = importlib.import_module(library)
    return buffer


def _reduced_dtype(dtype: mx.Dtype) -> tuple[Callable[[str], mx.Dtype], tuple[str]]:
    return dtype_named, (str(dtype).rpartition(".")[2],)


def dtype_named(name: str) -> mx.Dtype:
    """MLX's dtype of that name."""
    return getattr(import_mlx(), name)


def is_mlx_array(data: object) -> TypeGuard[mx.array]:
    """Whether *data* is an MLX array, without importing MLX."""
    return type(data).__module__ == "mlx.core" and type(data).__name__ == "array"


def known_mlx(data: object) -> mx.array:
    """*data*, which is known to be an MLX array."""
    assert is_mlx_array(data)
    return data


def known_numpy(data: object) -> npt.NDArray:
    """*data*, which is known to be a NumPy array."""
    assert isinstance(data, np.ndarray)
    return data


@functools.lru_cache(maxsize=256)
def _plan(source: np.dtype, target: str | None, gpu: bool) -> tuple[np.dtype | None, str | None, str | None, str]:
    """How an array of dtype *source* gets to MLX.

    Returns:
        The dtype to cast to in NumPy first, the MLX dtype to copy as, the MLX dtype to widen to on the device
        (each None where there is nothing to do), and the narrowing to warn about (empty: none).
    """
    extended = source.char in "gG"  # by its char: where long double is no wider than double, its name is float64
    if source.kind not in "biufc" or (extended and target is None):
        hint = "; give an explicit dtype to round it" if extended else ""
        raise TypeError(
            f"Data of dtype {source} cannot be converted to MLX{hint}. Allowed are bool, integer, float and complex "
            "dtypes of up to 64 bits a component."
        )
    if source.kind == "c" and target is not None and target != "complex64":
        raise TypeError(
            f"Data of dtype {source} cannot be converted to dtype {target!r}: it would lose the imaginary part."
        )

    native = source.newbyteorder("=")
    cast = None if source.isnative else native
    if extended:
        cast = np.dtype("complex128" if source.kind == "c" else "float64")
        native = cast

    asked = target or native.name.replace("bool", "bool_")
    final = asked
    if asked == "complex128" or (asked == "float64" and (gpu or target is None)):
        final = _NARROWED[asked]
    told = f"{asked} to {final}" if final != asked else misfit(native.name, final)

    if gpu and source.kind != "c" and np.dtype(native).itemsize < _itemsize(final):
        return cast, None, final, told
    return cast, final, None, told


@functools.lru_cache(maxsize=256)
def misfit(source: str, target: str) -> str:
    """The narrowing of *source* to a *target* of integers that do not hold all of its values; empty where they do.

    Both are names of dtypes. What does not fit wraps, or is whatever the machine makes of it, in silence.
    """
    if target == "bfloat16" or np.dtype(target.rstrip("_")).kind not in "iu":
        return ""
    if source != "bfloat16" and np.can_cast(source, target.rstrip("_")):
        return ""
    return f"{source} to {target} (what does not fit comes out as another number)"


def _itemsize(mlx_dtype: str) -> int:
    if mlx_dtype == "bfloat16":
        return 2
    return np.dtype(mlx_dtype).itemsize


def _has_mlx_strides(data: np.ndarray) -> bool:
    """Whether no stride is negative, or a fraction of an item as in a field of a packed record."""
    itemsize = data.itemsize
    for stride in data.strides:
        if stride < 0 or stride % itemsize:
            return False
    return True


def numpy_to_mlx(data: np.ndarray, dtype: str | None = None, *, rounds: bool = False) -> tuple[mx.array, str]:
    """Copy a NumPy array to MLX's default device.

    The result never shares memory with *data*, since ezmsg recycles the buffers that messages live in. Where
    the target is wider than the source and the device is a GPU, the narrow data is uploaded and widened there
    (int16 to float32: half the bytes over the bus); on the CPU the cast happens while copying. The result can be used
    in any thread.

    Args:
        data: Array of any shape, byte order and strides; bool, integer, float or complex.
        dtype: A name in :data:`MLX_DTYPES`, or None to keep the dtype. float64 becomes float32, as it does in
            ``mlx.core.array``, unless float64 is asked for and the device has it (the CPU).
        rounds: Whether values are rounded to the nearest integer and saturate, where *dtype* is one of integers, as in
            :func:`~ezmsg.mlx.stream.convert.numpy_to_integers`. Otherwise they are cut off, and wrap.

    Returns:
        The MLX array, and the narrowing to warn about (like ``"float64 to float32"``; empty if none): one that
        was not asked for, or to integers that do not hold all values of the source.

    Raises:
        TypeError: A dtype that MLX cannot hold (object, text, structured, datetime, extended precision without
            an explicit *dtype*), complex data with a real *dtype*, or a masked array with masked entries.
    """
    mx = import_mlx()
    if dtype is None and type(data) is np.ndarray and (own := data.dtype) in _SAME_IN_MLX and _has_mlx_strides(data):
        uploaded = _uploaded(data, own)
        return (keep_on_host(mx.array(data)) if uploaded is None else uploaded), ""
    if isinstance(data, np.ma.MaskedArray):
        if np.ma.is_masked(data):
            raise TypeError("A masked array cannot be converted to MLX, which has no mask; fill it first.")
        data = data.data
    if rounds and dtype is not None and is_integer(dtype) and data.dtype.kind in "biuf":
        data = numpy_to_integers(data, dtype)
    cast, copy_as, widen_to, narrowed = _plan(data.dtype, dtype, uses_gpu())
    if cast is not None:
        data = data.astype(cast)
    elif not _has_mlx_strides(data):
        data = data.copy()
    if copy_as is not None:
        as_is = copy_as == "float32" or data.dtype == copy_as.rstrip("_")
        uploaded = _uploaded(data, np.dtype(copy_as.rstrip("_"))) if as_is else None
        if uploaded is None:
            uploaded = keep_on_host(mx.array(data, dtype=getattr(mx, copy_as)))
        return uploaded, narrowed
    assert widen_to is not None
    uploaded = _uploaded(data, data.dtype, widen_to)
    if uploaded is None and bus() is not None and data.size * _itemsize(widen_to) < LEAST_STAGED:
        uploaded = keep_on_host(mx.array(data, dtype=getattr(mx, widen_to)))
    if uploaded is None:
        uploaded = _started(keep_on_host(mx.array(data)).astype(getattr(mx, widen_to)))
    return uploaded, narrowed


_UPLOADED = frozenset(map(np.dtype, "i1 u1 i2 u2 i4 u4 f2 f4".split()))

LEAST_STAGED = 64 * 1024
"""Bytes on the device from which on a message goes up by a kernel. With fewer, starting the kernel takes longer than
what it saves."""

LARGE_MESSAGE = 8 << 20
"""Bytes from which on a message is uploaded in parts, so that the device reads one while the host copies the next."""

N_PARTS = 4


def _uploaded(data: npt.NDArray, dtype: np.dtype, widen_to: str | None = None) -> mx.array | None:
    """*data* on a CUDA device, copied as *dtype* to memory that the device reads once, over the bus, and widened there.

    None where that is not done: MLX is to copy it.
    """
    if (copies := bus()) is None or dtype not in _UPLOADED or widen_to not in (None, "float32"):
        return None
    if data.size * (4 if widen_to else dtype.itemsize) < LEAST_STAGED:
        return None
    return upload(copies, data, dtype, widen_to or mlx_name(dtype))


def upload(copies: Bus, data: npt.NDArray, dtype: np.dtype, target: str) -> mx.array:
    """*data* on the device; its evaluation has begun.

    Args:
        copies: What copies.
        data: Of any shape.
        dtype: The one in which it is to go over the bus.
        target: The one that it is to have on the device: *dtype*, or float32.
    """
    import mlx.core as mx

    memory, target_dtype = device_memory(), getattr(mx, target)
    block = memory.take(data.size * dtype.itemsize)
    if data.nbytes < LARGE_MESSAGE or data.ndim == 0 or len(data) < N_PARTS:
        result, done = copies.read(block.filled(data, dtype), target_dtype)
        mx.async_eval(result, done)
    else:
        array, window = block.typed(data.shape, dtype)
        copy, parts = SharedCopy(data, window), []
        for number in range(N_PARTS):
            start, stop = (len(data) * border // N_PARTS for border in (number, number + 1))
            copy.wait_for(stop)
            part, done = copies.read(array[start:stop], target_dtype)
            mx.async_eval(part, done)
            parts.append(part)
        result = _started(mx.concatenate(parts))
    # Not the array, whose memory is to be free when nobody needs it.
    memory.give_back_after(block, [done])
    return result


def mlx_to_mlx(data: mx.array, dtype: str, *, rounds: bool = False) -> tuple[mx.array, str]:
    """Cast an MLX array; the arguments, the result and the errors are those of :func:`numpy_to_mlx`."""
    import mlx.core as mx

    final = "float32" if dtype == "float64" and uses_gpu() else dtype
    refuse_real(data, dtype)
    if rounds and is_integer(dtype):
        return _started(mlx_to_integers(data, dtype)), ""
    # Only MLX's CPU device knows float64, and casts from it.
    stream = mx.cpu if data.dtype == mx.float64 else None
    told = f"{dtype} to {final}" if final != dtype else misfit(dtype_name(data), final)
    return _started(data.astype(getattr(mx, final), stream=stream)), told


def _started(array: mx.array) -> mx.array:
    """*array*, whose evaluation has begun: a stream of MLX belongs to a thread, and only there can one begin."""
    import mlx.core as mx

    mx.async_eval(array)
    return array


def dtype_name(data: mx.array | np.ndarray) -> str:
    """The dtype of *data* as NumPy calls it."""
    return str(data.dtype).rpartition(".")[2].rstrip("_")


def as_float32(x: mx.array | npt.NDArray, operation: str) -> mx.array:
    """*x* as float32, from any real dtype.

    Raises:
        TypeError: *x* is complex; the error calls what was to be done with it *operation*.
    """
    import mlx.core as mx

    assert not isinstance(x, np.ndarray)
    if x.dtype == mx.float32:
        return x
    if x.dtype == mx.complex64:
        raise TypeError(f"{operation.capitalize()} of complex64 data is not defined; use a real dtype.")
    if x.dtype == mx.float64:
        # Only MLX's CPU device has float64; a GPU as the default device does not even cast it.
        return x.astype(mx.float32, stream=mx.cpu)
    return x.astype(mx.float32)


def mlx_to_numpy(data: mx.array, dtype: str | None = None, *, rounds: bool = False) -> np.ndarray:
    """Copy an MLX array to a NumPy array in memory that nobody else writes to, evaluating it.

    Args:
        data: Array of any shape and dtype; bfloat16, which NumPy lacks, comes out as float32 (exact).
        dtype: Name of a NumPy dtype, or None to keep the dtype.
        rounds: As in :func:`numpy_to_mlx`.

    Raises:
        TypeError: Complex data with a real *dtype*.
    """
    import mlx.core as mx

    if dtype is not None:
        refuse_real(data, dtype)
    if bus() is not None:
        return begin_reading(data, dtype, rounds=rounds).read()
    if data.dtype == mx.bfloat16:
        data = data.astype(mx.float32)
    return copied(np.asarray(data), dtype, rounds)


def refuse_real(data: mx.array, dtype: str) -> None:
    """TypeError where a real *dtype* would lose the imaginary part of *data*."""
    # Also cdouble and clongdouble; no real dtype of either backend starts with a c.
    if "complex" in str(data.dtype) and not dtype.startswith("c"):
        raise TypeError(
            f"Data of dtype {data.dtype} cannot be converted to dtype {dtype!r}: it would lose the imaginary part."
        )


class Unread:
    """A result that the device may still be computing.

    Args:
        done: Arrays that are there when it is.
        block: Where its values are then; None: in the first of *done*.
        shape: Its shape.
        source: The dtype of its values.
        dtype: Of the NumPy array that it is to become; None for *source*.
        rounds: As in :func:`mlx_to_numpy`.
    """

    __slots__ = ("_block", "_done", "_dtype", "_rounds", "_shape", "_source", "is_read", "nbytes")

    def __init__(
        self,
        done: Sequence[mx.array],
        block: Block | None,
        shape: tuple[int, ...],
        source: np.dtype,
        dtype: str | None,
        rounds: bool,
    ) -> None:
        self._done, self._block, self._shape, self._source = done, block, shape, source
        self._dtype, self._rounds = dtype, rounds
        self.nbytes = math.prod(shape) * source.itemsize
        """Size of its values."""
        self.is_read = False

    def read(self) -> npt.NDArray:
        """The result, in memory that nobody else writes to; waits for it. Once, and in any thread."""
        import mlx.core as mx

        # Before the values are asked for, since this wait lets other threads run.
        mx.eval(self._done)
        self.is_read = True
        if self._block is None:
            return copied(np.asarray(self._done[0]), self._dtype, self._rounds)
        block, self._block = self._block, None
        return read_block(block, self._shape, self._source, self._dtype, self._rounds)


def read_block(block: Block, shape: tuple[int, ...], source: np.dtype, dtype: str | None, rounds: bool) -> npt.NDArray:
    """The result that a device has written to *block*, which is given back or lent; see :class:`Unread`."""
    memory = device_memory()
    if dtype is None or source == dtype:
        return memory.lend(block, shape, source)
    result = copied(block.window(shape, source), dtype, rounds)
    memory.give_back(block)
    return result


def copied(values: npt.NDArray, dtype: str | None, rounds: bool) -> npt.NDArray:
    """A copy of *values*, perhaps in another dtype, as :func:`mlx_to_numpy` gives it."""
    if rounds and dtype is not None and is_integer(dtype) and values.dtype != dtype:
        return numpy_to_integers(values, dtype)
    result = used_again(values.shape, values.dtype if dtype is None else dtype)
    with np.errstate(all="ignore"):
        np.copyto(result, values, casting="unsafe")
    return result


def begin_reading(data: mx.array, dtype: str | None = None, *, rounds: bool = False, beside: object = ()) -> Unread:
    """Have the device compute *data* as what is to be read of it, without waiting for it.

    Args:
        data: Of any shape and dtype. To be called in the thread that made it.
        dtype: Name of a NumPy dtype, or None to keep the dtype (bfloat16 becomes float32).
        rounds: As in :func:`ezmsg.mlx.stream.convert.mlx_to_numpy`. What is rounded is so on the device.
        beside: A tree of other arrays to compute in the same evaluation, each of which takes the host 20 microseconds.

    Raises:
        TypeError: Complex data with a real *dtype*.
    """
    import mlx.core as mx

    if dtype is not None:
        refuse_real(data, dtype)
    if rounds and dtype in MLX_DTYPES and is_integer(dtype):
        data = mlx_to_integers(data, dtype)
    elif data.dtype == mx.bfloat16:
        data = data.astype(mx.float32)
    shape, source = data.shape, np.dtype(dtype_name(data))
    copies = bus() if data.size and data.dtype != mx.float64 else None
    if copies is None:
        mx.async_eval(data, beside)
        return Unread([data], None, shape, source, dtype, rounds)
    block = device_memory().take(data.nbytes)
    assert block.array is not None
    done = copies.write(data, block.array)
    mx.async_eval(done, beside)
    return Unread([done], block, shape, source, dtype, rounds)
