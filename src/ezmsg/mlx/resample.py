"""Another sampling rate, or that of a reference stream, by linear interpolation on every MLX backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import ezmsg.sigproc.resample as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulProcessor, processor_state
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis
from ezmsg.util.messages.util import replace

from .stream.convert import as_float32, is_mlx_array
from .stream.device import uses_gpu
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_message,
    check_number,
    is_real,
    known,
)

if TYPE_CHECKING:
    import mlx.core as mx

    Array: TypeAlias = mx.array | npt.NDArray[np.float32]

_OPERATION = "interpolation"


class ResampleSettings(sigproc.ResampleSettings):
    """The settings of :obj:`ezmsg.sigproc.resample.ResampleUnit`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resample_rate is not None:
            check_number("resample_rate", self.resample_rate)
        check_number("buffer_duration", self.buffer_duration)
        if _fill_values(self.fill_value) is None and self.fill_value not in ("extrapolate", "last"):
            raise ValueError(
                f"'fill_value' must be one of 'extrapolate', 'last', or one or two numbers, got {self.fill_value!r}"
            )
        check_fields(self, flags=("output_reference",), names=("axis",))


def _fill_values(given: object) -> tuple[float, float] | None:
    """The values before and after the samples, if *given* are such."""
    if isinstance(given, str):
        return None
    before, after = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, given)
    return (float(before), float(after)) if is_real(before) and is_real(after) else None


class _Kept:
    """MLX samples of a stream by their number, in place of which their numbers are resampled.

    Args:
        message: The first one.
        dim: The dimension of the samples.
    """

    def __init__(self, message: AxisArray, dim: str) -> None:
        self._dim, self._dims = dim, list(message.dims)
        self._axis = message.get_axis_idx(dim)
        self._first, self._stop = 0, 0
        # Of NumPy on the CPU, over MLX's memory: nothing waits for MLX's thread then.
        self._data: Array | None = None
        axes = {name: axis for name, axis in message.axes.items() if name != dim}
        self._template = replace(message, axes=axes)

    def numbers(self, message: AxisArray) -> AxisArray:
        """Keep the samples of *message*; a message of their numbers in place of it."""
        import mlx.core as mx

        data = as_float32(message.data, _OPERATION)
        if list(message.dims) != self._dims:
            data = data.transpose([message.get_axis_idx(dim) for dim in self._dims])
        before = self._data
        if uses_gpu():
            self._data = data if before is None else mx.concatenate([mx.array(before), data], axis=self._axis)
            mx.async_eval(self._data)
        else:
            parts = [np.asarray(part) for part in (before, data) if part is not None]
            self._data = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self._axis)
        n_samples = data.shape[self._axis]
        numbers = np.arange(self._stop, self._stop + n_samples, dtype=np.float64)
        self._stop += n_samples
        return replace(message, data=numbers, dims=[self._dim], axes={self._dim: message.axes[self._dim]})

    def at(self, result: AxisArray, fill: tuple[float, float] | None = None) -> AxisArray:
        """The samples at the numbers that *result* has, between which they are interpolated."""
        import mlx.core as mx

        numbers, axis = np.asarray(result.data, np.float64), result.axes[self._dim]
        if numbers.size:
            return self.between(numbers - self._first, axis, fill)
        shape = cast("Array", self._data).shape
        return self._with(mx.zeros((*shape[: self._axis], 0, *shape[self._axis + 1 :])), axis)

    def between(
        self, places: npt.NDArray[np.float64], axis: AxisBase, fill: tuple[float, float] | None = None
    ) -> AxisArray:
        """The values at *places*, counted in samples from the first one that is kept; with *axis* as that of time."""
        return self._with(_interpolated(cast("Array", self._data), places, self._axis, fill), axis)

    def rows(self, places: npt.NDArray[np.intp], axis: AxisBase) -> AxisArray:
        """The samples at *places*, which ascend, counted from the first one that is kept."""
        import mlx.core as mx

        data, (first, last) = cast("Array", self._data), (int(places[0]), int(places[-1]))
        lead = (slice(None),) * self._axis
        if last - first + 1 == len(places):
            return self._with(mx.array(data[(*lead, slice(first, last + 1))]), axis)
        return self._with(mx.take(mx.array(data), mx.array(places.astype(np.int32)), axis=self._axis), axis)

    def _with(self, data: mx.array, axis: AxisBase) -> AxisArray:
        return replace(self._template, data=data, axes={**self._template.axes, self._dim: axis})

    def forget_as(self, buffer: Any) -> None:
        """Let go of the samples whose numbers are not in *buffer* any more."""
        import mlx.core as mx

        # They end with the last one, so that it is enough to know how many there are.
        number = self._stop - int(buffer.available())
        if number > self._first and self._data is not None:
            kept = self._data[(slice(None),) * self._axis + (slice(number - self._first, None),)]
            # A copy: a part of a view would keep the whole message.
            self._data, self._first = np.array(kept) if isinstance(kept, np.ndarray) else mx.contiguous(kept), number


def _interpolated(
    data: Array, places: npt.NDArray[np.float64], axis: int, fill: tuple[float, float] | None
) -> mx.array:
    """The values of *data* at *places* along *axis*, in samples; outside of it those of the line through the last two.

    With *fill*, infinite places have its values.
    """
    import mlx.core as mx

    if isinstance(data, np.ndarray):
        from .kernels.cpu.interpolation import interpolate

        before, after = math.prod(data.shape[:axis]), math.prod(data.shape[axis + 1 :])
        x = np.ascontiguousarray(data).reshape(before, -1, after)
        y = np.empty((before, len(places), after), np.float32)
        interpolate(x, places, *(fill or (math.nan, math.nan)), y)
        return mx.array(y.reshape(*data.shape[:axis], -1, *data.shape[axis + 1 :]))
    finite = np.where(np.isfinite(places), places, 0.0)
    index = np.clip(np.floor(finite), 0, data.shape[axis] - 2).astype(np.int32)
    shape = tuple(-1 if i == axis else 1 for i in range(data.ndim))
    # In one array, since each that goes up costs as much as all the rest; float32 holds these numbers exactly.
    given = mx.array(np.stack([index, finite - index]).astype(np.float32))
    first, share = given[0].astype(mx.int32), given[1].reshape(shape)
    low, high = (mx.take(data, first + i, axis=axis) for i in (0, 1))
    # At the last sample itself the line gives it up to rounding.
    result = mx.where(share == 1.0, high, low + share * (high - low))
    for end, value in zip((-math.inf, math.inf), fill or (), strict=False):
        if (places == end).any():
            result = mx.where(mx.array(places == end).reshape(shape), value, result)
    return result


@processor_state
class ResampleState(sigproc.ResampleState):
    """The state of a resampler. For MLX data the buffers of ezmsg-sigproc hold the numbers of the samples."""

    signal: _Kept | None = None
    """The samples of the signal; None for other data than MLX arrays."""

    reference: _Kept | None = None
    """The same of the reference."""


class ResampleProcessor(
    TransformerTakesSettings,
    sigproc.ResampleProcessor,
    BaseStatefulProcessor[ResampleSettings, AxisArray, AxisArray, ResampleState],
):
    """Linear interpolation of a stream at another rate, or at the times of a reference.

    :obj:`ezmsg.sigproc.resample.ResampleProcessor`, which for MLX data resamples the numbers of the samples, in float64
    and on the host, while the samples stay on the device: what is made of the numbers says where the results lie
    between them. MLX data comes out as float32 MLX data.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    _state: ResampleState

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._message_hash(message, extra=(type(message.data),))

    def _reset_state(self, message: AxisArray) -> None:
        super()._reset_state(message)
        self._state.signal = _Kept(message, self._state.axis) if is_mlx_array(message.data) else None

    def _process(self, message: AxisArray) -> None:
        signal = self._state.signal
        super()._process(message if signal is None else signal.numbers(message))

    def push_reference(self, message: AxisArray) -> None:
        """Take a message of the reference: its times, and with ``output_reference`` its samples."""
        if type(message) is not AxisArray:
            check_message(message, self)
        state = self._state
        if state.ref_axis_buffer is None:
            # Otherwise the samples before would have no numbers.
            is_kept = is_mlx_array(message.data) and self.settings.output_reference
            state.reference = _Kept(message, self._seed_axis(message)) if is_kept else None
        super().push_reference(message if state.reference is None else state.reference.numbers(message))

    def __next__(self) -> AxisArray:
        """The next results; a message without samples where there are none yet."""
        if (inside := self._next_inside()) is not None:
            return inside
        state, settings = self._state, self.settings
        fill = _fill_values(settings.fill_value)
        if state.signal is not None and fill is not None:
            # A place that is out of reach instead of a value that might be one of them.
            self.settings = _Placed.of(settings)
        try:
            result = super().__next__()
        finally:
            self.settings = settings
        if state.reference is not None and state.reference_output is not None:
            state.reference_output = state.reference.at(state.reference_output)
            state.reference.forget_as(state.ref_data_buffer)
        if state.signal is None or state.axis not in result.dims:
            return result
        result = state.signal.at(result, fill)
        state.signal.forget_as(state.src_buffer)
        return result

    def _next_inside(self) -> AxisArray | None:
        """The next results of MLX data, if there are some and each lies between two of its samples.

        Nearly all messages have such results. ezmsg-sigproc would give the same, but takes more time for their numbers
        than the samples take.
        """
        state = self._state
        signal, samples, wanted = state.signal, state.src_buffer, state.ref_axis_buffer
        if signal is None or samples is None or wanted is None or wanted.is_empty() or samples.available() < 3:
            return None
        if self.settings.max_chunk_delay is not None or (state.ref_data_buffer is not None and state.reference is None):
            return None
        axis = known(wanted.peek())
        given, times = _values(known(samples.peek_axis()), samples.available()), _values(axis, wanted.available())
        due = np.flatnonzero((times > known(state.last_ref_ax_val)) & (times <= given[-1]))
        times = times[due]
        if not due.size or times.min() < given[0]:
            return None
        places = np.interp(times, given, np.arange(len(given)))
        results = replace(axis, offset=times[0]) if isinstance(axis, LinearAxis) else replace(axis, data=times)
        output = signal.between(places, results)
        state.reference_output = None if state.reference is None else state.reference.rows(due, results)
        # As ezmsg-sigproc leaves them: with a sample before the last result, and without times that are done.
        samples.seek(max(int(np.searchsorted(given, times[-1])) - 1, 0))
        signal.forget_as(samples)
        wanted.seek(due[-1] + 1)
        if state.ref_data_buffer is not None and state.reference is not None:
            state.ref_data_buffer.seek(due[-1] + 1)
            state.reference.forget_as(state.ref_data_buffer)
        state.last_ref_ax_val = times[-1]
        return output


def _values(axis: AxisBase, n: int) -> npt.NDArray[np.float64]:
    """The first *n* values of *axis*."""
    if isinstance(axis, LinearAxis):
        return np.asarray(axis.value(np.arange(n)))
    assert isinstance(axis, CoordinateAxis)
    return axis.data


class _Placed(sigproc.ResampleSettings):
    """Settings with which results outside of the samples lie at infinity."""

    fill_value: Any = (-math.inf, math.inf)

    def __post_init__(self) -> None: ...

    @classmethod
    def of(cls, settings: sigproc.ResampleSettings) -> sigproc.ResampleSettings:
        """*settings* with such a value."""
        return cls(**{name: value for name, value in vars(settings).items() if name != "fill_value"})


class ResampleUnit(UnitTakesSettings, sigproc.ResampleUnit):
    """Interpolates a stream at another rate, or at the times of a reference; see :obj:`ResampleProcessor`."""

    SETTINGS = ResampleSettings

    def create_processor(self) -> None:
        """Make the processor."""
        # Not by a base with its type: ezmsg would take that base's tasks for those of the unit.
        self.processor = ResampleProcessor(settings=cast(ResampleSettings, self.SETTINGS))
