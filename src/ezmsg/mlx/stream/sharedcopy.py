"""Copies of large arrays that several threads share: one alone does not use what the memory of a server gives."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time

import numpy as np
import numpy.typing as npt

LARGE = 4 << 20
"""Bytes from which on a copy is shared."""

CHUNK = 1 << 20
"""Bytes that a thread takes at a time: some 100 microseconds."""

HELPERS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4) - 1
"""Threads that help the one that calls."""


def copy(data: npt.NDArray, target: npt.NDArray) -> None:
    """Copy *data* to *target*, of the same shape and any dtype."""
    if data.nbytes < LARGE or not HELPERS or data.ndim == 0:
        _copied(data, target)
    else:
        SharedCopy(data, target).wait_for(len(data))


def _copied(data: npt.NDArray, target: npt.NDArray) -> None:
    # MLX says nothing of what overflows, so neither does this. The setting is that of a thread.
    with np.errstate(all="ignore"):
        np.copyto(target, data, casting="unsafe")


class SharedCopy:
    """A copy of rows, from the first on, which has begun in other threads.

    The caller takes its share when it waits. A thread that the processor is not free for comes late, finds all chunks
    taken, and goes, so that the copy never takes longer than by the caller alone.

    Args:
        data: At least one row.
        target: Of the same shape and any dtype. Nobody else may use it before all is copied.
    """

    def __init__(self, data: npt.NDArray, target: npt.NDArray) -> None:
        self._data, self._target = data, target
        self._n_rows = max(CHUNK * len(data) // max(data.nbytes, 1), 1)
        self._n_chunks = -(-len(data) // self._n_rows)
        self._next = itertools.count()
        self._done = [False] * self._n_chunks
        self._n_first = 0
        self._error: BaseException | None = None
        if HELPERS:
            _helpers(os.getpid()).call(self)

    def wait_for(self, n_rows: int) -> None:
        """Take part until the first *n_rows* are copied.

        Raises:
            Whatever a copy raises, here or in another thread.
        """
        n_needed = min(-(-n_rows // self._n_rows), self._n_chunks)
        while True:
            while self._n_first < n_needed and self._done[self._n_first]:
                self._n_first += 1
            if self._n_first >= n_needed:
                break
            if not self._take():
                # The rest is under way in other threads.
                time.sleep(0)
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Take part until all chunks are taken."""
        while self._take():
            pass

    def _take(self) -> bool:
        chunk = next(self._next)
        if chunk >= self._n_chunks:
            return False
        rows = slice(chunk * self._n_rows, (chunk + 1) * self._n_rows)
        try:
            if self._error is None:
                _copied(self._data[rows], self._target[rows])
        except BaseException as error:  # to be raised where the copy is waited for
            self._error = error
        self._done[chunk] = True
        return True


class _Helpers:
    """Threads that wait for copies."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[SharedCopy] = queue.SimpleQueue()
        for number in range(HELPERS):
            threading.Thread(target=self._run, name=f"ezmsg-mlx-copy-{number}", daemon=True).start()

    def call(self, copy: SharedCopy) -> None:
        """Have all of them help, unless copies that they have not begun wait already."""
        for _ in range(HELPERS - self._work.qsize()):
            self._work.put(copy)

    def _run(self) -> None:
        while True:
            copy = self._work.get()
            copy.help()
            # Until there is another, no arrays are kept.
            del copy


@functools.cache
def _helpers(process: int) -> _Helpers:
    # A forked child has none of the threads of its parent.
    return _Helpers()
