"""Processes of this machine as workers."""

import multiprocessing
import pickle
import signal
import sys
import time
import typing
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import ezmsg.core as ez

from .crew import Event, Task

RETRIES = 2
"""How often a task is begun again whose worker has died."""

_SECONDS_BETWEEN_REPORTS = 0.1
_SECONDS_TO_END = 5.0


class _Worker:
    """A process with a pipe, and the task that it has."""

    def __init__(self) -> None:
        # Spawned: a forked child of a process that has used MLX hangs.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)
        # A terminal sends Ctrl-C to all processes. The child begins with it blocked, until it ignores it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        self.is_ready = False
        self.number: int | None = None


class ProcessCrew:
    """Processes that are spawned when there is something to do, and end with this object or with this process.

    Args:
        n_workers: How many.
    """

    def __init__(self, n_workers: int) -> None:
        self._n_workers = n_workers
        self._workers: dict[Connection, _Worker] = {}
        self._tasks: dict[int, tuple[bytes, int]] = {}
        """Each as it was pickled, and how often it was begun."""
        self._waiting: deque[int] = deque()

    def has_room(self) -> bool:
        """See :class:`~.crew.Crew`."""
        return len(self._tasks) < self._n_workers

    def submit(self, number: int, task: Task) -> None:
        """See :class:`~.crew.Crew`.

        Raises:
            TypeError: The task cannot be pickled.
        """
        try:
            pickled = pickle.dumps(task)
        except Exception as error:  # whatever the classes of the parts raise
            raise TypeError(
                f"Source, sink and chain_factory are sent to other processes, and one of them cannot be pickled "
                f"({error}); allowed is a chain_factory that is a function of a module, or a partial of one."
            ) from error
        self._tasks[number] = pickled, 0
        self._waiting.append(number)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give tasks that wait to workers that have none."""
        while self._waiting:
            free = [worker for worker in self._workers.values() if worker.number is None]
            if free:
                worker = free[0]
            elif len(self._workers) < self._n_workers:
                worker = _Worker()
                self._workers[worker.connection] = worker
            else:
                return
            worker.number = self._waiting.popleft()
            pickled, n_begun = self._tasks[worker.number]
            self._tasks[worker.number] = pickled, n_begun + 1
            try:
                worker.connection.send_bytes(pickled)
            except OSError:
                continue  # it has died, which wait() sees, too

    def wait(self) -> list[Event]:
        """See :class:`~.crew.Crew`."""
        events: list[Event] = []
        while not events:
            for connection in wait(list(self._workers)):
                worker = self._workers[typing.cast(Connection, connection)]
                try:
                    kind, value = worker.connection.recv()
                except (EOFError, OSError):
                    events += self._buried(worker)
                    continue
                if kind == "ready":
                    worker.is_ready = True
                    continue
                number = typing.cast(int, worker.number)
                if kind == "done so far":
                    events.append(Event(number, done=value))
                    continue
                worker.number = None
                del self._tasks[number]
                events.append(Event(number, is_finished=True, outcome=value))
            self._hand_out()
        return events

    def _buried(self, worker: _Worker) -> list[Event]:
        """Give the task of a worker that has died to another one, or up."""
        del self._workers[worker.connection]
        worker.connection.close()
        worker.process.join()
        code = worker.process.exitcode
        if not worker.is_ready:
            raise RuntimeError(
                f"A worker ended before it began (exit status {code}). A script that starts workers needs the line "
                "`if __name__ == '__main__':` around what it does."
            )
        number = worker.number
        if number is None:
            return []
        n_begun = self._tasks[number][1]
        if n_begun > RETRIES:
            del self._tasks[number]
            error = RuntimeError(f"A worker died {n_begun} times at the same place (exit status {code}).")
            return [Event(number, is_finished=True, outcome=error)]
        ez.logger.warning(f"A worker died (exit status {code}); another one begins its piece again.")
        self._waiting.appendleft(number)
        return []

    def close(self) -> None:
        """See :class:`~.crew.Crew`."""
        for worker in self._workers.values():
            # One that waits for a task ends by itself, and the others are not to go on.
            worker.connection.close()
            if worker.number is not None:
                worker.process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for worker in self._workers.values():
            worker.process.join(max(deadline - time.monotonic(), 0.0))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _work(connection: Connection) -> None:
    """What a worker does, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # By an exception, so that locks and semaphores of libraries are given back.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() >= last + _SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            # An error here says that nobody waits for the results any more.
            connection.send(("done so far", done))

    try:
        connection.send(("ready", None))
        while True:
            outcome: object
            pickled = connection.recv_bytes()
            try:
                outcome = pickle.loads(pickled).run(report)
            except BrokenPipeError:
                return
            except Exception as error:
                outcome = error
            connection.send(("finished", _sendable(outcome)))
    except (EOFError, OSError):
        return


def _sendable(outcome: object) -> object:
    """*outcome*, or an error in its words if it would not arrive."""
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception:  # whatever its class raises
        return RuntimeError(f"{type(outcome).__name__}: {outcome}")
    return outcome
