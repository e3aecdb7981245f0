"""Element-wise power that takes MLX's own functions where it has them."""

import ezmsg.sigproc.math.pow as sigproc
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.sigproc.math.pow import PowSettings as PowSettings
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .convert import is_mlx_array


class PowTransformer(sigproc.PowTransformer, BaseTransformer[PowSettings, AxisArray, AxisArray]):
    """``x ** exponent``, as :obj:`ezmsg.sigproc.math.pow.PowTransformer` has it.

    Squares of MLX data come from ``mx.square``: on the CPU backend MLX's general power takes 840 us for 300 x 256
    samples, its square 26 us.
    """

    def _process(self, message: AxisArray) -> AxisArray:
        if self.settings.exponent == 2 and is_mlx_array(message.data):
            import mlx.core as mx

            if mx.issubdtype(message.data.dtype, mx.floating):
                return replace(message, data=mx.square(message.data))
        return super()._process(message)


class Pow(BaseTransformerUnit[PowSettings, AxisArray, AxisArray, PowTransformer]):
    SETTINGS = PowSettings
