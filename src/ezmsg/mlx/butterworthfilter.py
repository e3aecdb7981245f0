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
        check_butterworth_fields(self)


def check_butterworth_fields(settings: sigproc.ButterworthFilterSettings) -> None:
    """Check what describes a Butterworth filter.

    Raises:
        ValueError: The order is not an integer of 0 or more, or a corner not a finite frequency > 0.
        TypeError: Another field is not of its type.
    """
    if isinstance(settings.order, bool) or not isinstance(settings.order, numbers.Integral) or settings.order < 0:
        raise ValueError(f"'order' must be an integer of at least 0 (0: no filter), got {settings.order!r}")
    for field in ("cuton", "cutoff"):
        value = getattr(settings, field)
        if value is None:
            continue
        if not is_real(value):
            raise TypeError(f"{field!r} must be None or a finite frequency > 0, got {value!r}")
        if not 0 < as_float(value) < math.inf:
            raise ValueError(f"{field!r} must be None or a finite frequency > 0, got {value!r}")
    check_fields(settings, flags=("wn_hz",))
    check_filter_fields(settings)


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
