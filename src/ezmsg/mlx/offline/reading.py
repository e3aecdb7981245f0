"""Parts that sources share: optional libraries, errors with the name of the file, scaling, and runs without a gap.

h5py and neo answer a damaged file with errors of many types, most of which do not say which file they are about.

ezmsg-nwb says it, too, but loads pynwb, which takes longer than everything else that a reader of samples needs. The
tests compare.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt

from ..stream.segments import GAP_TOLERANCE


def import_extra(name: str) -> ModuleType:
    """Import a module that the extra brings; the ImportError names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'This needs {name.partition(".")[0]}: pip install "ezmsg-mlx[offline]".') from error


def existing(path: Path) -> Path:
    """The same path; FileNotFoundError if there is nothing."""
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return path


class RecordingError(ValueError):
    """The content of a file is not what a recording needs."""


class Unfit(ValueError):
    """The rest of a sentence about a file, or a series or stream in it: :func:`faults_of` says of which."""


def fault(path: Path, series: str | None, reason: str) -> RecordingError:
    """The error for *reason*, which is the rest of a sentence about the series or stream; None: about the file."""
    return RecordingError(f"{path}: {series} {reason}" if series else f"{path} {reason}")


@contextlib.contextmanager
def faults_of(path: Path, series: str | None = None) -> Iterator[None]:
    """Give errors that are raised inside the ``with`` block the names of the file and of the series or stream.

    Errors of the system stay OSError, of the subclass that belongs to their number, and MemoryError stays one.
    Everything else is the content of the file: ValueError.
    """
    try:
        yield
    except (RecordingError, ImportError):
        raise
    except Unfit as error:
        raise fault(path, series, str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise _unreadable(path, series, error) from error
        text = os.strerror(error.errno)
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            text = "locked, another process has it open for writing"
        raise OSError(error.errno, f"{series}: {text}" if series else text, str(path)) from error
    except MemoryError as error:
        raise MemoryError(f"{path}: {f'{series}: ' if series else ''}{error or 'out of memory'}") from error
    except Exception as error:  # whatever h5py or neo makes of damage
        raise _unreadable(path, series, error) from error


def _unreadable(path: Path, series: str | None, error: Exception) -> RecordingError:
    lines = str(error).strip("'\" \n").splitlines()
    return fault(path, series, f"cannot be read ({type(error).__name__}: {lines[0] if lines else 'no reason given'}).")


_VOLTS = {"v": 1.0, "mv": 1e-3, "uv": 1e-6, "nv": 1e-9}
_VOLTS |= {f"{prefix}volt": n for prefix, n in (("", 1.0), ("milli", 1e-3), ("micro", 1e-6), ("nano", 1e-9))}
_MICRO_SIGNS = str.maketrans({"\N{MICRO SIGN}": "u", "\N{GREEK SMALL LETTER MU}": "u"})


class Scaling(typing.NamedTuple):
    """A value is ``stored * gain + offset``."""

    gain: float | npt.NDArray[np.float64]
    """One for all channels where they agree."""

    offset: float
    unit: str
    is_voltage: bool

    def as_attrs(self) -> dict[str, object]:
        """Attrs of a message whose samples are as they are stored."""
        return {
            "nwb_scaling_gain": self.gain,
            "nwb_scaling_offset": self.offset,
            "nwb_scaling_unit": self.unit,
            "nwb_scaling_applied": False,
            "nwb_scaling_voltage": self.is_voltage,
        }


def one_gain(gains: npt.NDArray[np.float64]) -> float | npt.NDArray[np.float64]:
    """The gain of all channels, or *gains* where they differ."""
    return float(gains[0]) if gains.size and np.all(gains == gains[0]) else gains


def volts_of(unit: str) -> float | None:
    """How many volts a unit is; None if it is not a unit of voltage."""
    name = unit.strip().lower().translate(_MICRO_SIGNS)
    return _VOLTS.get(name.removesuffix("s") if name.endswith("volts") else name)


BLOCK = 2**19
"""Sample numbers or time stamps that are read at once."""

SHORTEST_RUN = 4
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
    """The runs in *numbers*, one for each sample, which may be mapped from a file: they are read block by block.

    Between two samples is *period*, in units of *seconds*. What is *tolerance* periods off is no gap yet, nor is a
    single number that does not fit those around it. ValueError if there are gaps everywhere, or most steps are another.
    *file* is where the numbers are from.
    """
    found, no_rate = (
        [np.zeros(1, np.int64)],
        fault(file, None, "has sample numbers that follow no rate, or another one."),
    )
    for begin in range(0, len(numbers), BLOCK):
        block: npt.NDArray[np.int64] = np.asarray(numbers[begin : begin + BLOCK + 1]).astype(np.int64)
        steps = block[1:] - block[:-1]
        if begin == 0 and len(steps) and abs(float(np.median(steps)) - period) > _ANOTHER_RATE * period:
            raise no_rate
        found.append(np.flatnonzero(np.abs(steps - period) > tolerance * period) + begin + 1)
    firsts = _without_single(np.concatenate(found), numbers, period, tolerance, file)
    if 1 < len(firsts) and len(numbers) < SHORTEST_RUN * len(firsts):
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
