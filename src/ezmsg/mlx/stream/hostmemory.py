"""Memory on the host that results are given in, and messages uploaded from, and that is used again.

Fresh memory costs page faults, which take longer than the copy into it. What a user holds is never written to:
memory comes back when no array, view or buffer refers to it any more. How much is kept for that has a bound, and what
nobody uses for some seconds is freed.

On CUDA, the memory is MLX's, with its pages on the host, where the device reads and writes it over the bus.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .device import PAGE, keep_on_host, leave_host
from .sharedcopy import LARGE, copy

if TYPE_CHECKING:
    import mlx.core as mx

SMALL_RESULT = 64 * 1024
"""Bytes below which a result is in memory of its own: a copy takes less than keeping account of who refers to it."""

LEAST_COMPUTED = 1 << 20
"""Bytes from which on memory that the host computes in is used again. Less than that malloc keeps, with its pages."""

MOST_LENT = 256 << 20
"""Bytes that users hold. Beyond that, each result is a copy in fresh memory."""

MOST_IDLE = 256 << 20
"""Bytes that wait for the next message. Beyond that, what has waited longest is freed."""

IDLE_SECONDS = 10.0
"""Memory that nobody has used for so long is freed."""

MOST_READ = 4
"""Pieces of memory of one size that the device may still read, each with a message; the next one waits."""


_MOST_TYPED = 8


class Block:
    """One piece of memory.

    Args:
        memory: All of it, as bytes.
        array: The same as an MLX array, where a device reads or writes it.
    """

    __slots__ = ("__weakref__", "_typed", "array", "buffer", "idle_since", "memory", "size")

    def __init__(self, memory: npt.NDArray[np.uint8], array: mx.array | None = None) -> None:
        self.memory, self.array, self.buffer = memory, array, memory.data
        self.size = len(memory)
        """In bytes."""
        self.idle_since = 0.0
        self._typed: dict[tuple[tuple[int, ...], np.dtype], tuple[mx.array, npt.NDArray]] = {}

    def window(self, shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray:
        """The beginning of the memory, as an array."""
        return self.memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def typed(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[mx.array, npt.NDArray]:
        """The beginning of the memory as an MLX array, and as one of NumPy. The last ones are kept."""
        typed = self._typed.get((shape, dtype))
        if typed is None:
            import mlx.core as mx

            assert self.array is not None
            n_bytes = math.prod(shape) * dtype.itemsize
            array = self.array[:n_bytes].view(getattr(mx, mlx_name(dtype))).reshape(shape)
            mx.eval(array)
            if len(self._typed) >= _MOST_TYPED:
                self._typed.clear()
            typed = self._typed[shape, dtype] = array, self.window(shape, dtype)
        return typed

    def filled(self, data: npt.NDArray, dtype: np.dtype) -> mx.array:
        """The beginning of the memory as an MLX array, with *data* copied to it as *dtype*."""
        array, window = self.typed(data.shape, dtype)
        if data.dtype == dtype and data.nbytes < LARGE:
            window[...] = data
        else:
            copy(data, window)
        return array


def mlx_name(dtype: np.dtype) -> str:
    """The attribute of ``mlx.core`` for *dtype*."""
    return dtype.name.replace("bool", "bool_")


class _Lent(weakref.ref):
    """A notice that a block has come back."""

    __slots__ = ("block",)

    block: Block


def is_lent(array: npt.NDArray) -> bool:
    """Whether *array* is in memory that was lent, and so in nobody else's."""
    buffer = getattr(array.base, "base", None)
    return type(buffer) is memoryview and type(buffer.obj) is np.ndarray


class HostMemoryUse(NamedTuple):
    """Bytes of each kind."""

    lent: int
    """In arrays that users hold."""

    idle: int
    """For the next results."""

    kept: int
    """All together, with what a device is reading or writing."""


class HostMemory:
    """Blocks by their size, for results and messages of one device.

    Args:
        make: Makes a block of so many bytes.
    """

    def __init__(self, make: Callable[[int], Block]) -> None:
        self._make = make
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._idle: dict[int, list[Block]] = {}
        self._n_idle = self._n_lent = self._n_read = 0
        self._lent: dict[int, _Lent] = {}
        # Appended to by the garbage collector, in any thread and at any time, so without the lock.
        self._came_back: deque[_Lent] = deque()
        self._read: dict[int, deque[tuple[Block, Sequence[mx.array]]]] = {}
        self._sweeper: threading.Thread | None = None

    def take(self, n_bytes: int) -> Block:
        """A block of at least *n_bytes*, which belongs to the caller until it is given back or lent."""
        size = _size_class(n_bytes)
        with self._lock:
            if self._came_back:
                self._collect()
            if idle := self._idle.get(size):
                self._n_idle -= size
                return idle.pop()
            read = self._read.get(size)
            oldest = read.popleft() if read and len(read) >= MOST_READ else None
            if oldest is not None:
                self._n_read -= size
        if oldest is not None:
            import mlx.core as mx

            block, marks = oldest
            mx.eval(marks)
            return block
        if self._n_read > MOST_IDLE:
            # Messages of many lengths, each with memory that no other one has used again yet.
            self._wait_for_read()
        block = self._make(size)
        self._blocks.add(block)
        return block

    def give_back(self, block: Block) -> None:
        """Have *block* used again, by the next one that takes it."""
        with self._lock:
            block.idle_since = time.monotonic()
            self._idle.setdefault(block.size, []).append(block)
            self._n_idle += block.size
            if self._n_idle > MOST_IDLE:
                self._trim()
            if self._sweeper is None:
                self._sweep_later()

    def give_back_after(self, block: Block, marks: Sequence[mx.array]) -> None:
        """Have *block* used again, once *marks* are there; their evaluation has begun.

        A thread that takes blocks may wait for *marks*, and the one that frees them does not: MLX ends the process
        where two threads use an array that is not there yet.
        """
        with self._lock:
            block.idle_since = time.monotonic()
            self._read.setdefault(block.size, deque()).append((block, marks))
            self._n_read += block.size
            if self._sweeper is None:
                self._sweep_later()

    def lend(self, block: Block, shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray:
        """The beginning of *block* as an array for a user, which may be written to, and kept for ever.

        The block is used again when nothing refers to the array or to any view of it. A small array is a copy, and so
        are all where users hold more than :data:`MOST_LENT` already.
        """
        is_small = math.prod(shape) * dtype.itemsize < SMALL_RESULT
        if not is_small and self._n_lent + block.size > MOST_LENT:
            with self._lock:
                self._collect()
        if is_small or self._n_lent + block.size > MOST_LENT:
            own = block.window(shape, dtype).copy()
            self.give_back(block)
            return own
        # Views refer to the array that they are of, and NumPy skips arrays that are views themselves, up to what is no
        # array; so all views of this one refer to it. It is no object of the garbage collector, so that its end cannot
        # be told before it has come, as it may be in a cycle.
        root = np.frombuffer(block.buffer, dtype, math.prod(shape))
        lent = _Lent(root, self._came_back.append)
        lent.block = block
        with self._lock:
            self._lent[id(lent)] = lent
            self._n_lent += block.size
            if self._sweeper is None:
                self._sweep_later()
        return root.reshape(shape)

    def is_lent_out(self, n_bytes: int) -> bool:
        """Whether users hold so much that so many bytes more would not be lent."""
        if self._n_lent + n_bytes + n_bytes // 8 <= MOST_LENT:
            return False
        with self._lock:
            self._collect()
        return self._n_lent + n_bytes + n_bytes // 8 > MOST_LENT

    def use(self) -> HostMemoryUse:
        """How much there is at the moment."""
        with self._lock:
            self._collect()
            kept = sum(block.size for block in self._blocks)
            return HostMemoryUse(self._n_lent, self._n_idle + self._n_read, kept)

    def free(self, idle_for: float = 0.0) -> None:
        """Free what has been idle for so many seconds."""
        before = time.monotonic() - idle_for
        freed: list[Block] = []
        with self._lock:
            self._collect()
            for size, idle in tuple(self._idle.items()):
                # What has come back last is taken first, so that the others wait at the front.
                while idle and idle[0].idle_since <= before:
                    freed.append(idle.pop(0))
                    self._n_idle -= size
                if not idle:
                    del self._idle[size]
            for size, read in tuple(self._read.items()):
                # Not asked whether the device has read it: MLX keeps the memory for as long as it does.
                while read and read[0][0].idle_since <= before:
                    freed.append(read.popleft()[0])
                    self._n_read -= size
                if not read:
                    del self._read[size]
        for block in freed:
            _free(block)

    def _collect(self) -> None:
        while self._came_back:
            lent = self._came_back.popleft()
            del self._lent[id(lent)]
            block = lent.block
            self._n_lent -= block.size
            block.idle_since = time.monotonic()
            self._idle.setdefault(block.size, []).append(block)
            self._n_idle += block.size
        if self._n_idle > MOST_IDLE:
            self._trim()

    def _trim(self) -> None:
        while self._n_idle > MOST_IDLE:
            oldest = min((idle for idle in self._idle.values() if idle), key=lambda idle: idle[0].idle_since)
            gone = oldest.pop(0)
            self._n_idle -= gone.size
            _free(gone)

    def _sweep_later(self) -> None:
        self._sweeper = threading.Thread(target=_sweep, args=(weakref.ref(self),), name="ezmsg-mlx-memory")
        self._sweeper.daemon = True
        self._sweeper.start()

    def _wait_for_read(self) -> None:
        """Make what the device has been given to read idle, once it has."""
        with self._lock:
            read = [item for items in self._read.values() for item in items]
            self._read.clear()
            self._n_read = 0
        if read:
            import mlx.core as mx

            for block, marks in read:
                mx.eval(marks)
                self.give_back(block)

    def _is_empty(self) -> bool:
        return not (self._lent or self._came_back or any(self._idle.values()) or any(self._read.values()))


def _sweep(memory: Callable[[], HostMemory | None]) -> None:
    """Free what is idle, as long as there is something."""
    while True:
        time.sleep(IDLE_SECONDS / 4)
        kept = memory()
        if kept is None:
            return
        kept.free(IDLE_SECONDS)
        with kept._lock:
            if kept._is_empty():
                kept._sweeper = None
                return
        del kept


@functools.lru_cache(maxsize=1024)
def _size_class(n_bytes: int) -> int:
    """*n_bytes* rounded up: pages, and above 16 of them an eighth of a power of two, so that sizes are few."""
    n_bytes = max(n_bytes, 1)
    step = 1 << max(n_bytes.bit_length() - 4, PAGE.bit_length() - 1)
    return -(-n_bytes // step) * step


def _plain_block(n_bytes: int) -> Block:
    return Block(np.empty(n_bytes, np.uint8))


def _device_block(n_bytes: int) -> Block:
    import mlx.core as mx

    array = keep_on_host(mx.array(np.zeros(n_bytes, np.uint8)))
    return Block(np.asarray(array), array)


def _free(block: Block) -> None:
    if block.array is not None:
        # MLX's cache gives the memory to whatever needs as much next, which is to lie on the device.
        leave_host(block.array)


_plain, _device = HostMemory(_plain_block), HostMemory(_device_block)


def device_memory() -> HostMemory:
    """The memory of this process that a device reads messages from, and writes results to."""
    return _device


def used_again(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray:
    """An array with nothing written to it. A large one is in memory that is used again, when nobody refers to it."""
    target = np.dtype(dtype)
    n_bytes = math.prod(shape) * target.itemsize
    if n_bytes < LEAST_COMPUTED or _plain.is_lent_out(n_bytes):
        return np.empty(shape, target)
    return _plain.lend(_plain.take(n_bytes), shape, target)


def memory_in_use() -> HostMemoryUse:
    """How much this process keeps."""
    plain, device = _plain.use(), _device.use()
    return HostMemoryUse(plain.lent + device.lent, plain.idle + device.idle, plain.kept + device.kept)


def _begin_anew() -> None:
    """In a forked child: what the parent's threads held or locked is nothing that it could use."""
    global _plain, _device
    _inherited.extend((_plain, _device))
    _plain, _device = HostMemory(_plain_block), HostMemory(_device_block)


# Not freed in a child: that would be a call of the device's driver, which does not work there.
_inherited: list[HostMemory] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
