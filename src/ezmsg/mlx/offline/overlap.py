"""Reading ahead and writing behind in threads of their own, in bounded memory, while this one computes.

Computing stays in the thread that calls, since MLX's streams belong to threads. What is written, and kept of a state,
stays in order: a state that is kept never counts on results that are not written yet.
"""

import contextlib
import threading
import typing
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..asarray import AsArrayTransformer
from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.integers import is_integer
from .contracts import ResultSink

MOST_AHEAD = 2
"""Chunks of a recording that are read ahead."""

MOST_BEHIND = 8 * 2**20
"""Bytes of results that wait to be written; one message may be larger."""

MOST_UNREAD = 3
"""Messages whose results a GPU computes, or has computed, before they are read."""

MOST_UNREAD_BYTES = 64 * 2**20
"""Bytes of their results; one message may be larger."""

ItemT = typing.TypeVar("ItemT")

BehindT = typing.TypeVar("BehindT", bound="_Behind")


class _Waiting(typing.Generic[ItemT]):
    """Items between two threads.

    Args:
        has_room: Whether another item may be put to the number and the bytes of those that wait.
    """

    def __init__(self, has_room: Callable[[int, int], bool]) -> None:
        self._has_room = has_room
        self._items: deque[tuple[ItemT, int]] = deque()
        self._n_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: ItemT, n_bytes: int = 0) -> bool:
        """Wait for room, and put an item; whether it was: not once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(len(self._items), self._n_bytes))
            if self._is_closed:
                return False
            self._items.append((item, n_bytes))
            self._n_bytes += n_bytes
            self._changed.notify_all()
            return True

    def first(self) -> ItemT | None:
        """Wait for an item, the first one; None once this is closed and nothing waits any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._items))
            return self._items[0][0] if self._items else None

    def drop_first(self) -> None:
        """Make room for another."""
        with self._changed:
            _, n_bytes = self._items.popleft()
            self._n_bytes -= n_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing be put any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@contextlib.contextmanager
def read_ahead(messages: Iterator[AxisArray], most: int = MOST_AHEAD) -> Iterator[Iterator[AxisArray]]:
    """*messages*, which are taken and closed in another thread, up to *most* before they are asked for.

    What taking them raises is raised where they are asked for. The thread ends with the ``with`` block.
    """
    waiting: _Waiting[AxisArray] = _Waiting(lambda n, n_bytes: n < most)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for message in messages:
                if is_mlx_array(message.data):
                    # Lazy data can be evaluated in the thread that made it only.
                    import mlx.core as mx

                    mx.eval(message.data)
                if not waiting.put(message):
                    break
        except BaseException as error:  # to be raised in the other thread
            errors.append(error)
        finally:
            if isinstance(messages, typing.Generator):
                messages.close()
            waiting.close()

    def taken() -> Iterator[AxisArray]:
        while (message := waiting.first()) is not None:
            waiting.drop_first()
            yield message
        if errors:
            raise errors[0]

    thread = threading.Thread(target=read, name="reading", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        waiting.close()
        thread.join()


class _Behind:
    """Does things in a thread of its own, in order.

    What they raise is raised by the next call, and nothing is done after it. What waits when the ``with`` block ends is
    done before, also after an error in the block.

    Args:
        name: Of the thread.
        has_room: See :class:`_Waiting`.
    """

    def __init__(self, name: str, has_room: Callable[[int, int], bool]) -> None:
        self._waiting: _Waiting[Callable[[], None]] = _Waiting(has_room)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self: BehindT) -> BehindT:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._waiting.close()
        self._thread.join()
        if error is None:
            self._check()

    def _put(self, action: Callable[[], None], n_bytes: int = 0) -> None:
        self._check()
        self._waiting.put(action, n_bytes)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (action := self._waiting.first()) is not None:
            if self._error is None:
                try:
                    action()
                except BaseException as error:  # to be raised in the other thread
                    self._error = error
            self._waiting.drop_first()
            del action


class WriteBehind(_Behind):
    """Has a sink take results and states in another thread, in order.

    Args:
        sink: It is open, and is not used by others before the ``with`` block has ended.
        most: Bytes of results that wait.
    """

    def __init__(self, sink: ResultSink, most: int = MOST_BEHIND) -> None:
        # One item may be larger than what is allowed.
        super().__init__("writing", lambda n, n_bytes: not n or n_bytes < most)
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

    A state goes the same way, so that it comes behind the results that it counts on.

    Args:
        behind: What takes what was read. It is open longer than this.
        conversion: Says what the results become.
    """

    def __init__(self, behind: WriteBehind, conversion: AsArrayTransformer) -> None:
        super().__init__("reading back", lambda n, n_bytes: not n or (n < MOST_UNREAD and n_bytes < MOST_UNREAD_BYTES))
        self._behind = behind
        settings = conversion.settings
        self._dtype, self._rounds = settings.dtype, settings.rounding == "nearest"
        self._conversion = conversion

    @staticmethod
    def takes_over(step: object) -> bool:
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
            self._take(replace(converted, data=np.array(converted.data)))
            return
        from ..stream.readback import begin_reading

        # Here, since only the thread that made an MLX array can begin to evaluate it.
        unread = begin_reading(message.data, self._dtype, rounds=self._rounds)
        # Without the data, whose memory the device can use again.
        empty = replace(message, data=np.empty((0,) * message.data.ndim))
        self._put(lambda: self._behind.take(replace(empty, data=unread.read())), unread.nbytes)

    def _take(self, message: AxisArray) -> None:
        self._put(lambda: self._behind.take(message), message.data.nbytes)

    def checkpoint(self, state: bytes) -> None:
        """Have a state kept, once all results so far are."""
        self._put(lambda: self._behind.checkpoint(state))
