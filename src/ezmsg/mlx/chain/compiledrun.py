"""A fused run on a GPU: one function that ``mx.compile`` has compiled for each length of a message.

MLX keeps what ``mx.compile`` has compiled for each thread, and lets go of it after Python has left the thread. If the
interpreter ends meanwhile, that aborts the process: "terminate called without an active exception". Python's own data
of a thread goes while Python is still in it, so the functions are dropped there.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from ..memory.shapes import note_compiled
from ..stream.convert import (
    LARGE_MESSAGE,
    MLX_DTYPES,
    copied,
    is_integer,
    mlx_to_integers,
    numpy_to_mlx,
    read_block,
    upload,
)
from ..stream.device import bus, keep_on_host
from ..stream.fusible import Array, FusedStage
from ..stream.hostmemory import Block, device_memory, mlx_name
from .fusedrun import ON_ENTRY, Configured, Ends, FusedRun, Key, Loaded, Plan, Resident

STAGED = {dtype: dtype if dtype.itemsize < 4 else np.dtype(np.float32) for dtype in ON_ENTRY}
"""By the dtype of a message, that in which it is copied to memory that the device reads: narrow ones are widened on the
device, wide ones narrowed while they are copied."""

MOST_BYTES = 64 << 20
"""Data that the device has been given and that has not been waited for."""

AT_LEAST = 2
"""Messages that are not waited for, however large: one to compute, and one behind it."""


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


class HoldsFunctions(Protocol):
    """An object that keeps functions of ``mx.compile``."""

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


class Begun(NamedTuple):
    """A message that the device has been given."""

    x: mx.array
    staged: Block | None
    """The memory that *x* is in; None where it is MLX's own."""
    outputs: list[mx.array]
    """The arrays after it and, if it has a result, that or what is there when it is."""
    result: Block | None
    """Where the result will be; None: in the last of the outputs."""
    shape: tuple[int, ...] | None
    """Of the result; None if there is none."""


class Function(NamedTuple):
    """A function that was compiled for one length and variant."""

    call: Callable[..., list[mx.array]]
    n_bytes: int
    """Of the result, which the function writes to memory of the host; 0: it gives the result itself."""


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


class CompiledRun(FusedRun[Flat, Begun]):
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
        self._functions: dict[Key, Function] = {}
        self._sizes: tuple[int, ...] = ()
        self._memory, self._has_entry = device_memory(), self.ends.entry is not None
        self._staged = STAGED[message.data.dtype] if self._has_entry else np.dtype(np.float32)
        self._in_flight = InFlight()
        self._bus = bus()
        # Without a bus a wide message costs one copy to MLX's memory, and a narrow one nothing else.
        self._stages_wide = self._has_entry and self._bus is not None
        # Truth values are few bytes, and are read as they are.
        self._writes = self._bus is not None and self.ends.exit is not None and self._result_dtype != "bool"
        rounds = self._rounds and self._dtype in MLX_DTYPES and is_integer(self._dtype)
        self._integer = self._dtype if rounds else None
        self._source = np.dtype(self._integer or np.float32)

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
        """Effects of messages of this length, from the present counts on and after an odd message."""
        now = self._present().counts
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

    def _present(self) -> Resident[Flat]:
        resident = self._resident
        assert resident is not None
        return resident

    def _compiled(self, steps: Plan) -> Function:
        shape, n_after = self._likeness.shape(steps.key[0]), steps.lengths[-1]
        n_values = math.prod(self._result_shape(n_after)) if self._writes else 0
        # A small result is computed in memory that MLX's cache gives to the next result, and to nothing of the size of
        # a message.
        n_bytes = n_values * self._source.itemsize if n_values > SMALL * math.prod(shape) else 0
        function = Function(mx.compile(functools.partial(self._function, steps, self._sizes, n_bytes > 0)), n_bytes)
        # Of zeros, and the state as it is: compiled and run once, and forgotten. The memory for messages and results
        # is that of the stream.
        zeros = np.zeros(shape, self._likeness.dtype) if self._has_entry else mx.zeros(shape)
        begun = self._started(function, zeros, self._present().arrays, steps)
        mx.eval(begun.outputs)
        self._result_of(begun)
        return function

    def _function(
        self, steps: Plan, sizes: tuple[int, ...], writes: bool, x: mx.array, *given: mx.array
    ) -> list[mx.array]:
        flat = given[1:] if writes else given
        if x.dtype != mx.float32:
            wide = x.astype(mx.float32)
        else:
            # The memory of a message is written to again: nothing that is kept may be a part of it.
            wide = x * 1.0 if self._stages_wide else x
        y, after = self._apply(wide, _grouped(flat, sizes), steps.key[1], steps.lengths)
        state: Flat = [*itertools.chain(*cast("Sequence[tuple[mx.array, ...]]", after))]
        # Where nobody waits for a result here, something else that is there when all of the message is done.
        if self.ends.exit is None or not (state or steps.lengths[-1]):
            marks = [x.reshape(-1)[:1].astype(mx.float32)]
        else:
            marks = [] if steps.lengths[-1] else [mx.expand_dims(state[0], 0)]
        results: list[mx.array] = []
        if y is not None:
            assert isinstance(y, mx.array)
            data = y
            if writes and data.dtype == mx.bool_:
                data = data.astype(mx.float32)
            data = data if self._integer is None else mlx_to_integers(data, self._integer)
            results = [self._bus.write(data, given[0]) if writes and self._bus is not None else data]
        return [*state, *results, *marks]

    def _begin(self, data: npt.NDArray | mx.array, state: Flat, steps: Plan) -> Begun:
        return self._started(self._functions[steps.key], data, state, steps)

    def _started(self, function: Function, data: npt.NDArray | mx.array, state: Flat, steps: Plan) -> Begun:
        memory, staged, result = self._memory, None, None
        if isinstance(data, mx.array):
            x = data
        elif data.nbytes >= LARGE_MESSAGE and self._bus is not None:
            x = upload(self._bus, data, self._staged, mlx_name(self._staged))
        elif self._staged == np.float32 and not self._stages_wide:
            x, _ = numpy_to_mlx(data, "float32")
        else:
            staged = memory.take(data.size * self._staged.itemsize)
            x = staged.filled(data, self._staged)
        if function.n_bytes:
            result = memory.take(function.n_bytes)
            outputs = function.call(x, result.array, *state)
        else:
            outputs = function.call(x, *state)
        mx.async_eval(outputs)
        n_after = steps.lengths[-1]
        if not n_after or self.ends.exit is None:
            # Of its own, and none of the state: other threads wait for it while this one computes with that, and MLX
            # ends the process where two threads use an array.
            marks = [outputs.pop()]
            # Some two buffers of a message live at a time, besides what was uploaded.
            self._in_flight.add(marks, 3 * x.nbytes)
            if staged is not None:
                memory.give_back_after(staged, marks)
        return Begun(x, staged, outputs, result, self._result_shape(n_after) if n_after else None)

    def _finish(self, begun: Begun) -> tuple[Array, Flat]:
        return self._result_of(begun), begun.outputs

    def _result_of(self, begun: Begun) -> Array:
        """The result, which is waited for where it goes to the host; what is left of the outputs is the state."""
        if begun.shape is None:
            return self._no_samples() if self.ends.exit else mx.array(self._no_samples())
        done = begun.outputs.pop()
        if self.ends.exit is None:
            return done
        if begun.result is not None:
            mx.eval(done)
            result = read_block(begun.result, begun.shape, self._source, self._dtype, self._rounds)
        else:
            result = copied(np.asarray(done), self._dtype, self._rounds)
            if done.size <= SMALL * begun.x.size:
                keep_on_host(done, least=1)
        if begun.staged is not None:
            # The device has read what was there.
            self._memory.give_back(begun.staged)
        self._in_flight.clear()
        return result

    def _from_transformers(self, arrays: Loaded) -> Flat:
        self._sizes = tuple(map(len, arrays))
        return [array for held in arrays for array in held]

    def _for_transformers(self, state: Flat) -> Loaded:
        return _grouped(state, self._sizes)


def _grouped(flat: Sequence[mx.array], sizes: tuple[int, ...]) -> list[tuple[mx.array, ...]]:
    ends = itertools.accumulate(sizes)
    return [tuple(flat[end - size : end]) for end, size in zip(ends, sizes, strict=False)]
