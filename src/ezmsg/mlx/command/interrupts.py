"""Ctrl-C that is not lost, for the command and for scripts that run chains."""

import signal
import threading
from types import FrameType


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt, and :meth:`check` raises it again if it was swallowed.

    NumPy and MLX's bindings swallow whatever is raised while they call Python. In another thread than the main one the
    context does nothing.
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
