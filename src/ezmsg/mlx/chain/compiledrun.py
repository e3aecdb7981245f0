"""A fused run on a GPU: one function that ``mx.compile`` has compiled for each length of a message.

MLX keeps what ``mx.compile`` has compiled for each thread, and lets go of it after Python has left the thread. If the
interpreter ends meanwhile, that aborts the process: "terminate called without an active exception". Python's own data
of a thread goes while Python is still in it, so the functions are dropped there.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, cast

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from ..memory.shapes import note_compiled
from ..stream.convert import mlx_to_numpy, numpy_to_mlx
from ..stream.device import PAGE, keep_on_host
from ..stream.fusible import Array, FusedStage
from .fusedrun import Arrays, Configured, Ends, FusedRun, Key, Plan, Resident

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


Flat: TypeAlias = list[mx.array]
"""The arrays of all stages in a row."""

Begun: TypeAlias = tuple[mx.array, list[mx.array], bool]
"""The message; the arrays after it and, if the last is true, the result."""

MOST_FUNCTIONS = 24
"""Functions that one run compiles: MLX keeps each for good."""

MOST_LENGTHS = 4
"""Lengths of messages among them, where nothing says which will come."""

BEGINNING = 16
"""Messages of a stream during which a length is compiled when it comes a second time; a stream that runs waits for no
compilation."""

SMALL = 0.25
"""Share of a message's values up to which a result is small."""

_LOOKAHEAD = 256
"""Messages whose variants are worked out ahead."""


class CompiledRun(FusedRun):
    """Uploads a message, runs one compiled function, and reads the result.

    Args:
        first: As in :class:`FusedRun`, like those up to *result*.
        transformers: See there.
        stages: See there.
        ends: See there.
        message: See there.
        result: See there.
        lengths: Lengths of messages in samples that are known to come; None where none are known.
    """

    how = "by mx.compile"

    def __init__(
        self,
        first: int,
        transformers: Sequence[Configured],
        stages: Sequence[FusedStage],
        ends: Ends,
        message: AxisArray,
        result: AxisArray,
        *,
        lengths: tuple[int, ...] | None,
    ) -> None:
        super().__init__(first, transformers, stages, ends, message, result)
        self._wanted, self._n_messages = lengths, 0
        self._seen = {message.data.shape[self._likeness.axis]}
        self._lengths: set[int] = set()
        self._functions: dict[Key, Callable[..., list[mx.array]]] = {}
        self._sizes: tuple[int, ...] = ()
        self._is_narrow = self.ends.entry is not None and message.data.dtype in DTYPES
        self._staging = Staging() if self._is_narrow and self.ends.exit is not None else None
        self._is_idle = True
        self._in_flight = InFlight()
        self._stagings = StagingsInTurn() if self._is_narrow and self.ends.exit is None else None

    def compile_ahead(self) -> None:
        """Compile what is known to come, at the start of a stream; it takes seconds the first time on a machine."""
        if self._wanted and (self._resident or self._load()):
            self._prepare(self._wanted)

    def drop_functions(self) -> None:
        """Forget what was compiled: messages go stage by stage from then on."""
        self._functions.clear()

    def _takes(self, n_samples: int) -> bool:
        if self._wanted is not None or self._n_messages >= BEGINNING:
            return n_samples in self._lengths
        self._n_messages += 1
        if n_samples in self._seen and n_samples not in self._lengths and len(self._lengths) < MOST_LENGTHS:
            if self._resident or self._load():
                self._prepare([n_samples])
        self._seen.add(n_samples)
        return n_samples in self._lengths

    def _is_ready(self, key: Key) -> bool:
        return key in self._functions

    def _prepare(self, lengths: Iterable[int]) -> None:
        started_at, n_before = time.perf_counter(), len(self._functions)
        drop_at_thread_end(self)
        for n_samples in lengths:
            ahead = self._keys_ahead(n_samples)
            if len(ahead.keys() - self._functions.keys()) + len(self._functions) > MOST_FUNCTIONS:
                ez.logger.warning(
                    f"A fused run leaves messages of {n_samples} samples to its stages one by one: it would be "
                    f"compiled for more than {MOST_FUNCTIONS} shapes."
                )
                continue
            try:
                new = {key: self._compiled(steps) for key, steps in ahead.items() if key not in self._functions}
            except Exception:
                # A backend may lack what the stages do well one by one.
                ez.logger.exception(f"Messages of {n_samples} samples could not be compiled and run stage by stage.")
                continue
            self._functions |= new
            self._lengths.add(n_samples)
        note_compiled(self, self._lengths)
        if n_new := len(self._functions) - n_before:
            seconds = time.perf_counter() - started_at
            names = ", ".join(map(str, sorted(self._lengths)))
            ez.logger.info(
                f"Cold start of a fused run: {n_new} functions compiled in {seconds:.1f} s, for {names} samples."
            )

    def _keys_ahead(self, n_samples: int) -> dict[Key, Plan]:
        """What messages of this length may do, from the present counts on and after an odd message."""
        now = cast(Resident, self._resident).counts
        found: dict[Key, Plan] = {}
        odd = self._steps(1, now)
        for counts in (now, now if odd is None else odd.counts):
            for _ in range(_LOOKAHEAD):
                steps = self._steps(n_samples, counts)
                if steps is None:
                    break
                counts = steps.counts
                found.setdefault(steps.key, steps)
        return found

    def _compiled(self, steps: Plan) -> Callable[..., list[mx.array]]:
        function = mx.compile(functools.partial(self._function, steps, self._sizes))
        # Of zeros, and the state as it is: compiled and run once, and forgotten. The memory for messages and results
        # is that of the stream.
        likeness = self._likeness
        shape = likeness.shape(steps.key[0])
        if self._staging is not None:
            x = self._staging.filled(np.zeros(shape, dtype=likeness.dtype))
        else:
            x = mx.zeros(shape, getattr(mx, str(likeness.dtype)) if self._is_narrow else mx.float32)
        outputs = function(x, *cast(Resident, self._resident).arrays)
        mx.eval(outputs)
        if steps.lengths[-1] > 0 and self.ends.exit is not None:
            self._read(outputs[-1], x)
        return function

    def _function(self, steps: Plan, sizes: tuple[int, ...], x: mx.array, *flat: mx.array) -> list[mx.array]:
        y, after = self._apply(x.astype(mx.float32), _grouped(flat, sizes), steps.key[1], steps.lengths)
        # Where nobody waits for the result here, one sample, which is there when all of the message is done.
        marks = [x.reshape(-1)[:1].astype(mx.float32)] if self.ends.exit is None else []
        return [*itertools.chain(*after), *(() if y is None else (y,)), *marks]

    def _begin(self, data: npt.NDArray | mx.array, state: Flat, steps: Plan) -> Begun:
        if self.ends.entry is None:
            x = cast(mx.array, data)
        elif self._staging is not None and self._is_idle:
            # The device has read what was there, since the result has been waited for.
            x, self._is_idle = self._staging.filled(cast(np.ndarray, data)), False
        elif self._stagings is not None:
            x = self._stagings.filled(cast(np.ndarray, data))
        else:
            # Narrow integers are widened on the device, by the compiled function.
            x, _ = numpy_to_mlx(cast(np.ndarray, data), None if self._is_narrow else "float32")
        outputs = self._functions[steps.key](x, *state)
        mx.async_eval(outputs)
        has_result, is_waited_for = steps.lengths[-1] > 0, self.ends.exit is not None
        if not (has_result and is_waited_for):
            # Of its own, since the thread that reads the result may wait for that meanwhile.
            marks = outputs if is_waited_for else [outputs.pop()]
            # Some two buffers of a message live at a time, besides what was uploaded.
            self._in_flight.add(marks, 3 * x.nbytes)
            if self._stagings is not None:
                self._stagings.give_back(marks)
        return x, outputs, has_result

    def _finish(self, begun: Begun) -> tuple[Array, Flat]:
        x, outputs, has_result = begun
        y = outputs.pop() if has_result else None
        if y is not None and self.ends.exit is not None:
            result = self._read(y, x)
            self._is_idle = True
            self._in_flight.clear()
            return result, outputs
        if y is not None:
            return y, outputs
        empty = self._result_shape(0)
        return (np.empty(empty, self._dtype or np.float32) if self.ends.exit else mx.zeros(empty)), outputs

    def _read(self, y: mx.array, x: mx.array) -> npt.NDArray:
        result = mlx_to_numpy(y, self._dtype, rounds=self._rounds)
        if y.size <= SMALL * x.size:
            # MLX's cache gives its memory to the next result, and to nothing of the size of a message.
            keep_on_host(y, least=1)
        return result

    def _from_transformers(self, arrays: Arrays) -> Flat:
        self._sizes = tuple(map(len, arrays))
        return [array for held in cast("Sequence[tuple[mx.array, ...]]", arrays) for array in held]

    def _for_transformers(self, state: Flat) -> Sequence[tuple[mx.array, ...]]:
        return _grouped(state, self._sizes)


def _grouped(flat: Sequence[mx.array], sizes: tuple[int, ...]) -> list[tuple[mx.array, ...]]:
    ends = itertools.accumulate(sizes)
    return [tuple(flat[end - size : end]) for end, size in zip(ends, sizes, strict=False)]
