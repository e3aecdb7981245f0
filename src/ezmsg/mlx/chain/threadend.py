"""Compiled functions end with the thread that compiled them.

MLX keeps what ``mx.compile`` has compiled for each thread, and lets go of it after Python has left the thread. If the
interpreter ends meanwhile, that aborts the process: "terminate called without an active exception". Python's own data
of a thread goes while Python is still in it, so the functions are dropped there.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class HoldsFunctions(Protocol):
    """What keeps functions that ``mx.compile`` has made."""

    def drop_functions(self) -> None:
        """Forget the functions."""


class _Holders:
    """Those of one thread."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[HoldsFunctions] = weakref.WeakSet()

    def __del__(self) -> None:
        for holder in self.known:
            holder.drop_functions()


_thread = threading.local()


def drop_at_thread_end(holder: HoldsFunctions) -> None:
    """Let *holder* drop its functions when the calling thread ends; it is not kept alive for that."""
    if not hasattr(_thread, "holders"):
        _thread.holders = _Holders()
    _thread.holders.known.add(holder)
