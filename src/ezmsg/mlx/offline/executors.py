"""Where pieces of recordings are run: an executor of ``concurrent.futures``, usually that of a Dask cluster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
import time
import typing
from collections.abc import Callable, Generator, Iterator

from .reading import import_extra

OutcomeT = typing.TypeVar("OutcomeT")

MOST_IN_FLIGHT = 1000
"""Tasks that an executor is given at a time, since it does not say how many workers it has."""

SECONDS_BETWEEN_REPORTS = 0.25

_SECONDS_TO_NOTICE = 1.0
"""Between looks at whether there was a signal: one that comes right before a wait does not end it."""

_TOPIC = "ezmsg.mlx.offline"


class Task(typing.Protocol):
    """Something to do on a worker. It is pickled."""

    @property
    def n_samples(self) -> int:
        """How much there is to do."""

    def steps(self) -> Generator[int, None, object]:
        """Do it: yields how many samples are done, returns the outcome. Called again if the worker has died."""


def run_through(steps: Generator[int, None, OutcomeT], report: Callable[[int], object] | None = None) -> OutcomeT:
    """Take all steps, and tell *report* after each how many samples are done; returns what they return."""
    with contextlib.closing(steps):
        while True:
            try:
                done = next(steps)
            except StopIteration as end:
                return typing.cast(OutcomeT, end.value)
            if report is not None:
                report(done)


def _run(task: Task, number: int, reports: bool) -> object:
    """Do *task* on a worker; on one of a cluster of this machine, report through its scheduler."""
    return run_through(task.steps(), _reporter(number) if reports else None)


def _reporter(number: int) -> Callable[[int], None]:
    worker, last = import_extra("distributed").get_worker(), -math.inf

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() >= last + SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            worker.log_event(_TOPIC, (number, done))

    return report


class TaskEvent(typing.NamedTuple):
    """How far the task of a number is; when it is finished, with the result of its steps, or what they raised."""

    number: int
    done: int = 0
    is_finished: bool = False
    outcome: object = None


class Tasks:
    """Tasks on the workers of an executor, which its owner shuts down, or of so many processes of this machine."""

    def __init__(self, workers: int | concurrent.futures.Executor) -> None:
        self._stack = contextlib.ExitStack()
        self._n_workers = None if isinstance(workers, concurrent.futures.Executor) else workers
        self._executor = workers if isinstance(workers, concurrent.futures.Executor) else None
        self._futures: dict[int, concurrent.futures.Future] = {}
        self._events: queue.SimpleQueue[TaskEvent] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def has_room(self) -> bool:
        """Whether another task would be begun at once, or soon."""
        # One for each process: Dask has all tasks that are at a worker count as what it has died of.
        return len(self._futures) < (self._n_workers or MOST_IN_FLIGHT)

    def submit(self, task: Task) -> int:
        """Have *task* done; its number. TypeError if it cannot be pickled."""
        if self._executor is None:
            assert self._n_workers is not None
            self._executor = self._stack.enter_context(_local_cluster(self._n_workers, self._hear))
        number = next(self._numbers)
        try:
            future = self._executor.submit(_run, task, number, self._n_workers is not None)
        except TypeError as error:
            raise TypeError(
                "Source, sink and chain_factory are sent to other processes, and one of them cannot be pickled "
                f"({error.__cause__ or error})."
            ) from error
        self._futures[number] = future
        future.add_done_callback(lambda _: self._events.put(TaskEvent(number, is_finished=True)))
        return number

    def _hear(self, event: tuple[float, tuple[int, int]]) -> None:
        self._events.put(TaskEvent(*event[1]))

    def wait(self) -> TaskEvent:
        """The next event; RuntimeError if there are no workers any more."""
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_SECONDS_TO_NOTICE)
                if not event.is_finished:
                    return event
                future = self._futures.pop(event.number)
                if future.cancelled():
                    raise RuntimeError("The workers are gone: a task was cancelled, though not from here.")
                error = future.exception()
                return event._replace(outcome=future.result() if error is None else error)

    def close(self) -> None:
        """Cancel what is not done, and end the workers that were started here."""
        for future in self._futures.values():
            future.cancel()
        self._stack.close()


@contextlib.contextmanager
def _local_cluster(n_workers: int, hear: Callable[[typing.Any], None]) -> Iterator[concurrent.futures.Executor]:
    """The executor of a Dask cluster of processes of one thread each, which end with the ``with`` block.

    One thread, since MLX's streams and the limit on its cache belong to threads and processes. A worker that dies is
    started again, and its piece is begun again, three times at most.
    """
    dask, distributed = import_extra("dask"), import_extra("distributed")
    # By default Dask has workers hand freed memory back at once, to take it anew for each message: a fifth of the time.
    environment = {**dask.config.get("distributed.nanny.pre-spawn-environ")}
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    settings = {
        "distributed.nanny.pre-spawn-environ": environment,
        # A forked child of a process that has used MLX hangs.
        "distributed.worker.multiprocessing-method": "spawn",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(settings))
        try:
            with _hidden_from_children():
                cluster = stack.enter_context(
                    distributed.LocalCluster(
                        n_workers=n_workers,
                        threads_per_worker=1,
                        processes=True,
                        dashboard_address=":0",
                        memory_limit=0,
                        # A worker that is ended would speak of its heartbeat.
                        silence_logs=logging.CRITICAL,
                    )
                )
        except RuntimeError as error:
            raise RuntimeError(
                f"No worker could be started ({error}). A script that starts workers needs the line "
                "`if __name__ == '__main__':` around what it does."
            ) from error
        client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
        client.subscribe_topic(_TOPIC, hear)
        yield client.get_executor(pure=False)


@contextlib.contextmanager
def _hidden_from_children() -> Iterator[None]:
    """A context in which Ctrl-C is blocked in the calling thread, and in threads and processes that it starts.

    A terminal sends Ctrl-C to all processes; only this one is to hear of it. It runs handlers in its main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The resource tracker lets the signal through again when it starts, so it starts first. It removes what workers
    # leave that are killed, and is not to complain of it.
    with _environment("PYTHONWARNINGS", "ignore:resource_tracker"):
        multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A context in which a variable of the environment has *value* in addition to what it has."""
    before = os.environ.get(name)
    os.environ[name] = f"{before},{value}" if before else value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
