"""Processes of this machine as workers, this one included.

This one works, too, since it has imported and compiled everything already, and others are started when they pay: a
process takes seconds to import and to compile what a chain needs.
"""

import multiprocessing
import pickle
import signal
import sys
import time
import typing
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import ezmsg.core as ez

from .crew import Event, Task, run_through
from .ownwork import SECONDS_BETWEEN_EVENTS, OwnWork

RETRIES = 2
"""How often a task is begun again whose worker has died."""

SECONDS_TO_START = 2.0
"""How long a process imports before it begins with its first task."""

LEAST_GAIN = 2.0
"""Another process is started where those that run would be busy for so many times as long as it takes to start."""

_SECONDS_TO_END = 5.0

_SECONDS_TO_NOTICE = 1.0
"""Between looks at whether there was a signal: one that comes right before a wait does not end it."""


@dataclass
class _Given:
    """A task that is not finished."""

    pickled: bytes
    n_samples: int
    n_begun: int = 0
    """How often a worker other than this process has begun it."""


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
    """This process, and others that are spawned when there is enough to do, and end with this object or this process.

    This one works step by step, in :meth:`wait`, and looks after the others in between. It leaves a task alone at which
    another has died.

    Args:
        n_workers: How many, this process included.
        works_itself: Whether this process works. If not, the others are spawned when there is anything to do.
    """

    def __init__(self, n_workers: int, works_itself: bool = True) -> None:
        self._own = OwnWork() if works_itself else None
        self._n_others = n_workers - 1 if works_itself else n_workers
        self._n_workers = n_workers
        self._begun = time.monotonic()
        self._workers: dict[Connection, _Worker] = {}
        self._tasks: dict[int, _Given] = {}
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
        self._tasks[number] = _Given(pickled, task.n_samples)
        self._waiting.append(number)

    def _hand_out(self, n_to_come: int, may_be_more: bool) -> None:
        """Give tasks that wait to workers that have none, this process first."""
        if self._own is not None and self._own.number is None:
            # What another has died of is not tried here, unless there are no others.
            mine = (number for number in self._waiting if not self._tasks[number].n_begun or not self._n_others)
            if (number := next(mine, None)) is not None:
                self._waiting.remove(number)
                self._own.begin(number, pickle.loads(self._tasks[number].pickled))
        while self._waiting:
            free = [worker for worker in self._workers.values() if worker.number is None]
            if free:
                worker = free[0]
            elif len(self._workers) < self._n_others and self._another_pays(n_to_come, may_be_more):
                worker = _Worker()
                self._workers[worker.connection] = worker
            else:
                return
            worker.number = self._waiting.popleft()
            given = self._tasks[worker.number]
            given.n_begun += 1
            try:
                worker.connection.send_bytes(given.pickled)
            except OSError:
                continue  # it has died, which wait() sees, too

    def _another_pays(self, n_to_come: int, may_be_more: bool) -> bool:
        """Whether another process would be ready long before those that run have done what is left."""
        if self._own is None or self._own.number is None:
            return True
        least = LEAST_GAIN * (SECONDS_TO_START + self._own.seconds_of_first)
        if may_be_more and time.monotonic() - self._begun > least:
            # As long as there has been something to do, there may be.
            return True
        seconds = self._own.seconds_a_sample
        if seconds is None:
            return False
        n_left = n_to_come + sum(self._tasks[number].n_samples for number in self._waiting)
        return seconds * n_left > least * (1 + len(self._workers))

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[Event]:
        """See :class:`~.crew.Crew`."""
        events: list[Event] = []
        while not events:
            self._hand_out(n_to_come, may_be_more)
            if self._own is not None and self._own.number is not None:
                if (event := self._own.step()) is not None:
                    events.append(event)
                events += self._heard(0.0)
            else:
                events += self._heard(_SECONDS_TO_NOTICE)
            for event in events:
                if event.is_finished:
                    self._tasks.pop(event.number, None)
        return events

    def _heard(self, timeout: float) -> list[Event]:
        """What the other processes tell, once one of them does, or nothing after *timeout* seconds."""
        events: list[Event] = []
        for connection in wait(list(self._workers), timeout) if self._workers else ():
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
            events.append(Event(number, is_finished=True, outcome=value))
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
        n_begun = self._tasks[number].n_begun
        if n_begun > RETRIES:
            error = RuntimeError(f"A worker died {n_begun} times at the same place (exit status {code}).")
            return [Event(number, is_finished=True, outcome=error)]
        ez.logger.warning(f"A worker died (exit status {code}); another one begins its piece again.")
        self._waiting.appendleft(number)
        return []

    def close(self) -> None:
        """See :class:`~.crew.Crew`."""
        if self._own is not None:
            self._own.close()
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

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() >= last + SECONDS_BETWEEN_EVENTS:
            last = time.monotonic()
            # An error here says that nobody waits for the results any more.
            connection.send(("done so far", done))

    try:
        connection.send(("ready", None))
        while True:
            outcome: object
            pickled = connection.recv_bytes()
            try:
                outcome = run_through(pickle.loads(pickled).steps(), report)
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
