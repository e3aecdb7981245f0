"""Functions that give fewer samples than they take: bins, and every n-th sample.

Both count samples from message to message. Where a bin or the next sample begins in a message is a number on the
device, and not a part of the compiled function: otherwise each length would mean as many functions as it has phases.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer, BinSchedule
from ezmsg.sigproc.downsample import DownsampleTransformer
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, LinearAxis

from ...stream.device import uses_gpu
from ...stream.fusible import Advance, Array, Axes, FusedStage, fusion_of
from .loops import bin_means

if TYPE_CHECKING:
    import mlx.core as mx

_REDUCED = {AggregationFunction.MEAN, AggregationFunction.SUM, AggregationFunction.MIN, AggregationFunction.MAX}

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
        schedule = _schedule_of(transformer)
        # Of a bin, in samples, which may be a fraction; and in seconds.
        self._length, self._gain = schedule.spb, schedule.output_gain
        self._room = math.ceil(schedule.spb) + 1
        self._others = message.data.shape[1:]
        self._operations = transformer._operations
        self._is_multiple = isinstance(transformer.settings.operation, tuple)
        self._uses_gpu = uses_gpu()

    def load(self) -> tuple[tuple[mx.array, ...], BinCounts]:
        """See :class:`FusedStage`."""
        import mlx.core as mx

        state = self.transformer.state
        n_open = 0 if state.carry is None else state.carry.shape[0]
        room = mx.zeros((self._room - n_open, *self._others))
        if state.carry is not None:
            room = mx.concatenate([room, state.carry] if self._uses_gpu else [state.carry, room])
        n_open_on_device = mx.array([n_open], mx.int32)
        mx.eval(room, n_open_on_device)
        return (room, n_open_on_device), (_schedule_of(self.transformer).n_bins_done, n_open)

    def store(self, arrays: tuple[mx.array, ...], counts: BinCounts) -> None:
        """See :class:`FusedStage`."""
        state, schedule = self.transformer.state, _schedule_of(self.transformer)
        n_done, n_open = counts
        schedule.n_bins_done, schedule.carry_count = n_done, n_open
        # Sigproc has none before the first sample, and none right after a bin.
        (room, _), start = arrays, self._room - n_open if self._uses_gpu else 0
        state.carry = room[start : start + n_open] if n_open else None

    def advance(self, n_samples: int, counts: BinCounts) -> Advance:
        """See :class:`FusedStage`."""
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
        """See :class:`FusedStage`."""
        # A chain fuses messages with a regular axis only.
        axis, gain = cast(LinearAxis, axes[self.dim]), self._gain
        n_done, n_open = counts
        offset = axis.offset - (int(n_done * self._length) + n_open) * axis.gain + n_done * gain
        axes = {**axes, self.dim: LinearAxis(axis.unit, gain, offset)}
        if self._is_multiple:
            axes[self.transformer.settings.newaxis] = cast(AxisBase, self.transformer.state.metric_axis)
        return axes

    def apply(
        self, x: Array, arrays: tuple[Array, ...], variant: tuple[tuple[int, ...], bool]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        ends, is_aligned = variant
        if isinstance(x, np.ndarray):
            return self._on_host(x, cast("tuple[npt.NDArray, ...]", arrays), ends, is_aligned)
        return self._on_device(x, cast("tuple[mx.array, ...]", arrays), ends, is_aligned)

    def _on_host(
        self, x: Floats, arrays: tuple[npt.NDArray, ...], ends: tuple[int, ...], is_aligned: bool
    ) -> tuple[Floats, tuple[npt.NDArray, ...]]:
        room, n_open = arrays
        if is_aligned:
            return self._reduced_on_host(x, ends), arrays
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
            if operation is AggregationFunction.MEAN:
                y = np.empty((len(ends), *self._others), np.float32)
                bin_means(work.reshape(len(work), -1), np.array(ends), y.reshape(len(ends), -1))
            else:
                y = self._reduced(work, ends, operation, np)
            results.append(y)
        return np.stack(results, axis=-1) if self._is_multiple else results[0]

    def _on_device(
        self, x: mx.array, arrays: tuple[mx.array, ...], ends: tuple[int, ...], is_aligned: bool
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        import mlx.core as mx

        room, n_open = arrays
        n_samples = x.shape[0]
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


def _schedule_of(transformer: BinnedAggregateTransformer) -> BinSchedule:
    """The bins of a transformer that has run a message."""
    return cast(BinSchedule, transformer.state.schedule)


@fusion_of(BinnedAggregateTransformer)
def fuse_bins(transformer: BinnedAggregateTransformer, message: AxisArray) -> FusedStage | None:
    """Bins of mean, sum, least and largest, of one sample or more."""
    settings = transformer.settings
    operations = settings.operation if isinstance(settings.operation, tuple) else (settings.operation,)
    stage = FusedBins(transformer, message)
    # A bin shorter than a sample may be empty.
    is_dense = _schedule_of(transformer).spb >= 1.0
    if settings.passthrough or not is_dense or not _REDUCED.issuperset(operations):
        return None
    return stage if stage.axis == 0 and transformer.state.axis == stage.dim else None


class FusedDownsample(FusedStage[DownsampleTransformer]):
    """Every n-th sample. Count: that of ezmsg-sigproc. Array: the place of the first sample in the next message."""

    def load(self) -> tuple[tuple[mx.array, ...], int]:
        """See :class:`FusedStage`."""
        import mlx.core as mx

        index = self.transformer.state.s_idx
        first = mx.array(-index % self.transformer.state.q, mx.int32)
        mx.eval(first)
        return (first,), index

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`FusedStage`."""
        self.transformer.state.s_idx = counts

    def advance(self, n_samples: int, counts: int) -> Advance:
        """See :class:`FusedStage`."""
        q = self.transformer.state.q
        n_kept = max(-(-(n_samples - -counts % q) // q), 0)
        if n_samples > 0:
            counts = (counts + n_samples - 1) % q + 1
        return Advance((n_samples, n_kept), n_kept, counts)

    def relabel(self, axes: Axes, n_samples: int, counts: int) -> Axes:
        """See :class:`FusedStage`."""
        q, axis = self.transformer.state.q, cast(LinearAxis, axes[self.dim])
        first = -counts % q
        offset = axis.offset + axis.gain * (first if first < n_samples else 0)
        return {**axes, self.dim: LinearAxis(axis.unit, axis.gain * q, offset)}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: tuple[int, int]) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        n_samples, n_kept = variant
        (first,), q = arrays, self.transformer.state.q
        if isinstance(x, np.ndarray):
            start = int(first)
            kept = x[(slice(None),) * self.axis + (slice(start, start + n_kept * q, q),)]
            return np.ascontiguousarray(kept), (np.array((start - n_samples) % q, np.int32),)
        import mlx.core as mx

        rows = cast(mx.array, first) + mx.arange(n_kept, dtype=mx.int32) * q
        return mx.take(x, rows, axis=self.axis), ((first - n_samples) % q,)


@fusion_of(DownsampleTransformer)
def fuse_downsample(transformer: DownsampleTransformer, message: AxisArray) -> FusedStage | None:
    """Every n-th sample of the stream dimension."""
    stage = FusedDownsample(transformer, message)
    return stage if transformer.state.axis == stage.dim else None
