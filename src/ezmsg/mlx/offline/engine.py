"""Run a chain over one piece of a recording, or over all of it: read ahead, compute, write behind, and save states.

Computing stays in the thread that calls, since MLX's streams belong to threads. What is written, and kept of a state,
stays in order: a state that is kept never counts on results that are not written yet.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import typing
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..asarray import AsArrayTransformer
from ..chain import BaseChainTransformer
from ..rechunk import RechunkSettings, RechunkTransformer
from ..stream.convert import is_integer, is_mlx_array, mlx_to_numpy
from ..stream.device import uses_gpu
from ..stream.fusible import grid_in_a_row
from ..stream.unit import Output, Stage, Stages, flush_steps, run_steps, steps_of
from . import checkpoint
from .checkpoint import pack, unpack
from .contracts import RecordingSource, ResultSink
from .pieces import Piece, PieceResults, check_type, span, unspoken

MOST_AHEAD = 2
"""Chunks of a recording that are read ahead."""

MOST_BEHIND = 8 * 2**20
"""Bytes of results that wait to be written; one message may be larger."""

MOST_UNREAD = 3
"""Messages whose results a GPU computes, or has computed, before they are read."""

MOST_UNREAD_BYTES = 64 * 2**20
"""Bytes of their results; one message may be larger."""

BehindT = typing.TypeVar("BehindT", bound="_Behind")


@contextlib.contextmanager
def read_ahead(messages: Iterator[AxisArray], most: int = MOST_AHEAD) -> Iterator[Iterator[AxisArray]]:
    """*messages*, which are taken and closed in another thread, up to *most* before they are asked for.

    What taking them raises is raised where they are asked for. The thread ends with the ``with`` block.
    """
    # Not an executor, which takes nothing any more once the main thread has ended, although others go on.
    waiting: queue.SimpleQueue[AxisArray | None] = queue.SimpleQueue()
    room, is_over, errors = threading.Semaphore(most), threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            for message in messages:
                if is_mlx_array(message.data):
                    # Lazy data can be evaluated in the thread that made it only.
                    import mlx.core as mx

                    mx.eval(message.data)
                waiting.put(message)
                room.acquire()
                if is_over.is_set():
                    break
        except BaseException as error:  # to be raised in the other thread
            errors.append(error)
        finally:
            if isinstance(messages, typing.Generator):
                messages.close()
            waiting.put(None)

    def taken() -> Iterator[AxisArray]:
        while (message := waiting.get()) is not None:
            room.release()
            yield message
        if errors:
            raise errors[0]

    thread = threading.Thread(target=read, name="reading", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        is_over.set()
        room.release()
        thread.join()


class _Behind:
    """Does things in a thread of its own, in order.

    What they raise is raised by the next call, and nothing is done after it. What waits when the ``with`` block ends is
    done before, also after an error in the block. *has_room* is asked with the number and the bytes of what waits.
    """

    def __init__(self, name: str, has_room: Callable[[int, int], bool]) -> None:
        self._has_room = has_room
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        """Those that are not done, with their bytes."""
        self._n_bytes = 0
        self._changed = threading.Condition()
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self: BehindT) -> BehindT:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self._check()

    def _put(self, action: Callable[[], None], n_bytes: int = 0) -> None:
        self._check()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._has_room(len(self._waiting), self._n_bytes))
            self._waiting.append((action, n_bytes))
            self._n_bytes += n_bytes
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    return
                action, n_bytes = self._waiting[0]
            if self._error is None:
                try:
                    action()
                except BaseException as error:  # to be raised in the other thread
                    self._error = error
            del action
            with self._changed:
                self._waiting.popleft()
                self._n_bytes -= n_bytes
                self._changed.notify_all()


class WriteBehind(_Behind):
    """Has an open sink take results and states in another thread, in order; *most* bytes of results wait."""

    def __init__(self, sink: ResultSink | PieceResults, most: int = MOST_BEHIND) -> None:
        super().__init__("writing", lambda n, n_bytes: n_bytes < most)
        self._sink = sink

    def append(self, message: AxisArray) -> None:
        """Have the sink take results, of which a copy is made."""
        self._check()
        # Here, since only the thread that made an MLX array can evaluate it.
        data = mlx_to_numpy(message.data) if is_mlx_array(message.data) else np.array(message.data)
        self.take(replace(message, data=data))

    def take(self, message: AxisArray) -> None:
        """Have the sink take results in NumPy's memory that nobody else writes to."""
        self._put(lambda: self._sink.append(message), message.data.nbytes)

    def checkpoint(self, state: bytes) -> None:
        """Have the sink keep a state, once all results so far are written."""
        self._put(lambda: self._sink.checkpoint(state))


class ReadBehind(_Behind):
    """Reads results from a GPU in another thread, in order, while the device computes the next ones.

    A state goes the same way, so that it comes behind the results that it counts on. *behind* takes what was read, and
    *conversion* says what it becomes.
    """

    def __init__(self, behind: WriteBehind, conversion: AsArrayTransformer) -> None:
        super().__init__("reading back", lambda n, n_bytes: n < MOST_UNREAD and n_bytes < MOST_UNREAD_BYTES)
        self._behind, self._conversion = behind, conversion
        self._dtype, self._rounds = conversion.settings.dtype, conversion.settings.rounding == "nearest"

    @staticmethod
    def takes_over(step: object) -> typing.TypeGuard[AsArrayTransformer]:
        """Whether *step* is a conversion to NumPy that can be done here: the log says nothing of what is cut off."""
        if type(step) is not AsArrayTransformer or step.settings.backend != "numpy":
            return False
        dtype = step.settings.dtype
        return dtype is None or step.settings.rounding == "nearest" or not is_integer(dtype)

    def append(self, message: AxisArray) -> None:
        """Have results read; waits where the device is too far behind."""
        self._check()
        if not is_mlx_array(message.data):
            converted = self._conversion(message)
            copied = replace(converted, data=np.array(converted.data))
            self._put(lambda: self._behind.take(copied), copied.data.nbytes)
            return
        from ..stream.convert import begin_reading

        # Here, since only the thread that made an MLX array can begin to evaluate it.
        unread = begin_reading(message.data, self._dtype, rounds=self._rounds)
        # Without the data, whose memory the device can use again.
        empty = replace(message, data=np.empty((0,) * message.data.ndim))
        self._put(lambda: self._behind.take(replace(empty, data=unread.read())), unread.nbytes)

    def checkpoint(self, state: bytes) -> None:
        """Have a state kept, once all results so far are."""
        self._put(lambda: self._behind.checkpoint(state))


class _ResumableStep:
    """A step that may go on from a saved state, and that names whoever gives it something else than a message."""

    def __init__(self, step: Stage, giver: str) -> None:
        self.step, self.giver = step, giver
        self.made = checkpoint.as_made(step)
        self.saved: bytes | None = None
        """State to go on from, until the first message with samples has come."""

    def __call__(self, message: AxisArray) -> Output:
        check_type(message, self.giver)
        if self.saved is None:
            return self.step(message)
        if 0 in message.data.shape:
            # Not yet: a step without samples may not know enough to take its state, nor have anything to say.
            return None
        saved, self.saved = self.saved, None
        return checkpoint.call_restored(self.step, saved, message)

    @property
    def flush(self) -> Callable[[], Sequence[AxisArray]] | None:
        flush = getattr(self.step, "flush", None)
        if callable(flush) and self.saved is not None:
            checkpoint.restore(self.step, self.saved)
            self.saved = None
        return flush

    def save(self) -> bytes | None:
        return self.saved or checkpoint.save(self.step, self.made)


class ResumableChain:
    """Steps in a row, with their states; the last one, which has none, may be left to the caller."""

    def __init__(self, steps: list[Stage], leaves_last: bool = False) -> None:
        givers = ["the source", *(checkpoint.description(step).partition("(")[0] for step in steps)]
        self.steps = [_ResumableStep(step, giver) for step, giver in zip(steps, givers, strict=False)]
        self._run = self.steps[:-1] if leaves_last else self.steps
        self._last_giver = givers[len(self._run)]
        self._made = [each for step in unspoken(steps) for each in checkpoint.as_made(step)]

    def process(self, message: AxisArray) -> Iterator[AxisArray]:
        """The results of the next message."""
        return self._checked(run_steps(self._run, message))

    def flush(self) -> Iterator[AxisArray]:
        """The rest, once there are no more messages."""
        return self._checked(flush_steps(self._run))

    def _checked(self, results: Iterator[AxisArray]) -> Iterator[AxisArray]:
        for result in results:
            check_type(result, self._last_giver)
            yield result

    def check_forgets(self) -> None:
        """ValueError for a step that does not say how long it remembers, and keeps something outside of its state."""
        try:
            checkpoint.check_keeps_nothing(self._made)
        except checkpoint.CannotSave as error:
            raise ValueError(f"{error}; a method settling_time says how long it remembers.") from error

    def save(self, done: int) -> bytes:
        """The state after *done* samples; :obj:`CannotSave` if a step has one that cannot be saved."""
        return pack((done, [step.save() for step in self.steps]))

    def restore(self, saved: bytes) -> int:
        """Go on from a saved state; the number of samples done then. After a ValueError the steps are as they were."""
        done, states = typing.cast(tuple[int, list[bytes | None]], unpack(saved))
        if not isinstance(done, int) or len(states) != len(self.steps):
            raise ValueError("it is not one of this chain")
        for step, state in zip(self.steps, states, strict=True):
            if state is not None:
                checkpoint.check(step.step, state)
        for step, state in zip(self.steps, states, strict=True):
            step.saved = state
        return done


class PieceDone(typing.NamedTuple):
    """The outcome of a piece."""

    n_there: int
    """Samples of it whose results were there already."""

    checkpoint: bytes | None
    """Data that was kept with the results of a part of a recording: packed :class:`~.pieces.Seams`."""


@dataclass(frozen=True)
class PieceTask:
    """One piece of a recording: what there is to do, and where its results go. It may be pickled."""

    source: RecordingSource
    chain_factory: Callable[[], Stages]
    rechunk: RechunkSettings | None
    sink: ResultSink
    piece: Piece
    checkpoint_seconds: float
    """Seconds of the recording between checkpoints of the whole of it. A part of it has none."""

    @property
    def n_samples(self) -> int:
        """Length of the piece."""
        return self.piece.end - self.piece.begin

    def steps(self) -> Generator[int, None, PieceDone]:
        """Process it; after each chunk it yields the number of samples of the piece that are done."""
        piece, source = self.piece, self.source
        steps = chain_of(self.chain_factory, self.rechunk)
        recipe = recipe_of(source, steps)
        conversion = _left_conversion(steps)
        chain = ResumableChain(steps, leaves_last=conversion is steps[-1])
        try:
            opened = self.sink.open(recipe, f"{recipe}\n{checkpoint.environment()}")
            if opened.is_complete:
                ez.logger.info(f"Results are there already: {source.identity}")
                return PieceDone(self.n_samples, opened.checkpoint)
            if piece.is_whole:
                first, results = _resumed(chain, self.sink, opened.checkpoint, source.identity), None
            else:
                piece = piece.settled_after_gaps(source, steps)
                grid_in_a_row(steps, 1.0 / source.sampling_rate).begin(piece.first_result)
                first, results = piece.start, PieceResults(self.sink, piece)
            messages = span(source, first, piece.end)
            messages = messages if results is None else results.watch(messages)
            yield from self._run(chain, messages, results or self.sink, conversion, first)
            if results is not None:
                chain.check_forgets()
                results.finish(source.identity)
            self.sink.commit()
            return PieceDone(first if results is None else 0, None if results is None else results.seams)
        finally:
            self.sink.close()

    def _run(
        self,
        chain: ResumableChain,
        messages: Iterator[AxisArray],
        sink: ResultSink | PieceResults,
        conversion: AsArrayTransformer | None,
        first: int,
    ) -> Generator[int, None, None]:
        """Read ahead, compute, write behind, and keep states, from sample *first* on."""
        piece, source = self.piece, self.source
        every = self.checkpoint_seconds * float(source.sampling_rate) if piece.is_whole else math.inf
        done = saved_at = first
        with contextlib.ExitStack() as stack:
            behind: WriteBehind | ReadBehind
            behind = writing = stack.enter_context(WriteBehind(sink))
            if conversion is not None:
                behind = stack.enter_context(ReadBehind(writing, conversion))
            for message in stack.enter_context(read_ahead(messages)):
                for result in chain.process(message):
                    behind.append(result)
                done += message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]
                yield max(done - piece.begin, 0)
                if done - saved_at >= every and done < piece.end:
                    saved_at = done
                    try:
                        behind.checkpoint(chain.save(done))
                    except checkpoint.CannotSave as error:
                        reason = f"{error} ({source.identity})"
                        ez.logger.info(f"No checkpoints, an interrupted run will start over: {reason}.")
                        every = math.inf
            for result in chain.flush():
                behind.append(result)


def _left_conversion(steps: list[Stage]) -> AsArrayTransformer | None:
    """The conversion of results to NumPy, if they come from a GPU and can be read in another thread.

    It is the last step, or the last stage of the last step, which leaves it to the caller from now on.
    """
    chain = last if isinstance(last := steps[-1], BaseChainTransformer) else None
    found = last if chain is None else list(chain.stages.values())[-1]
    with contextlib.suppress(ImportError):  # a chain without MLX, where it is not installed
        if ReadBehind.takes_over(found) and uses_gpu() and (chain is None or chain.leave_last()):
            return found
    return None


def _resumed(chain: ResumableChain, sink: ResultSink, saved: bytes | None, recording: str) -> int:
    """The sample to go on at, with the chain in the state that it had there."""
    if saved is None:
        return 0
    try:
        done = chain.restore(saved)
    except ValueError as error:
        ez.logger.info(f"The last checkpoint cannot be used ({error}); starting over with {recording}.")
        sink.restart()
        return 0
    ez.logger.info(f"Going on at sample {done} of {recording}.")
    return done


def recipe_of(source: RecordingSource, steps: list[Stage]) -> str:
    """The recording and the settings of the chain, as text whose first line is the recording."""
    return "\n".join([source.identity, *map(checkpoint.description, steps)])


def chain_of(chain_factory: Callable[[], Stages], rechunk: RechunkSettings | None) -> list[Stage]:
    """The chain, with what cuts the recording in front; TypeError if *chain_factory* builds none."""
    if not callable(chain_factory):
        raise TypeError(f"'chain_factory' must be a callable that builds a chain, got {chain_factory!r}")
    steps = steps_of(chain_factory(), "The result of 'chain_factory'")
    return steps if rechunk is None else [typing.cast(Stage, RechunkTransformer(rechunk)), *steps]
