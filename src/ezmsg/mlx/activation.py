"""Activation functions of each sample, on every MLX backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ezmsg.sigproc.activation as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import as_float32, is_mlx_array
from .stream.device import uses_gpu
from .stream.fusible import Array, FusedStage
from .stream.unit import TakesMessages, TransformerTakesSettings, UnitTakesSettings

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "an activation function"


def _function_of(settings: sigproc.ActivationSettings) -> sigproc.ActivationFunction:
    """The function that *settings* name; a text counts in capitals, too.

    Raises:
        ValueError: There is none of that name.
    """
    name = settings.function
    if isinstance(name, sigproc.ActivationFunction):
        return name
    try:
        return sigproc.ActivationFunction(name.lower())
    except (AttributeError, ValueError):
        options = ", ".join(map(repr, sigproc.ActivationFunction.options()))
        raise ValueError(f"'function' must be one of {options}, got {name!r}") from None


class ActivationSettings(sigproc.ActivationSettings):
    """The settings of :obj:`ezmsg.sigproc.activation.Activation`, checked when they are built."""

    def __post_init__(self) -> None:
        _function_of(self)


def _sigmoid(x: mx.array) -> mx.array:
    import mlx.core as mx

    return mx.sigmoid(x)


def _logit(x: mx.array) -> mx.array:
    import mlx.core as mx

    return mx.log(x) - mx.log1p(-x)


def _log_expit(x: mx.array) -> mx.array:
    import mlx.core as mx

    return -mx.logaddexp(mx.zeros_like(x), -x)


_ON_DEVICE: dict[sigproc.ActivationFunction, Callable[[mx.array], mx.array]] = {
    sigproc.ActivationFunction.SIGMOID: _sigmoid,
    sigproc.ActivationFunction.EXPIT: _sigmoid,
    sigproc.ActivationFunction.LOGIT: _logit,
    sigproc.ActivationFunction.LOGEXPIT: _log_expit,
}


class ActivationTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.ActivationTransformer,
    BaseTransformer[ActivationSettings, AxisArray, AxisArray],
):
    """A function of each sample, as :obj:`ezmsg.sigproc.activation.ActivationTransformer` has it.

    MLX data comes out as float32 MLX data: from scipy's functions over a view of it on the CPU, and from MLX operations
    on a GPU. NumPy data is left to ezmsg-sigproc.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: a result is that of one sample."""
        return 0.0

    def _process(self, message: AxisArray) -> AxisArray:
        function = _function_of(self.settings)
        if function is sigproc.ActivationFunction.NONE or not is_mlx_array(message.data):
            return super()._process(message)
        x = as_float32(message.data, _OPERATION)
        if uses_gpu():
            return replace(message, data=_ON_DEVICE[function](x))
        from .kernels.cpu.compiled import computed

        def run(source: npt.NDArray[np.float32], target: npt.NDArray[np.float32]) -> None:
            sigproc.ACTIVATIONS[function](source, out=target)

        return replace(message, data=computed(np.asarray(x), x.shape, run))

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return (
            None if _function_of(self.settings) is sigproc.ActivationFunction.NONE else FusedActivation(self, message)
        )


class FusedActivation(FusedStage[ActivationTransformer]):
    """The function of each sample."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        function = _function_of(self.transformer.settings)
        if isinstance(x, np.ndarray):
            return sigproc.ACTIVATIONS[function](x, out=x), arrays
        return _ON_DEVICE[function](x), arrays


class Activation(
    UnitTakesSettings, BaseTransformerUnit[ActivationSettings, AxisArray, AxisArray, ActivationTransformer]
):
    """Applies an activation function to each sample; see :obj:`ActivationTransformer`."""

    SETTINGS = ActivationSettings  # type: ignore[assignment]
