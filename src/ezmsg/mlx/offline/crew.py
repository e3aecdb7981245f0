"""Workers that take tasks, whatever they are: processes of this machine, or an executor of somebody else's."""

import concurrent.futures
import contextlib
import typing
from collections.abc import Callable, Generator

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


class Event(typing.NamedTuple):
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

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[Event]:
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

    def wait(self, n_to_come: int = 0, may_be_more: bool = False) -> list[Event]:
        """See :class:`Crew`."""
        finished, _ = concurrent.futures.wait(self._futures, return_when=concurrent.futures.FIRST_COMPLETED)
        events = []
        for future in finished:
            number = self._futures.pop(future)
            if future.cancelled():
                raise RuntimeError("The workers are gone: a task was cancelled, though not from here.")
            error = future.exception()
            events.append(Event(number, is_finished=True, outcome=error if error is not None else future.result()))
        return events

    def close(self) -> None:
        """See :class:`Crew`."""
        for future in self._futures:
            future.cancel()
