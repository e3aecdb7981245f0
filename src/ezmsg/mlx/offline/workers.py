"""Workers that take tasks: processes of this machine, this one included, or an executor of somebody else's.

This one works, too, since it has imported and compiled everything already, and others are started when they pay: a
process takes seconds to import and to compile what a chain needs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import pickle
import signal
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import ezmsg.core as ez

_Outcome = typing.TypeVar("_Outcome")


class Task(typing.Protocol):
    """Something to do on a worker. It is pickled."""

    @property
    def n_samples(self) -> int:
        """How much there is to do."""

    def steps(self) -> Generator[int, None, object]:
        """Do it, step by step: yields how many samples are done, returns the outcome.

        Called again, on another worker, if the first has died.
        """


def run_through(steps: Generator[int, None, _Outcome], report: Callable[[int], object] | None = None) -> _Outcome:
    """Take all steps, and tell *report* after each how many samples are done; what they return."""
    with contextlib.closing(steps):
        while True:
            try:
                done = next(steps)
            except StopIteration as end:
                return typing.cast(_Outcome, end.value)
            if report is not None:
                report(done)


class TaskEvent(typing.NamedTuple):
    """What has become of a task."""

    number: int
    """That of the task."""

    done: int = 0
    """How far it is, as far as it is not finished."""

    is_finished: bool = False

    outcome: object = None
    """What ``run`` returned, or the exception that it raised, when it is finished."""


class Crew(typing.Protocol):
    """Workers that take tasks."""

    def has_room(self) -> bool:
        """Whether another task would be begun at once, or soon."""

    def submit(self, number: int, task: Task) -> None:
        """Have *task* done."""

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[TaskEvent]:
        """What has happened since the last call, one event or more.

        Args:
            n_to_come: Samples of tasks that are known, but not submitted yet.
            may_be_more: Whether there may be others that are not known.

        Raises:
            RuntimeError: There are no workers any more.
        """

    def close(self) -> None:
        """End everything, whatever is being done."""


MOST_IN_FLIGHT = 1000
"""Tasks that an executor is given at a time, since it does not say how many workers it has."""


def _run(task: Task) -> object:
    # An executor has no way back for reports.
    return run_through(task.steps())


class ExecutorCrew:
    """The workers of an executor, for example of a Dask cluster.

    Args:
        executor: Not shut down at the end, since it is its owner's.
    """

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self._executor = executor
        self._futures: dict[concurrent.futures.Future, int] = {}

    def has_room(self) -> bool:
        """See :class:`Crew`."""
        return len(self._futures) < MOST_IN_FLIGHT

    def submit(self, number: int, task: Task) -> None:
        """See :class:`Crew`."""
        self._futures[self._executor.submit(_run, task)] = number

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[TaskEvent]:
        """See :class:`Crew`."""
        finished, _ = concurrent.futures.wait(self._futures, return_when=concurrent.futures.FIRST_COMPLETED)
        events = []
        for future in finished:
            number = self._futures.pop(future)
            if future.cancelled():
                raise RuntimeError("The workers are gone: a task was cancelled, though not from here.")
            error = future.exception()
            events.append(TaskEvent(number, is_finished=True, outcome=error if error is not None else future.result()))
        return events

    def close(self) -> None:
        """See :class:`Crew`."""
        for future in self._futures:
            future.cancel()


SECONDS_BETWEEN_EVENTS = 0.1


class OwnWork:
    """A task at a time, step by step, and what is known of the speed from all of them."""

    def __init__(self) -> None:
        self.number: int | None = None
        """That of the task."""

        self.seconds_of_first = 0.0
        """What the first step of all took: it loads and compiles, as each process has to."""

        self._steps: Generator[int, None, object] | None = None
        self._n_samples = 0
        self._done = 0
        """Of the task."""
        self._n_before = 0
        """Samples of the tasks before."""
        self._seconds = 0.0
        self._is_first = True
        self._last_event = 0.0

    @property
    def seconds_a_sample(self) -> float | None:
        """How long a sample takes, once that is known."""
        n = self._n_before + self._done
        return self._seconds / n if n and self._seconds else None

    def begin(self, number: int, task: Task) -> None:
        """Take a task."""
        self.number, self._n_samples, self._done = number, task.n_samples, 0
        self._steps = task.steps()

    def step(self) -> TaskEvent | None:
        """Do some of it; what there is to tell."""
        if self._steps is None or self.number is None:
            return None
        begin = time.monotonic()
        try:
            self._done = next(self._steps)
        except StopIteration as end:
            return self._finished(end.value)
        except Exception as error:
            return self._finished(error)
        finally:
            now = time.monotonic()
            if self._is_first:
                self._is_first, self.seconds_of_first = False, now - begin
            else:
                self._seconds += now - begin
        if now < self._last_event + SECONDS_BETWEEN_EVENTS:
            return None
        self._last_event = now
        return TaskEvent(self.number, self._done)

    def _finished(self, outcome: object) -> TaskEvent:
        number, self.number, self._steps = self.number, None, None
        self._n_before, self._done = self._n_before + self._n_samples, 0
        assert number is not None
        return TaskEvent(number, is_finished=True, outcome=outcome)

    def close(self) -> None:
        """Leave the task as it is."""
        if self._steps is not None:
            self._steps.close()


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

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[TaskEvent]:
        """See :class:`~.crew.Crew`."""
        events: list[TaskEvent] = []
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

    def _heard(self, timeout: float) -> list[TaskEvent]:
        """What the other processes tell, once one of them does, or nothing after *timeout* seconds."""
        events: list[TaskEvent] = []
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
                events.append(TaskEvent(number, done=value))
                continue
            worker.number = None
            events.append(TaskEvent(number, is_finished=True, outcome=value))
        return events

    def _buried(self, worker: _Worker) -> list[TaskEvent]:
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
            return [TaskEvent(number, is_finished=True, outcome=error)]
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
