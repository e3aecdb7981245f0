"""Threshold crossings in plain MLX operations, for any device.

What follows from the order of samples is found by jumps: from an event to the first crossing after its refractory
period, which is known for all samples at once.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..contract import Proof
from ..crossings import (
    EAGERNESS,
    LARGEST_SCALED,
    LEFT,
    NORMAL,
    OVER,
    SCALE,
    STATUS,
    STEP,
    UNDER,
    Crossings,
)
from . import ewma, zscore

_SIZES = (32, 256, 1024)


def _median(x: mx.array, alpha: float, state: mx.array) -> tuple[mx.array, mx.array]:
    """The running median of the magnitudes, sample by sample, for no other way gives the same."""
    high, low, weight, rest = mx.split(state, 4)
    medians = []
    for n in range(x.shape[0]):
        size = mx.abs(x[n : n + 1])
        taken = size <= LARGEST_SCALED
        gained = weight + (rest + alpha * ((1.0 - weight) - rest))
        lost = (weight - gained) + (rest + alpha * ((1.0 - weight) - rest))
        gain = mx.minimum(STEP * (alpha / gained) * (1.0 + EAGERNESS * (1.0 - gained)), 0.5)
        change = low + gain * high * mx.sign(size - high)
        after = high + change
        after_low = (high - after) + change
        is_first = high == 0.0
        high_now = mx.where(is_first, size, after)
        low = mx.where(taken, mx.where(is_first, 0.0, after_low), low)
        high = mx.where(taken, high_now, high)
        weight, rest = mx.where(taken, gained, weight), mx.where(taken, lost, rest)
        medians.append(mx.where(taken, high, mx.nan))
    return mx.concatenate(medians), mx.concatenate([high, low, weight, rest])


def _scaled(x: mx.array, crossings: Crossings, zi: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The values that are compared, their thresholds, and the running scale after the message."""
    thresholds = mx.array(crossings.thresholds_of(x.shape[1]))
    state = zi[SCALE : crossings.open_row]
    if crossings.scale == "none":
        return x, thresholds, state
    if crossings.scale == "mad":
        medians, state = _median(x, crossings.alpha, state)
        return x, thresholds * (NORMAL * medians), state
    taken = mx.abs(x) <= LARGEST_SCALED
    if crossings.scale == "zscore":
        scores, state = zscore.run(mx.where(taken, x, mx.nan), crossings.alpha, state, 0, _SIZES)
        return scores, thresholds, state
    squares, state = ewma.run(mx.where(taken, x * x, mx.nan), crossings.alpha, state, 0, _SIZES)
    return x, thresholds * mx.sqrt(squares), state


def _first_from(flags: mx.array) -> mx.array:
    """For each sample and the one after the last, the first one from it on that has its flag, or the one after."""
    n_samples = flags.shape[0]
    numbers = mx.arange(n_samples, dtype=mx.int32)[:, None]
    after = mx.full((1, flags.shape[1]), n_samples, mx.int32)
    return mx.concatenate([mx.cummin(mx.where(flags, numbers, n_samples), axis=0, reverse=True), after])


def _jumps(first: mx.array, start: mx.array, step: int, count: int) -> mx.array:
    """*count* samples in order, each the *first* one that is *step* or more after the one before, from *start* on."""
    n_samples = first.shape[0] - 1
    found, at = [], start
    for _ in range(count):
        at = mx.take_along_axis(first, mx.minimum(at, n_samples), axis=0)
        found.append(at)
        at = at + step
    return mx.concatenate(found)


def _largest(compared: mx.array, ends: mx.array, window: int) -> tuple[mx.array, mx.array]:
    """The largest value of at most *window* samples from each on and before *ends*, and how far it is from there."""
    n_samples = compared.shape[0]
    numbers = mx.arange(n_samples, dtype=mx.int32)[:, None]
    largest, offset = compared, mx.zeros(compared.shape, mx.int32)
    width = 1
    while width < window:
        step = min(width, window - width)
        other = mx.minimum(numbers + step, n_samples - 1)
        value, further = (
            mx.take_along_axis(array, mx.broadcast_to(other, array.shape), 0) for array in (largest, offset)
        )
        is_larger = (numbers + step < ends) & (value > largest)
        largest, offset = mx.where(is_larger, value, largest), mx.where(is_larger, further + step, offset)
        width += step
    return largest, offset


def compile_ahead(coefficients: Crossings, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(
    x: mx.array, crossings: Crossings, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""
    n_samples, n_channels = x.shape
    compared, bound, scale = _scaled(x, crossings, zi)
    sign = mx.array(np.where(crossings.thresholds_of(n_channels) >= 0, 1, -1).astype(np.float32))
    over = compared * sign >= bound * sign
    was_under = mx.concatenate([zi[STATUS : STATUS + 1] == UNDER, ~over[:-1]])
    left, apart = zi[LEFT : LEFT + 1].astype(mx.int32), max(crossings.refractory, 1) + 1
    events = _jumps(_first_from(over & was_under), left, apart, -(-n_samples // apart))
    last = mx.max(mx.where(events < n_samples, events, -1), axis=0, keepdims=True)
    left_after = mx.where(last >= 0, crossings.refractory - (n_samples - 1 - last), left - n_samples)
    state = [
        mx.where(over[-1:], OVER, UNDER),
        mx.maximum(left_after, 0).astype(mx.float32) if crossings.refractory else mx.zeros((1, n_channels)),
        scale,
    ]
    if not crossings.has_window:
        if crossings.is_sparse:
            return mx.where(events < n_samples, events, -1).astype(mx.float32), mx.concatenate(state)
        y = mx.put_along_axis(mx.zeros((n_samples + 1, n_channels), mx.bool_), events, mx.array(True), axis=0)
        return y[:n_samples], mx.concatenate(state)
    open_after, full = _decided(x, compared * sign, sign, over, events, crossings, zi)
    y, pending = full[:n_samples], full[n_samples : n_samples + crossings.delay]
    state += [open_after, pending]
    if not crossings.is_sparse:
        return (y if crossings.gives_values else y != 0), mx.concatenate(state)
    slots = crossings.slots(n_samples)
    rows = _jumps(_first_from(y != 0), mx.zeros((1, n_channels), mx.int32), 1, slots)
    found = [mx.where(rows < n_samples, rows, -1).astype(mx.float32)]
    if crossings.gives_values:
        values = mx.take_along_axis(mx.concatenate([y, mx.zeros((1, n_channels))]), rows, axis=0)
        found.append(values)
    return mx.concatenate(found), mx.concatenate(state)


def _decided(
    x: mx.array,
    deviation: mx.array,
    sign: mx.array,
    over: mx.array,
    events: mx.array,
    crossings: Crossings,
    zi: mx.array,
) -> tuple[mx.array, mx.array]:
    """The event that is not decided after the message; and all results that are known, of what is due and later."""
    n_samples, n_channels = x.shape
    window, delay, shortest, row = crossings.window, crossings.delay, crossings.shortest, crossings.open_row
    ends = _first_from(~over)
    # The one that is open from before.
    age, peak, value, offset = (zi[row + k : row + k + 1] for k in range(4))
    age, offset = age.astype(mx.int32), offset.astype(mx.int32)
    more = mx.minimum(ends[:1], window - age) * (age > 0)
    inside = mx.arange(n_samples, dtype=mx.int32)[:, None] < more
    in_message = mx.where(inside, deviation, -mx.inf)
    at = mx.argmax(in_message, axis=0, keepdims=True).astype(mx.int32)
    is_larger = (more > 0) & (mx.take_along_axis(in_message, at, axis=0) > peak * sign)
    peak = mx.where(is_larger, sign * mx.take_along_axis(in_message, at, axis=0), peak)
    value = mx.where(is_larger, mx.take_along_axis(x, at, axis=0), value)
    offset = mx.where(is_larger, age + at, offset)
    before, age = age, age + more
    is_cut = (ends[:1] < n_samples) & (age < window)
    is_open = (before > 0) & ~is_cut & (age < window)
    counts = (before > 0) & mx.where(is_cut, age >= shortest, age >= window)
    nowhere = n_samples + delay
    rows = [mx.where(counts, delay - before + (offset if crossings.at_peak else 0), nowhere)]
    values = [value]
    # Those that have begun in the message.
    largest, offsets = _largest(deviation, ends[:-1], window)
    there = mx.minimum(events, n_samples - 1)
    largest, offsets, until = (mx.take_along_axis(array, there, axis=0) for array in (largest, offsets, ends))
    length, is_event = until - there, events < n_samples
    samples = mx.take_along_axis(x, there + offsets, axis=0)
    ended = (until < n_samples) & (length < window)
    counts = is_event & mx.where(ended, length >= shortest, length >= window)
    undecided = is_event & (until == n_samples) & (length < window)
    rows.append(mx.where(counts, there + delay + (offsets if crossings.at_peak else 0), nowhere))
    values.append(samples)
    # One at the most.
    pick = mx.argmax(undecided, axis=0, keepdims=True)
    has = mx.any(undecided, axis=0, keepdims=True)
    of_event = [length, mx.take_along_axis(deviation, there + offsets, axis=0) * sign, samples, offsets]
    open_after = [
        mx.where(has, mx.take_along_axis(new, pick, axis=0), mx.where(is_open, old, 0)).astype(mx.float32)
        for new, old in zip(of_event, (age, peak, value, offset), strict=True)
    ]
    empty = mx.zeros((n_samples + 1, n_channels))
    full = mx.concatenate([zi[crossings.pending_row : crossings.n_rows], empty])
    marks = mx.concatenate(values) if crossings.gives_values else mx.ones((len(events) + 1, n_channels))
    return mx.concatenate(open_after), mx.put_along_axis(full, mx.concatenate(rows), marks, axis=0)


def proofs() -> list[Proof[Crossings]]:
    """See :class:`~ezmsg.mlx.kernels.contract.PlainKernel`: each scale, and each kind of dense results."""
    # For as many channels as the self-test times.
    both = np.where(np.arange(1024) % 2, 1.0, -1.0).astype(np.float32)
    # The data has a mean of 5.
    above = np.full(1024, 5.5, np.float32)
    kinds = [
        Crossings(above, shortest=2, window=5, at_peak=True, gives_values=True),
        Crossings(both, refractory=9, scale="zscore", alpha=0.01),
        Crossings(abs(both), refractory=3, scale="rms", alpha=0.01),
        Crossings(abs(both) * np.float32(0.75), scale="mad", alpha=0.01, shortest=2, window=2),
    ]
    return [Proof(crossings, (crossings.n_rows,), events) for crossings in kinds]


def _scale_of(x: npt.NDArray[np.float64], crossings: Crossings) -> npt.NDArray[np.float64]:
    """The scale that thresholds are multiples of, at each sample."""
    scale, now, weight = np.ones(x.shape), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for sample, result in zip(x, scale, strict=True):
        taken = np.isfinite(sample)
        size = np.abs(sample[taken])
        weight[taken] += (1.0 - weight[taken]) * crossings.alpha
        share = crossings.alpha / weight[taken]
        if crossings.scale == "rms":
            now[taken] += share * (size**2 - now[taken])
            result[taken] = np.sqrt(now[taken])
        else:
            gain = np.minimum(STEP * share * (1.0 + EAGERNESS * (1.0 - weight[taken])), 0.5)
            moved = now[taken] * (1.0 + gain * np.sign(size - now[taken]))
            now[taken] = np.where(now[taken] == 0.0, size, moved)
            result[taken] = NORMAL * now[taken]
    return scale


def events(x: npt.NDArray[np.float64], crossings: Crossings) -> npt.NDArray[np.float64]:
    """Dense results, each event having an end within the window or lasting as long."""
    compared = zscore.scores(x, crossings.alpha) if crossings.scale == "zscore" else x
    thresholds = crossings.thresholds[: x.shape[1]]
    bound = thresholds * (1.0 if crossings.scale in ("none", "zscore") else _scale_of(x, crossings))
    sign = np.where(thresholds >= 0, 1.0, -1.0)
    over = compared * sign >= bound * sign
    y, window = np.zeros((len(x) + crossings.delay, x.shape[1])), crossings.window
    for channel in range(x.shape[1]):
        free = 0
        for n in np.flatnonzero(over[1:, channel] & ~over[:-1, channel]) + 1:
            if n < free:
                continue
            free = int(n) + crossings.refractory + 1
            lasts = over[n : n + window, channel]
            length = len(lasts) if lasts.all() else int(np.argmin(lasts))
            if length >= min(crossings.shortest, window):
                offset = int(np.argmax(compared[n : n + length, channel] * sign[channel]))
                at = n + crossings.delay + (offset if crossings.at_peak else 0)
                y[at, channel] = x[n + offset, channel] if crossings.gives_values else 1.0
    return y[: len(x)]
