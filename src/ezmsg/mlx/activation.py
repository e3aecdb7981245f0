"""Activation functions of each sample, on every MLX backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import ezmsg.sigproc.activation as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import as_float32, is_mlx_array
from .stream.device import uses_gpu
from .stream.fusible import Array, FusedStage, OfEachSample
from .stream.unit import TakesMessages, TransformerTakesSettings, UnitTakesSettings, one_of

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "an activation function"

Samples: TypeAlias = npt.NDArray[np.float32]


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
        raise ValueError(f"'function' must be {one_of(sigproc.ActivationFunction.options())}, got {name!r}") from None


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


def _sigmoid_of(x: Samples, y: Samples) -> None:
    # NumPy's exponential takes many numbers at a time, where scipy's functions take one.
    np.negative(x, out=y)
    np.exp(y, out=y)
    y += np.float32(1.0)
    np.reciprocal(y, out=y)


def _logit_of(x: Samples, y: Samples) -> None:
    np.divide(x, np.float32(1.0) - x, out=y)
    np.log(y, out=y)


def _log_expit_of(x: Samples, y: Samples) -> None:
    # Without overflow: log(1 + exp(-x)) is log(1 + exp(x)) - x.
    least = np.minimum(x, np.float32(0.0))
    np.abs(x, out=y)
    np.negative(y, out=y)
    np.exp(y, out=y)
    np.log1p(y, out=y)
    np.subtract(least, y, out=y)


class Function(NamedTuple):
    """One activation function, on either side."""

    on_gpu: Callable[[mx.array], mx.array]
    on_host: Callable[[Samples, Samples], None]
    """Of the first array into the second, which may be the same."""

    def fill(self, x: Samples, y: Samples) -> None:
        """The function of *x* into *y*; infinities on the way are what they are meant to be."""
        with np.errstate(all="ignore"):
            self.on_host(x, y)


_SIGMOID = Function(_sigmoid, _sigmoid_of)

FUNCTIONS = {
    sigproc.ActivationFunction.SIGMOID: _SIGMOID,
    sigproc.ActivationFunction.EXPIT: _SIGMOID,
    sigproc.ActivationFunction.LOGIT: Function(_logit, _logit_of),
    sigproc.ActivationFunction.LOGEXPIT: Function(_log_expit, _log_expit_of),
}
"""Functions for MLX data. ``NONE`` leaves it alone."""


class ActivationTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.ActivationTransformer,
    BaseTransformer[ActivationSettings, AxisArray, AxisArray],
):
    """A function of each sample, as :obj:`ezmsg.sigproc.activation.ActivationTransformer` has it.

    MLX data comes out as float32 MLX data: from NumPy's functions over a view of it on the CPU, and from MLX operations
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
            return replace(message, data=FUNCTIONS[function].on_gpu(x))
        from .kernels.cpu.compiled import computed

        return replace(message, data=computed(np.asarray(x), x.shape, FUNCTIONS[function].fill))

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return (
            None if _function_of(self.settings) is sigproc.ActivationFunction.NONE else FusedActivation(self, message)
        )


class FusedActivation(OfEachSample[ActivationTransformer]):
    """The function of each sample."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        function = FUNCTIONS[_function_of(self.transformer.settings)]
        if isinstance(x, np.ndarray):
            function.fill(x, x)
            return x, arrays
        return function.on_gpu(x), arrays


class Activation(
    UnitTakesSettings, BaseTransformerUnit[ActivationSettings, AxisArray, AxisArray, ActivationTransformer]
):
    """Applies an activation function to each sample; see :obj:`ActivationTransformer`."""

    SETTINGS = ActivationSettings  # type: ignore[assignment]
