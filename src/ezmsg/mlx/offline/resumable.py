"""Steps in a row whose states can be saved, and that go on from saved ones."""

import typing
from collections.abc import Callable, Iterator, Sequence

from ezmsg.util.messages.axisarray import AxisArray

from ..stream.steps import Output, Step, flush_steps, run_steps
from . import checkpoint
from .packing import pack
from .unpacking import unpack


class _ResumableStep:
    """A step that may go on from a saved state, and that names whoever gives it something else than a message."""

    def __init__(self, step: Step, giver: str) -> None:
        self.step = step
        self.giver = giver
        self._made = checkpoint.as_made(step)
        self.saved: bytes | None = None
        """State to go on from, until the first message with samples has come."""

    def __call__(self, message: AxisArray) -> Output:
        check_type(message, self.giver)
        if self.saved is None:
            return self.step(message)
        if 0 in message.data.shape:
            # Not yet: a step without samples may not know enough to take its state, nor have anything to say.
            return None
        saved, self.saved = self.saved, None
        return checkpoint.call_restored(self.step, saved, message)

    @property
    def flush(self) -> Callable[[], Sequence[AxisArray]] | None:
        flush = getattr(self.step, "flush", None)
        if callable(flush) and self.saved is not None:
            checkpoint.restore(self.step, self.saved)
            self.saved = None
        return flush

    def save(self) -> bytes | None:
        return self.saved or checkpoint.save(self.step, self._made)


class ResumableChain:
    """Steps in a row, with their states.

    Args:
        steps: All of them.
        leaves_last: Whether the last one, which has no state, is left to the caller.
    """

    def __init__(self, steps: list[Step], leaves_last: bool = False) -> None:
        givers = ["the source", *(checkpoint.description(step).partition("(")[0] for step in steps)]
        self.steps = [_ResumableStep(step, giver) for step, giver in zip(steps, givers, strict=False)]
        self._run = self.steps[:-1] if leaves_last else self.steps
        self._last_giver = givers[len(self._run)]

    def process(self, message: AxisArray) -> Iterator[AxisArray]:
        """The results of the next message."""
        return self._checked(run_steps(self._run, message))

    def flush(self) -> Iterator[AxisArray]:
        """The rest, once there are no more messages."""
        return self._checked(flush_steps(self._run))

    def _checked(self, results: Iterator[AxisArray]) -> Iterator[AxisArray]:
        for result in results:
            check_type(result, self._last_giver)
            yield result

    def save(self, done: int) -> bytes:
        """The state after *done* samples.

        Raises:
            CannotSave: A step has a state that cannot be saved.
        """
        for step in self.steps:
            checkpoint.check_savable(step.step)
        return pack((done, [step.save() for step in self.steps]))

    def restore(self, saved: bytes) -> int:
        """Go on from a state that was saved; the number of samples done then.

        Raises:
            ValueError: *saved* is not one of this chain. The steps are as they were.
        """
        done, states = typing.cast(tuple[int, list[bytes | None]], unpack(saved))
        if not isinstance(done, int) or len(states) != len(self.steps):
            raise ValueError("it is not one of this chain")
        for step, state in zip(self.steps, states, strict=True):
            if state is not None:
                checkpoint.check(step.step, state)
        for step, state in zip(self.steps, states, strict=True):
            step.saved = state
        return done


def check_type(message: object, giver: str) -> None:
    """TypeError unless *message*, which *giver* gave, is one."""
    if not isinstance(message, AxisArray):
        raise TypeError(f"Messages are of type AxisArray, but {giver} gave a {type(message).__name__}.")
