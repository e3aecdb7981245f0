"""Ctrl-C for several processes: who hears of it, and when all of them end."""

import atexit
import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """A context in which Ctrl-C is blocked in the calling thread, and so in threads and processes that it starts."""
    before = _block()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _block() -> set[signal.Signals]:
    # Python's resource tracker lets the signal through again when it starts, so it starts first.
    resource_tracker.ensure_running()
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


class GraphInterrupts:
    """Ctrl-C for the main process of a graph, from before its processes start.

    A terminal sends Ctrl-C to all processes. They inherit here that it is blocked, so that none of them ends before the
    others have reached the barrier at which they all wait; this process alone hears of it, in a thread of its own. The
    first one is for the graph to notice, with :meth:`check`, as soon as it runs. If it does not run within
    *patience* seconds, or at a second one, all processes are ended. To be made in the main thread.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self.patience = patience
        self.asked = threading.Event()
        self.running = threading.Event()
        """To be set by the graph when it runs and calls :meth:`check`."""
        _block()
        # Python runs a handler in the main thread only, which may wait in ezmsg; the file tells other threads, too.
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True).start()

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a Ctrl-C."""
        self.running.set()
        if self.asked.is_set():
            raise KeyboardInterrupt

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.read(self._signals, 1)
        self.asked.set()
        if not self.running.is_set():
            print("ending as soon as the processes have started; once more: at once", flush=True)
        latest = time.monotonic() + self.patience
        while not self.running.wait(0.05):
            if select.select([self._signals], [], [], 0)[0] or time.monotonic() > latest:
                end_all_processes("interrupted while the processes started", 130)
        os.read(self._signals, 1)
        end_all_processes("interrupted", 130)


def end_all_processes(reason: str, code: int) -> None:
    """End this process and those that it started, at once: ezmsg waits until all have met, if need be for ever."""
    print(reason, file=sys.stderr, flush=True)
    # A main thread that waits for these processes may reach its end before the last line here does.
    atexit.register(os._exit, code)
    for process in multiprocessing.active_children():
        process.terminate()
    os._exit(code)
