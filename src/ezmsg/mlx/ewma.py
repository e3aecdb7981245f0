"""Exponentially weighted moving average of MLX data, on every MLX backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ezmsg.sigproc.ewma as sigproc
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    processor_state,
)
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .kernels import Path, check_path, default_path, kernel
from .kernels.scheduling import schedule_after, schedule_before
from .scan import normalize_axis, normalize_chunk_sizes
from .stream.checks import as_float, check_fields, check_message, check_mlx, is_real
from .stream.convert import as_float32, is_mlx_array
from .stream.sampling import is_same_rate, sampling_period, stream_dimension, with_known_rate
from .stream.settings import TransformerTakesSettings, UnitTakesSettings

if TYPE_CHECKING:
    import mlx.core as mx

MAX_CHUNK_SIZE = 1024
"""Most samples that one launch of a GPU kernel takes (threads in a Metal threadgroup)."""

CHUNK_SIZES = (32, MAX_CHUNK_SIZE)
"""Samples a launch, by default: one size for short messages and one for long ones."""

MIN_ALPHA = 2.0**-52
"""Least weight of the newest sample in a stream: with half of it, ``1 - alpha`` may be 1 in float64, and far below it
the weights that correct the bias are lost in float32. After 4e10 samples the first weighs 1e-5 less than the last."""

_OPERATION = "an exponentially weighted moving average"


def ewma(
    x: mx.array,
    alpha: float,
    zi: mx.array | None = None,
    *,
    axis: int = -1,
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
    path: Path | None = None,
) -> tuple[mx.array, mx.array]:
    """Exponentially weighted moving average along one axis, carrying its state.

    ``y[n] = y[n-1] + alpha * (x[n] - y[n-1])``, which is
    ``scipy.signal.lfilter([alpha], [1, alpha - 1], x, axis, zi)``. Results follow scipy's in float64 within 1e-5
    of the largest value, time constants of up to 300 s at 30 kHz included, whatever the cutting of the stream.

    A sample that is not finite comes out as it is and leaves the average where it was; other channels do not
    notice. (In plain MLX operations it counts as a sample at the average as it was at the start of the chunk.)

    Args:
        x: Data of any real dtype and any number of dimensions; computed in float32.
        alpha: Weight of the newest sample, ``0 < alpha <= 1``. For a time constant ``tau`` in seconds at a sampling
            rate ``fs`` in Hz it is ``1 - exp(-1 / (fs * tau))``.
        zi: State as scipy's ``lfilter`` leaves it, ``(1 - alpha) * y[-1]``, of the shape of *x* with length 1 along
            *axis*; or with length 2, the second entry being what the first lost in rounding to float32, which
            averages over more than a second at 30 kHz need when the data comes in pieces. None: zero, with length 1.
        axis: The axis to average along.
        chunk_sizes: Samples a launch, where a kernel is compiled for fixed sizes: integers from 1 to 1024.
        path: Kernels to use: ``"cpu"`` (numba), ``"cuda"``, ``"metal"`` or ``"plain"`` (MLX operations, on any
            device). None: the ones for MLX's default device at the time of the call.

    Returns:
        The averages, float32, of the shape of *x*; and the state after the last sample, of the form of *zi*.

    Raises:
        ValueError: *alpha*, *axis*, *chunk_sizes*, *path* or the shape of *zi* is not as above.
        TypeError: *x* or *zi* is complex, or no MLX array; *axis* is no integer.
    """
    import mlx.core as mx

    if not ((type(alpha) is float or is_real(alpha)) and 0.0 < alpha <= 1.0):
        raise ValueError(f"alpha is {alpha!r}; allowed is a number > 0 and <= 1.")
    if path is not None:
        check_path(path)
    # The usual case costs no call: a short message is a matter of microseconds.
    if not (isinstance(x, mx.array) and isinstance(zi, mx.array)):
        check_mlx(x=x, zi=zi)
    shape = x.shape
    axis = normalize_axis(axis, shape)
    if chunk_sizes is not CHUNK_SIZES:
        chunk_sizes = normalize_chunk_sizes(chunk_sizes, MAX_CHUNK_SIZE)
    before, after = shape[:axis], shape[axis + 1 :]
    is_pair = zi is not None and zi.shape == (*before, 2, *after)
    if zi is None:
        zi = mx.zeros((*before, 1, *after))
    elif not is_pair and zi.shape != (*before, 1, *after):
        raise ValueError(
            f"zi has shape {zi.shape}; allowed with x of shape {shape} are {(*before, 1, *after)}, "
            f"{(*before, 2, *after)}."
        )
    if x.dtype != mx.float32 or zi.dtype != mx.float32:
        x, zi = as_float32(x, _OPERATION), as_float32(zi, _OPERATION)
    if 0 in shape:
        return x, zi
    run = kernel("ewma", path or default_path()).run
    if is_pair:
        return run(x, float(alpha), zi, axis, chunk_sizes)
    y, pair = run(x, float(alpha), mx.concatenate([zi, mx.zeros_like(zi)], axis=axis), axis, chunk_sizes)
    return y, mx.split(pair, 2, axis=axis)[0]


class EWMASettings(sigproc.EWMASettings):
    time_constant: float = 1.0
    """Time in seconds after which the response to a unit step has reached 1 - 1/e (about 63.2 %).

    One of more than 2**52 samples (4760 years at 30 kHz) counts as 2**52, which weigh all samples alike, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tau = self.time_constant
        if not is_real(tau):
            raise TypeError(f"time_constant is {tau!r}; allowed is a finite number of seconds > 0.")
        if not 0 < as_float(tau) < math.inf:
            raise ValueError(f"time_constant is {tau!r}; allowed is a finite number of seconds > 0.")
        check_fields(self, flags=("accumulate", "passthrough", "reset_on_resume"), names=("axis",))
        normalize_chunk_sizes(self.mlx_metal_chunk_sizes, MAX_CHUNK_SIZE, name="mlx_metal_chunk_sizes")


@processor_state
class EWMAState(sigproc.EWMAState):
    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds that *alpha* was computed for."""

    weight: mx.array | None = None
    """State of the average of ones over the finite samples of each channel, which corrects the bias of the zero
    start. None once every channel has seen enough for it to round to 1."""

    next_weight_check: float = math.inf
    """``n_seen`` at which to look whether *weight* is still needed."""


class EWMATransformer(
    TransformerTakesSettings,
    sigproc.EWMATransformer,
    BaseStatefulTransformer[EWMASettings, AxisArray, AxisArray, EWMAState],
):
    """Bias-corrected exponentially weighted moving average along the stream dimension.

    Takes the settings of :obj:`ezmsg.sigproc.ewma.EWMATransformer` and gives its results, for MLX data on every
    MLX backend: float32 out, MLX in and out. NumPy data is left to ezmsg-sigproc. See :func:`ewma` for accuracy
    and for samples that are not finite; the bias correction counts finite samples only, channel by channel.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; the message
            has no dimension.
        TypeError: Complex data; what is given is no message.
    """

    def __call__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        if 0 not in message.data.shape and not self.settings.passthrough:
            return BaseStatefulTransformer.__call__(self, message)
        return self._same_dtype(super().__call__(message))

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        if 0 not in message.data.shape and not self.settings.passthrough:
            return await BaseStatefulTransformer.__acall__(self, message)
        return self._same_dtype(await super().__acall__(message))

    def _same_dtype(self, message: AxisArray) -> AxisArray:
        """A message without samples has the dtype of those with samples; ezmsg-sigproc lets it through as it is."""
        if self.settings.passthrough or not is_mlx_array(message.data):
            return message
        data = as_float32(message.data, _OPERATION)
        return message if data is message.data else replace(message, data=data)

    def _hash_message(self, message: AxisArray) -> int:
        backend = ("mlx",) if is_mlx_array(message.data) else ("other",)
        message = with_known_rate(message, self._state.stream_dim, self._state.gain)
        return self._message_hash(message, extra=backend)

    def _reset_state(self, message: AxisArray) -> None:
        dim = stream_dimension(self, message, _OPERATION)
        gain = sampling_period(message, dim, _OPERATION)
        state = self._state
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            # Otherwise the known one stays: the hash of this message was taken with it, and would not be that of the
            # next, so that a wobbling rate would reset the state at each message from here on.
            state.gain = gain
        state.stream_dim = dim
        state.axis_idx = message.get_axis_idx(dim)
        state.weight = None
        if not is_mlx_array(message.data):
            super()._reset_state(message)
            state.alpha = max(state.alpha, MIN_ALPHA)
        else:
            import mlx.core as mx

            state.n_seen = 0
            state.alpha = max(-math.expm1(-state.gain / self.settings.time_constant), MIN_ALPHA)
            shape = list(message.data.shape)
            n_channels = message.data.size // shape[state.axis_idx]
            kernel("ewma", default_path()).compile_ahead(state.alpha, n_channels)
            shape[state.axis_idx] = 2
            # Evaluated, since only the thread that made a lazy array can do so later.
            state.zi = mx.zeros(shape)
            state.weight = mx.zeros(shape)
            mx.eval(state.zi, state.weight)
            # (1 - alpha)**n below half the resolution of float32: dividing by the weight changes nothing.
            settled = -25.0 * math.log(2.0) / math.log1p(-state.alpha) if state.alpha < 1.0 else 1.0
            state.next_weight_check = state.bias_settle_n = settled

    def _process(self, message: AxisArray) -> AxisArray:
        if not is_mlx_array(message.data):
            return super()._process(message)
        average, _ = self._average(as_float32(message.data, _OPERATION), default_path())
        return replace(message, data=average)

    def _run_kernel(self, data: mx.array, zi: mx.array, path: Path) -> tuple[mx.array, mx.array]:
        state = self._state
        return kernel("ewma", path).run(data, state.alpha, zi, state.axis_idx, self.settings.mlx_metal_chunk_sizes)

    def _average(self, data: mx.array, path: Path) -> tuple[mx.array, mx.array | None]:
        """The average at each sample of *data*, float32, and the weights that it is corrected with (None: all 1)."""
        import mlx.core as mx

        state = self._state
        schedule_before(path, state.zi, state.weight)
        average, zf = self._run_kernel(data, state.zi, path)
        weight = weights = None
        if state.weight is not None:
            finite = mx.isfinite(data)
            weights, weight = self._run_kernel(mx.where(finite, 1.0, math.nan), state.weight, path)
            average = mx.where(finite, average / weights, average)
        if self.settings.accumulate:
            schedule_after(path, zf, weight, first=state.n_seen == 0)
            state.zi = zf
            state.weight = weight
            state.n_seen += data.shape[state.axis_idx]
            if state.n_seen >= state.next_weight_check:
                self._drop_settled_weight()
        return average, weights

    def _drop_settled_weight(self) -> None:
        """Stop correcting once it changes nothing; a channel that was dead until now needs as long again."""
        import mlx.core as mx

        state = self._state
        low = mx.min(mx.sum(state.weight, axis=state.axis_idx)).item()
        if low >= (1.0 - state.alpha) * (1.0 - 2.0**-23):
            state.weight = None
            state.next_weight_check = math.inf
        else:
            state.next_weight_check = state.n_seen + state.bias_settle_n


class EWMAUnit(UnitTakesSettings, BaseTransformerUnit[EWMASettings, AxisArray, AxisArray, EWMATransformer]):
    """Exponentially weighted moving average of each channel; see :obj:`EWMATransformer`."""

    SETTINGS = EWMASettings
