"""numba's compiler for the kernels, with a cache on disk whose failures cost time and nothing else.

numba itself lets a call fail where its cache is of no use: ``cannot cache function`` at import where no folder can be
written, an error of pickle for an index that ends too early, an ``OSError`` for a disk that is full. A file of which a
block was lost to a power cut can even end the process, since numba hands its machine code to LLVM as it is. Here such a
function is compiled anew; a damaged cache is emptied first, so that the next process finds a good one.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import ezmsg.core as ez
import numba

# The cache cannot be replaced through public names; test_compiled.py notices when these go.
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

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
