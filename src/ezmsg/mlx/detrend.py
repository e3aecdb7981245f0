"""Subtract the exponentially weighted moving average, on every MLX backend."""

from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .ewma import EWMASettings, EWMATransformer
from .stream.convert import as_float32, is_mlx_array
from .stream.unit import UnitTakesSettings


class DetrendTransformer(EWMATransformer):
    """``x - EWMA(x)``: a first-order high-pass of time constant ``time_constant``.

    The counterpart of :obj:`ezmsg.sigproc.detrend.DetrendTransformer`, with its settings.
    """

    def _process(self, message: AxisArray) -> AxisArray:
        means = super()._process(message)
        data = as_float32(message.data, "detrending") if is_mlx_array(message.data) else message.data
        return replace(means, data=data - means.data)


class DetrendUnit(UnitTakesSettings, BaseTransformerUnit[EWMASettings, AxisArray, AxisArray, DetrendTransformer]):
    """Subtracts from each channel its moving average; see :obj:`DetrendTransformer`."""

    SETTINGS = EWMASettings  # type: ignore[assignment]
