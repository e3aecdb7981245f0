"""Compile kernels with numba, give them memory, and count the weight of the samples that a channel has taken.

numba itself lets a call fail where its cache is of no use: ``cannot cache function`` at import where no folder can be
written, an error of pickle for an index that ends too early, an ``OSError`` for a disk that is full. A file of which a
block was lost to a power cut can even end the process, since numba hands its machine code to LLVM as it is. Here such a
function is compiled anew; a damaged cache is emptied first, so that the next process finds a good one.

MLX's CPU backend adopts no buffer of others, and asking it for an empty one costs a round trip to its stream. What it
does give at once is a copy.

The weight of the samples that a channel has taken is ``1 - (1 - alpha)**n`` after *n* of them. Nearly always all
channels have taken as many, so that one table serves them all, and no sample of a channel costs a division.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import ezmsg.core as ez
import numba
import numpy as np
import numpy.typing as npt

# The cache cannot be replaced through public names; test_compiled.py notices when these go.
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

if TYPE_CHECKING:
    import mlx.core as mx

Function = TypeVar("Function", bound=Callable)

_told = False


def compiled(
    fastmath: bool | set[str] = False, inline: Literal["never", "always"] = "never"
) -> Callable[[Function], Function]:
    """A decorator that compiles as ``numba.njit(cache=True, nogil=True, error_model="numpy", ...)`` does.

    The log warns once in a process if the cache cannot be used.
    """

    def decorate(function: Function) -> Function:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, inline=inline)(function)
        try:
            dispatcher._cache = _OptionalCache(function)
        except Exception as error:
            _warn_once("has no place", error)
        return dispatcher

    return decorate


def _warn_once(what: str, error: Exception, where: str = "") -> None:
    global _told
    if not _told:
        _told = True
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        ez.logger.warning(
            f"numba's cache {where and f'in {where} '}{what} ({reason}); the kernels are compiled anew, which takes "
            "seconds. The environment variable NUMBA_CACHE_DIR sets another folder for it."
        )


class _CheckedImpl(CompileResultCacheImpl):
    """Keeps a checksum with what it writes: a pickle with a damaged array of bytes in it loads without an error."""

    def reduce(self, cres: CompileResult) -> tuple[bytes, bytes]:
        payload = dumps(super().reduce(cres))
        return hashlib.sha256(payload).digest(), payload

    def rebuild(self, target_context: object, checked: tuple[bytes, bytes]) -> CompileResult:
        digest, payload = checked
        if hashlib.sha256(payload).digest() != digest:
            raise ValueError("a file's checksum does not fit")
        return super().rebuild(target_context, pickle.loads(payload))


class _OptionalCache(FunctionCache):
    """A cache that counts as empty where it cannot be read, and as disabled where it cannot be written."""

    _impl_class = _CheckedImpl

    def load_overload(self, sig: object, target_context: object) -> CompileResult | None:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            _warn_once("cannot be read", error, self.cache_path)
        try:
            self.flush()
        except Exception:
            self.disable()
        return None

    def save_overload(self, sig: object, data: CompileResult) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self.disable()
            _warn_once("cannot be written", error, self.cache_path)


def flattened(arrays: tuple[Samples, ...], axis: int) -> list[Samples]:
    """*arrays*, of one shape but for their length along *axis*, as contiguous ones of shape (outer, length, inner)."""
    shape = arrays[0].shape
    if axis == 0 and len(shape) == 2:
        # In a chain they are contiguous already; others numba compiles for as they are.
        return [array[None] for array in arrays]
    n_before, n_after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return [np.ascontiguousarray(array).reshape(n_before, array.shape[axis], n_after) for array in arrays]


_PAGE = 4096

KEPT_FLOATS = 1 << 18
"""Float32 values that each thread keeps memory for (1 MiB): a message of 1024 samples of 256 channels. A short message
is faster in memory that is still in the processor's cache."""

_kept = threading.local()

Samples = npt.NDArray[np.float32]


def computed(samples: Samples, shape: tuple[int, ...], run: Callable[[Samples, Samples], None]) -> mx.array:
    """The MLX array of *shape* that *run* makes of *samples*.

    ``run(source, target)`` reads *source* and writes all of *target*, both of the shape of *samples*. These are one and
    the same array where *samples* are many: in the copy that MLX gives, which is faster than from one large memory to
    another.
    """
    import mlx.core as mx

    if samples.size > KEPT_FLOATS:
        result = mx.array(samples.reshape(shape))
        target = np.asarray(result).reshape(samples.shape)
        run(target, target)
        return result
    target = _kept_memory()[: samples.size].reshape(samples.shape)
    run(samples, target)
    return mx.array(target.reshape(shape))


def _kept_memory() -> Samples:
    """The memory of this thread, which begins half a page into a page.

    Buffers of MLX and numpy often begin 16 bytes after each other in their pages: a fifth of those of 300 x 256 in the
    example chain. From such a one to its neighbour glibc's memcpy (2.36), which takes ``rep movsb`` on AMD Zen for up
    to 512 KiB, copies at a tenth of the speed.
    """
    try:
        return _kept.memory
    except AttributeError:
        memory = np.empty(KEPT_FLOATS + _PAGE // 4, np.float32)
        start = (_PAGE // 2 - memory.__array_interface__["data"][0]) % _PAGE // 4
        _kept.memory = memory[start : start + KEPT_FLOATS]
        return _kept.memory


# A multiplication and an addition may become one instruction. The other liberties of fastmath would break NaN.
_compiled = compiled(fastmath={"contract"})

# Inlined, since a separate function takes longer to compile than its lines do in the functions that call it.
_inlined = compiled(fastmath={"contract"}, inline="always")


@_inlined
def pair_at(states: np.ndarray, outer: int, place: int, channel: int) -> float:
    """The value of a pair, from *states* (outer, length, channel)."""
    return np.float64(states[outer, place, channel]) + states[outer, place + 1, channel]


@_compiled
def get_pairs(states: np.ndarray, values: np.ndarray) -> None:
    """The first pairs of *states*, to *values* (outer, channel)."""
    # Loops rather than expressions of arrays, each of which takes a second to compile.
    for outer in range(values.shape[0]):
        for channel in range(values.shape[1]):
            values[outer, channel] = pair_at(states, outer, 0, channel)


@_compiled
def common_weight(weights: np.ndarray) -> float:
    """The weight that all channels have, or -1 where they differ."""
    common = weights[0, 0]
    for outer in range(weights.shape[0]):
        for channel in range(weights.shape[1]):
            if weights[outer, channel] != common:
                return -1.0
    return common


@_compiled
def tables(weight: float, alpha: float, inverse: np.ndarray, share: np.ndarray, keep: np.ndarray) -> float:
    """For each of the next samples: one over the weight after it, its share, and one less its share; the last weight.

    *inverse* may be empty, or *share* and *keep* both.
    """
    beta = 1.0 - alpha
    for n in range(max(inverse.size, share.size)):
        before, weight = weight, weight + alpha * (1.0 - weight)
        if inverse.size:
            inverse[n] = 1.0 / weight
        if share.size:
            share[n], keep[n] = alpha / weight, beta * before / weight
    return weight


@_inlined
def put_pair(value: float, states: np.ndarray, outer: int, place: int, channel: int) -> None:
    """Write *value* as a pair."""
    states[outer, place, channel] = value
    states[outer, place + 1, channel] = value - np.float64(states[outer, place, channel])
