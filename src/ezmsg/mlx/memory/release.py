"""Give the cache back when the stream is silent, or when the machine is short of memory."""

import ctypes
import math
import sys
import time
from collections.abc import Callable

import ezmsg.core as ez

from ..cache import MIB, release_cache
from .pressure import PressureGauge
from .shapes import n_messages

SECONDS_BETWEEN = 10.0
"""Under pressure that lasts, a stream that runs gives its cache back no more often than this."""


class CacheRelease:
    """When to give MLX's buffer cache back. Asked now and then, by whoever is there anyway: it has no thread.

    Args:
        after_idle: Seconds without a message to a node that converts to MLX, after which the cache is given back; None:
            it is kept.
        pressure: Tells shortage of memory; None: it does not matter.
        clock: Seconds.
    """

    def __init__(
        self,
        after_idle: float | None,
        pressure: PressureGauge | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after_idle, self._pressure, self._clock = after_idle, pressure, clock
        self._n_messages, self._since = n_messages(), clock()
        self._is_idle = False
        self._last = -math.inf

    def poll(self) -> float:
        """Give the cache back if it is time to; how many MiB it was."""
        now, n_seen = self._clock(), n_messages()
        if n_seen != self._n_messages:
            self._n_messages, self._since, self._is_idle = n_seen, now, False
        if self._after_idle is not None and not self._is_idle and now - self._since >= self._after_idle:
            self._is_idle = True
            return self._release(f"no message came for {now - self._since:.0f} s")
        if self._pressure is not None and (reason := self._pressure.reason()) and now - self._last >= SECONDS_BETWEEN:
            return self._release(reason)
        return 0.0

    def _release(self, why: str) -> float:
        released = release_cache() / MIB
        if released:
            self._last = self._clock()
            _trim_heap()
            ez.logger.info(f"MLX's buffer cache is given back, {released:.0f} MiB: {why}.")
        return released


def _trim_heap() -> None:
    """Have the C library of Linux give back what it keeps of freed memory: on the CPU MLX's buffers come from there."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
