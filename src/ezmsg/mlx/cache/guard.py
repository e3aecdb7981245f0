"""The guard of MLX's cache limit in one process: who asks for what, and which limit follows from it.

:mod:`ezmsg.mlx.cache` has the rules, and the guard of this process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import ezmsg.core as ez

from ..stream.convert import import_mlx
from ..stream.device import has_gpu_allocator

MIB = 1 << 20

MLX_CPU_DEFAULT = 32 * MIB
"""Limit in bytes that MLX's CPU allocator starts with (``mlx/backend/no_gpu/allocator.cpp``)."""

UNLIMITED = 1 << 62
"""A limit in bytes that no cache reaches."""


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


def check_cache_limit(limit_mb: float | str | None, field: str = "mlx_cache_limit_mb", *, auto: bool = False) -> None:
    """Raise unless *limit_mb*, which the error calls *field*, is None, a limit that MLX can hold, or maybe ``"auto"``.

    Raises:
        TypeError: *limit_mb* is neither None nor a number (a bool or text is not).
        ValueError: *limit_mb* is not finite, negative, or 2**63 bytes or more.
    """
    if limit_mb is None or (auto and isinstance(limit_mb, str) and limit_mb == "auto"):
        return
    others = 'None, "auto"' if auto else "None"
    allowed = f"{field!r} must be {others} or a finite number of MiB >= 0"
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, numbers.Real):
        raise TypeError(f"{allowed}, got {limit_mb!r} ({type(limit_mb).__name__})")
    try:
        as_float = float(limit_mb)
    except OverflowError:
        raise ValueError(f"{allowed} and below 2**63 bytes, got one that does not fit into a float") from None
    except TypeError:
        raise TypeError(f"{allowed}, got {limit_mb!r} ({type(limit_mb).__name__})") from None
    if not math.isfinite(as_float) or as_float < 0 or as_float * MIB >= 2.0**63:
        raise ValueError(f"{allowed} and below 2**63 bytes, got {limit_mb!r}")


def in_mib(n_bytes: int) -> str:
    """A size for the log."""
    return f"{n_bytes / MIB:g} MiB"


@dataclass(frozen=True)
class _Request:
    limit_mb: float
    node: str
    alive: weakref.ref

    @property
    def n_bytes(self) -> int:
        return int(self.limit_mb * MIB)


class CacheGuard:
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
        self._was_passing = False
        self._n_named = 0
        self._used_in_parent = False
        self._used_before_fork = False
        self._forked_thread: int | None = None
        self._lock = threading.RLock()
        self._get_cache_memory: Callable[[], int] = lambda: 0

    def apply(self, node: object, limit_mb: float | None, is_passing: bool = False) -> None:
        """See :func:`ezmsg.mlx.cache.apply_cache_limit`.

        With *is_passing*, the node asks for it for a few messages only: nothing of it is logged at INFO or above.
        """
        if self._forked_thread is not None:
            self._refuse_forked_thread()
        request = self._requests.get(id(node))
        if request is None:
            if limit_mb is None and not self._stale:
                return
        elif request.limit_mb == limit_mb and not self._stale and self._get_cache_memory() <= self._ceiling:
            return
        with self._lock:
            self._settle(node, limit_mb, is_passing)

    def withdraw(self, node: object) -> None:
        """See :func:`ezmsg.mlx.cache.withdraw_cache_limit`."""
        self._forget(id(node))

    def _forget(self, key: int) -> None:
        # Also called by the garbage collector, in any thread: so without the lock, and without MLX. The next
        # message of any node settles what follows.
        if self._requests.pop(key, None) is not None:
            self._stale = True

    @property
    def leaves_cache_alone(self) -> bool:
        """Whether the cache must be left alone now: it is being measured, or MLX would hang in this forked process."""
        return self._lifted > 0 or (self._used_before_fork and not has_gpu_allocator())

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """See :func:`ezmsg.mlx.cache.lifted_cache_limit`."""
        mx = import_mlx()
        if self._used_before_fork and not has_gpu_allocator():
            raise RuntimeError(
                "This process was forked from one that had used MLX, and lifting the MLX cache limit here would hang. "
                'Call multiprocessing.set_start_method("spawn") first.'
            )
        with self._lock:
            before = mx.set_cache_limit(UNLIMITED)
            mx.clear_cache()
            self._lifted += 1
        try:
            yield
        finally:
            with self._lock:
                self._lifted -= 1
                found = mx.set_cache_limit(before)
                if found != UNLIMITED:
                    # Set by others meanwhile, so it is the newer one.
                    mx.set_cache_limit(found)
                mx.clear_cache()
        if found != UNLIMITED:
            raise RuntimeError(
                f"MLX's cache limit was set to {in_mib(found)} while it was lifted, which voids the measurement; that "
                "limit is in force now. Measure again without what set it, for example ezmsg-sigproc's own AsArray."
            )

    def _settle(self, node: object, limit_mb: float | None, is_passing: bool) -> None:
        if self._lifted:
            return
        self._get_cache_memory = import_mlx().get_cache_memory
        # Before the requests are read, so that a node that goes meanwhile is left to the next message.
        self._stale = False
        recorded = self._record(node, limit_mb)
        if self._used_before_fork and not has_gpu_allocator():
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
        in_force = self._in_force
        if in_force is None or in_force != self._allowed(tightest) or self._raised_outside(in_force):
            in_force = self._enforce(tightest, is_passing)
        self._ceiling = in_force + self._overshoot
        if in_force < tightest.n_bytes:
            self.source = CacheLimit(in_force / MIB, "outside")
        else:
            self.source = CacheLimit(tightest.limit_mb, "node", tightest.node, "mlx_cache_limit_mb")
        if recorded is not None and not is_passing:
            self._tell_disagreement(recorded, [r for r in requests if r is not recorded], in_force)

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

    def _raised_outside(self, in_force: int) -> bool:
        """Whether the cache holds more than the limit, and what MLX lets through, can explain."""
        import mlx.core as mx

        cache = mx.get_cache_memory()
        if has_gpu_allocator() and cache > in_force:
            # The GPU allocators admit one buffer past the limit, and none was larger than all live memory.
            self._overshoot = max(self._overshoot, mx.get_peak_memory(), mx.get_active_memory())
        return cache > in_force + self._overshoot

    def _enforce(self, request: _Request, is_passing: bool) -> int:
        import mlx.core as mx

        tried = self._allowed(request)
        found = mx.set_cache_limit(tried)
        if self._in_force is None:
            self._before = found
            if has_gpu_allocator() or found != MLX_CPU_DEFAULT:
                self._outside = found
        elif found != self._in_force:
            self._outside = found
            if found > max(self._in_force, request.n_bytes):
                self._tell_once(
                    "raised",
                    f"MLX's cache limit was raised from {in_mib(self._in_force)} to {in_mib(found)} outside of "
                    f"ezmsg-mlx; the {request.limit_mb:g} MiB that {request.node} asks for are back in force.",
                )
        limit = self._allowed(request)
        if limit != tried:
            mx.set_cache_limit(limit)
        if limit < request.n_bytes and not is_passing:
            self._tell_once(
                ("tighter", limit, request.limit_mb),
                f"{request.node} asks for an MLX cache limit of {request.limit_mb:g} MiB; the tighter one of "
                f"{in_mib(limit)} that was set outside of ezmsg-mlx stays in force.",
            )
        if limit != found:
            # From a passing limit, too.
            level = logging.DEBUG if is_passing or self._was_passing else logging.INFO
            ez.logger.log(level, f"MLX cache limit: {in_mib(found)} -> {in_mib(limit)}, asked for by {request.node}.")
        self._was_passing = is_passing
        self._in_force = limit
        return limit

    def _give_back(self) -> None:
        """Nobody asks any more: the limit goes back to what it was before the first request."""
        import mlx.core as mx

        if self._in_force is None or self._before is None:
            return
        old = self._before if self._outside is None else self._outside
        found = mx.set_cache_limit(old)
        if found != self._in_force:
            # Others have changed it meanwhile; theirs is the newer one.
            mx.set_cache_limit(found)
            old = self._outside = found
        if old != self._in_force:
            ez.logger.info(
                f"MLX cache limit: {in_mib(self._in_force)} -> {in_mib(old)}, no node asks for one any more."
            )
        self.source = CacheLimit(old / MIB, "default" if self._outside is None else "outside")
        self._in_force = self._outside = None

    def _name(self, node: object) -> str:
        self._n_named += 1
        return getattr(node, "node_name", None) or f"{type(node).__name__}#{self._n_named}"

    def _tell_disagreement(self, request: _Request, others: list[_Request], in_force: int) -> None:
        other = min(others, key=lambda r: r.limit_mb, default=request)
        if other.limit_mb == request.limit_mb:
            return
        self._tell_once(
            frozenset((request.limit_mb, other.limit_mb)),
            f"{request.node} asks for an MLX cache limit of {request.limit_mb:g} MiB and {other.node} for "
            f"{other.limit_mb:g} MiB; the limit belongs to the process, so the tightest, {in_mib(in_force)}, "
            "is in force. Give them the same mlx_cache_limit_mb.",
        )

    def _tell_fork(self) -> None:
        kept = "MLX's default" if self.source.limit_mb is None else f"{self.source.limit_mb:g} MiB"
        self._tell_once(
            "fork",
            f"This process was forked from one that had used MLX, and changing the MLX cache limit here would hang; "
            f'{kept} stays in force. Call multiprocessing.set_start_method("spawn") before the graph starts.',
        )

    def _refuse_forked_thread(self) -> None:
        # MLX's work for a thread is done by another one of its own, which a fork does not copy: whatever this thread
        # asks for would be waited for in vain. Threads that were started after the fork, as those of ezmsg's units,
        # have theirs.
        if threading.get_ident() == self._forked_thread and not has_gpu_allocator():
            raise RuntimeError(
                "This process was forked from one that had used MLX, and using MLX here, in the thread that forked, "
                'would hang. Call multiprocessing.set_start_method("spawn") first.'
            )

    def _tell_once(self, what: object, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            ez.logger.warning(text)

    def before_fork(self) -> None:
        """Note whether this process has used MLX, since a forked child cannot tell."""
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
            self.source = CacheLimit(UNLIMITED / MIB, "outside")
