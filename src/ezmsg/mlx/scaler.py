"""Adaptive z-scores of MLX data, on every MLX backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ezmsg.core as ez
import ezmsg.sigproc.scaler as sigproc
import numpy as np
from ezmsg.baseproc import (
    BaseTransformerUnit,
    processor_state,
    suppress_axis_deprecation,
)
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .ewma import (
    CHUNK_SIZES,
    MAX_CHUNK_SIZE,
    AveragesStream,
    EWMASettings,
    EWMATransformer,
    alpha_of,
    check_alpha,
    pairs_of,
    values_of,
)
from .kernels import Path, check_kernel_path, default_path, in_stream, kernel, recursion
from .scan import normalize_axis, normalize_chunk_sizes
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.fusible import Advance, Array, FusedStage, PassesThrough, averaging_time
from .stream.segments import is_same_rate
from .stream.unit import TransformerTakesSettings, UnitTakesSettings, check_mlx

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "scaling"


def zscore(
    x: mx.array,
    alpha: float,
    zi: mx.array | None = None,
    *,
    axis: int = -1,
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
    path: Path | None = None,
) -> tuple[mx.array, mx.array]:
    """z-scores along one axis, by the mean and variance of the samples so far with the weights of a moving average.

    In one pass, without differences of large numbers::

        share = alpha / w[n]
        mean[n] = mean[n-1] + share * (x[n] - mean[n-1])
        var[n] = (1 - share) * (var[n-1] + share * (x[n] - mean[n-1])**2)
        y[n] = (x[n] - mean[n]) / sqrt(var[n])

    with ``w[n] = 1 - (1 - alpha)**n`` (West, Comm. ACM 22, 532, 1979). Results follow those in float64 within 1e-5 of
    the largest, whatever the offset of the data, its first sample, and the cutting of the stream. A channel that does
    not vary gives zeros. A sample that is not finite, or larger than 1e18, comes out as it is and does not count.

    Args:
        x: Data of any real dtype and any number of dimensions; computed in float32 pairs or float64.
        alpha: Weight of the newest sample in the long run, ``0 < alpha <= 1``; see :func:`ezmsg.mlx.ewma.ewma`.
        zi: State, of the shape of *x* with length 6 along *axis*: the mean, the variance and *w*, each as a value in
            float32 and what that rounding lost. None or zeros: no samples so far.
        axis: The axis to go along.
        chunk_sizes: Samples a launch, where a kernel is compiled for fixed sizes: integers from 1 to 1024.
        path: Kernels to use: ``"cpu"`` (numba), ``"cuda"``, ``"metal"`` or ``"plain"`` (MLX operations, on any device).
            None: the ones for MLX's default device at the time of the call.

    Returns:
        The scores, float32, of the shape of *x*; and the state after the last sample, of the form of *zi*.

    Raises:
        ValueError: *alpha*, *axis*, *chunk_sizes*, *path* or the shape of *zi* is not as above.
        TypeError: *x* or *zi* is complex, or not an MLX array; *axis* is not an integer.

    Example:
        >>> import mlx.core as mx
        >>> scores, state = zscore(mx.array([1.0, 3.0, 2.0]), alpha=0.5)
        >>> state.shape
        (6,)
    """
    import mlx.core as mx

    check_alpha(alpha)
    check_kernel_path(path)
    check_mlx(x=x, zi=zi)
    axis = normalize_axis(axis, x.shape)
    chunk_sizes = normalize_chunk_sizes(chunk_sizes, MAX_CHUNK_SIZE)
    shape = (*x.shape[:axis], 6, *x.shape[axis + 1 :])
    if zi is None:
        zi = mx.zeros(shape)
    elif zi.shape != shape:
        raise ValueError(f"zi has shape {zi.shape}; allowed with x of shape {x.shape} is {shape}.")
    x, zi = as_float32(x, _OPERATION), as_float32(zi, _OPERATION)
    if 0 in x.shape:
        return x, zi
    return kernel("zscore", path or default_path()).run(x, float(alpha), zi, axis, chunk_sizes)


class AdaptiveStandardScalerSettings(EWMASettings):
    """The settings of :obj:`ezmsg.sigproc.scaler.AdaptiveStandardScaler`, checked when they are built."""


@processor_state
class AdaptiveStandardScalerState(sigproc.AdaptiveStandardScalerState):
    """``samps_ewma`` and ``vars_sq_ewma`` serve NumPy data only."""

    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds that *alpha* was computed for."""

    samps_ewma: EWMATransformer | None = None
    vars_sq_ewma: EWMATransformer | None = None

    zi: mx.array | None = None
    """Mean, variance and weight of each channel, as :func:`zscore` has them; None while the data is NumPy's."""

    n_seen: int = 0
    """Samples since the start."""


class AdaptiveStandardScalerTransformer(
    TransformerTakesSettings,
    AveragesStream[AdaptiveStandardScalerSettings, AdaptiveStandardScalerState],
    sigproc.AdaptiveStandardScalerTransformer,
):
    """Subtract the moving average of each channel and divide by the standard deviation around it.

    Takes the settings of :obj:`ezmsg.sigproc.scaler.AdaptiveStandardScalerTransformer` and gives its results, for MLX
    data on every MLX backend: float32 out, MLX in and out. NumPy data is left to ezmsg-sigproc, integers as float64,
    since their squares would overflow. A stream that changes from one to the other goes on with its statistics.

    A channel that does not vary gives zeros. A sample that is not finite, or larger than 1e18, comes out as it is and
    leaves the statistics of its channel where they were; other channels do not notice. A channel begins with its first
    finite sample. See :func:`zscore` for accuracy.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; the message
            has no dimension.
        TypeError: Complex MLX data; what is given is not a message.
    """

    _OPERATION = _OPERATION

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

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`; infinite if it does not accumulate."""
        if self.settings.passthrough:
            return 0.0
        return averaging_time(self.settings.time_constant, tolerance) if self.settings.accumulate else math.inf

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        if self.settings.passthrough:
            return PassesThrough(self, message)
        return None if self._state.zi is None else FusedScores(self, message)

    def _begin(self, message: AxisArray) -> None:
        state = self._state
        state.n_seen = 0
        state.alpha = alpha_of(self.settings.time_constant, state.gain)
        if is_mlx_array(message.data):
            state.samps_ewma = state.vars_sq_ewma = None
            shape = list(message.data.shape)
            n_channels = message.data.size // shape[state.axis_idx]
            kernel("zscore", default_path()).compile_ahead(state.alpha, n_channels)
            shape[state.axis_idx] = 1
            state.zi = pairs_of(*[np.zeros(shape)] * 3, axis=state.axis_idx)
            return
        state.zi = None
        fields = ("time_constant", "axis", "accumulate", "mlx_metal_chunk_sizes")
        with suppress_axis_deprecation():
            settings = EWMASettings(**{field: getattr(self.settings, field) for field in fields})
        state.samps_ewma, state.vars_sq_ewma = EWMATransformer(settings), EWMATransformer(settings)

    def _process(self, message: AxisArray) -> AxisArray:
        state = self._state
        if not is_mlx_array(message.data):
            return self._process_numpy(message)
        if state.zi is None:
            self._go_on_with_mlx(message)
        data, zi, settings = as_float32(message.data, _OPERATION), state.zi, self.settings
        assert zi is not None and state.alpha is not None
        sizes, accumulates = settings.mlx_metal_chunk_sizes, settings.accumulate
        scores, state.zi = in_stream("zscore", data, state.alpha, zi, state.axis_idx, sizes, state.n_seen, accumulates)
        if accumulates:
            state.n_seen += data.shape[state.axis_idx]
        return replace(message, data=scores)

    def _process_numpy(self, message: AxisArray) -> AxisArray:
        if message.data.dtype.kind in "biu":
            message = replace(message, data=message.data.astype(np.float64))
        if self._state.zi is not None:
            self._go_on_with_numpy(message)
        return sigproc.AdaptiveStandardScalerTransformer._process(self, message)

    def _go_on_with_mlx(self, message: AxisArray) -> None:
        """Take over the statistics of ezmsg-sigproc's averages, of the samples and of their squares."""
        state = self._state
        samples, squares = state.samps_ewma, state.vars_sq_ewma
        if samples is None or squares is None or samples.state.zi is None:
            self._begin(message)
            return
        n_seen = samples.state.n_seen
        (mean, weight), (square, of_squares) = samples.so_far(), squares.so_far()
        weight = np.minimum(weight, of_squares)
        self._begin(message)
        state.zi = pairs_of(mean, np.maximum(square - mean**2, 0.0), weight, axis=state.axis_idx)
        state.n_seen = n_seen

    def _go_on_with_numpy(self, message: AxisArray) -> None:
        """The inverse of :meth:`_go_on_with_mlx`."""
        state = self._state
        mean, variance, weight = values_of(known_mlx(state.zi), state.axis_idx)
        n_seen = state.n_seen
        self._begin(message)
        samples, squares = state.samps_ewma, state.vars_sq_ewma
        assert samples is not None and squares is not None
        samples.go_on(message, mean, weight, n_seen)
        squares.go_on(message, variance + mean**2, weight, n_seen)


class FusedScores(FusedStage[AdaptiveStandardScalerTransformer]):
    """z-scores as a function of arrays. Array: mean, variance and weight. Count: the samples so far."""

    def __init__(self, transformer: AdaptiveStandardScalerTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        state, settings = transformer.state, transformer.settings
        assert state.alpha is not None
        self._alpha, self._known_gain, self._sizes = state.alpha, state.gain, settings.mlx_metal_chunk_sizes
        self._accumulates, self._run = settings.accumulate, recursion("zscore", default_path())

    def allows_rate(self, gain: float) -> bool:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        return is_same_rate(gain, self._known_gain)

    def load(self) -> tuple[tuple[mx.array, ...], int] | None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state = self.transformer.state
        return None if state.zi is None else ((state.zi,), state.n_seen)

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: int) -> Advance:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        return Advance(None, n_samples, counts + n_samples if self._accumulates else counts)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        y, after = self._run(x, self._alpha, arrays[0], self.axis, self._sizes)
        return y, (after,) if self._accumulates else arrays


class AdaptiveStandardScaler(
    UnitTakesSettings,
    BaseTransformerUnit[AdaptiveStandardScalerSettings, AxisArray, AxisArray, AdaptiveStandardScalerTransformer],
):
    """z-scores of each channel by its moving average; see :obj:`AdaptiveStandardScalerTransformer`."""

    SETTINGS = AdaptiveStandardScalerSettings  # type: ignore[assignment]

    INPUT_ACCUMULATE = ez.InputStream(bool)

    @ez.subscriber(INPUT_ACCUMULATE)
    async def on_accumulate(self, accumulate: bool) -> None:
        """Begin or cease to take new samples into the statistics."""
        self.processor.accumulate = accumulate
