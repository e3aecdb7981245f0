"""Butterworth filter in a stream, on every MLX backend."""

import math
import numbers

import ezmsg.sigproc.butterworthfilter as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign
from .scan import normalize_chunk_sizes
from .sosfilt import MAX_CHUNK_SIZE


class ButterworthFilterSettings(sigproc.ButterworthFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.butterworthfilter.ButterworthFilter`, checked when they are built.

    ``coef_type="sos"`` is what MLX data needs to stay on its device; the default, ``"ba"``, goes to scipy and back.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.order, bool) or not isinstance(self.order, numbers.Integral) or self.order < 0:
            raise ValueError(f"order is {self.order!r}; allowed is an integer >= 0 (0: no filter).")
        for field in ("cuton", "cutoff"):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{field} is {value!r}; allowed is None or a finite frequency > 0.")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} is {value!r}; allowed is None or a finite frequency > 0.")
        if self.coef_type not in ("ba", "sos"):
            raise ValueError(f"coef_type is {self.coef_type!r}; allowed are 'ba' and 'sos'.")
        normalize_chunk_sizes(self.mlx_metal_chunk_sizes, MAX_CHUNK_SIZE, name="mlx_metal_chunk_sizes")


class ButterworthFilterTransformer(FilterByDesign[ButterworthFilterSettings], sigproc.ButterworthFilterTransformer):
    """Butterworth filter along the stream dimension; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.butterworthfilter.ButterworthFilterTransformer`, with its settings.
    """


class ButterworthFilter(
    BaseTransformerUnit[ButterworthFilterSettings, AxisArray, AxisArray, ButterworthFilterTransformer]
):
    SETTINGS = ButterworthFilterSettings
