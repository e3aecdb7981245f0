"""One limit on MLX's buffer cache for the whole process, whoever asks for it.

MLX keeps every freed buffer in a cache keyed by size, so each message length never seen before adds
buffers that nothing reuses. ``mx.set_cache_limit`` bounds that cache, but it belongs to the process: two
nodes that ask for different limits, a library that sets its own, or a limit that the user has already set
would each undo the other without notice. The functions here are the one place that calls it.

Rules, in the order in which they decide:

* The tightest limit that any living node asks for is in force, whichever node converts first.
* A tighter limit that other code has set stays. MLX's own default on the CPU (32 MiB) is not set by a user, and is
  replaced.
* A limit that other code raises later is put back once the cache has grown past the ceiling.
* The log warns of a disagreement once, and names every change of the limit (INFO).
"""

import contextlib
import os
import sys

from .auto import AutoLimit
from .guard import MIB, CacheGuard, CacheLimit, check_cache_limit

__all__ = [
    "MIB",
    "CacheLimit",
    "apply_cache_limit",
    "cache_limit",
    "check_cache_limit",
    "follow_cache_limit",
    "lifted_cache_limit",
    "release_cache",
    "withdraw_cache_limit",
]

_GUARD = CacheGuard()
_AUTO = AutoLimit(_GUARD)

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
            withdraws the node's request. When no node asks any more, the limit goes back to what it was.

    Raises:
        RuntimeError: In a forked child of a process that has used MLX, on the CPU backend, in the thread that forked,
            where MLX would hang.
    """
    if _AUTO.nodes:
        _AUTO.forget(node)
    _GUARD.apply(node, limit_mb)


def follow_cache_limit(node: object, shape: tuple[int, ...]) -> None:
    """Ask for a limit that follows the working set of the running stream (see :mod:`ezmsg.mlx.cache.auto`).

    In place of :func:`apply_cache_limit`, for every message. All nodes that call it share one limit.

    Args:
        node: The object that asks.
        shape: The shape of the message's data.

    Raises:
        RuntimeError: As :func:`apply_cache_limit`.
    """
    _AUTO.apply(node, shape)


def withdraw_cache_limit(node: object) -> None:
    """Drop *node*'s request, without touching MLX: the next call of :func:`apply_cache_limit` settles the rest."""
    _AUTO.forget(node)
    _GUARD.withdraw(node)


def release_cache() -> int:
    """Give the contents of MLX's buffer cache back to the system, where that is safe; how many bytes they were.

    The next message allocates its working set anew. Nothing happens without MLX, while the limit is lifted, and where
    MLX would hang, in a forked process on the CPU.
    """
    mx = sys.modules.get("mlx.core")
    if mx is None or _GUARD.leaves_cache_alone:
        return 0
    released: int = mx.get_cache_memory()
    mx.clear_cache()
    return released


def lifted_cache_limit() -> contextlib.AbstractContextManager[None]:
    """A context without a limit on MLX's buffer cache, for measuring what a computation needs.

    The cache is empty when it begins and when it ends. Meanwhile nodes may convert, but what they ask for is neither
    applied nor recorded; they ask again with their next message. At the end the very limit that was in force before
    is back, whoever had set it. Contexts may be nested.

    Raises:
        RuntimeError: On entry, in a forked child of a process that has used MLX, on the CPU backend; at the end, if
            other code has set a limit meanwhile, which then stays.
    """
    return _GUARD.lifted()


def cache_limit() -> CacheLimit:
    """The limit on MLX's buffer cache in this process and where it came from, without touching MLX.

    A limit that other code changes is known only once the guard has met it (there is no getter in MLX, and
    probing with a small value would empty the cache).
    """
    return _GUARD.source
