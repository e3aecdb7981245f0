"""The coefficients of threshold crossings, and the form of their state.

Crossings are a recurrence like the others (:mod:`ezmsg.mlx.kernels.contract`), time first with flat channels. Their
state is float32, with rows in the place of samples; all zeros is the start:

- :data:`STATUS`: 0 before the first sample, 1 after one that is not over the threshold, 2 after one that is.
- :data:`LEFT`: samples in which no event may begin, since one has begun before them.
- from :data:`SCALE` on, the running scale (:data:`SCALE_ROWS`), *alpha* being the weight of the newest sample in the
  long run, and *w* the weight of the samples so far, as ``"zscore"`` has it:

  - ``"zscore"``: as the recurrence of that name, whose scores are compared with the threshold.
  - ``"rms"``: as ``"ewma"`` of length 4, of the squares. The threshold counts in ``sqrt(mean square)``.
  - ``"mad"``: ``[m_hi, m_lo, w_hi, w_lo]``, the median *m* of the magnitudes. It goes up by a share of itself with each
    sample of a larger magnitude and down with each smaller one::

        share = alpha / w[n]
        gain[n] = min(0.5, STEP * share * (1 + EAGERNESS * (1 - w[n])))
        m[n] = m[n-1] * (1 + gain[n] * sign(abs(x[n]) - m[n-1]))

    and is the magnitude itself where it was 0. With :data:`STEP`, normal samples move it as an average of time constant
    ``1 / alpha`` moves. The threshold counts in ``NORMAL * m``, the standard deviation of normal samples (Quiroga,
    Nadasdy, Ben-Shaul, Neural Comput. 16, 1661, 2004).

- with a *window*, the event that has begun and is not decided yet, by :data:`OPEN_ROWS` numbers: samples over the
  threshold so far (0: there is none), the largest deviation, the sample there, and how many samples after the first
  that was;
- with a *delay*, one row for each sample that has gone in and is not out yet.

A sample that is not finite, or larger than :data:`LARGEST_SCALED`, leaves a running scale alone, and is then not over
the threshold.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Scale: TypeAlias = Literal["none", "zscore", "rms", "mad"]
"""Scales that thresholds are multiples of."""

STATUS, LEFT, SCALE = 0, 1, 2
"""First rows of a state."""

SCALE_ROWS: dict[Scale, int] = {"none": 0, "zscore": 6, "rms": 4, "mad": 4}
"""Rows of each running scale."""

OPEN_ROWS = 4
"""Rows of the event that is not decided yet."""

UNDER, OVER = 1.0, 2.0
"""Values of :data:`STATUS` after the first sample."""

LARGEST_SCALED = float(np.float32(1e15))
"""Largest magnitude of a sample that running scales take: that of its square must be one that averages take."""

NORMAL = 1.4826022185056018
"""Standard deviation of normal samples, in medians of their magnitude."""

STEP = 1.1664
"""Steps of the median of normal magnitudes, in shares of itself: 1 / (2 * m * density(m))."""

EAGERNESS = 7.0
"""How many more such steps the first samples make, for the very first may be of any size."""


@dataclasses.dataclass(frozen=True, eq=False)
class Crossings:
    """Parameters of a crossing, and of the results for it.

    Known by identity, so that kernels can keep what they have made for it.
    """

    thresholds: npt.NDArray[np.float32]
    """Of each channel, more being left out: to reach from below where it is 0 or more, from above where it is less."""

    refractory: int = 0
    """Samples after an event in which none begins."""

    scale: Scale = "none"
    alpha: float = 1.0

    shortest: int = 1
    """Samples in a row that are over the threshold, for an event that has an end within the window."""

    window: int = 1
    """Samples, from the first of an event on, after which it is decided at the latest."""

    at_peak: bool = False
    """Whether an event counts at its largest deviation, or else at its first sample."""

    gives_values: bool = False
    """Whether results are the samples at the largest deviations, in float32, or else whether there is an event."""

    is_sparse: bool = False
    """Whether results are lists of :meth:`slots` events for each channel, or else an entry for each sample.

    Such a result has, in float32, a row for each event, with the number of the sample or -1, the events of a channel
    being in order; and with *gives_values* as many rows more, with the values."""

    @property
    def delay(self) -> int:
        """How many samples results are behind."""
        return self.window - 1

    @property
    def has_window(self) -> bool:
        """Whether events are looked at beyond their first sample."""
        return self.window > 1 or self.gives_values

    @property
    def open_row(self) -> int:
        """Of the state, where the event that is not decided yet is."""
        return SCALE + SCALE_ROWS[self.scale]

    @property
    def pending_row(self) -> int:
        """Where the samples are that are not out yet."""
        return self.open_row + OPEN_ROWS * self.has_window

    @property
    def n_rows(self) -> int:
        """Of the state."""
        return self.pending_row + self.delay

    def slots(self, n_samples: int) -> int:
        """The most events that a channel can have in a result of *n_samples*."""
        # At their peaks, two may be nearer than they began; but all of them began in the samples of the delay, too.
        n_samples += self.delay if self.at_peak else 0
        return -(-n_samples // (max(self.refractory, 1) + 1))

    def thresholds_of(self, n_channels: int) -> npt.NDArray[np.float32]:
        """The thresholds of the first channels.

        Raises:
            ValueError: There are fewer.
        """
        if len(self.thresholds) < n_channels:
            raise ValueError(f"'thresholds' must be one for each of {n_channels} channels, got {len(self.thresholds)}")
        return self.thresholds[:n_channels]

    def table(self, n_samples: int, n_channels: int) -> npt.NDArray[np.float32]:
        """Inputs of the kernels for GPUs, for a message: eight numbers, and the thresholds."""
        numbers = [self.alpha, 1.0 - self.alpha, self.refractory, self.shortest, self.window, self.at_peak]
        numbers += [self.slots(n_samples) if self.is_sparse else 0, 0]
        return np.concatenate([np.array(numbers, np.float32), self.thresholds_of(n_channels)])

    def constants(self) -> dict[str, int]:
        """Constants that they are compiled with."""
        return {
            "SCALE": list(SCALE_ROWS).index(self.scale),
            "HAS_WINDOW": int(self.has_window),
            "GIVES_VALUES": int(self.gives_values),
            "IS_SPARSE": int(self.is_sparse),
        }

    def result_rows(self, n_samples: int) -> int:
        """Rows of the results of *n_samples*."""
        return self.slots(n_samples) * (1 + self.gives_values) if self.is_sparse else n_samples

    @property
    def gives_floats(self) -> bool:
        """Whether results are float32, or else bool."""
        return self.gives_values or self.is_sparse
