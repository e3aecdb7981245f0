"""A fused run on a GPU: one function that ``mx.compile`` has compiled for each length of a message."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from ..memory.shapes import note_compiled
from ..stream.convert import mlx_to_numpy, numpy_to_mlx
from ..stream.fusible import Array, FusedStage
from ..stream.hostpages import keep_on_host
from .fusedrun import Arrays, Configured, Ends, FusedRun, Key, Resident, Steps
from .inflight import InFlight, StagingsInTurn
from .staging import DTYPES, Staging
from .threadend import drop_at_thread_end

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

    def _keys_ahead(self, n_samples: int) -> dict[Key, Steps]:
        """What messages of this length may do, from the present counts on and after an odd message."""
        now = cast(Resident, self._resident).counts
        found: dict[Key, Steps] = {}
        odd = self._steps(1, now)
        for counts in (now, now if odd is None else odd.counts):
            for _ in range(_LOOKAHEAD):
                steps = self._steps(n_samples, counts)
                if steps is None:
                    break
                counts = steps.counts
                found.setdefault(steps.key, steps)
        return found

    def _compiled(self, steps: Steps) -> Callable[..., list[mx.array]]:
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

    def _function(self, steps: Steps, sizes: tuple[int, ...], x: mx.array, *flat: mx.array) -> list[mx.array]:
        y, after = self._apply(x.astype(mx.float32), _grouped(flat, sizes), steps.key[1], steps.lengths)
        # Where nobody waits for the result here, one sample, which is there when all of the message is done.
        marks = [x.reshape(-1)[:1].astype(mx.float32)] if self.ends.exit is None else []
        return [*itertools.chain(*after), *(() if y is None else (y,)), *marks]

    def _begin(self, data: npt.NDArray | mx.array, state: Flat, steps: Steps) -> Begun:
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
