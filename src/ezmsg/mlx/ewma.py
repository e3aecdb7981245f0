"""Exponentially weighted moving average of MLX data, on every MLX backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import ezmsg.sigproc.ewma as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .kernels import Path, check_kernel_path, default_path, in_stream, kernel, recursion
from .scan import normalize_axis, normalize_chunk_sizes
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.device import uses_gpu
from .stream.fusible import Advance, Array, FusedStage, PassesThrough, averaging_time
from .stream.segments import is_same_rate, sampling_period, stream_dimension, with_known_rate
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    as_float,
    check_fields,
    check_message,
    check_mlx,
    is_real,
)

if TYPE_CHECKING:
    import mlx.core as mx

MIN_ALPHA = 2.0**-52
"""Least weight of the newest sample in a stream: with half of it, ``1 - alpha`` may be 1 in float64, and far below it
the weights that correct the bias are lost in float32. After 4e10 samples the first weighs 1e-5 less than the last."""


def alpha_of(time_constant: float, period: float) -> float:
    """Weight of the newest sample, for a time constant and a sampling period in seconds."""
    return max(-math.expm1(-period / time_constant), MIN_ALPHA)


def weight_after(n_samples: int, alpha: float) -> float:
    """Weight of *n_samples* samples since the start, ``1 - (1 - alpha)**n_samples``."""
    if alpha >= 1.0:
        return float(n_samples > 0)
    return -math.expm1(n_samples * math.log1p(-alpha))


def pairs_of(*values: npt.NDArray[np.float64], axis: int) -> mx.array:
    """An array of float32 pairs, each of *values* with length 1 along *axis*; evaluated.

    Evaluated, since only the thread that made a lazy array can do so later.
    """
    import mlx.core as mx

    from .kernels.layout import to_pairs

    pairs = mx.array(np.concatenate([to_pairs(value, axis) for value in values], axis=axis))
    mx.eval(pairs)
    return pairs


def values_of(pairs: mx.array, axis: int) -> list[npt.NDArray[np.float64]]:
    """The inverse of :func:`pairs_of`."""
    halves = np.split(np.array(pairs, dtype=np.float64), pairs.shape[axis], axis=axis)
    return [high + low for high, low in zip(halves[::2], halves[1::2], strict=True)]


class AveragingState(Protocol):
    """Fields that all states of moving averages have."""

    axis_idx: int
    stream_dim: str
    gain: float


SettingsT = TypeVar("SettingsT", bound="sigproc.EWMASettings")
StateT = TypeVar("StateT", bound=AveragingState)


class AveragesStream(BaseStatefulTransformer[SettingsT, AxisArray, AxisArray, StateT]):
    """To be named among the bases of a transformer before its counterpart in ezmsg-sigproc."""

    _OPERATION: ClassVar[str]
    """Name of the operation in errors."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """The result of *message*; with ``passthrough`` it comes back as it is."""
        if type(message) is not AxisArray:
            check_message(message, self)
        if self.settings.passthrough:
            return super().__call__(message)
        if 0 in message.data.shape:
            return self._without_samples(message)
        # Past that of ezmsg-sigproc, which looks for the same two again, by a product that NumPy takes of the shape:
        # nearly half of the time of a short message.
        return BaseStatefulTransformer.__call__(self, message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        if self.settings.passthrough:
            return await super().__acall__(message)
        if 0 in message.data.shape:
            return self._without_samples(message)
        return await BaseStatefulTransformer.__acall__(self, message)

    def _without_samples(self, message: AxisArray) -> AxisArray:
        """A message without samples has the dtype of those with samples."""
        if not is_mlx_array(message.data):
            return message
        data = as_float32(message.data, self._OPERATION)
        return message if data is message.data else replace(message, data=data)

    def _hash_message(self, message: AxisArray) -> int:
        # Not of the backend, which may change within a stream.
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        dim = stream_dimension(self, message, self._OPERATION)
        gain = sampling_period(message, dim, self._OPERATION)
        state = self._state
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            # Otherwise the known one stays: the hash of this message was taken with it, and would not be that of the
            # next, so that a wobbling rate would reset the state at each message from here on.
            state.gain = gain
        state.stream_dim = dim
        state.axis_idx = message.get_axis_idx(dim)
        self._begin(message)

    def _begin(self, message: AxisArray) -> None:
        """A state of no samples, for data of the backend of *message*."""
        raise NotImplementedError


MAX_CHUNK_SIZE = 1024
"""Most samples that one launch of a GPU kernel takes (threads in a Metal threadgroup)."""

CHUNK_SIZES = (32, MAX_CHUNK_SIZE)
"""Samples a launch, by default: one size for short messages and one for long ones."""

_OPERATION = "an exponentially weighted moving average"


def check_alpha(alpha: float) -> None:
    """Check the weight of the newest sample.

    Raises:
        ValueError: *alpha* is not a number > 0 and <= 1.
    """
    if not ((type(alpha) is float or is_real(alpha)) and 0.0 < alpha <= 1.0):
        raise ValueError(f"'alpha' must be a number > 0 and <= 1, got {alpha!r}")


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
            With length 4, of which the last two are the weight of the samples so far in the same form, results are
            corrected for the start from zero; zeros are the start.
        axis: The axis to average along.
        chunk_sizes: Samples a launch, where a kernel is compiled for fixed sizes: integers from 1 to 1024.
        path: Kernels to use: ``"cpu"`` (numba), ``"cuda"``, ``"metal"`` or ``"plain"`` (MLX operations, on any
            device). None: the ones for MLX's default device at the time of the call.

    Returns:
        The averages, float32, of the shape of *x*; and the state after the last sample, of the form of *zi*.

    Raises:
        ValueError: *alpha*, *axis*, *chunk_sizes*, *path* or the shape of *zi* is not as above.
        TypeError: *x* or *zi* is complex, or not an MLX array; *axis* is not an integer.
    """
    import mlx.core as mx

    check_alpha(alpha)
    if path is not None:
        check_kernel_path(path)
    # The usual case costs no call: a short message is a matter of microseconds.
    if not (isinstance(x, mx.array) and isinstance(zi, mx.array)):
        check_mlx(x=x, zi=zi)
    shape = x.shape
    axis = normalize_axis(axis, shape)
    if chunk_sizes is not CHUNK_SIZES:
        chunk_sizes = normalize_chunk_sizes(chunk_sizes, MAX_CHUNK_SIZE)
    before, after = shape[:axis], shape[axis + 1 :]
    if zi is None:
        zi = mx.zeros((*before, 1, *after))
    length = zi.shape[axis] if zi.ndim == len(shape) else 0
    if length not in (1, 2, 4) or zi.shape != (*before, length, *after):
        raise ValueError(
            f"zi has shape {zi.shape}; allowed with x of shape {shape} are {(*before, 1, *after)}, "
            f"{(*before, 2, *after)} and {(*before, 4, *after)}."
        )
    if x.dtype != mx.float32 or zi.dtype != mx.float32:
        x, zi = as_float32(x, _OPERATION), as_float32(zi, _OPERATION)
    if 0 in shape:
        return x, zi
    run = kernel("ewma", path or default_path()).run
    if length > 1:
        return run(x, float(alpha), zi, axis, chunk_sizes)
    y, pair = run(x, float(alpha), mx.concatenate([zi, mx.zeros_like(zi)], axis=axis), axis, chunk_sizes)
    return y, mx.split(pair, 2, axis=axis)[0]


class EWMASettings(sigproc.EWMASettings):
    """The settings of :obj:`ezmsg.sigproc.ewma.EWMAUnit`, checked when they are built."""

    time_constant: float = 1.0
    """Time in seconds after which the response to a unit step has reached 1 - 1/e (about 63.2 %).

    One of more than 2**52 samples (4760 years at 30 kHz) counts as 2**52, which weigh all samples alike, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tau = self.time_constant
        if not is_real(tau):
            raise TypeError(f"'time_constant' must be a finite number of seconds > 0, got {tau!r}")
        if not 0 < as_float(tau) < math.inf:
            raise ValueError(f"'time_constant' must be a finite number of seconds > 0, got {tau!r}")
        check_fields(self, flags=("accumulate", "passthrough", "reset_on_resume"), names=("axis",))
        normalize_chunk_sizes(self.mlx_metal_chunk_sizes, MAX_CHUNK_SIZE, name="mlx_metal_chunk_sizes")


@processor_state
class EWMAState(sigproc.EWMAState):
    """The state of a moving average."""

    # ezmsg-sigproc declares NumPy's only, and keeps those of other libraries in it, too.
    zi: npt.NDArray | mx.array | None = None  # type: ignore[assignment]
    """The state of the average, in the array library of the stream; of MLX arrays as :func:`ewma` has it."""

    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds that *alpha* was computed for."""

    next_weight_check: float = math.inf
    """``n_seen`` at which to look whether the weights are still needed."""


class EWMATransformer(TransformerTakesSettings, AveragesStream[EWMASettings, EWMAState], sigproc.EWMATransformer):
    """Bias-corrected exponentially weighted moving average along the stream dimension.

    Takes the settings of :obj:`ezmsg.sigproc.ewma.EWMATransformer` and gives its results, for MLX data on every
    MLX backend: float32 out, MLX in and out. NumPy data is left to ezmsg-sigproc. A stream that changes from one to the
    other goes on with its average. See :func:`ewma` for accuracy and for samples that are not finite; the bias
    correction counts finite samples only, channel by channel.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; the message
            has no dimension.
        TypeError: Complex data; what is given is not a message.
    """

    _OPERATION = _OPERATION

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`; infinite if it does not accumulate."""
        if self.settings.passthrough:
            return 0.0
        return averaging_time(self.settings.time_constant, tolerance) if self.settings.accumulate else math.inf

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return fuse_averaging(self, message, FusedAverage)

    def _begin(self, message: AxisArray) -> None:
        state = self._state
        if not is_mlx_array(message.data):
            sigproc.EWMATransformer._reset_state(self, message)
            state.alpha = max(state.alpha, MIN_ALPHA)
            return
        state.n_seen = 0
        state.alpha = alpha_of(self.settings.time_constant, state.gain)
        shape = list(message.data.shape)
        n_channels = message.data.size // shape[state.axis_idx]
        kernel("ewma", default_path()).compile_ahead(state.alpha, n_channels)
        shape[state.axis_idx] = 1
        nothing = np.zeros(shape)
        state.zi = pairs_of(nothing, nothing, axis=state.axis_idx)
        # (1 - alpha)**n below half the resolution of float32: dividing by the weight changes nothing.
        settled = -25.0 * math.log(2.0) / math.log1p(-state.alpha) if state.alpha < 1.0 else 1.0
        state.next_weight_check = state.bias_settle_n = settled

    def _process(self, message: AxisArray) -> AxisArray:
        state = self._state
        if not is_mlx_array(message.data):
            if not isinstance(state.zi, np.ndarray):
                self._change_backend(message)
            return sigproc.EWMATransformer._process(self, message)
        if isinstance(state.zi, np.ndarray):
            self._change_backend(message)
        data, zi = as_float32(message.data, _OPERATION), known_mlx(state.zi)
        sizes, accumulates = self.settings.mlx_metal_chunk_sizes, self.settings.accumulate
        average, state.zi = in_stream("ewma", data, state.alpha, zi, state.axis_idx, sizes, state.n_seen, accumulates)
        if accumulates:
            state.n_seen += data.shape[state.axis_idx]
            if state.n_seen >= state.next_weight_check:
                self._drop_settled_weight()
        return replace(message, data=average)

    def _drop_settled_weight(self) -> None:
        """Stop correcting once it changes nothing; a channel that was dead until now needs as long again."""
        import mlx.core as mx

        state = self._state
        state.next_weight_check = math.inf
        pairs = known_mlx(state.zi)
        if pairs.shape[state.axis_idx] == 2:
            return
        zi, weight = mx.split(pairs, 2, axis=state.axis_idx)
        if np.asarray(mx.min(mx.sum(weight, axis=state.axis_idx))) >= 1.0 - 2.0**-23:
            state.zi = mx.contiguous(zi)
            mx.eval(state.zi)
        else:
            state.next_weight_check = state.n_seen + state.bias_settle_n

    def _change_backend(self, message: AxisArray) -> None:
        """Go on with the average so far, for data of the backend of *message*."""
        self.go_on(message, *self.so_far(), self._state.n_seen)

    def so_far(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The average of each channel, with length 1 along the stream dimension, and its weight (see :meth:`go_on`)."""
        state = self._state
        if isinstance(state.zi, np.ndarray):
            z, weight = state.zi.astype(np.float64), np.full(state.zi.shape, weight_after(state.n_seen, state.alpha))
        else:
            z, *weights = values_of(known_mlx(state.zi), state.axis_idx)
            weight = weights[0] if weights else np.ones(z.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            average = z / ((1.0 - state.alpha) * weight)
        is_known = np.isfinite(average)
        return np.where(is_known, average, 0.0), np.where(is_known, weight, 0.0)

    def go_on(
        self, message: AxisArray, average: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], n_seen: int
    ) -> None:
        """Begin a stream like that of *message* with an average.

        Args:
            message: A message of the stream.
            average: Of each channel, with length 1 along the stream dimension.
            weight: Of the samples that made it: ``1 - (1 - alpha)**n`` after *n*. ezmsg-sigproc's average of NumPy
                data has the weight of *n_seen* in all channels.
            n_seen: Samples of the stream so far.
        """
        self._reset_state(message)
        self._hash = self._hash_message(message)
        state = self._state
        state.n_seen = n_seen
        rest = 1.0 - state.alpha
        if is_mlx_array(message.data):
            state.zi = pairs_of(rest * weight * average, weight, axis=state.axis_idx)
        else:
            dtype = message.data.dtype if message.data.dtype.kind in "fc" else np.float64
            state.zi = (rest * weight_after(n_seen, state.alpha) * average).astype(dtype)


class FusedAverage(FusedStage[EWMATransformer]):
    """A moving average as a function of arrays.

    Array: its state, with weights until they have settled. Count: the samples so far.
    """

    subtracts = False

    def __init__(self, transformer: EWMATransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        state, settings = transformer.state, transformer.settings
        self._alpha, self._known_gain, self._sizes = state.alpha, state.gain, settings.mlx_metal_chunk_sizes
        self._accumulates, self._run = settings.accumulate, recursion("ewma", default_path())
        self._is_weighted = state.zi is not None and state.zi.shape[self.axis] == 4

    def allows_rate(self, gain: float) -> bool:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        return is_same_rate(gain, self._known_gain)

    def load(self) -> tuple[tuple[mx.array, ...], int] | None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state = self.transformer.state
        zi: object = state.zi
        if not is_mlx_array(zi):
            # A message of NumPy's has come between; the transformer goes on from its state.
            return None
        if not (self._is_weighted and zi.shape[self.axis] == 2 and uses_gpu()):
            return (zi,), state.n_seen
        import mlx.core as mx

        # The transformer has stopped correcting, but the function is compiled for a state with weights: all are 1.
        high, low = mx.split(zi, 2, axis=self.axis)
        return (mx.concatenate([zi, mx.ones_like(high), mx.zeros_like(low)], axis=self.axis),), state.n_seen

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: int) -> Advance | None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        if not self._accumulates:
            return Advance(None, n_samples, counts)
        counts += n_samples
        # The transformer itself looks whether the weights have settled.
        is_left = counts >= self.transformer.state.next_weight_check
        return None if is_left else Advance(None, n_samples, counts)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        y, after = self._run(x, self._alpha, arrays[0], self.axis, self._sizes)
        if self.subtracts:
            y = np.subtract(x, y, out=x) if isinstance(x, np.ndarray) else x - y
        return y, (after,) if self._accumulates else arrays


def fuse_averaging(transformer: EWMATransformer, message: AxisArray, kind: type[FusedAverage]) -> FusedStage | None:
    """*transformer* as a stage of that *kind*, while its state is MLX's."""
    if transformer.settings.passthrough:
        return PassesThrough(transformer, message)
    return kind(transformer, message) if is_mlx_array(transformer.state.zi) else None


class EWMAUnit(UnitTakesSettings, BaseTransformerUnit[EWMASettings, AxisArray, AxisArray, EWMATransformer]):
    """Exponentially weighted moving average of each channel; see :obj:`EWMATransformer`."""

    SETTINGS = EWMASettings  # type: ignore[assignment]
