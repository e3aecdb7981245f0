"""Subtract the exponentially weighted moving average, on every MLX backend."""

from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .ewma import EWMASettings, EWMATransformer


class DetrendTransformer(EWMATransformer):
    """``x - EWMA(x)``: a first-order high-pass of time constant ``time_constant``.

    The counterpart of :obj:`ezmsg.sigproc.detrend.DetrendTransformer`, with its settings.
    """

    def _process(self, message: AxisArray) -> AxisArray:
        means = super()._process(message)
        return replace(means, data=message.data - means.data)


class DetrendUnit(BaseTransformerUnit[EWMASettings, AxisArray, AxisArray, DetrendTransformer]):
    SETTINGS = EWMASettings
