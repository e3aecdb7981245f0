"""Ctrl-C that is not lost."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt, and :meth:`check` raises it again if it was swallowed.

    NumPy and MLX's bindings swallow whatever is raised while they call Python: 1 KeyboardInterrupt in 300. In another
    thread than the main one the context does nothing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: object = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """To be called now and then; does nothing in another thread than the main one."""
        if self._asked and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """A context in which Ctrl-C is blocked in the calling thread, and so in threads and processes that it starts."""
    # Python's resource tracker lets the signal through again when it starts, so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
