"""The transformers of ezmsg-sigproc: how they are fused, how long they remember, and where their results lie.

Those of this package say it themselves (:mod:`ezmsg.mlx.stream.fusible`). All is registered when this is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import ezmsg.sigproc.affinetransform as sigproc
import numpy as np
import numpy.typing as npt
from array_api_compat import get_namespace
from ezmsg.sigproc.affinetransform import AffineTransformTransformer
from ezmsg.sigproc.aggregate import AggregateTransformer, AggregationFunction, RangedAggregateTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.butterworthfilter import ButterworthFilterTransformer
from ezmsg.sigproc.cheby import ChebyshevFilterTransformer
from ezmsg.sigproc.detrend import DetrendTransformer
from ezmsg.sigproc.diff import DiffTransformer
from ezmsg.sigproc.downsample import DownsampleTransformer
from ezmsg.sigproc.ewma import EWMATransformer
from ezmsg.sigproc.filter import FilterByDesignTransformer, FilterTransformer
from ezmsg.sigproc.firfilter import FIRFilterTransformer
from ezmsg.sigproc.kaiser import KaiserFilterTransformer
from ezmsg.sigproc.math.abs import AbsTransformer
from ezmsg.sigproc.math.clip import ClipTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.sigproc.math.pow import PowTransformer
from ezmsg.sigproc.scaler import AdaptiveStandardScalerTransformer
from ezmsg.sigproc.slicer import SlicerTransformer
from ezmsg.sigproc.spectrum import SpectrumTransformer
from ezmsg.sigproc.transpose import TransposeTransformer
from ezmsg.sigproc.util.binning import BinSchedule
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from ..affinetransform import fuse_affine, fuse_common_rereference
from ..binned import bins_remember, grid_of_bins
from ..pow import FusedPow
from ..stream.convert import is_mlx_array
from ..stream.device import uses_gpu
from ..stream.fusible import (
    Advance,
    Array,
    Axes,
    FusedStage,
    OfEachSample,
    PassesThrough,
    ResultGrid,
    Settling,
    averaging_time,
    filter_time,
    fusion_of,
    one_for_each,
    settling_of,
    without_samples_of,
)

if TYPE_CHECKING:
    import mlx.core as mx

# --------------------------------------------------------------------------------------------------- without a state


class FunctionOfData(OfEachSample[object]):
    """A transformer whose data are a function of its input alone, which may write to NumPy arrays."""

    def __init__(self, transformer: object, message: AxisArray, function: Callable[[Array], Array]) -> None:
        super().__init__(transformer, message)
        self._function = function

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        return self._function(x), arrays


@fusion_of(AbsTransformer)
def fuse_abs(transformer: AbsTransformer, message: AxisArray) -> FusedStage:
    """The absolute value."""
    return FunctionOfData(
        transformer,
        message,
        lambda x: np.abs(x, out=x) if isinstance(x, np.ndarray) else get_namespace(x).abs(x),
    )


@fusion_of(ClipTransformer)
def fuse_clip(transformer: ClipTransformer, message: AxisArray) -> FusedStage:
    """The value between two bounds."""
    bounds = transformer.settings.min, transformer.settings.max
    return FunctionOfData(
        transformer,
        message,
        lambda x: np.clip(x, *bounds, out=x) if isinstance(x, np.ndarray) else get_namespace(x).clip(x, *bounds),
    )


@fusion_of(LogTransformer)
def fuse_log(transformer: LogTransformer, message: AxisArray) -> FusedStage:
    """The logarithm to any base."""
    import mlx.core as mx

    from ..kernels.cpu.loops import logarithm

    base, clips = transformer.settings.base, transformer.settings.clip_zero
    least = np.finfo(np.float32).smallest_normal if clips else np.float32(-np.inf)
    # By MLX's own logarithm, as the transformer has it.
    divisor = np.float32(np.array(mx.log(mx.array(base))))

    def apply(x: Array) -> Array:
        if isinstance(x, np.ndarray):
            logarithm(x.reshape(-1), least, divisor)
            return x
        xp = get_namespace(x)
        quotient: Array = xp.log(xp.clip(x, float(least), None) if clips else x) / xp.log(base)
        return quotient

    return FunctionOfData(transformer, message, apply)


fusion_of(PowTransformer)(FusedPow)
fusion_of(sigproc.CommonRereferenceTransformer)(fuse_common_rereference)


@without_samples_of(sigproc.CommonRereferenceTransformer)
def reference_without_samples(
    transformer: sigproc.CommonRereferenceTransformer, message: AxisArray
) -> AxisArray | None:
    """No samples, in place of an error of MLX's where there are medians to be written."""
    if transformer.settings.mode != "median" or not is_mlx_array(message.data):
        return None
    # Integers become floats, as with samples.
    return replace(message, data=message.data * 1.0)


fusion_of(AffineTransformTransformer)(fuse_affine)

_ADDED = {AggregationFunction.MEAN, AggregationFunction.SUM}

_REDUCED = {AggregationFunction.MEAN, AggregationFunction.SUM, AggregationFunction.MIN, AggregationFunction.MAX}


class FusedAggregate(OfEachSample[AggregateTransformer]):
    """Reduces another dimension than that of the stream."""

    def __init__(self, transformer: AggregateTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self.reduced = message.get_axis_idx(transformer.settings.axis)

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        return {name: axis for name, axis in axes.items() if name != self.transformer.settings.axis}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        return getattr(x, self.transformer.settings.operation.value)(axis=self.reduced), arrays


@fusion_of(AggregateTransformer)
def fuse_aggregate(transformer: AggregateTransformer, message: AxisArray) -> FusedStage | None:
    """Mean, sum, least or largest along another dimension than that of the stream."""
    stage = FusedAggregate(transformer, message)
    return stage if transformer.settings.operation in _REDUCED and stage.reduced != stage.axis else None


# ------------------------------------------------------------------------------ fewer samples: bins, and every n-th one
#
# Both count samples from message to message. Where a bin or the next sample begins in a message is a number on the
# device, and not a part of the compiled function: otherwise each length would mean as many functions as it has phases.

BinCounts: TypeAlias = tuple[int, int]
"""The bins that are done, and the samples of the open one."""

Floats: TypeAlias = npt.NDArray[np.float32]

ArrayT = TypeVar("ArrayT", npt.NDArray[np.float32], "mx.array")


class FusedBins(FusedStage[BinnedAggregateTransformer]):
    """Bins of the stream dimension, where it is the first.

    Counts: the bins that are done, and the samples of the open one. Arrays: room for the samples of an open bin, and
    their number. On the CPU they are the first ones in it, so that more can be written behind them. On a GPU the room
    has the last samples of the stream, the open ones at its end: where they begin is then needed only when a bin
    closes. Variant: the ends of the bins that close, counted from the beginning of the open bin, and whether nothing is
    open before and after.
    """

    def __init__(self, transformer: BinnedAggregateTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        schedule = schedule_of(transformer)
        # Of a bin, in samples, which may be a fraction; and in seconds.
        self._length, self._bin_gain = schedule.spb, schedule.output_gain
        self._room = math.ceil(schedule.spb) + 1
        self._others = message.data.shape[1:]
        self._operations = transformer._operations
        self._is_multiple = isinstance(transformer.settings.operation, tuple)
        self._uses_gpu, self._is_one_column = uses_gpu(), math.prod(self._others) == 1
        from ..kernels.cpu.loops import bin_means

        self._bin_means = bin_means

    def load(self) -> tuple[tuple[mx.array, ...], BinCounts]:
        import mlx.core as mx

        state = self.transformer.state
        n_open = 0 if state.carry is None else state.carry.shape[0]
        room = mx.zeros((self._room - n_open, *self._others))
        if state.carry is not None:
            # Of NumPy, where what came before was.
            carry = mx.array(state.carry).astype(mx.float32)
            room = mx.concatenate([room, carry] if self._uses_gpu else [carry, room])
        n_open_on_device = mx.array([n_open], mx.int32)
        mx.eval(room, n_open_on_device)
        return (room, n_open_on_device), (schedule_of(self.transformer).n_bins_done, n_open)

    def store(self, arrays: tuple[mx.array, ...], counts: BinCounts) -> None:
        state, schedule = self.transformer.state, schedule_of(self.transformer)
        n_done, n_open = counts
        schedule.n_bins_done, schedule.carry_count = n_done, n_open
        # Sigproc has none before the first sample, and none right after a bin.
        (room, _), start = arrays, self._room - n_open if self._uses_gpu else 0
        state.carry = room[start : start + n_open] if n_open else None

    def advance(self, n_samples: int, counts: BinCounts) -> Advance:
        # As :class:`BinSchedule` does, which takes NumPy and ten times as long for the few bins of a message.
        n_done, n_open = counts
        length, work = self._length, n_open + n_samples
        ends: list[int] = []
        begin = int(n_done * length)
        while (end := int((n_done + len(ends) + 1) * length) - begin) <= work:
            ends.append(end)
        n_left = work - ends[-1] if ends else work
        variant = tuple(ends), n_open == 0 and n_left == 0 and bool(ends)
        return Advance(variant, len(ends), (n_done + len(ends), n_left))

    def relabel(self, axes: Axes, n_samples: int, counts: BinCounts) -> Axes:
        # A chain fuses messages with a regular axis only.
        axis, gain = axes[self.dim], self._bin_gain
        assert isinstance(axis, LinearAxis)
        n_done, n_open = counts
        offset = axis.offset - (int(n_done * self._length) + n_open) * axis.gain + n_done * gain
        axes = {**axes, self.dim: LinearAxis(axis.unit, gain, offset)}
        if self._is_multiple:
            metric_axis = self.transformer.state.metric_axis
            assert metric_axis is not None
            axes[self.transformer.settings.newaxis] = metric_axis
        return axes

    def apply(
        self, x: Array, arrays: tuple[Array, ...], variant: tuple[tuple[int, ...], bool]
    ) -> tuple[Array, tuple[Array, ...]]:
        ends, is_aligned = variant
        room, n_open = arrays
        if isinstance(x, np.ndarray):
            assert isinstance(room, np.ndarray) and isinstance(n_open, np.ndarray)
            return self._on_host(x, room, n_open, ends, is_aligned)
        assert is_mlx_array(room) and is_mlx_array(n_open)
        return self._on_device(x, room, n_open, ends, is_aligned)

    def _on_host(
        self, x: Floats, room: Floats, n_open: npt.NDArray, ends: tuple[int, ...], is_aligned: bool
    ) -> tuple[Floats, tuple[npt.NDArray, ...]]:
        if is_aligned:
            return self._reduced_on_host(x, ends), (room, n_open)
        first = int(n_open[0])
        after = first + len(x)
        if not ends:
            # Behind what the state holds, so that the state before this message is as it was.
            room[first:after] = x
            return x[:0], (room, np.array([after], np.int32))
        if after <= len(room):
            room[first:after] = x
            work = room[:after]
        else:
            work = np.concatenate([room[:first], x])
        y = self._reduced_on_host(work, ends)
        n_left = after - ends[-1]
        if n_left:
            room = np.empty_like(room)
            room[:n_left] = work[ends[-1] :]
        return y, (room, np.array([n_left], np.int32))

    def _reduced_on_host(self, work: Floats, ends: tuple[int, ...]) -> Floats:
        results: list[Floats] = []
        for operation in self._operations:
            if self._is_one_column and operation in _ADDED:
                import mlx.core as mx

                # MLX adds up what lies side by side in an order of its own.
                y = np.asarray(self._reduced(mx.array(work), ends, operation, mx))
            elif operation is AggregationFunction.MEAN:
                y = np.empty((len(ends), *self._others), np.float32)
                self._bin_means(work.reshape(len(work), -1), np.array(ends), y.reshape(len(ends), -1))
            else:
                y = self._reduced(work, ends, operation, np)
            results.append(y)
        return np.stack(results, axis=-1) if self._is_multiple else results[0]

    def _on_device(
        self, x: mx.array, room: mx.array, n_open: mx.array, ends: tuple[int, ...], is_aligned: bool
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        import mlx.core as mx

        n_samples, arrays = x.shape[0], (room, n_open)
        if is_aligned:
            work = x
        elif not ends:
            return x[:0], (mx.concatenate([room[n_samples:], x]), n_open + n_samples)
        else:
            both, last = mx.concatenate([room, x]), ends[-1]
            # By their numbers and not by ``mx.slice``: in MLX up to 0.32 a start that is on the device can lose a fence
            # on Metal. What is compiled ahead runs with fewer open samples than there will be.
            rows = mx.minimum((self._room - n_open) + mx.array(np.arange(last, dtype=np.int32)), both.shape[0] - 1)
            work = mx.take(both, rows, axis=0)
            arrays = both[n_samples:], n_open + (n_samples - last)
        results = [self._reduced(work, ends, operation, mx) for operation in self._operations]
        return (mx.stack(results, axis=-1) if self._is_multiple else results[0]), arrays

    def _reduced(self, work: ArrayT, ends: tuple[int, ...], operation: AggregationFunction, xp: ModuleType) -> ArrayT:
        bins = list(zip((0, *ends), ends, strict=False))
        reduce, length = getattr(xp, operation.value), ends[0]
        if len(bins) == 1:
            return reduce(work[:length], axis=0, keepdims=True)
        if all(end - start == length for start, end in bins):
            return reduce(work[: ends[-1]].reshape(len(ends), length, *self._others), axis=1)
        return xp.stack([reduce(work[start:end], axis=0) for start, end in bins], axis=0)


def schedule_of(transformer: BinnedAggregateTransformer) -> BinSchedule:
    """The bins of a transformer that has run a message."""
    schedule = transformer.state.schedule
    assert isinstance(schedule, BinSchedule)
    return schedule


@fusion_of(BinnedAggregateTransformer)
def fuse_bins(transformer: BinnedAggregateTransformer, message: AxisArray) -> FusedStage | None:
    """Bins of mean, sum, least and largest, of one sample or more, where time is first."""
    settings = transformer.settings
    if settings.passthrough:
        return PassesThrough(transformer, message)
    operations = settings.operation if isinstance(settings.operation, tuple) else (settings.operation,)
    # A bin shorter than a sample may be empty.
    if not _REDUCED.issuperset(operations) or schedule_of(transformer).spb < 1.0:
        return None
    stage = FusedBins(transformer, message)
    return stage if stage.axis == 0 and transformer.state.axis == stage.dim else None


class FusedDownsample(FusedStage[DownsampleTransformer]):
    """Every n-th sample. Count: that of ezmsg-sigproc. Array: the place of the first sample in the next message."""

    def load(self) -> tuple[tuple[mx.array, ...], int]:
        import mlx.core as mx

        index = self.transformer.state.s_idx
        first = mx.array(-index % self.transformer.state.q, mx.int32)
        mx.eval(first)
        return (first,), index

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        self.transformer.state.s_idx = counts

    def advance(self, n_samples: int, counts: int) -> Advance:
        q = self.transformer.state.q
        n_kept = max(-(-(n_samples - -counts % q) // q), 0)
        if n_samples > 0:
            counts = (counts + n_samples - 1) % q + 1
        return Advance((n_samples, n_kept), n_kept, counts)

    def relabel(self, axes: Axes, n_samples: int, counts: int) -> Axes:
        q, axis = self.transformer.state.q, axes[self.dim]
        assert isinstance(axis, LinearAxis)
        first = -counts % q
        offset = axis.offset + axis.gain * (first if first < n_samples else 0)
        return {**axes, self.dim: LinearAxis(axis.unit, axis.gain * q, offset)}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: tuple[int, int]) -> tuple[Array, tuple[Array, ...]]:
        n_samples, n_kept = variant
        (first,), q = arrays, self.transformer.state.q
        if isinstance(x, np.ndarray):
            start = int(first)
            kept = x[(slice(None),) * self.axis + (slice(start, start + n_kept * q, q),)]
            return np.ascontiguousarray(kept), (np.array((start - n_samples) % q, np.int32),)
        import mlx.core as mx

        assert is_mlx_array(first)
        rows = first + mx.arange(n_kept, dtype=mx.int32) * q
        return mx.take(x, rows, axis=self.axis), ((first - n_samples) % q,)


@fusion_of(DownsampleTransformer)
def fuse_downsample(transformer: DownsampleTransformer, message: AxisArray) -> FusedStage | None:
    """Every n-th sample of the stream dimension."""
    stage = FusedDownsample(transformer, message)
    return stage if transformer.state.axis == stage.dim else None


# ----------------------------------------------------------------------------------------------- how long they remember


def _designed_time(stage: FilterByDesignTransformer, tolerance: float, gain: float) -> float:
    design = stage.get_design_function()
    if design is None or not getattr(stage.settings, "order", 1):
        return 0.0
    coefs = design(1.0 / gain)
    return filter_time(coefs, "ba" if isinstance(coefs, tuple) else "sos", tolerance, gain)


def _average_time(stage: EWMATransformer | AdaptiveStandardScalerTransformer, tolerance: float, gain: float) -> float:
    return averaging_time(stage.settings.time_constant, tolerance)


def _filter_time(stage: FilterTransformer, tolerance: float, gain: float) -> float:
    return filter_time(stage.settings.coefs, stage.settings.coef_type, tolerance, gain)


_TIMES: dict[type, Settling] = {
    # Their states hold what follows from the shape of a message.
    AffineTransformTransformer: lambda stage, tolerance, gain: 0.0,
    sigproc.CommonRereferenceTransformer: lambda stage, tolerance, gain: 0.0,
    RangedAggregateTransformer: lambda stage, tolerance, gain: 0.0,
    SlicerTransformer: lambda stage, tolerance, gain: 0.0,
    SpectrumTransformer: lambda stage, tolerance, gain: 0.0,
    TransposeTransformer: lambda stage, tolerance, gain: 0.0,
    DiffTransformer: lambda stage, tolerance, gain: gain,
    AdaptiveStandardScalerTransformer: _average_time,
    DetrendTransformer: _average_time,
    EWMATransformer: _average_time,
    FilterTransformer: _filter_time,
    ButterworthFilterTransformer: _designed_time,
    ChebyshevFilterTransformer: _designed_time,
    FIRFilterTransformer: _designed_time,
    KaiserFilterTransformer: _designed_time,
}
for _kind, _time in _TIMES.items():
    settling_of(_kind, _time)


settling_of(BinnedAggregateTransformer, bins_remember, grid_of_bins)


def _every(stage: DownsampleTransformer, gain: float) -> int:
    settings = stage.settings
    if settings.factor is not None:
        return max(settings.factor, 1)
    return 1 if settings.target_rate is None else max(int(1 / (gain * settings.target_rate)), 1)


def _downsampled_grid(stage: DownsampleTransformer, gain: float) -> ResultGrid:
    every = _every(stage, gain)
    return ResultGrid(gain * every, lambda n_samples: -(-n_samples // every), lambda number: number * every)


settling_of(DownsampleTransformer, lambda stage, tolerance, gain: gain * _every(stage, gain), _downsampled_grid)


def _window_time(stage: WindowTransformer, tolerance: float, gain: float) -> float:
    settings = stage.settings
    if settings.window_dur is None:
        return 0.0
    if settings.window_shift is None or settings.zero_pad_until not in ("none", "shift"):
        # Where the windows lie follows from the lengths of messages.
        return math.inf
    if settings.window_shift > settings.window_dur or stage.is_batcher:
        return math.inf
    return settings.window_dur + gain


def _window_grid(stage: WindowTransformer, gain: float) -> ResultGrid:
    settings = stage.settings
    if settings.window_dur is None or settings.window_shift is None:
        return one_for_each(gain)
    rate = 1.0 / gain
    length, shift = int(settings.window_dur * rate), max(int(settings.window_shift * rate), 1)
    n_first = length if settings.zero_pad_until == "none" else shift

    def results_after(n_samples: int) -> int:
        return max((n_samples - n_first) // shift + 1, 0)

    return ResultGrid(gain * shift, results_after, lambda number: number * shift)


settling_of(WindowTransformer, _window_time, _window_grid)
