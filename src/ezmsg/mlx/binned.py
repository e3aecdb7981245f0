"""Events in bins, as counts or per second, on every MLX backend."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateState, BinnedAggregateTransformer
from ezmsg.sigproc.util.binning import BinSchedule
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from .peak import SparseEvents
from .stream.convert import is_mlx_array
from .stream.device import uses_gpu
from .stream.fusible import Advance, Array, Axes, FusedStage, ResultGrid, one_for_each
from .stream.segments import linear_axis
from .stream.unit import (
    PublishesEach,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_message,
    check_number,
    known,
)

if TYPE_CHECKING:
    import mlx.core as mx
    import sparse


class BinnedEventAggregatorSettings(ez.Settings):
    """Settings for :obj:`BinnedEventAggregatorUnit`: those of ezmsg-event's."""

    bin_duration: float = 0.05
    """Seconds of a bin."""

    scale_output: bool = True
    """Whether counts are divided by ``bin_duration``: events per second."""

    axis: str | None = None
    """The dimension to go along; None: the stream dimension."""

    fractional: bool = True
    """Whether bins last ``bin_duration`` on average, some being a sample longer than others. Otherwise all have
    ``int(bin_duration * sampling rate)`` samples."""

    scale_by_value: bool = False
    """Whether the values of events are added up, and not their number."""

    # What BinnedAggregate asks for besides.
    operation: ClassVar[AggregationFunction] = AggregationFunction.SUM
    newaxis: ClassVar[str] = "metric"
    passthrough: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("bin_duration", self.bin_duration)
        check_fields(self, flags=("scale_output", "fractional", "scale_by_value"), names=("axis",))


class _BeginsAt(BinnedAggregateState):
    """The state of bins that are to begin with another one than the first.

    The schedule is made at the first message, which is then cut by it. From then on this is a state like any other.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        vars(self)["number"] = number

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if isinstance(value, BinSchedule):
            value.n_bins_done = vars(self).pop("number")
            self.__class__ = BinnedAggregateState  # type: ignore[assignment]


def grid_of_bins(stage: BinnedAggregateTransformer, gain: float) -> ResultGrid:
    """Where the results of bins lie; see :mod:`ezmsg.mlx.stream.fusible`."""
    settings = stage.settings
    if settings.passthrough:
        return one_for_each(gain)
    schedule = BinSchedule(bin_duration=settings.bin_duration, fractional=settings.fractional)
    schedule.reset(1.0 / gain)
    spb = schedule.spb

    def results_after(n_samples: int) -> int:
        # As the schedule has it: bin number m ends before sample int((m + 1) * spb).
        number = int((n_samples + 1) / spb) + 1
        while int(number * spb) > n_samples:
            number -= 1
        return number

    def begin(number: int) -> None:
        stage.state = _BeginsAt(number)

    return ResultGrid(schedule.output_gain, results_after, lambda number: int(number * spb), begin)


def bins_remember(stage: BinnedAggregateTransformer, tolerance: float, gain: float) -> float:
    """How long bins remember; see :class:`ezmsg.mlx.stream.fusible.Settles`."""
    return 0.0 if stage.settings.passthrough else stage.settings.bin_duration + gain


class BinnedEventAggregator(
    TransformerTakesSettings,
    BinnedAggregateTransformer,
    BaseStatefulTransformer[BinnedEventAggregatorSettings, AxisArray, AxisArray, BinnedAggregateState],
):
    """Count events in bins of equal duration.

    Takes the settings of ezmsg-event's class of this name and gives its results: MLX data gives MLX data in float32,
    NumPy's and ``sparse.COO`` give NumPy's in float64. The bins are those of ezmsg-sigproc's
    :obj:`~ezmsg.sigproc.binned_aggregate.BinnedAggregate`. An event is what is not 0, as :obj:`ThresholdCrossing` gives
    it, dense or sparse. A message in which no bin ends gives one without samples.

    Raises:
        TypeError: What is given is not a message.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx import BinnedEventAggregator
        >>> from ezmsg.util.messages.axisarray import AxisArray
        >>> count = BinnedEventAggregator(bin_duration=0.002, scale_output=False)
        >>> events = mx.array([[True], [False], [True], [True]])
        >>> count(AxisArray(events, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=1000.0)})).data.tolist()
        [[1.0], [2.0]]
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"scale_output", "scale_by_value"})

    settings: BinnedEventAggregatorSettings  # type: ignore[assignment]

    def __call__(self, message: AxisArray) -> AxisArray:
        """The bins that end in *message*."""
        if type(message) is not AxisArray:
            check_message(message, self)
        return super().__call__(message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return await super().__acall__(message)

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        stage = FusedEventCounts(self, message)
        # A bin shorter than a sample may be empty.
        return stage if stage.length >= 1.0 and stage.axis == 0 and self.state.axis == stage.dim else None

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        return bins_remember(self, tolerance, gain)

    def result_grid(self, gain: float) -> ResultGrid:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return grid_of_bins(self, gain)

    def divisor(self) -> float:
        """Divisor of the counts."""
        return self.settings.bin_duration if self.settings.scale_output else 1.0

    def _process(self, message: AxisArray) -> AxisArray:
        state, axis_of_time = self.state, linear_axis(message.axes, self.state.axis)
        axis, schedule = message.get_axis_idx(state.axis), known(state.schedule)
        n_open, n_samples = schedule.carry_count, message.data.shape[axis]
        step = schedule.advance(n_new=n_samples, in_offset=axis_of_time.offset, gain_in=axis_of_time.gain)
        given: npt.NDArray | mx.array | SparseEvents | sparse.COO = message.data
        data: npt.NDArray | mx.array
        if isinstance(given, np.ndarray) or is_mlx_array(given):
            data = given
        else:
            data = cast("SparseEvents | sparse.COO", given).todense()
        # Where the bins of the message and the rest of it end.
        ends = [0, *(cut - n_open for cut in step.cut_points), n_samples]
        sums: npt.NDArray | mx.array
        if is_mlx_array(data) and uses_gpu():
            # ezmsg-sigproc declares NumPy's only.
            sums, carry = self._on_device(data, ends, axis)
            state.carry = carry
        else:
            sums, state.carry = self._on_host(np.asarray(data), ends, axis)
            if is_mlx_array(data):
                import mlx.core as mx

                sums = mx.array(sums.astype(np.float32))
        return replace(message, data=sums, axes=self._out_axes(message, step))

    def _on_host(self, data: npt.NDArray, ends: list[int], axis: int) -> tuple[npt.NDArray, npt.NDArray]:
        """The results, and what is in the bin that is open: all that sigproc's carry is asked for here."""
        marks = data if self.settings.scale_by_value or data.dtype == np.bool_ else data != 0
        lead = (slice(None),) * axis
        sums = [
            marks[(*lead, slice(start, stop))].sum(axis=axis, dtype=np.float64, keepdims=True)
            for start, stop in itertools.pairwise(ends)
        ]
        if self.state.carry is not None:
            sums[0] += np.asarray(self.state.carry).sum(axis=axis, dtype=np.float64, keepdims=True)
        if len(sums) == 1:
            return np.empty_like(sums[0], shape=(*data.shape[:axis], 0, *data.shape[axis + 1 :])), sums[0]
        done = np.concatenate(sums[:-1], axis=axis)
        return (done if self.divisor() == 1.0 else done / self.divisor()), sums[-1]

    def _on_device(self, data: mx.array, ends: list[int], axis: int) -> tuple[mx.array, mx.array]:
        import mlx.core as mx

        marks = data if self.settings.scale_by_value else data != 0
        lead, one = (slice(None),) * axis, (*data.shape[:axis], 1, *data.shape[axis + 1 :])
        # The sum of no samples does not always end in MLX.
        sums = [
            mx.sum(marks[(*lead, slice(start, stop))].astype(mx.float32), axis=axis, keepdims=True)
            if start < stop
            else mx.zeros(one)
            for start, stop in itertools.pairwise(ends)
        ]
        carry: npt.NDArray | mx.array | None = self.state.carry
        if carry is not None:
            # As a message of NumPy's has left it.
            carry = mx.array(carry.astype(np.float32)) if isinstance(carry, np.ndarray) else carry
            sums[0] = sums[0] + mx.sum(carry, axis=axis, keepdims=True)
        # Not lazy, or it would hold the messages of a bin.
        mx.async_eval(sums[-1])
        if len(sums) == 1:
            return mx.zeros((*data.shape[:axis], 0, *data.shape[axis + 1 :])), sums[0]
        done = mx.concatenate(sums[:-1], axis=axis)
        return (done if self.divisor() == 1.0 else done / self.divisor()), sums[-1]


class BinnedEventAggregatorUnit(
    UnitTakesSettings, PublishesEach[BinnedEventAggregatorSettings, AxisArray, BinnedEventAggregator]
):
    """Counts events in bins; see :obj:`BinnedEventAggregator`. Publishes nothing where no bin ends."""

    SETTINGS = BinnedEventAggregatorSettings  # type: ignore[assignment]

    def _results(self, message: AxisArray, output: AxisArray) -> list[AxisArray]:
        return with_samples(self.processor, output)


def with_samples(counter: BinnedEventAggregator, output: AxisArray) -> list[AxisArray]:
    """The messages that a unit publishes of a result."""
    return [output] if output.data.shape[output.get_axis_idx(counter.state.axis)] else []


BinCounts: TypeAlias = tuple[int, int]
"""The bins that are done, and the samples of the open one."""

MOST_BINS = 8
"""Bins of a message that are counted as part of a compiled function; more are left to the transformer."""


class FusedEventCounts(FusedStage[BinnedEventAggregator]):
    """Counts: the bins that are done, and the samples of the open one.

    Arrays: what the open bin has so far, and the number of its samples. Variant: the ends of the bins that close,
    counted from the beginning of the open bin.
    """

    takes = frozenset({"bool", "float32"})

    def __init__(self, transformer: BinnedEventAggregator, message: AxisArray) -> None:
        super().__init__(transformer, message)
        schedule = known(transformer.state.schedule)
        self.length, self._gain = schedule.spb, schedule.output_gain
        self._others = message.data.shape[1:]
        self._by_value, self._divisor = transformer.settings.scale_by_value, transformer.divisor()
        self._uses_gpu = uses_gpu()

    def load(self) -> tuple[tuple[mx.array, ...], BinCounts]:
        """See :class:`FusedStage`."""
        import mlx.core as mx

        state, schedule = self.transformer.state, known(self.transformer.state.schedule)
        carry = np.zeros((1, *self._others)) if state.carry is None else np.array(state.carry)
        so_far = mx.array(carry.sum(axis=0, keepdims=True).astype(np.float32))
        n_open = mx.array([schedule.carry_count], mx.int32)
        mx.eval(so_far, n_open)
        return (so_far, n_open), (schedule.n_bins_done, schedule.carry_count)

    def store(self, arrays: tuple[mx.array, ...], counts: BinCounts) -> None:
        """See :class:`FusedStage`."""
        state, schedule = self.transformer.state, known(self.transformer.state.schedule)
        schedule.n_bins_done, schedule.carry_count = counts
        state.carry = arrays[0]

    def advance(self, n_samples: int, counts: BinCounts) -> Advance | None:
        """See :class:`FusedStage`."""
        n_done, n_open = counts
        work, begin = n_open + n_samples, int(n_done * self.length)
        ends: list[int] = []
        while (end := int((n_done + len(ends) + 1) * self.length) - begin) <= work:
            ends.append(end)
        if self._uses_gpu and len(ends) > MOST_BINS:
            return None
        return Advance(tuple(ends), len(ends), (n_done + len(ends), work - ends[-1] if ends else work))

    def relabel(self, axes: Axes, n_samples: int, counts: BinCounts) -> Axes:
        """See :class:`FusedStage`."""
        axis, (n_done, n_open) = linear_axis(axes, self.dim), counts
        offset = axis.offset - (int(n_done * self.length) + n_open) * axis.gain + n_done * self._gain
        return {**axes, self.dim: LinearAxis(axis.unit, self._gain, offset)}

    def apply(self, x: Array, arrays: tuple[Array, ...], ends: tuple[int, ...]) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        if isinstance(x, np.ndarray):
            return self._on_host(x, cast("tuple[npt.NDArray, ...]", arrays), ends)
        return self._on_device(x, cast("tuple[mx.array, ...]", arrays), ends)

    def _on_host(
        self, x: npt.NDArray, arrays: tuple[npt.NDArray, ...], ends: tuple[int, ...]
    ) -> tuple[npt.NDArray, tuple[npt.NDArray, ...]]:
        so_far, n_open = arrays
        if not self._by_value and x.dtype != np.bool_:
            x = x != 0
        if not ends:
            return x[:0], (so_far + x.sum(axis=0, dtype=np.float32, keepdims=True), n_open + np.int32(len(x)))
        places = [end - int(n_open[0]) for end in ends]
        sums = [x[a:b].sum(axis=0, dtype=np.float32) for a, b in zip((0, *places), (*places, None), strict=True)]
        sums[0] = sums[0] + so_far[0]
        y = np.stack(sums[:-1])
        if self._divisor != 1.0:
            y /= np.float32(self._divisor)
        return y, (sums[-1][None], np.array([len(x) - places[-1]], np.int32))

    def _on_device(
        self, x: mx.array, arrays: tuple[mx.array, ...], ends: tuple[int, ...]
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        import mlx.core as mx

        (so_far, n_open), n_samples = arrays, x.shape[0]
        marks = x if self._by_value else (x != 0).astype(mx.float32)
        if not ends:
            return marks[:0], (so_far + mx.sum(marks, axis=0, keepdims=True), n_open + n_samples)
        place = (mx.arange(n_samples, dtype=mx.int32) + n_open).reshape(-1, *[1] * (x.ndim - 1))
        sums = []
        for start, stop in zip((None, *ends), (*ends, None), strict=True):
            is_inside = (place >= (start or 0)) if stop is None else (place < stop) & (place >= (start or 0))
            sums.append(mx.sum(mx.where(is_inside, marks, 0.0), axis=0, keepdims=True))
        sums[0] = sums[0] + so_far
        y = mx.concatenate(sums[:-1])
        return (y if self._divisor == 1.0 else y / self._divisor), (sums[-1], n_open + (n_samples - ends[-1]))
