"""Workers that take tasks, whatever they are: processes of this machine, or an executor of somebody else's."""

import concurrent.futures
import typing

from .progress import Report


class Task(typing.Protocol):
    """Something to do on a worker. It is pickled."""

    def run(self, report: Report) -> object:
        """Do it. Called again, on another worker, if the first has died."""


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

    def wait(self) -> list[Event]:
        """What has happened since the last call, one event or more.

        Raises:
            RuntimeError: There are no workers any more.
        """

    def close(self) -> None:
        """End everything, whatever is being done."""


MOST_IN_FLIGHT = 1000
"""Tasks that an executor is given at a time, since it does not say how many workers it has."""


def _ignore(done: int, total: int) -> None:
    """An executor has no way back for reports."""


def _run(task: Task) -> object:
    return task.run(_ignore)


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

    def wait(self) -> list[Event]:
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
