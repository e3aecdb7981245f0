"""Subtract the exponentially weighted moving average, on every MLX backend."""

from __future__ import annotations

from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .ewma import EWMASettings, EWMATransformer, FusedAverage, fuse_averaging
from .stream.convert import as_float32, is_mlx_array
from .stream.fusible import FusedStage
from .stream.unit import UnitTakesSettings


class DetrendTransformer(EWMATransformer):
    """``x - EWMA(x)``: a first-order high-pass of time constant ``time_constant``.

    The counterpart of :obj:`ezmsg.sigproc.detrend.DetrendTransformer`, with its settings.
    """

    def _process(self, message: AxisArray) -> AxisArray:
        means = super()._process(message)
        data = as_float32(message.data, "detrending") if is_mlx_array(message.data) else message.data
        return replace(means, data=data - means.data)

    settling_time = EWMATransformer.settling_time

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return fuse_averaging(self, message, FusedDetrend)


class FusedDetrend(FusedAverage):
    """The data minus its average, with the state of the average."""

    subtracts = True


class DetrendUnit(UnitTakesSettings, BaseTransformerUnit[EWMASettings, AxisArray, AxisArray, DetrendTransformer]):
    """Subtracts from each channel its moving average; see :obj:`DetrendTransformer`."""

    SETTINGS = EWMASettings  # type: ignore[assignment]
