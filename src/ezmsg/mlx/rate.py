"""The rate of events, on every MLX backend."""

from __future__ import annotations

from typing import ClassVar

import ezmsg.core as ez
from ezmsg.baseproc import BaseStatefulTransformer
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateState
from ezmsg.util.messages.axisarray import AxisArray

from .binned import BinnedEventAggregator, with_samples
from .stream.unit import PublishesEach, UnitTakesSettings, check_fields, check_number, known


class EventRateSettings(ez.Settings):
    """Settings for :obj:`EventRate`: those of ezmsg-event's."""

    bin_duration: float = 0.05
    """Seconds of a bin."""

    fractional: bool = True
    """As in :obj:`BinnedEventAggregatorSettings`."""

    axis: ClassVar[str | None] = None
    scale_by_value: ClassVar[bool] = False
    operation: ClassVar[AggregationFunction] = AggregationFunction.SUM
    newaxis: ClassVar[str] = "metric"
    passthrough: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("bin_duration", self.bin_duration)
        check_fields(self, flags=("fractional",))


class Rate(
    BinnedEventAggregator, BaseStatefulTransformer[EventRateSettings, AxisArray, AxisArray, BinnedAggregateState]
):
    """Events per second in bins of equal duration, by the duration that bins have.

    The counterpart of ezmsg-event's class of this name, for the data that :obj:`BinnedEventAggregator` takes. It
    differs from that with ``fractional=False``, where bins may be shorter than ``bin_duration``.
    """

    # As they are there, by what this divides by.
    fuse = BinnedEventAggregator.fuse
    settling_time = BinnedEventAggregator.settling_time
    result_grid = BinnedEventAggregator.result_grid

    def divisor(self) -> float:
        """Divisor of the counts."""
        return known(self.state.schedule).output_gain


class EventRate(UnitTakesSettings, PublishesEach[EventRateSettings, AxisArray, Rate]):
    """Events per second in bins; see :obj:`Rate`. Publishes nothing where no bin ends."""

    SETTINGS = EventRateSettings  # type: ignore[assignment]

    def _results(self, message: AxisArray, output: AxisArray) -> list[AxisArray]:
        return with_samples(self.processor, output)
