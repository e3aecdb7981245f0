"""Messages that a GPU has been given and is not waited for: how many there may be, and the memory that they came in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import numpy.typing as npt

from .staging import Staging

MOST_BYTES = 64 << 20
"""Data that the device has been given and that has not been waited for."""

AT_LEAST = 2
"""Messages that are not waited for, however large: one to compute, and one behind it."""

MOST_STAGED = 4
"""Pieces of memory that messages are copied to in turn."""


class InFlight:
    """Waits for the oldest messages where the device is too far behind, and not for the newest, which would idle it."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Sequence[mx.array], int]] = deque()
        self._n_bytes = 0

    def add(self, marks: Sequence[mx.array], n_bytes: int) -> None:
        """Take a message whose evaluation has begun.

        Args:
            marks: Arrays that are there when it is done.
            n_bytes: What it takes of the device's memory.
        """
        self._messages.append((marks, n_bytes))
        self._n_bytes += n_bytes
        while self._n_bytes > MOST_BYTES and len(self._messages) > AT_LEAST:
            oldest, n_bytes = self._messages.popleft()
            self._n_bytes -= n_bytes
            mx.eval(oldest)

    def clear(self) -> None:
        """Forget all, since the newest has been waited for."""
        self._messages.clear()
        self._n_bytes = 0


class StagingsInTurn:
    """Memory that messages are copied to, for a device that may still read the ones before.

    It is used again when the device has read what was there.
    """

    def __init__(self) -> None:
        self._given_back: deque[tuple[Staging, Sequence[mx.array]]] = deque()
        self._in_use = Staging()

    def filled(self, data: npt.NDArray) -> mx.array:
        """Memory for *data*, which are copied to it; see :meth:`.Staging.filled`."""
        if len(self._given_back) < MOST_STAGED:
            self._in_use = Staging()
        else:
            self._in_use, marks = self._given_back.popleft()
            mx.eval(marks)
        return self._in_use.filled(data)

    def give_back(self, marks: Sequence[mx.array]) -> None:
        """Have the memory of the last message used again, once *marks* are there."""
        self._given_back.append((self._in_use, marks))
