"""One limit on MLX's buffer cache for the whole process, whoever asks for it.

MLX keeps every freed buffer in a cache keyed by size, so each message length never seen before adds
buffers that nothing reuses. ``mx.set_cache_limit`` bounds that cache, but it belongs to the process: two
nodes that ask for different limits, a library that sets its own, or a limit that the user has already set
would each undo the other in silence. The functions here are the one place that calls it.

Rules, in the order in which they decide:

* The tightest limit that any living node asks for is in force, whichever node converts first.
* A tighter limit that somebody else has set stays. MLX's own default on the CPU (32 MiB) is nobody's wish
  and is replaced.
* A limit that somebody else raises later is put back once the cache has grown past the ceiling.
* A disagreement is told once, a change of the limit always (INFO).
"""

import contextlib
import math
import numbers
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import ezmsg.core as ez

from .convert import import_mlx

MIB = 1 << 20

MLX_CPU_DEFAULT = 32 * MIB
"""Limit in bytes that MLX's CPU allocator starts with (``mlx/backend/no_gpu/allocator.cpp``)."""

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class CacheLimit:
    """The limit on MLX's buffer cache that is in force in this process, and where it came from."""

    limit_mb: float | None
    """Limit in MiB. None where it is not known: only MLX knows its default, and it has no getter."""

    source: Literal["node", "outside", "default"]
    """``"node"``: a node's setting; ``"outside"``: a call of ``mx.set_cache_limit`` elsewhere in the process;
    ``"default"``: MLX's own."""

    node: str | None = None
    """The node that asked for it, where *source* is ``"node"``."""

    setting: str | None = None
    """The settings field that it was asked with, where *source* is ``"node"``."""


def check_cache_limit(limit_mb: float | None, field: str = "mlx_cache_limit_mb") -> None:
    """Raise unless *limit_mb* is a limit that MLX can hold.

    Args:
        limit_mb: Limit in MiB, or None for no limit of our own.
        field: Name of the settings field or argument, for the error.

    Raises:
        TypeError: *limit_mb* is neither None nor a number (bool and text are no numbers here).
        ValueError: *limit_mb* is not finite, negative, or 2**63 bytes or more.
    """
    if limit_mb is None:
        return
    allowed = "allowed are None and a finite number of MiB >= 0"
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, numbers.Real):
        raise TypeError(f"{field} is {limit_mb!r} ({type(limit_mb).__name__}); {allowed}.")
    try:
        as_float = float(limit_mb)
    except OverflowError:
        raise ValueError(f"{field} does not fit into a float; {allowed}, below 2**63 bytes.") from None
    except TypeError:
        raise TypeError(f"{field} is {limit_mb!r} ({type(limit_mb).__name__}); {allowed}.") from None
    if not math.isfinite(as_float) or as_float < 0 or as_float * MIB >= 2.0**63:
        raise ValueError(f"{field} is {limit_mb!r}; {allowed}, below 2**63 bytes.")


@dataclass(frozen=True)
class _Request:
    limit_mb: float
    node: str
    alive: weakref.ref

    @property
    def n_bytes(self) -> int:
        return int(self.limit_mb * MIB)


class _CacheGuard:
    """The requests of this process and the limit that follows from them. Sizes in bytes."""

    def __init__(self) -> None:
        self.source = CacheLimit(None, "default")
        self._requests: dict[int, _Request] = {}
        self._in_force: int | None = None
        self._before: int | None = None
        self._outside: int | None = None
        self._overshoot = 0
        self._ceiling = 0
        self._stale = False
        self._lifted = 0
        self._told: set[object] = set()
        self._n_named = 0
        self._used_in_parent = False
        self._used_before_fork = False
        self._forked_thread: int | None = None
        self._lock = threading.RLock()
        self._get_cache_memory: Callable[[], int] = lambda: 0

    def apply(self, node: object, limit_mb: float | None) -> None:
        if self._forked_thread is not None:
            self._refuse_forked_thread()
        request = self._requests.get(id(node))
        if request is None:
            if limit_mb is None and not self._stale:
                return
        elif request.limit_mb == limit_mb and not self._stale and self._get_cache_memory() <= self._ceiling:
            return
        with self._lock:
            self._settle(node, limit_mb)

    def withdraw(self, node: object) -> None:
        self._forget(id(node))

    def _forget(self, key: int) -> None:
        # Also called by the garbage collector, in any thread: so without the lock, and without MLX. The next
        # message of any node settles what follows.
        if self._requests.pop(key, None) is not None:
            self._stale = True

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        mx = import_mlx()
        if self._used_before_fork and not _has_gpu_allocator():
            raise RuntimeError(
                "This process was forked from one that had used MLX, and lifting the MLX cache limit here would hang. "
                'Call multiprocessing.set_start_method("spawn") first.'
            )
        with self._lock:
            before = mx.set_cache_limit(_UNLIMITED)
            mx.clear_cache()
            self._lifted += 1
        try:
            yield
        finally:
            with self._lock:
                self._lifted -= 1
                found = mx.set_cache_limit(before)
                if found != _UNLIMITED:
                    # Somebody else's, and the newer wish.
                    mx.set_cache_limit(found)
                mx.clear_cache()
        if found != _UNLIMITED:
            raise RuntimeError(
                f"MLX's cache limit was set to {_mib(found)} while it was lifted, which voids the measurement; that "
                "limit is in force now. Measure again without what set it, such as ezmsg-sigproc's own AsArray."
            )

    def _settle(self, node: object, limit_mb: float | None) -> None:
        if self._lifted:
            return
        self._get_cache_memory = import_mlx().get_cache_memory
        # Before the requests are read, so that a node that goes meanwhile is left to the next message.
        self._stale = False
        recorded = self._record(node, limit_mb)
        if self._used_before_fork and not _has_gpu_allocator():
            self._tell_fork()
            self._ceiling = sys.maxsize
            return
        # A list, since the garbage collector may forget a request while we look at the others.
        requests = list(self._requests.values())
        tightest = min(requests, key=lambda r: r.limit_mb, default=None)
        if tightest is None:
            self._give_back()
            self._ceiling = sys.maxsize
            return
        if self._in_force != self._allowed(tightest) or self._raised_outside():
            self._enforce(tightest)
        self._ceiling = self._in_force + self._overshoot
        if self._in_force < tightest.n_bytes:
            self.source = CacheLimit(self._in_force / MIB, "outside")
        else:
            self.source = CacheLimit(tightest.limit_mb, "node", tightest.node, "mlx_cache_limit_mb")
        if recorded is not None:
            self._tell_disagreement(recorded, [r for r in requests if r is not recorded])

    def _record(self, node: object, limit_mb: float | None) -> _Request | None:
        """Take note of what *node* asks for; the request, if it is a new one."""
        key = id(node)
        old = self._requests.get(key)
        if limit_mb is None:
            self._requests.pop(key, None)
            return None
        check_cache_limit(limit_mb, "limit_mb")
        # A plain number: those of NumPy overflow in the product with MIB.
        limit_mb = float(limit_mb)
        if old is not None and old.limit_mb == limit_mb:
            return None
        name = old.node if old is not None else self._name(node)
        request = _Request(limit_mb, name, weakref.ref(node, lambda _: self._forget(key)))
        self._requests[key] = request
        return request

    def _allowed(self, request: _Request) -> int:
        return request.n_bytes if self._outside is None else min(request.n_bytes, self._outside)

    def _raised_outside(self) -> bool:
        """Whether the cache holds more than the limit, and what MLX lets through, can explain."""
        import mlx.core as mx

        cache = mx.get_cache_memory()
        if _has_gpu_allocator() and cache > self._in_force:
            # The GPU allocators admit one buffer past the limit, and none was larger than all live memory.
            self._overshoot = max(self._overshoot, mx.get_peak_memory(), mx.get_active_memory())
        return cache > self._in_force + self._overshoot

    def _enforce(self, request: _Request) -> None:
        import mlx.core as mx

        tried = self._allowed(request)
        found = mx.set_cache_limit(tried)
        if self._in_force is None:
            self._before = found
            if _has_gpu_allocator() or found != MLX_CPU_DEFAULT:
                self._outside = found
        elif found != self._in_force:
            self._outside = found
            if found > max(self._in_force, request.n_bytes):
                self._tell_once(
                    "raised",
                    f"MLX's cache limit was raised from {_mib(self._in_force)} to {_mib(found)} outside of ezmsg-mlx; "
                    f"the {request.limit_mb:g} MiB that {request.node} asks for are back in force.",
                )
        limit = self._allowed(request)
        if limit != tried:
            mx.set_cache_limit(limit)
        if limit < request.n_bytes:
            self._tell_once(
                ("tighter", limit, request.limit_mb),
                f"{request.node} asks for an MLX cache limit of {request.limit_mb:g} MiB; the tighter one of "
                f"{_mib(limit)} that was set outside of ezmsg-mlx stays in force.",
            )
        if limit != found:
            ez.logger.info(f"MLX cache limit: {_mib(found)} -> {_mib(limit)}, asked for by {request.node}.")
        self._in_force = limit

    def _give_back(self) -> None:
        """Nobody asks any more: the limit goes back to what it was before the first request."""
        import mlx.core as mx

        if self._in_force is None:
            return
        old = self._before if self._outside is None else self._outside
        found = mx.set_cache_limit(old)
        if found != self._in_force:
            # Somebody else has changed it meanwhile; that is the newer wish.
            mx.set_cache_limit(found)
            old = self._outside = found
        if old != self._in_force:
            ez.logger.info(f"MLX cache limit: {_mib(self._in_force)} -> {_mib(old)}, no node asks for one any more.")
        self.source = CacheLimit(old / MIB, "default" if self._outside is None else "outside")
        self._in_force = self._outside = None

    def _name(self, node: object) -> str:
        self._n_named += 1
        return getattr(node, "node_name", None) or f"{type(node).__name__}#{self._n_named}"

    def _tell_disagreement(self, request: _Request, others: list[_Request]) -> None:
        other = min(others, key=lambda r: r.limit_mb, default=request)
        if other.limit_mb == request.limit_mb:
            return
        self._tell_once(
            frozenset((request.limit_mb, other.limit_mb)),
            f"{request.node} asks for an MLX cache limit of {request.limit_mb:g} MiB and {other.node} for "
            f"{other.limit_mb:g} MiB; the limit belongs to the process, so the tightest, {_mib(self._in_force)}, "
            "is in force. Give them the same mlx_cache_limit_mb.",
        )

    def _tell_fork(self) -> None:
        kept = "MLX's default" if self._in_force is None else _mib(self._in_force)
        self._tell_once(
            "fork",
            f"This process was forked from one that had used MLX, and changing the MLX cache limit here would hang; "
            f'{kept} stays in force. Call multiprocessing.set_start_method("spawn") before the graph starts.',
        )

    def _refuse_forked_thread(self) -> None:
        # MLX's work for a thread is done by another one of its own, which a fork does not copy: whatever this thread
        # asks for would be waited for in vain. Threads that were started after the fork, as those of ezmsg's units,
        # have theirs.
        if threading.get_ident() == self._forked_thread and not _has_gpu_allocator():
            raise RuntimeError(
                "This process was forked from one that had used MLX, and using MLX here, in the thread that forked, "
                'would hang. Call multiprocessing.set_start_method("spawn") first.'
            )

    def _tell_once(self, what: object, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            ez.logger.warning(text)

    def before_fork(self) -> None:
        mx = sys.modules.get("mlx.core")
        used = mx is not None and (mx.get_peak_memory() or mx.get_active_memory() or mx.get_cache_memory())
        # The counters can all be reset to 0 after use; what the guard has seen cannot.
        self._used_in_parent = bool(used) or self._in_force is not None

    def after_fork_in_child(self) -> None:
        """The parent's nodes ask nothing here; the limit that was in force came along."""
        self._used_before_fork |= self._used_in_parent
        # The child goes on in the thread that forked, under the same identifier.
        self._forked_thread = threading.get_ident() if self._used_before_fork else None
        self._lock = threading.RLock()
        self._requests.clear()
        self._stale = False
        if self._lifted:
            # Nobody in this process will put the limit back.
            self._lifted = 0
            self._in_force = self._outside = None
            self.source = CacheLimit(_UNLIMITED / MIB, "outside")


def _has_gpu_allocator() -> bool:
    import mlx.core as mx

    return mx.metal.is_available() or mx.cuda.is_available()


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:g} MiB"


_GUARD = _CacheGuard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_GUARD.before_fork, after_in_child=_GUARD.after_fork_in_child)


def apply_cache_limit(node: object, limit_mb: float | None) -> None:
    """Ask for a limit on MLX's buffer cache on behalf of *node*, and keep it in force. Idempotent.

    Meant to be called for every message, by whatever converts to MLX, in the process that does it. After the
    first call it costs a dictionary look-up and one ``mx.get_cache_memory()``; ``mx.set_cache_limit`` is called
    only when the limit in force must change.

    Args:
        node: The object that asks. It may ask for something else later, which replaces its request; once it is
            garbage-collected it no longer counts. An attribute ``node_name`` names it in the log.
        limit_mb: Limit in MiB, as :func:`check_cache_limit` allows; ``0`` turns the cache off, ``None``
            withdraws the node's request. When nobody asks any more, the limit goes back to what it was.

    Raises:
        RuntimeError: In a forked child of a process that has used MLX, on the CPU backend, in the thread that forked,
            where MLX would hang.
    """
    _GUARD.apply(node, limit_mb)


def withdraw_cache_limit(node: object) -> None:
    """Drop *node*'s request, without touching MLX: the next call of :func:`apply_cache_limit` settles the rest."""
    _GUARD.withdraw(node)


def lifted_cache_limit() -> contextlib.AbstractContextManager[None]:
    """A context without a limit on MLX's buffer cache, for measuring what a computation needs.

    The cache is empty when it begins and when it ends. Meanwhile nodes may convert, but what they ask for is neither
    applied nor recorded; they ask again with their next message. At the end the very limit that was in force before
    is back, whoever had set it. Contexts may be nested.

    Raises:
        RuntimeError: On entry, in a forked child of a process that has used MLX, on the CPU backend; at the end, if
            somebody else has set a limit meanwhile, which then stays.
    """
    return _GUARD.lifted()


def cache_limit() -> CacheLimit:
    """The limit on MLX's buffer cache in this process and where it came from, without touching MLX.

    A limit that somebody else changes is known only once the guard has met it (there is no getter in MLX, and
    probing with a small value would empty the cache).
    """
    return _GUARD.source
