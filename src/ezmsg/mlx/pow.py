"""Element-wise power that takes MLX's own functions where it has them."""

from __future__ import annotations

import math

import ezmsg.sigproc.math.pow as sigproc
import numpy as np
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import is_mlx_array
from .stream.fusible import Array, OfEachSample
from .stream.unit import TransformerTakesSettings, UnitTakesSettings, as_float, check_message, is_real


class PowSettings(sigproc.PowSettings):
    """The settings of :obj:`ezmsg.sigproc.math.pow.Pow`, checked when they are built."""

    def __post_init__(self) -> None:
        if not is_real(self.exponent):
            raise TypeError(f"'exponent' must be a finite number, got {self.exponent!r}")
        if not math.isfinite(as_float(self.exponent)):
            raise ValueError(f"'exponent' must be a finite number, got {self.exponent!r}")


class PowTransformer(
    TransformerTakesSettings, sigproc.PowTransformer, BaseTransformer[PowSettings, AxisArray, AxisArray]
):
    """``x ** exponent``, as :obj:`ezmsg.sigproc.math.pow.PowTransformer` has it with an exponent that is a float.

    Integers and booleans become floats whatever the type of the exponent (float64 in NumPy, float32 in MLX), so that
    no power of them wraps, and negative powers are defined.

    Squares of MLX data come from ``mx.square``, which is many times as fast as MLX's general power on the CPU backend.

    Raises:
        TypeError: What is given is not a message.
    """

    def _process(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        # A float of Python's: a NumPy scalar would widen float32 data.
        exponent = float(self.settings.exponent)
        if exponent == 2.0 and is_mlx_array(message.data):
            import mlx.core as mx

            data = message.data
            if not mx.issubdtype(data.dtype, mx.inexact):
                data = data.astype(mx.float32)
            return replace(message, data=mx.square(data))
        if isinstance(message.data, np.ndarray) and message.data.dtype == np.bool_:
            # NumPy before 2.3 gives int8 for the square of booleans.
            return replace(message, data=message.data.astype(np.float64) ** exponent)
        return replace(message, data=message.data**exponent)

    def fuse(self, message: AxisArray) -> FusedPow:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return FusedPow(self, message)


class FusedPow(OfEachSample[sigproc.PowTransformer]):
    """A power as a function of arrays."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        exponent = float(self.transformer.settings.exponent)
        if isinstance(x, np.ndarray):
            return (np.multiply(x, x, out=x) if exponent == 2.0 else np.power(x, exponent, out=x)), arrays
        return (x * x if exponent == 2.0 else x**exponent), arrays


class Pow(UnitTakesSettings, BaseTransformerUnit[PowSettings, AxisArray, AxisArray, PowTransformer]):
    """Raises each sample to a power; see :obj:`PowTransformer`."""

    SETTINGS = PowSettings  # type: ignore[assignment]
