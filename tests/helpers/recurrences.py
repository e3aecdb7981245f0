"""The recurrences of the package as a table, and what the tests of all of them need.

A recurrence that is added to :data:`RECURRENCES` is tested by all of :mod:`helpers.recurrence_cases`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from scipy.signal import butter, cheby2, iirnotch, lfilter, sosfilt_zi, tf2sos
from scipy.signal import sosfilt as scipy_sosfilt

from ezmsg.mlx.ewma import ewma
from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE, LARGEST_SCORED
from ezmsg.mlx.scaler import zscore
from ezmsg.mlx.sosfilt import sosfilt

FS = 30000.0
ULP = 2.0**-23
Float64 = npt.NDArray[np.float64]
Coefficients = TypeVar("Coefficients")


class Cases(dict[str, Callable[..., None]]):
    """Functions that raise AssertionError where something does not hold, by name."""

    def add(self, **parameters: Iterable) -> Callable:
        """Register a function, once for each value of its one parameter, if it has one."""

        def register(function: Callable) -> Callable:
            for name, values in parameters.items():
                for value in values:
                    self[f"{function.__name__}[{value}]"] = functools.partial(function, **{name: value})
            if not parameters:
                self[function.__name__] = function
            return function

        return register


def noise(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check_close(
    y: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 1e-5, peak: float | None = None, name: object = ""
) -> None:
    """Within *tolerance* of *peak*, by default the largest expected value; *name* is for the message."""
    y, expected = np.asarray(y), np.asarray(expected)
    assert y.dtype == np.float32 and y.shape == expected.shape, (y.dtype, y.shape, expected.shape)
    atol = tolerance * (peak or np.abs(expected).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=atol, err_msg=str(name))


def check_state(zf: npt.NDArray, expected: npt.NDArray, tolerance: float = 1e-5, peak: float = 0.0) -> None:
    """Within *tolerance* of the largest expected value, or of *peak* if that is larger."""
    np.testing.assert_allclose(zf, expected, rtol=0, atol=tolerance * max(peak, np.abs(expected).max()))


@dataclasses.dataclass(frozen=True)
class Recurrence(Generic[Coefficients]):
    name: str
    """Of the function of the package, and of that in each module of kernels."""

    function: Callable[..., tuple[mx.array, mx.array]]
    """``function(x, coefficients, zi, *, axis, chunk_sizes, path)``."""

    scipy: Callable[[Float64, Coefficients, Float64, int], tuple[Float64, Float64]]
    """``scipy(x, coefficients, zi, axis)``, the reference."""

    settled: Callable[[Coefficients], Float64]
    """scipy's state of one channel after a long time of ones: the last axis is that of time, with one entry for each
    order; those before it come before the axes of the data."""

    coefficients: dict[str, Coefficients]
    """All that results are compared for."""

    short: Coefficients
    """A memory of 30 samples or so."""

    long: Coefficients
    """A memory of 10000 samples or more."""

    unused: Coefficients
    """Those of one test alone, which kernels have nothing of from before."""

    starts_with_a_pair: bool
    """What the state is where none is given."""

    tolerance: float
    """Largest error, relative to the largest sample; relative to the largest result it is 1e-5."""

    kernel: str = ""
    """Of the module in each folder of kernels, where it is not *name*."""

    forms: tuple[bool, ...] = (True, False)
    """Whether the function takes a state of pairs, and whether it takes one of single values."""

    is_interleaved: bool = False
    """Whether pairs of a state are one after the other; else the first halves of all are first."""

    scales: tuple[bool, ...] | None = None
    """Which entries of the settled state are in proportion to the samples; None: all."""

    largest: float = LARGEST_SAMPLE
    """Largest magnitude of a sample that it takes."""

    def state_shape(
        self, shape: tuple[int, ...], axis: int, *, pair: bool, coefficients: Coefficients | None = None
    ) -> tuple[int, ...]:
        *lead, order = self.settled(self.short if coefficients is None else coefficients).shape
        return (*lead, *(order * (1 + pair) if dim == axis % len(shape) else n for dim, n in enumerate(shape)))

    def state_axis(self, axis: int) -> int:
        """Where the state has the axis *axis* >= 0 of the data."""
        return axis + self.settled(self.short).ndim - 1

    def settled_state(self, coefficients: Coefficients, x: npt.NDArray, axis: int = 0) -> Float64:
        """scipy's state after a long time of the first sample of each channel."""
        settled = self.settled(coefficients)
        shape = (*settled.shape[:-1], *(settled.shape[-1] if dim == axis else 1 for dim in range(x.ndim)))
        scales = np.array(settled.size * (True,) if self.scales is None else self.scales).reshape(shape)
        return settled.reshape(shape) * np.where(scales, x.take([0], axis).astype(np.float64), 1.0)

    def pairs_of(self, zi: Float64, axis: int = 0) -> mx.array:
        """scipy's state *zi* as pairs of float32."""
        axis = self.state_axis(axis)
        halves = zi.astype(np.float32), (zi - zi.astype(np.float32)).astype(np.float32)
        if not self.is_interleaved:
            return mx.array(np.concatenate(halves, axis=axis))
        shape = [2 * n if dim == axis else n for dim, n in enumerate(zi.shape)]
        return mx.array(np.stack(halves, axis=axis + 1).reshape(shape))

    def state_of(self, pairs: mx.array, axis: int = 0) -> Float64:
        """The inverse of :meth:`pairs_of`."""
        halves, axis = np.array(pairs).astype(np.float64), self.state_axis(axis)
        if not self.is_interleaved:
            return np.add(*np.split(halves, 2, axis=axis))
        before = (slice(None),) * axis
        return halves[(*before, slice(0, None, 2))] + halves[(*before, slice(1, None, 2))]

    def given(self, zi: Float64, axis: int = 0) -> mx.array:
        """*zi* as single values, where the function takes them."""
        return mx.array(zi) if False in self.forms else self.pairs_of(zi, axis)

    def reference(
        self, x: npt.ArrayLike, coefficients: Coefficients, zi: Float64 | None = None, axis: int = 0
    ) -> tuple[Float64, Float64]:
        """scipy's results in float64."""
        x = np.asarray(x, np.float64)
        if zi is None:
            zi = np.zeros(self.state_shape(x.shape, axis, pair=False, coefficients=coefficients))
        return self.scipy(x, coefficients, zi, axis)

    def without(self, x: npt.NDArray, coefficients: Coefficients, zi: Float64) -> Float64:
        """scipy's result for *x*, time first, if bad samples are taken out and put back as they are."""
        expected = x.astype(np.float64)
        for channel in range(x.shape[1]):
            good = np.abs(x[:, channel]) <= self.largest
            if good.any():
                expected[good, channel], _ = self.reference(x[good, channel], coefficients, zi[..., channel])
        return expected

    def in_pieces(
        self,
        x: mx.array,
        lengths: Iterable[int],
        coefficients: Coefficients,
        zi: mx.array | None,
        path: str,
        axis: int = 0,
    ) -> tuple[np.ndarray, mx.array | None]:
        """Results for *x* cut into messages of *lengths* (the last one gets the rest), and the last state."""
        results, start = [], 0
        for n in (*lengths, x.shape[axis]):
            piece = x[(slice(None),) * axis + (slice(start, start + n),)]
            y, zi = self.function(piece, coefficients, zi, axis=axis, path=path)
            results.append(np.array(y))
            start += n
        return np.concatenate(results, axis=axis), zi


def alpha_of(time_constant: float, fs: float = FS) -> float:
    return -math.expm1(-1.0 / (fs * time_constant))


EWMA = Recurrence[float](
    name="ewma",
    function=ewma,
    scipy=lambda x, alpha, zi, axis: lfilter([alpha], [1.0, alpha - 1.0], x, axis=axis, zi=zi),
    settled=lambda alpha: np.array([1.0 - alpha]),
    coefficients={
        **{f"{time_constant} s": alpha_of(time_constant) for time_constant in (0.001, 0.01, 0.1, 1.0, 60.0, 300.0)},
        **{f"alpha {alpha}": alpha for alpha in (0.5, 0.9, 0.999999, 1.0 - 2.0**-40)},
    },
    short=alpha_of(0.001),
    long=alpha_of(300.0),
    unused=0.123,
    starts_with_a_pair=False,
    tolerance=1e-5,
)


def corrected_in_turn(x: Float64, alpha: float, zi: Float64, axis: int) -> tuple[Float64, Float64]:
    """Averages that are corrected for their start, sample by sample; the state is ``(1 - alpha) * y`` and a weight."""
    x, (z, weight) = np.moveaxis(x, axis, 0), np.moveaxis(zi, axis, 0)
    y = np.empty(x.shape)
    for n, sample in enumerate(x):
        average = alpha * sample + z
        z, weight = (1.0 - alpha) * average, weight + alpha * (1.0 - weight)
        y[n] = average / weight
    return np.moveaxis(y, 0, axis), np.moveaxis(np.stack([z, weight]), 0, axis)


def scores_in_turn(x: Float64, alpha: float, zi: Float64, axis: int) -> tuple[Float64, Float64]:
    """z-scores, sample by sample; the state is mean, variance and weight."""
    x, (mean, var, weight) = np.moveaxis(x, axis, 0), np.moveaxis(zi, axis, 0)
    y = np.zeros(x.shape)
    for n, sample in enumerate(x):
        before, weight = weight, weight + alpha * (1.0 - weight)
        share, rest = alpha / weight, (1.0 - alpha) * before / weight
        delta = sample - mean
        mean, var = mean + share * delta, rest * (var + share * delta**2)
        varies = var > (2.0**-40 * mean) ** 2
        y[n] = np.where(varies, rest * delta / np.sqrt(np.where(varies, var, 1.0)), 0.0)
    return np.moveaxis(y, 0, axis), np.moveaxis(np.stack([mean, var, weight]), 0, axis)


def _corrected_ewma(x: mx.array, alpha: float, zi: mx.array | None = None, **arguments) -> tuple[mx.array, mx.array]:
    axis = arguments.get("axis", -1)
    if zi is None and isinstance(axis, int) and not isinstance(axis, bool) and -x.ndim <= axis < x.ndim:
        zi = mx.zeros([4 if dim == axis % x.ndim else n for dim, n in enumerate(x.shape)])
    return ewma(x, alpha, zi, **arguments)


SOME = ("0.001 s", "1.0 s", "300.0 s", "alpha 0.5", "alpha 0.999999")
"""References in turn take a second each. Nearer to an alpha of 1, scores are of what rounding leaves."""

CORRECTED = dataclasses.replace(
    EWMA,
    name="corrected",
    coefficients={name: EWMA.coefficients[name] for name in SOME},
    kernel="ewma",
    function=_corrected_ewma,
    scipy=corrected_in_turn,
    settled=lambda alpha: np.array([1.0 - alpha, 1.0]),
    starts_with_a_pair=True,
    forms=(True,),
    is_interleaved=True,
    scales=(True, False),
)

ZSCORE = dataclasses.replace(
    EWMA,
    name="zscore",
    coefficients=CORRECTED.coefficients,
    function=zscore,
    scipy=scores_in_turn,
    settled=lambda alpha: np.array([1.0, 1.0, 1.0]),
    starts_with_a_pair=True,
    forms=(True,),
    is_interleaved=True,
    scales=(True, False, False),
    largest=LARGEST_SCORED,
)

BAND_PASS = butter(4, (300.0, 5000.0), "bandpass", fs=FS, output="sos")
HIGH_PASS = butter(4, 0.5, "highpass", fs=FS, output="sos")

FILTERS = {
    **{f"band-pass {order}": butter(order, (300.0, 5000.0), "bandpass", fs=FS, output="sos") for order in (2, 4, 8)},
    **{f"high-pass 300 Hz {order}": butter(order, 300.0, "highpass", fs=FS, output="sos") for order in (2, 3, 8)},
    **{f"high-pass 0.5 Hz {order}": butter(order, 0.5, "highpass", fs=FS, output="sos") for order in (1, 2, 4, 8)},
    "low-pass 5000 Hz 4": butter(4, 5000.0, fs=FS, output="sos"),
    "low-pass 50 Hz 4": butter(4, 50.0, fs=FS, output="sos"),
    "band-pass 0.5 to 10000 Hz 3": butter(3, (0.5, 10000.0), "bandpass", fs=FS, output="sos"),
    "Chebyshev stop band 4": cheby2(4, 40.0, (55.0, 65.0), "bandstop", fs=FS, output="sos"),
    "notch 60 Hz": tf2sos(*iirnotch(60.0, 30.0, fs=FS)),
    "notch 14940 Hz": tf2sos(*iirnotch(14940.0, 3000.0, fs=FS)),
    "low-pass 14950 Hz 4": butter(4, 14950.0, fs=FS, output="sos"),
    "no feedback": np.array([[0.25, 0.5, 0.25, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]),
}

SOSFILT = Recurrence[Float64](
    name="sosfilt",
    function=sosfilt,
    scipy=lambda x, sos, zi, axis: scipy_sosfilt(sos, x, axis=axis, zi=zi),
    settled=sosfilt_zi,
    coefficients=FILTERS,
    short=BAND_PASS,
    long=HIGH_PASS,
    unused=BAND_PASS * [[0.5, 0.5, 0.5, 1, 1, 1]],
    starts_with_a_pair=True,
    tolerance=1e-6,
)

RECURRENCES = {recurrence.name: recurrence for recurrence in (EWMA, CORRECTED, ZSCORE, SOSFILT)}
