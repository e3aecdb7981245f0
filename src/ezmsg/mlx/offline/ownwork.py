"""What this process does of the tasks that it shares out, and how fast that goes."""

import time
from collections.abc import Generator

from .crew import Event, Task

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

    def step(self) -> Event | None:
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
        return Event(self.number, self._done)

    def _finished(self, outcome: object) -> Event:
        number, self.number, self._steps = self.number, None, None
        self._n_before, self._done = self._n_before + self._n_samples, 0
        assert number is not None
        return Event(number, is_finished=True, outcome=outcome)

    def close(self) -> None:
        """Leave the task as it is."""
        if self._steps is not None:
            self._steps.close()
