"""How long a stage remembers, so that a recording can be processed in pieces of time.

A piece begins a margin earlier than its results, so that by then each stage of the chain has forgotten that it began in
the middle. A stage says how long that takes in a method ``settling_time``, and where its results lie on its input in a
method ``result_grid``, if it does not give one for each sample:

    >>> from ezmsg.baseproc import BaseStatefulTransformer
    >>> class LeakyIntegrator(BaseStatefulTransformer):
    ...     def settling_time(self, tolerance, gain):
    ...         return averaging_time(self.settings.time_constant, tolerance)

For a class that cannot be changed, :func:`settling_of` registers both. What is registered counts for exactly that
class: a subclass may compute something else. A subclass inherits the methods, and overrides them where it remembers
more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

SLACK = 1e3
"""What the response of a filter to how it began may be larger than the fall of its slowest pole says."""


class Settles(Protocol):
    """A stage that says how long it remembers."""

    def settling_time(self, tolerance: float, gain: float) -> float:
        """Seconds after which results depend on how the stage began by *tolerance* or less, as a share of the largest.

        Args:
            tolerance: For example 1e-6.
            gain: Seconds between the samples of its input.
        """


class ResultGrid(NamedTuple):
    """Where the results of a stage lie on its input, counted from the start of the stream."""

    gain: float
    """Seconds between results."""

    results_after: Callable[[int], int]
    """How many results a stage has given after that many samples."""

    start_of: Callable[[int], int]
    """The sample at which a fresh stage may begin, to give the result of that number first, and the others after it."""

    begin: Callable[[int], None] = lambda number: None
    """Called before the first sample, with the number of the result that the stage is to begin with."""


def one_for_each(gain: float) -> ResultGrid:
    """The grid of a stage that gives one result for each sample."""
    return ResultGrid(gain, lambda n_samples: n_samples, lambda number: number)


StageT = TypeVar("StageT")

Settling = Callable[[StageT, float, float], float]
"""``settling_time`` as a function of the stage, a tolerance and a gain."""

Gridding = Callable[[StageT, float], ResultGrid]
"""``result_grid`` as a function of the stage and a gain."""

_registered: dict[type, tuple[Settling, Gridding | None]] = {}


def settling_of(kind: type[StageT], settling: Settling, grid: Gridding | None = None) -> None:
    """Register how long stages of exactly the class *kind* remember.

    Args:
        kind: The class.
        settling: Takes the stage, a tolerance and a gain, and gives seconds (see :class:`Settles`).
        grid: Takes the stage and a gain, and gives a :class:`ResultGrid`. None: one result for each sample.
    """
    _registered[kind] = settling, grid


def says_settling(stage: object) -> bool:
    """Whether somebody has said how long *stage* remembers."""
    return type(stage) in _registered or callable(getattr(stage, "settling_time", None))


def settling_time(stage: object, tolerance: float, gain: float) -> float | None:
    """How long *stage* remembers, in seconds; None if nobody has said it."""
    if (registered := _registered.get(type(stage))) is not None:
        return registered[0](stage, tolerance, gain)
    said = getattr(stage, "settling_time", None)
    return float(said(tolerance, gain)) if callable(said) else None


def result_grid(stage: object, gain: float) -> ResultGrid:
    """Where the results of *stage* lie on its input, whose samples are *gain* seconds apart."""
    if (registered := _registered.get(type(stage))) is not None:
        return registered[1](stage, gain) if registered[1] else one_for_each(gain)
    said = getattr(stage, "result_grid", None)
    return said(gain) if callable(said) else one_for_each(gain)


def averaging_time(time_constant: float, tolerance: float) -> float:
    """Seconds after which an average of this time constant has forgotten what came before.

    Its weight, ``exp(-t / time_constant)``, is then a tenth of *tolerance*: the rest is for what is computed from it, a
    difference or a standard deviation.
    """
    return time_constant * math.log(10.0 / tolerance)


def filter_time(coefs: object, coef_type: str, tolerance: float, gain: float) -> float:
    """Seconds after which a filter has forgotten how it began.

    Without feedback that is the length of its taps. With feedback its response to that falls as the power of the
    largest radius of its poles, from :data:`SLACK` times the input at most.

    Args:
        coefs: *b* and *a* (a tuple or ezmsg-sigproc's ``FilterCoefficients``), sections, or None for no filter.
        coef_type: ``"sos"`` for sections, ``"ba"`` for *b* and *a*.
        tolerance: Share of the input that is left.
        gain: Seconds between samples.

    Returns:
        The time; infinite for a filter that does not forget.
    """
    if coefs is None:
        return 0.0
    if coef_type == "sos":
        sections = np.atleast_2d(np.asarray(coefs, np.float64))
        radius = max(_radius(section[3:]) for section in sections)
        n_taps = 2 * len(sections) + 1
    else:
        # It loads scipy's filters, which takes longer than all else of this package.
        from .coefficients import check_ba

        b, a = check_ba(coefs)
        radius, n_taps = _radius(a), max(len(b), len(a))
    if radius >= 1.0:
        return math.inf
    n_feedback = math.log(SLACK / tolerance) / -math.log(radius) if radius > 0.0 else 0.0
    return (n_taps + math.ceil(n_feedback)) * gain


def _radius(denominator: npt.NDArray) -> float:
    """The largest distance of a pole from 0."""
    return float(np.abs(np.roots(denominator)).max(initial=0.0))
