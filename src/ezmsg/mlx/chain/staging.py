"""Memory that a GPU reads messages from, written to again and again."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..stream.hostpages import PAGE, keep_on_host

DTYPES = frozenset(map(np.dtype, ("i1", "u1", "i2", "u2")))
"""Of messages that are staged. What is computed of them is float32, and so never in the same memory."""

LARGE = 8 << 20
"""Bytes from which on several threads copy: one alone does not use what the memory of a server gives."""

MOST_THREADS = 4
"""That copy, the calling one included."""


class Staging:
    """One piece of memory for each shape of a message, in place of a new one for each message.

    ``mx.array`` asks MLX's cache for memory, makes an array, and its pages have to be looked up; that takes longer
    than the copy of a short message. Whoever uses this must not write before the device has read what was there.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[mx.array, npt.NDArray]] = {}

    def filled(self, data: npt.NDArray) -> mx.array:
        """The memory for *data*, of a dtype in :data:`DTYPES`, which are copied to it."""
        kept = self._kept.get(data.shape)
        if kept is None or kept[1].dtype != data.dtype:
            kept = self._kept[data.shape] = _made(data.shape, data.dtype)
        array, window = kept
        if data.nbytes < LARGE:
            window[...] = data
        else:
            _copy(data, window)
        return array


def _made(shape: tuple[int, ...], dtype: np.dtype) -> tuple[mx.array, npt.NDArray]:
    n_items = math.prod(shape)
    # Pages of its own, since smaller arrays share one.
    pages = keep_on_host(mx.array(np.zeros(max(n_items, PAGE // dtype.itemsize), dtype)))
    array = pages[:n_items].reshape(shape)
    mx.eval(array)
    return array, np.asarray(array)


@functools.cache
def _threads(process: int) -> concurrent.futures.ThreadPoolExecutor:
    # Of this process: those of its parent are not there in a forked one.
    return concurrent.futures.ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="ezmsg-mlx-copy")


def _copy(data: npt.NDArray, target: npt.NDArray) -> None:
    n_parts = min(MOST_THREADS, os.cpu_count() or 1, len(data))
    step = -(-len(data) // n_parts)
    others = [
        _threads(os.getpid()).submit(np.copyto, target[start : start + step], data[start : start + step])
        for start in range(step, len(data), step)
    ]
    try:
        np.copyto(target[:step], data[:step])
    finally:
        concurrent.futures.wait(others)
    for other in others:
        other.result()
