"""Threshold crossings on MLX's CPU device: numba over a view of the MLX array, running scales in float64."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..crossings import (
    EAGERNESS,
    LARGEST_SCALED,
    LEFT,
    NORMAL,
    OVER,
    SCALE,
    SCALE_ROWS,
    STATUS,
    STEP,
    UNDER,
    Crossings,
)
from ..layout import RESOLUTION, SMALLEST_VARIANCE
from .compiled import compiled

_compiled = compiled(fastmath={"contract"})

_LARGEST = np.float32(LARGEST_SCALED)
_NAN = np.float32(np.nan)
_UNDER, _OVER = np.float32(UNDER), np.float32(OVER)

Floats = npt.NDArray[np.float32]


@_compiled
def _pairs_to_values(state: np.ndarray, values: np.ndarray) -> None:
    for k in range(values.shape[0]):
        for c in range(values.shape[1]):
            values[k, c] = np.float64(state[2 * k, c]) + np.float64(state[2 * k + 1, c])


@_compiled
def _values_to_pairs(values: np.ndarray, state: np.ndarray) -> None:
    for k in range(values.shape[0]):
        for c in range(values.shape[1]):
            state[2 * k, c] = values[k, c]
            state[2 * k + 1, c] = values[k, c] - np.float64(state[2 * k, c])


# Each of one sample of all channels, without branches, so that compilers take several channels at a time: a sample that
# is not taken counts as 0 with a share of 0, and what is compared is NaN.


@_compiled
def _by_score(x: np.ndarray, alpha: float, values: np.ndarray, compared: np.ndarray) -> None:
    mean, var, weight = values[0], values[1], values[2]
    for c in range(x.size):
        taken = abs(x[c]) <= _LARGEST
        before = weight[c]
        after = before + alpha * (1.0 - before) if taken else before
        share = alpha / after if taken else 0.0
        keep = (1.0 - alpha) * before / after if taken else 1.0
        delta = np.float64(x[c]) - mean[c] if taken else 0.0
        weight[c] = after
        mean[c] += share * delta
        var[c] = keep * var[c] + share * keep * (delta * delta)
        rounding = RESOLUTION * mean[c]
        varies = var[c] > max(rounding * rounding, SMALLEST_VARIANCE)
        score = np.float32(keep * delta) / np.sqrt(np.float32(var[c] if varies else 1.0))
        score = score if varies else np.float32(0.0)
        compared[c] = score if taken else _NAN


@_compiled
def _by_square(
    x: np.ndarray, alpha: float, values: np.ndarray, given: np.ndarray, compared: np.ndarray, bound: np.ndarray
) -> None:
    average, weight = values[0], values[1]
    for c in range(x.size):
        taken = abs(x[c]) <= _LARGEST
        sample = np.float64(x[c]) if taken else 0.0
        after = weight[c] + alpha * (1.0 - weight[c]) if taken else weight[c]
        now = alpha * (sample * sample) + average[c]
        weight[c] = after
        average[c] = (1.0 - alpha) * now if taken else average[c]
        compared[c] = x[c] if taken else _NAN
        bound[c] = given[c] * np.sqrt(np.float32(now / (after if taken else 1.0)))


@_compiled
def _by_magnitude(
    x: np.ndarray, alpha: float, values: np.ndarray, given: np.ndarray, compared: np.ndarray, bound: np.ndarray
) -> None:
    median, weight = values[0], values[1]
    for c in range(x.size):
        taken = abs(x[c]) <= _LARGEST
        after = weight[c] + alpha * (1.0 - weight[c]) if taken else weight[c]
        share = alpha / after if taken else 0.0
        gain = min(0.5, STEP * share * (1.0 + EAGERNESS * (1.0 - after)))
        size = abs(np.float64(x[c])) if taken else 0.0
        before = median[c]
        step = (gain if size > before else 0.0) - (gain if size < before else 0.0)
        now = size if before == 0.0 else before + step * before
        weight[c] = after
        median[c] = now
        compared[c] = x[c] if taken else _NAN
        bound[c] = given[c] * np.float32(NORMAL * now)


@_compiled
def _begins(
    compared: np.ndarray,
    bound: np.ndarray,
    sign: np.ndarray,
    refractory: np.float32,
    status: np.ndarray,
    left: np.ndarray,
    result: np.ndarray,
) -> None:
    """Whether an event begins with a sample of each channel."""
    for c in range(compared.size):
        is_over = compared[c] * sign[c] >= bound[c] * sign[c]
        begins = is_over and status[c] == _UNDER and left[c] == np.float32(0.0)
        status[c] = _OVER if is_over else _UNDER
        left[c] = refractory if begins else max(left[c] - np.float32(1.0), np.float32(0.0))
        result[c] = begins


@_compiled
def _crossings(
    x: np.ndarray,
    y: np.ndarray,
    zi: np.ndarray,
    zf: np.ndarray,
    thresholds: np.ndarray,
    alpha: float,
    scale: int,
    n_values: int,
    refractory: int,
    shortest: int,
    window: int,
    at_peak: bool,
    has_window: bool,
    gives_values: bool,
    slots: int,
) -> None:
    """Crossings of *x* (time, channel) in *y*, which has rows for *slots* events, or for samples where that is -1."""
    n_samples, n_channels = x.shape
    delay = window - 1
    open_row = SCALE + 2 * n_values
    pending = open_row + (4 if has_window else 0)
    values = np.empty((n_values, n_channels))
    _pairs_to_values(zi[SCALE:open_row], values)
    status, left = zf[STATUS], zf[LEFT]
    status[:] = zi[STATUS]
    left[:] = zi[LEFT]
    sign = np.empty(n_channels, np.float32)
    for c in range(n_channels):
        sign[c] = np.float32(1.0) if thresholds[c] >= 0 else np.float32(-1.0)
    bound = thresholds.copy()
    scaled = np.empty(n_channels, np.float32)
    begins = np.empty(n_channels, np.float32)
    found = np.zeros(n_channels, np.int64)
    is_sparse = slots >= 0
    if is_sparse:
        y[:slots] = np.float32(-1.0)
        y[slots:] = np.float32(0.0)
    # Results begin as what is known of them already.
    for row in range(delay):
        for c in range(n_channels):
            held = zi[pending + row, c]
            if row >= n_samples:
                zf[pending + row - n_samples, c] = held
            elif not is_sparse:
                y[row, c] = held
            elif held != 0.0:
                y[found[c], c] = row
                if gives_values:
                    y[slots + found[c], c] = held
                found[c] += 1
    for row in range(max(delay - n_samples, 0), delay):
        zf[pending + row] = np.float32(0.0)
    if not is_sparse:
        for row in range(delay, n_samples):
            y[row] = np.float32(0.0)
    if has_window:
        zf[open_row:pending] = zi[open_row:pending]
    for n in range(n_samples):
        sample = x[n]
        compared = sample if scale == 0 else scaled
        if scale == 1:
            _by_score(sample, alpha, values, scaled)
        elif scale == 2:
            _by_square(sample, alpha, values, thresholds, scaled, bound)
        elif scale == 3:
            _by_magnitude(sample, alpha, values, thresholds, scaled, bound)
        if not has_window and not is_sparse:
            _begins(compared, bound, sign, np.float32(refractory), status, left, y[n])
            continue
        _begins(compared, bound, sign, np.float32(refractory), status, left, begins)
        for c in range(n_channels):
            if not has_window:
                if begins[c] != 0.0:
                    y[found[c], c] = n
                    found[c] += 1
                continue
            age, over = zf[open_row, c], status[c] == _OVER
            if begins[c] != 0.0:
                age = np.float32(1.0)
                zf[open_row + 1, c], zf[open_row + 2, c], zf[open_row + 3, c] = compared[c], sample[c], 0.0
            elif age == 0.0:
                continue
            elif over:
                if compared[c] * sign[c] > zf[open_row + 1, c] * sign[c]:
                    zf[open_row + 1, c], zf[open_row + 2, c], zf[open_row + 3, c] = compared[c], sample[c], age
                age += np.float32(1.0)
            if over and age < window:
                zf[open_row, c] = age
                continue
            zf[open_row, c] = 0.0
            if not over and age < shortest:
                continue
            row = n + delay - int(age) + (1 if over else 0)
            if at_peak:
                row += int(zf[open_row + 3, c])
            value = zf[open_row + 2, c] if gives_values else np.float32(1.0)
            if row >= n_samples:
                zf[pending + row - n_samples, c] = value
            elif is_sparse:
                y[found[c], c] = row
                if gives_values:
                    y[slots + found[c], c] = value
                found[c] += 1
            else:
                y[row, c] = value
    _values_to_pairs(values, zf[SCALE:open_row])


def find(x: Floats, crossings: Crossings, zi: Floats) -> tuple[npt.NDArray, Floats]:
    """As :func:`run` of NumPy arrays, (time, channel); dense events are bool."""
    n_samples, n_channels = x.shape
    if zi.shape != (crossings.n_rows, n_channels):
        raise ValueError(f"'zi' must have the shape {(crossings.n_rows, n_channels)}, got {zi.shape}")
    slots = crossings.slots(n_samples) if crossings.is_sparse else -1
    shape = crossings.result_rows(n_samples), n_channels
    y: npt.NDArray = np.empty(shape, np.float32 if crossings.gives_floats else np.bool_)
    zf = np.empty_like(zi)
    scale = list(SCALE_ROWS).index(crossings.scale)
    n_values = (crossings.open_row - SCALE) // 2
    _crossings(
        x, y, zi, zf, crossings.thresholds_of(n_channels), crossings.alpha, scale, n_values, crossings.refractory,
        crossings.shortest, crossings.window, crossings.at_peak, crossings.has_window, crossings.gives_values, slots,
    )  # fmt: skip
    return y, zf


def compile_ahead(coefficients: Crossings, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Compiled once on a machine, and loaded in each process."""
    _compile_ahead(coefficients.gives_floats)


@functools.cache
def _compile_ahead(gives_floats: bool) -> None:
    crossings = Crossings(np.zeros(2, np.float32), gives_values=gives_floats)
    find(np.zeros((1, 2), np.float32), crossings, np.zeros((crossings.n_rows, 2), np.float32))


def run(
    x: mx.array, crossings: Crossings, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Evaluates *x*; *chunk_sizes* do not matter here."""
    y, zf = find(np.ascontiguousarray(x), crossings, np.ascontiguousarray(zi))
    return mx.array(y), mx.array(zf)
