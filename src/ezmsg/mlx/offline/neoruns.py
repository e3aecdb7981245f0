"""Runs of samples without a gap, found in the numbers or time stamps that a format keeps of all samples."""

import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt

from ..stream.segments import GAP_TOLERANCE
from .faults import fault

_BLOCK = 2**19
"""Numbers that are read at once."""

_SHORTEST_RUN = 4
"""Samples that a run has on average; with fewer, the numbers follow no rate."""

_ANOTHER_RATE = 0.01
"""Difference between the median step and the period, in periods, that no clock has."""


class Runs(typing.NamedTuple):
    """Samples of a segment that follow one another without a gap."""

    firsts: npt.NDArray[np.int64]
    """The sample that each begins with, counted from the start of the segment."""

    times: npt.NDArray[np.float64]
    """When, in seconds."""


def one_run(start: float) -> Runs:
    """Samples without a gap from *start* on, in seconds."""
    return Runs(np.zeros(1, np.int64), np.array([start]))


def runs_in(
    numbers: npt.NDArray[np.integer], period: float, seconds: float, file: Path, tolerance: float = GAP_TOLERANCE
) -> Runs:
    """The runs in the numbers of all samples.

    A single number that does not fit those around it is not a gap.

    Args:
        numbers: A number for each sample, which may be mapped from a file: it is read block by block.
        period: What is between two samples.
        seconds: What one is.
        file: Where they are from, for the errors and the log.
        tolerance: Difference from *period*, in periods, that is still no gap.

    Raises:
        ValueError: There are gaps everywhere, or most steps are not *period*.
    """
    found, no_rate = (
        [np.zeros(1, np.int64)],
        fault(file, None, "has sample numbers that follow no rate, or another one."),
    )
    for begin in range(0, len(numbers), _BLOCK):
        block: npt.NDArray[np.int64] = np.asarray(numbers[begin : begin + _BLOCK + 1]).astype(np.int64)
        steps = block[1:] - block[:-1]
        if begin == 0 and len(steps) and abs(float(np.median(steps)) - period) > _ANOTHER_RATE * period:
            raise no_rate
        found.append(np.flatnonzero(np.abs(steps - period) > tolerance * period) + begin + 1)
    firsts = _without_single(np.concatenate(found), numbers, period, tolerance, file)
    if 1 < len(firsts) and len(numbers) < _SHORTEST_RUN * len(firsts):
        raise no_rate
    backward = [int(first) for first in firsts[1:] if numbers[first] <= numbers[first - 1]]
    if backward:
        ez.logger.warning(
            f"{file}: the sample numbers step back at sample {backward[0]}; the results have the times of the file."
        )
    return Runs(firsts, np.asarray(numbers[firsts], np.float64) * seconds)


def _without_single(
    firsts: npt.NDArray[np.int64], numbers: npt.NDArray[np.integer], period: float, tolerance: float, file: Path
) -> npt.NDArray[np.int64]:
    """The same without runs of one sample between two that follow one another."""
    begins = np.asarray(numbers[firsts]).astype(np.int64)
    levels = (begins - begins[0]) - firsts * period
    single = np.flatnonzero((np.diff(firsts)[1:] == 1) & (np.abs(levels[2:] - levels[:-2]) <= tolerance * period)) + 1
    if not len(single):
        return firsts
    ez.logger.warning(
        f"{file}: {len(single)} sample numbers do not fit those around them, that of sample {firsts[single[0]]} first; "
        "they are not used."
    )
    return np.delete(firsts, np.union1d(single, single + 1))
