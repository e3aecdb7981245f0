"""Threshold crossings of MLX data, on every MLX backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from .ewma import alpha_of
from .kernels import default_path, kernel
from .kernels.contract import schedule_after, schedule_before
from .kernels.crossings import Crossings
from .stream.convert import as_float32, is_mlx_array, known_mlx, known_numpy
from .stream.fusible import Advance, Array, Axes, FusedStage, averaging_time
from .stream.segments import is_same_rate, sampling_period, value_at, with_known_rate
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    as_float,
    check_fields,
    check_member,
    check_message,
    check_number,
    is_real,
    known,
)

if TYPE_CHECKING:
    import mlx.core as mx
    import sparse

_OPERATION = "finding crossings"


class OutputFormat(str, Enum):
    """Form of the results of :obj:`ThresholdCrossing`."""

    SPARSE = "sparse"
    """The events alone: :obj:`SparseEvents` for MLX data, ``sparse.COO`` for NumPy's."""

    DENSE = "dense"
    """An array with an entry for each sample, which is not zero where there is an event."""


class AutoScale(str, Enum):
    """Scale that thresholds are multiples of, where ``auto_scale_tau`` is above 0."""

    ZSCORE = "zscore"
    """The running standard deviation, around the running mean: as in ezmsg-event."""

    RMS = "rms"
    """The running root mean square."""

    MAD = "mad"
    """The running median of the magnitudes, times 1.4826, which is the standard deviation of normal samples: spikes
    hardly move it."""


Thresholds: TypeAlias = "float | Sequence[float] | npt.NDArray"


class ThresholdSettings(ez.Settings):
    """Settings for :obj:`ThresholdCrossing`: those of ezmsg-event's, thresholds by channel, and other scales."""

    threshold: Thresholds = -3.5
    """Value that a sample has to reach. A sample that equals it has reached it: one of 0 or more is reached from below
    (``x >= threshold``), a negative one from above (``x <= threshold``). One for all channels, or one for each."""

    max_peak_dur: float = 0.002
    """Seconds from the beginning of an event in which its peak is looked for, and its end."""

    min_peak_dur: float = 0.0
    """Seconds that an event lasts at least. An event that ends earlier is none, but others may not begin in its
    refractory period. One that does not end within ``max_peak_dur`` counts. 0: no matter how long."""

    refrac_dur: float = 0.001
    """Seconds after the beginning of an event in which no other begins. No more than two samples, or 0: none."""

    align_on_peak: bool = False
    """Whether an event is reported at its largest deviation, and not at its first sample."""

    return_peak_val: bool = False
    """Whether events carry the value of the signal at the largest deviation."""

    auto_scale_tau: float = 0.0
    """Time constant in seconds of the scale that thresholds are multiples of. 0: they are absolute."""

    output_format: OutputFormat = OutputFormat.SPARSE
    """Whether only the events come out, or an array with an entry for each sample."""

    auto_scale: AutoScale = AutoScale.ZSCORE
    """The scale that ``auto_scale_tau`` is the time constant of. The log warns of one without a time constant."""

    def __post_init__(self) -> None:
        values = self.threshold if isinstance(self.threshold, (Sequence, np.ndarray)) else (self.threshold,)
        if isinstance(self.threshold, str) or not all(map(is_real, np.ravel(np.asarray(values, object)))):
            raise TypeError(f"'threshold' must be a number, or one for each channel, got {self.threshold!r}")
        if not len(values) or not all(math.isfinite(as_float(value)) for value in np.ravel(values)):
            raise ValueError(f"'threshold' must be a finite number, or one for each channel, got {self.threshold!r}")
        check_number("max_peak_dur", self.max_peak_dur)
        for field in ("min_peak_dur", "refrac_dur", "auto_scale_tau"):
            check_number(field, getattr(self, field), zero=True)
        check_fields(self, flags=("align_on_peak", "return_peak_val"))
        for field, kind in (("output_format", OutputFormat), ("auto_scale", AutoScale)):
            object.__setattr__(self, field, check_member(field, getattr(self, field), kind))


class SparseEvents:
    """Events of a message, on the device that found them.

    In the place of an array of ``shape`` in a message. It has room for as many events as the refractory period lets
    happen, so it needs nothing of the host until somebody asks.

    Args:
        rows: As :attr:`ezmsg.mlx.kernels.crossings.Crossings.is_sparse` says.
        shape: Samples, and the other dimensions.
        has_values: Whether *rows* has values.
    """

    def __init__(self, rows: mx.array, shape: tuple[int, ...], has_values: bool) -> None:
        self.rows, self.shape, self.has_values = rows, shape, has_values

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Entries of an array of this shape."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the values: float32, or bool where each is True."""
        return np.dtype(np.float32 if self.has_values else np.bool_)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.rows.nbytes)

    def tocoo(self) -> sparse.COO:
        """The events as ezmsg-event has them, on the host. Waits for the device."""
        return events_to_coo(np.asarray(self.rows), self.shape, self.has_values)

    def todense(self) -> mx.array:
        """An array with the values of the events and 0, or False, elsewhere. Stays on the device, and lazy."""
        import mlx.core as mx

        samples, values = mx.split(self.rows, 2) if self.has_values else (self.rows, mx.array(True))
        n_samples = self.shape[0]
        rows = mx.where(samples >= 0, samples, n_samples).astype(mx.int32)
        nothing = mx.zeros((n_samples + 1, self.rows.shape[1]), mx.float32 if self.has_values else mx.bool_)
        return mx.put_along_axis(nothing, rows, values, axis=0)[:n_samples].reshape(self.shape)

    def __reduce__(self) -> tuple[object, ...]:
        # To another process as what everybody has.
        return _same, (self.tocoo(),)

    def __repr__(self) -> str:
        return f"<SparseEvents: shape={self.shape}, dtype={self.dtype}, room for {self.rows.shape[0]} a channel>"


def find(x: npt.NDArray, crossings: Crossings, zi: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """See :func:`ezmsg.mlx.kernels.cpu.crossings.find`, which takes a while to import."""
    from .kernels.cpu import crossings as kernels

    return kernels.find(x, crossings, zi)


def _same(events: sparse.COO) -> sparse.COO:
    return events


def events_to_coo(rows: npt.NDArray, shape: tuple[int, ...], has_values: bool) -> sparse.COO:
    """*rows*, as :attr:`ezmsg.mlx.kernels.crossings.Crossings.is_sparse` says, as a ``sparse.COO`` of *shape*."""
    import sparse

    samples, values = np.split(rows, 2) if has_values else (rows, None)
    slot, channel = np.nonzero(samples >= 0)
    coordinates = [samples[slot, channel].astype(np.int64), *np.unravel_index(channel, shape[1:])]
    data = np.ones(slot.size, bool) if values is None else values[slot, channel]
    return sparse.COO(np.array(coordinates[: len(shape)]), data=data, shape=shape)


@processor_state
class ThresholdCrossingState:
    """State for :obj:`ThresholdCrossingTransformer`."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds."""

    settings: ThresholdSettings | None = None
    """Those that *crossings* was made of."""

    crossings: Crossings | None = None
    """Parameters of a crossing, in samples."""

    zi: npt.NDArray | mx.array | None = None
    """State of each channel, as :mod:`ezmsg.mlx.kernels.crossings` says."""

    n_seen: int = 0
    """Samples since the start."""


class ThresholdCrossingTransformer(
    TransformerTakesSettings,
    BaseStatefulTransformer[ThresholdSettings, AxisArray, AxisArray, ThresholdCrossingState],
):
    """Find where a signal crosses a threshold, channel by channel.

    Takes the settings of ezmsg-event's class of this name and finds the same samples, for MLX data on every MLX backend
    in one launch a message. MLX data gives MLX data, on its device. NumPy data is taken as float32, too, by the kernel
    for the CPU.

    An event begins with a sample that has reached the threshold, after one that has not; the first sample of a stream
    has none before it and begins none. It begins no event if another one began ``refrac_dur`` or less before. Samples
    that are NaN have not reached any threshold. With a running scale, neither have infinite ones, and neither counts in
    it; the scale at a sample includes that sample. The state goes on over gaps.

    The result does not depend on how the stream is cut into messages, and is what ezmsg-event finds in the whole stream
    as one message. (From message to message it is stricter there: the refractory period after an event that was too
    short is forgotten, and that after one that is reported at its peak begins at the peak. An event that has not ended
    within ``max_peak_dur`` holds all results back there, and counts here.)

    Where an event has to be watched beyond its first sample (``min_peak_dur``, ``align_on_peak``,
    ``return_peak_val``), all results are behind by as much as that may take: the result of a message has as many
    samples, and its offset is that much earlier. What comes before the stream began holds no events.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; there are
            thresholds for another number of channels.
        TypeError: Complex data; what is given is not a message.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx import ThresholdCrossingTransformer
        >>> from ezmsg.util.messages.axisarray import AxisArray
        >>> find = ThresholdCrossingTransformer(threshold=-3.0, output_format="dense")
        >>> x = mx.array([[0.0], [-3.0], [-4.0], [0.0]])
        >>> message = AxisArray(x, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})
        >>> find(message).data.tolist()
        [[False], [True], [False], [False]]
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"threshold", "refrac_dur"})

    def __call__(self, message: AxisArray) -> AxisArray:
        """The events of *message*."""
        if type(message) is not AxisArray:
            check_message(message, self)
        if 0 in message.data.shape:
            return self._without_samples(message)
        return super().__call__(message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        if 0 in message.data.shape:
            return self._without_samples(message)
        return await super().__acall__(message)

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        settings = self.settings
        scale = averaging_time(settings.auto_scale_tau, tolerance) if settings.auto_scale_tau > 0 else 0.0
        # Two chains of refractory periods that began differently soon have an event in common.
        return scale + 20.0 * settings.refrac_dur + settings.max_peak_dur + gain

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        stage = FusedCrossings(self, message)
        return stage if stage.axis == 0 and not stage.crossings.is_sparse else None

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        if not message.dims:
            raise ValueError(f"The message has data of shape (), without a dimension; {_OPERATION} needs one.")
        dim, state = resolve_stream_dim(message), self._state
        gain = sampling_period(message, dim, _OPERATION)
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            state.gain = gain
        state.stream_dim, state.n_seen = dim, 0
        n_channels = message.data.size // message.data.shape[message.get_axis_idx(dim)]
        # Not those of another rate, or of another number of channels.
        state.crossings = None
        crossings = self._crossings(message)
        state.zi = np.zeros((crossings.n_rows, n_channels), np.float32)
        if is_mlx_array(message.data):
            kernel("crossings", default_path()).compile_ahead(crossings, n_channels)

    def _crossings(self, message: AxisArray) -> Crossings:
        """Those of the settings, for messages like *message*."""
        state, settings = self._state, self.settings
        if state.settings is settings and state.crossings is not None:
            return state.crossings
        shape = list(message.data.shape)
        del shape[message.get_axis_idx(state.stream_dim)]
        given = np.asarray(settings.threshold, np.float32)
        try:
            thresholds = np.ascontiguousarray(np.broadcast_to(given, shape)).reshape(-1)
        except ValueError:
            raise ValueError(
                f"'threshold' must be a number, or one for each channel of shape {tuple(shape)}, got one of shape "
                f"{given.shape}"
            ) from None
        rate, tau = 1.0 / state.gain, settings.auto_scale_tau
        # As ezmsg-event, which counts two samples or less as none.
        longest, shortest, refractory = (
            int(seconds * rate) for seconds in (settings.max_peak_dur, settings.min_peak_dur, settings.refrac_dur)
        )
        longest, shortest = max(longest, 1), max(shortest, 1)
        looks_for_peak = settings.align_on_peak or settings.return_peak_val
        self._warn_of_scale(state.settings)
        state.settings, state.crossings = settings, Crossings(
            thresholds,
            refractory=refractory if refractory > 2 else 0,
            scale=settings.auto_scale.value if tau > 0 else "none",
            alpha=alpha_of(tau, state.gain) if tau > 0 else 1.0,
            shortest=shortest,
            window=longest if looks_for_peak else min(shortest, longest),
            at_peak=settings.align_on_peak,
            gives_values=settings.return_peak_val,
            is_sparse=settings.output_format is OutputFormat.SPARSE,
        )  # fmt: skip
        return state.crossings

    def _warn_of_scale(self, before: ThresholdSettings | None) -> None:
        """Warn where a scale is named and none is in use. That is no error: it may be switched on while a stream runs.

        Args:
            before: The settings so far.
        """
        tau, scale = self.settings.auto_scale_tau, self.settings.auto_scale
        is_new = before is None or (before.auto_scale_tau, before.auto_scale) != (tau, scale)
        if tau == 0 and scale is not AutoScale.ZSCORE and is_new:
            ez.logger.warning(
                f"{type(self).__name__} takes {self.settings.threshold!r} for an absolute value, not for multiples of "
                f"the scale that 'auto_scale' names ({scale.value!r}), since 'auto_scale_tau' is 0."
            )

    def _process(self, message: AxisArray) -> AxisArray:
        state = self._state
        crossings, axis = self._crossings(message), message.get_axis_idx(state.stream_dim)
        shape = list(message.data.shape)
        shape.insert(0, shape.pop(axis))
        n_samples = shape[0]
        result: Any
        if is_mlx_array(message.data):
            result = self._of_mlx(as_float32(message.data, _OPERATION), crossings, axis, tuple(shape))
        else:
            result = self._of_numpy(np.asarray(message.data), crossings, axis, tuple(shape))
        state.n_seen += n_samples
        return self._result(message, result, axis, crossings.delay)

    def _result(self, message: AxisArray, data: Any, axis: int, delay: int) -> AxisArray:
        dims = [message.dims[axis], *message.dims[:axis], *message.dims[axis + 1 :]]
        return replace(message, data=data, dims=dims, axes=_delayed(message.axes, dims[0], delay))

    def _of_mlx(self, x: mx.array, crossings: Crossings, axis: int, shape: tuple[int, ...]) -> mx.array | SparseEvents:
        import mlx.core as mx

        state, path = self._state, default_path()
        zi = mx.array(state.zi) if isinstance(state.zi, np.ndarray) else known_mlx(state.zi)
        # A view of MLX's is to be evaluated, which takes the host longer than the usual message takes the kernel.
        flat = x if x.ndim == 2 and not axis else mx.moveaxis(x, axis, 0).reshape(shape[0], -1)
        schedule_before(path, zi)
        y, zf = kernel("crossings", path).run(flat, crossings, zi, 0, ())
        schedule_after(path, zf, first=state.n_seen == 0)
        state.zi = zf
        if crossings.is_sparse:
            return SparseEvents(y, shape, crossings.gives_values)
        return y if len(shape) == 2 else y.reshape(shape)

    def _of_numpy(
        self, x: npt.NDArray, crossings: Crossings, axis: int, shape: tuple[int, ...]
    ) -> npt.NDArray | sparse.COO:
        if x.dtype.kind == "c":
            raise TypeError(f"The data is {x.dtype}; {_OPERATION} needs real numbers.")
        flat = np.ascontiguousarray(np.moveaxis(x, axis, 0).reshape(shape[0], -1), np.float32)
        y, self._state.zi = find(flat, crossings, np.ascontiguousarray(self._state.zi))
        return events_to_coo(y, shape, crossings.gives_values) if crossings.is_sparse else y.reshape(shape)

    def _without_samples(self, message: AxisArray) -> AxisArray:
        """A message without samples has the form of those with samples."""
        import sparse

        axis = message.get_axis_idx(resolve_stream_dim(message))
        shape = [message.data.shape[axis], *message.data.shape[:axis], *message.data.shape[axis + 1 :]]
        settings = self.settings
        result: Any
        if not is_mlx_array(message.data):
            dtype = np.float32 if settings.return_peak_val else np.bool_
            is_sparse = settings.output_format is OutputFormat.SPARSE
            result = sparse.COO(np.zeros((len(shape), 0), np.int64), np.zeros(0, dtype), tuple(shape)) \
                if is_sparse else np.zeros(shape, dtype)  # fmt: skip
        else:
            import mlx.core as mx

            if settings.output_format is OutputFormat.SPARSE:
                result = SparseEvents(mx.zeros((0, math.prod(shape[1:]))), tuple(shape), settings.return_peak_val)
            else:
                result = mx.zeros(shape, mx.float32 if settings.return_peak_val else mx.bool_)
        crossings = self._state.crossings
        return self._result(message, result, axis, 0 if crossings is None else crossings.delay)


def _delayed(axes: Axes, dim: str, delay: int) -> Axes:
    """*axes* of samples that are *delay* samples earlier."""
    if not delay or not isinstance(axis := axes.get(dim), LinearAxis):
        return axes
    return {**axes, dim: replace(axis, offset=value_at(axis, -delay))}


class FusedCrossings(FusedStage[ThresholdCrossingTransformer]):
    """Dense events. Array: the state. Count: the samples so far."""

    def __init__(self, transformer: ThresholdCrossingTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self.crossings = known(transformer.state.crossings)
        self._has_host_kernel = default_path() == "cpu"

    def load(self) -> tuple[tuple[mx.array, ...], int]:
        """See :class:`FusedStage`."""
        import mlx.core as mx

        state = self.transformer.state
        zi = mx.array(state.zi) if isinstance(state.zi, np.ndarray) else known_mlx(state.zi)
        return (zi,), state.n_seen

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: int) -> Advance:
        """See :class:`FusedStage`."""
        return Advance(None, n_samples, counts + n_samples)

    def relabel(self, axes: Axes, n_samples: int, counts: int) -> Axes:
        """See :class:`FusedStage`."""
        return _delayed(axes, self.dim, self.crossings.delay)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        flat, (zi,) = x.reshape(x.shape[0], -1), arrays
        results: tuple[Array, Array]
        if not isinstance(flat, np.ndarray):
            results = kernel("crossings", default_path()).run(flat, self.crossings, known_mlx(zi), 0, ())
        elif self._has_host_kernel:
            results = find(flat, self.crossings, known_numpy(zi))
        else:
            import mlx.core as mx

            y, zf = kernel("crossings", default_path()).run(mx.array(flat), self.crossings, mx.array(zi), 0, ())
            results = np.array(y), np.array(zf)
        return results[0].reshape(x.shape), (results[1],)


class ThresholdCrossing(
    UnitTakesSettings,
    BaseTransformerUnit[ThresholdSettings, AxisArray, AxisArray, ThresholdCrossingTransformer],
):
    """Finds where each channel crosses a threshold; see :obj:`ThresholdCrossingTransformer`."""

    SETTINGS = ThresholdSettings  # type: ignore[assignment]
