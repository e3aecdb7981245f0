"""Adaptive z-scores of MLX data, on every MLX backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ezmsg.core as ez
import ezmsg.sigproc.scaler as sigproc
import numpy as np
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    processor_state,
    suppress_axis_deprecation,
)
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .ewma import EWMASettings, EWMAState, EWMATransformer
from .kernels import Path, default_path
from .kernels.scheduling import schedule_after, schedule_before
from .stream.checks import check_message
from .stream.convert import as_float32, is_mlx_array
from .stream.sampling import first_finite_samples
from .stream.settings import TransformerTakesSettings, UnitTakesSettings

if TYPE_CHECKING:
    import mlx.core as mx

RESOLUTION = 2.0**-22
"""Standard deviation, relative to the mean's distance from the first sample, below which a channel counts as constant:
two units in the last place of float32, which is what is left of one that has come to rest there."""

_OPERATION = "scaling"


class AdaptiveStandardScalerSettings(EWMASettings): ...


@processor_state
class StandardizerState(EWMAState):
    pivot: mx.array | None = None
    """First finite sample of each channel, which is subtracted from all."""

    variance: mx.array | None = None
    """State of the average that the variance is, as that of :func:`ezmsg.mlx.ewma.ewma`."""


class StandardizerTransformer(
    EWMATransformer, BaseStatefulTransformer[EWMASettings, AxisArray, AxisArray, StandardizerState]
):
    """z-scores of MLX data, by the mean and variance of the samples so far with the weights of a moving average.

    ``E[x**2] - E[x]**2`` in float32 leaves nothing of a small variance on a large offset. With the weights of the
    average it is the same as the average of ``(x[n] - mean[n]) * (x[n] - mean[n - 1])`` (Welford, Technometrics 4,
    419, 1962), which is ``(x[n] - mean[n])**2 / (1 - share)`` where *share* is that of sample *n* in its mean: *alpha*,
    or *alpha* over the sum of the weights so far. Nothing cancels there, and no variance is negative.
    """

    def _reset_state(self, message: AxisArray) -> None:
        import mlx.core as mx

        super()._reset_state(message)
        state = self._state
        first = first_finite_samples(as_float32(message.data, _OPERATION), state.axis_idx)
        state.pivot = mx.array(first.astype(np.float32))
        state.variance = mx.zeros_like(state.zi)
        mx.eval(state.variance)

    def _process(self, message: AxisArray) -> AxisArray:
        import mlx.core as mx

        state = self._state
        path = default_path()
        is_first = state.n_seen == 0
        data = as_float32(message.data, _OPERATION)
        centred = data - state.pivot
        mean, weights = self._average(centred, path)
        residual = centred - mean
        finite = mx.isfinite(residual)
        variance = self._average_square(residual, weights, finite, path, is_first)
        deviation = mx.sqrt(variance)
        score = mx.where(deviation > RESOLUTION * mx.abs(mean), residual / deviation, 0.0)
        return replace(message, data=mx.where(finite, score, data))

    def _average_square(
        self, residual: mx.array, weights: mx.array | None, finite: mx.array, path: Path, is_first: bool
    ) -> mx.array:
        import mlx.core as mx

        state = self._state
        if weights is None:
            square = mx.square(residual) * (1.0 / (1.0 - state.alpha) if state.alpha < 1.0 else 0.0)
        else:
            # A weight of alpha is the first finite sample, which is the mean.
            others = weights - state.alpha
            square = mx.where(others > 0.5 * state.alpha, mx.square(residual) * (weights / others), 0.0)
        schedule_before(path, state.variance)
        variance, after = self._run_kernel(mx.where(finite, square, math.nan), state.variance, path)
        if self.settings.accumulate:
            schedule_after(path, after, first=is_first)
            state.variance = after
        return variance if weights is None else variance / weights


@processor_state
class AdaptiveStandardScalerState(sigproc.AdaptiveStandardScalerState): ...


class AdaptiveStandardScalerTransformer(
    TransformerTakesSettings,
    sigproc.AdaptiveStandardScalerTransformer,
    BaseStatefulTransformer[AdaptiveStandardScalerSettings, AxisArray, AxisArray, AdaptiveStandardScalerState],
):
    """Subtract the moving average of each channel and divide by the standard deviation around it.

    Takes the settings of :obj:`ezmsg.sigproc.scaler.AdaptiveStandardScalerTransformer` and gives its results, for MLX
    data on every MLX backend: float32 out, MLX in and out. NumPy data is left to ezmsg-sigproc, integers as float64,
    since their squares would overflow.

    A channel that does not vary gives zeros. A sample that is not finite comes out as it is and leaves the statistics
    of its channel where they were (see :func:`ezmsg.mlx.ewma.ewma`); other channels do not notice.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; the message
            has no dimension.
        TypeError: Complex MLX data; what is given is no message.
    """

    @property
    def accumulate(self) -> bool:
        """Whether the statistics take in new samples; may be set at any time."""
        return self.settings.accumulate

    @accumulate.setter
    def accumulate(self, value: bool) -> None:
        with suppress_axis_deprecation():
            self.settings = replace(self.settings, accumulate=value)
            for average in (self._state.samps_ewma, self._state.vars_sq_ewma):
                if average is not None:
                    average.settings = replace(average.settings, accumulate=value)

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        # The rest is looked at by the averages.
        return int(is_mlx_array(message.data))

    def _reset_state(self, message: AxisArray) -> None:
        fields = ("time_constant", "axis", "accumulate", "mlx_metal_chunk_sizes")
        with suppress_axis_deprecation():
            settings = EWMASettings(**{field: getattr(self.settings, field) for field in fields})
        if is_mlx_array(message.data):
            self._state.samps_ewma, self._state.vars_sq_ewma = StandardizerTransformer(settings), None
        else:
            self._state.samps_ewma, self._state.vars_sq_ewma = EWMATransformer(settings), EWMATransformer(settings)

    def _process(self, message: AxisArray) -> AxisArray:
        if is_mlx_array(message.data):
            return self._state.samps_ewma(message)
        if message.data.dtype.kind in "biu":
            message = replace(message, data=message.data.astype(np.float64))
        return super()._process(message)


class AdaptiveStandardScaler(
    UnitTakesSettings,
    BaseTransformerUnit[AdaptiveStandardScalerSettings, AxisArray, AxisArray, AdaptiveStandardScalerTransformer],
):
    """z-scores of each channel by its moving average; see :obj:`AdaptiveStandardScalerTransformer`."""

    SETTINGS = AdaptiveStandardScalerSettings

    INPUT_ACCUMULATE = ez.InputStream(bool)

    @ez.subscriber(INPUT_ACCUMULATE)
    async def on_accumulate(self, accumulate: bool) -> None:
        self.processor.accumulate = accumulate
