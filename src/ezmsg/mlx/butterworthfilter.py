"""Butterworth filter in a stream, on every MLX backend."""

import math
import numbers

import ezmsg.sigproc.butterworthfilter as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign, check_filter_fields
from .stream.unit import UnitTakesSettings, as_float, check_fields, is_real


class ButterworthFilterSettings(sigproc.ButterworthFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.butterworthfilter.ButterworthFilter`, checked when they are built.

    ``coef_type`` is for other data than MLX arrays, which are filtered by second-order sections in any case. Choose
    ``"sos"`` for slow filters: *b* and *a* of order 4 and 0.5 Hz at 30 kHz are 1e-4 of the peak off in float64.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.order, bool) or not isinstance(self.order, numbers.Integral) or self.order < 0:
            raise ValueError(f"'order' must be an integer of at least 0 (0: no filter), got {self.order!r}")
        for field in ("cuton", "cutoff"):
            value = getattr(self, field)
            if value is None:
                continue
            if not is_real(value):
                raise TypeError(f"{field!r} must be None or a finite frequency > 0, got {value!r}")
            if not 0 < as_float(value) < math.inf:
                raise ValueError(f"{field!r} must be None or a finite frequency > 0, got {value!r}")
        check_fields(self, flags=("wn_hz",))
        check_filter_fields(self)


class ButterworthFilterTransformer(FilterByDesign[ButterworthFilterSettings], sigproc.ButterworthFilterTransformer):
    """Butterworth filter along the stream dimension; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.butterworthfilter.ButterworthFilterTransformer`, with its settings.
    """


class ButterworthFilter(
    UnitTakesSettings,
    BaseTransformerUnit[ButterworthFilterSettings, AxisArray, AxisArray, ButterworthFilterTransformer],
):
    """Butterworth filter along the stream dimension; see :obj:`ButterworthFilterTransformer`."""

    SETTINGS = ButterworthFilterSettings  # type: ignore[assignment]
