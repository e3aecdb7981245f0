"""Where a recording is cut into pieces of time, and how much earlier each begins."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ezmsg.baseproc import BaseProcessor, CompositeProcessor
from ezmsg.baseproc.stateful import Stateful

from ..stream.settling import ResultGrid, result_grid, says_settling, settling_time
from ..stream.steps import Step
from . import checkpoint

LEAST_MARGINS = 4
"""Length of a piece in margins, at least: what is computed twice is a quarter of the whole or less."""

PIECES = 8
"""Pieces of a recording, at least, if they are long enough: so many that workers finish at about the same time."""

LONG_ENOUGH = 4.0
"""Seconds of a piece for which to begin and to finish it costs little."""

MARGINS_LONG_ENOUGH = 16
"""Length of a piece in margins for which the margin costs little."""


@dataclass(frozen=True)
class Piece:
    """A piece of a recording, and of its results."""

    number: int

    start: int
    """The sample at which reading begins, a margin earlier than the piece; 0 is the start of the recording."""

    begin: int
    """First sample of the piece."""

    end: int
    """The sample behind its last."""

    first_result: int
    """Number of the result that a chain gives first which begins at *start*."""

    results_begin: int
    """Number of the first result of the piece, counted from the start of the recording."""

    results_end: int
    """Number of the result behind its last."""


@dataclass(frozen=True)
class Plan:
    """How a recording is cut."""

    margin: float
    """Seconds that a piece begins earlier, at least."""

    n_samples: int
    """Length of a piece; the last is shorter."""

    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{len(self.pieces)} pieces of {self.n_samples} samples, begun {self.margin:g} s earlier"


def plan_pieces(
    n_samples: int,
    sampling_rate: float,
    steps: Sequence[Step],
    *,
    seconds: float,
    margin: float | None,
    tolerance: float,
    multiple: int = 1,
) -> Plan:
    """Cut a recording for a chain.

    Args:
        n_samples: Length of the recording.
        sampling_rate: Samples a second.
        steps: The chain, as it was made.
        seconds: Length of a piece, unless :data:`LEAST_MARGINS` margins are longer; a shorter recording has shorter
            ones, so that there are :data:`PIECES`. With infinity there is one piece.
        margin: In seconds; None: as long as the steps say.
        tolerance: For what they say.
        multiple: Pieces begin at multiples of so many samples.

    Raises:
        ValueError: A step does not say how long it remembers, or does not forget at all.
    """
    # As a time axis has it, so that steps which compute with the rate of a message find the same places.
    gain = 1.0 / sampling_rate
    if margin is None:
        margin = chain_settling_time(steps, tolerance, gain)
    least = max(math.ceil(margin / gain) * LEAST_MARGINS, 1)
    wanted = n_samples if math.isinf(seconds) else max(round(_length(n_samples * gain, margin, seconds) / gain), least)
    length = min(-(-wanted // multiple) * multiple, -(-n_samples // multiple) * multiple)
    grids = list(grids_of(steps, gain))
    pieces = []
    for number, begin in enumerate(range(0, n_samples, length)):
        start, first_result = _start_of(grids, begin - math.ceil(margin / gain))
        end = min(begin + length, n_samples)
        results = [results_after(grids, sample) for sample in (begin, end)]
        pieces.append(Piece(number, start, begin, end, first_result, *results))
    return Plan(margin, length, tuple(pieces))


def _length(recording: float, margin: float, most: float) -> float:
    """Seconds of a piece, *most* at most. Not by the number of workers, on which no bit of the results may depend."""
    return min(max(recording / PIECES, LONG_ENOUGH, MARGINS_LONG_ENOUGH * margin), most)


def chain_settling_time(steps: Sequence[Step], tolerance: float, gain: float) -> float:
    """Seconds after which a chain has forgotten that it began in the middle: the sum of what its steps need.

    The sum, since what a step has not forgotten is the input of the next.

    Raises:
        ValueError: A step does not say how long it remembers, or does not forget at all.
    """
    total = 0.0
    for step in _flat(steps):
        time = settling_time(step, tolerance, gain)
        if time is None and isinstance(step, BaseProcessor) and not isinstance(step, Stateful):
            time = 0.0
        if time is None or not math.isfinite(time):
            reason = (
                "does not say how long it remembers (a method settling_time, or settling_of for its class, does)"
                if time is None
                else "does not forget how it began, with these settings"
            )
            raise ValueError(
                f"{checkpoint.description(step)} {reason}, so the recording cannot be cut into pieces; "
                "use margin='exact', or give a margin in seconds."
            )
        total += time
        gain = result_grid(step, gain).gain
    return total


def unspoken(steps: Sequence[Step]) -> list[Step]:
    """The steps that do not say how long they remember."""
    return [step for step in _flat(steps) if not says_settling(step)]


def _flat(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps, with those that composites consist of in their places, unless a composite speaks for itself."""
    if any(type(step).__module__.startswith("ezmsg.sigproc.") for step in steps):
        # It says for them how long they remember; here, since it loads all of their modules.
        from . import knownstages  # noqa: F401

    for step in steps:
        parts = list(checkpoint.parts_of(step).values())
        if parts and isinstance(step, CompositeProcessor) and not hasattr(step, "settling_time"):
            yield from _flat(parts)
        else:
            yield step


def grids_of(steps: Sequence[Step], gain: float) -> Iterator[ResultGrid]:
    """Where the results of each step lie on its input; *gain* is that of the first."""
    for step in _flat(steps):
        grid = result_grid(step, gain)
        yield grid
        gain = grid.gain


def results_after(grids: Sequence[ResultGrid], n_samples: int) -> int:
    """How many results a chain has given after that many samples."""
    for grid in grids:
        n_samples = grid.results_after(n_samples)
    return n_samples


def _start_of(grids: Sequence[ResultGrid], sample: int) -> tuple[int, int]:
    """Where a fresh chain may begin, at *sample* or before; and the number of the result that it then gives first."""
    if sample <= 0:
        return 0, 0
    number = results_after(grids, sample)
    while number > 0:
        start = number
        for grid in reversed(grids):
            start = grid.start_of(start)
        if start <= sample:
            return start, number
        number -= 1
    return 0, 0


def begin_at(steps: Sequence[Step], gain: float, number: int) -> None:
    """Have a fresh chain begin with the result of that number."""
    for grid in reversed(list(grids_of(steps, gain))):
        grid.begin(number)
        number = grid.start_of(number)
