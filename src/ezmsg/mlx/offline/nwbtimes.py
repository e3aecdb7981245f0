"""When the samples of an NWB series are: at a rate, or at time stamps.

Time stamps are read in blocks, so that memory does not grow with the length of the recording. They are cut into runs
without gaps; within a run the samples follow the rate, and each message is placed by the median of its time stamps.
"""

import hashlib
import itertools
import math
import typing
from collections.abc import Iterator
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt

from ..stream.segments import GAP_TOLERANCE
from .faults import fault, faults_of
from .nwbseries import Place, member

if typing.TYPE_CHECKING:
    import h5py

_BLOCK = 2**19
"""Time stamps that are read at once."""

_WINDOW = 16
"""Samples before and after a gap that are compared: a single late time stamp between others is not a gap."""

_SAMPLED = 100_000
"""Intervals that the period is first estimated from."""

_SHORTEST_RUN = 4
"""Samples a run has on average; with fewer, time stamps follow no rate."""

Run = tuple[int, int, float]
"""First sample, the one after the last, and the time of the first."""


class RegularTimes(typing.NamedTuple):
    """A starting time and a rate."""

    start: float
    rate: float

    place: None = None

    @property
    def gaps(self) -> list[int]:
        """No samples have time jump in front of them."""
        return []

    @property
    def identity(self) -> str:
        """What tells these times apart from others, for the identity of the recording."""
        return f"from {self.start!r} s at {self.rate!r} Hz"

    def runs(self, begin: int, end: int, stamps: object) -> Iterator[Run]:
        """The samples from *begin* to *end*, which are one run."""
        # From the sample number each time: adding up gains would drift away from it.
        yield begin, end, self.start + begin / self.rate


class StampedTimes(typing.NamedTuple):
    """Time stamps, with what was found out about them."""

    place: Place
    rate: float
    starts: npt.NDArray[np.int64]
    """Samples that a run begins with, but for the first one."""

    digest: str

    @property
    def gaps(self) -> list[int]:
        """The samples in front of which time jumps."""
        return self.starts.tolist()

    @property
    def identity(self) -> str:
        """What tells these times apart from others, for the identity of the recording."""
        return f"at time stamps {self.digest}, {self.rate!r} Hz"

    def runs(self, begin: int, end: int, stamps: "h5py.Dataset") -> Iterator[Run]:
        """The runs of regular samples from *begin* to *end*, with the time at which each begins."""
        values = np.asarray(stamps[begin:end], np.float64)
        first, last = np.searchsorted(self.starts, [begin, end])
        inner = [int(start) for start in self.starts[first:last] if begin < start < end]
        for one, other in itertools.pairwise([begin, *inner, end]):
            run = values[one - begin : other - begin]
            yield one, other, float(run[0] + np.median(run - run[0] - np.arange(len(run)) / self.rate))


def read_times(group: "h5py.Group", n_samples: int, path: Path, name: str) -> RegularTimes | StampedTimes:
    """The times of the series in *group*.

    Raises:
        ValueError: A rate or a starting time that is not finite, time stamps that are not finite, that are not as many
            as the samples, that follow no rate or whose type does not hold it.
    """
    with faults_of(path, name):
        # By iteration: a link that leads nowhere is not "in" its group.
        names = set(group)
        if "timestamps" in names:
            return _stamped(member(group, "timestamps", path, name), n_samples, path, name)
        if "starting_time" not in names:
            raise fault(path, name, "has neither a rate nor time stamps.")
        start = float(group["starting_time"][()])
        rate = float(group["starting_time"].attrs["rate"])
        if not 0 < rate < math.inf:
            raise fault(path, name, f"has a rate of {rate} Hz; allowed is a finite number above 0.")
        if not math.isfinite(start):
            raise fault(path, name, f"has a starting time of {start} s; allowed is a finite number.")
        return RegularTimes(start, rate)


def _stamped(stamps: "h5py.Dataset", n_samples: int, path: Path, name: str) -> StampedTimes:
    if stamps.shape != (n_samples,) or stamps.dtype.kind not in "iuf":
        raise fault(
            path,
            name,
            f"has {n_samples} samples and time stamps of shape {stamps.shape} and dtype {stamps.dtype}; allowed is one "
            "number for each sample.",
        )
    survey = _Survey(stamps, path, name)
    no_rate = fault(path, name, "has time stamps that follow no rate.")
    if survey.resolution > GAP_TOLERANCE * survey.mean_period > 0:
        raise fault(
            path,
            name,
            f"has time stamps in {stamps.dtype}, which go in steps of {survey.resolution:.2g} s there: too coarse for "
            f"samples {survey.mean_period:.2g} s apart.",
        )
    if not survey.period > 0 or survey.jitter > GAP_TOLERANCE * survey.period:
        raise no_rate
    starts, covered, n_steps = _gaps(stamps, survey, path, name)
    if len(starts) and n_samples < _SHORTEST_RUN * (len(starts) + 1):
        raise no_rate
    rate = n_steps / covered if covered > 0 else 1 / survey.period
    return StampedTimes(Place.of(stamps), rate, starts, survey.digest)


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _BLOCK, n)) for begin in range(0, n, _BLOCK))


class _Survey:
    """What one reading of all time stamps tells."""

    def __init__(self, stamps: "h5py.Dataset", path: Path, name: str) -> None:
        n, digest, sampled, largest = len(stamps), hashlib.sha256(), [], 0.0
        stride = -(-n // _SAMPLED)
        for begin, end in _blocks(n):
            stored = np.asarray(stamps[begin : min(end + 1, n)])
            values = stored.astype(np.float64)
            if not np.isfinite(values).all():
                place = begin + int(np.argmin(np.isfinite(values)))
                raise fault(path, name, f"has a time stamp of {values[place - begin]} s at sample {place}.")
            digest.update(values[: end - begin].tobytes())
            # A copy, since a view would keep all intervals.
            sampled.append(np.diff(values)[::stride].copy())
            largest = max(largest, float(np.abs(values).max()))
        intervals = np.concatenate(sampled)
        self.digest = digest.hexdigest()[:16]
        self.span = float(stamps[n - 1]) - float(stamps[0])
        self.mean_period = self.span / (n - 1) if n > 1 else 0.0
        self.resolution = float(np.spacing(stamps.dtype.type(largest))) if stamps.dtype.kind == "f" else 0.0
        self.period = float(np.median(intervals)) if len(intervals) else 0.0
        if self.period > 0:
            # The median alone is a multiple of the steps that the time stamps go in.
            near = np.abs(intervals - self.period) < GAP_TOLERANCE * self.period
            self.period = float(intervals[near].mean())
        self.jitter = float(np.median(np.abs(intervals - self.period))) if len(intervals) else 0.0


def _gaps(stamps: "h5py.Dataset", survey: _Survey, path: Path, name: str) -> tuple[npt.NDArray[np.int64], float, int]:
    """Where runs begin, the seconds that all runs cover, and the number of intervals in them."""
    n, period = len(stamps), survey.period
    tolerance = GAP_TOLERANCE * period + 2 * survey.jitter + survey.resolution
    found, jumps, warned = [], 0.0, False
    offsets = np.arange(1, _WINDOW + 1)
    for begin, end in _blocks(n):
        first, last = max(begin - _WINDOW, 0), min(end + _WINDOW + 1, n)
        values = np.asarray(stamps[first:last], np.float64)
        steps = np.diff(values[begin - first : end - first + 1])
        candidates = np.flatnonzero(np.abs(steps - period) > tolerance) + begin - first
        if not len(candidates):
            continue
        levels = values - values[0] - np.arange(len(values)) * period
        after = np.median(levels[np.minimum(candidates[:, None] + offsets, len(levels) - 1)], axis=1)
        before = np.median(levels[np.maximum(candidates[:, None] + 1 - offsets, 0)], axis=1)
        gaps = candidates[np.abs(after - before) > tolerance]
        found.append(gaps + first + 1)
        jumps += float((values[gaps + 1] - values[gaps]).sum())
        backward = gaps[values[gaps + 1] < values[gaps]]
        if len(backward) and not warned:
            warned = True
            ez.logger.warning(
                f"{path}: the time stamps of {name} step back at sample {first + int(backward[0]) + 1}; the results "
                "have the times of the file."
            )
    starts = np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)
    return starts, survey.span - jumps, n - 1 - len(starts)
