"""Steps in a row: what every runner of a chain of transformers does with their outputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ezmsg.util.messages.axisarray import AxisArray

Output: TypeAlias = AxisArray | Sequence[AxisArray] | None
"""What a step returns: a message, several in a list or tuple, or None where it has nothing to say yet."""

Step: TypeAlias = Callable[[AxisArray], Output]
"""A transformer that is called bare, or any other callable of this form."""

Chain: TypeAlias = Step | Sequence[Step]
"""One step, or several that are applied in order."""


def steps_of(chain: Chain, name: str = "chain") -> list[Step]:
    """The steps of *chain* as a list; for the error, the caller calls it *name*.

    Raises:
        TypeError: There is no step, or one that cannot be called.
    """
    steps = list(chain) if isinstance(chain, Sequence) else [chain]
    if not steps or not all(map(callable, steps)):
        raise TypeError(f"{name} is {chain!r}; allowed is a callable or a sequence of one or more callables.")
    return steps


def run_steps(steps: Sequence[Step], message: AxisArray, first: int = 0) -> Iterator[AxisArray]:
    """The results of a message that goes into step number *first*.

    A step that returns a list or tuple has its messages fed on one by one; None ends the message there.
    """
    for number in range(first, len(steps)):
        # Under the same name, so that nothing keeps the input alive: MLX then computes in place.
        output = message = steps[number](message)  # type: ignore[assignment]
        if output is None:
            return
        if isinstance(output, (list, tuple)):
            del message
            for piece in output:
                yield from run_steps(steps, piece, number + 1)
            return
        del output
    yield message


def flush_steps(steps: Sequence[Step]) -> Iterator[AxisArray]:
    """The results of what the steps still hold, once there are no more messages: each one's ``flush``, in order."""
    for number, step in enumerate(steps):
        flush = getattr(step, "flush", None)
        if callable(flush):
            for piece in flush():
                yield from run_steps(steps, piece, number + 1)
