"""Hilbert filter without feedback and the envelope that it gives, on every MLX backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ezmsg.sigproc.fir_hilbert as sigproc
import numpy as np
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .filter import FilterByDesign, check_filter_fields
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.device import uses_gpu
from .stream.segments import stream_dimension, with_known_rate
from .stream.unit import (
    TakesMessages,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_count,
    check_number,
    known,
)

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "filtering"


class FIRHilbertFilterSettings(sigproc.FIRHilbertFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.fir_hilbert.FIRHilbertFilterUnit`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coef_type != "ba":
            raise ValueError(f"'coef_type' must be 'ba', got {self.coef_type!r}")
        check_count("order", self.order, 0)
        for field in ("f_lo", "trans_lo", "trans_hi", "weight_pass", "weight_stop_lo", "weight_stop_hi"):
            check_number(field, getattr(self, field), zero=True)
        for field in ("f_hi", "norm_freq"):
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field))
        check_filter_fields(self)


class FIRHilbertFilterTransformer(FilterByDesign[FIRHilbertFilterSettings], sigproc.FIRHilbertFilterTransformer):
    """Hilbert filter along the stream dimension; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.fir_hilbert.FIRHilbertFilterTransformer`, with its settings.
    """

    _AS_SECTIONS = False


class FIRHilbertFilterUnit(
    UnitTakesSettings,
    BaseTransformerUnit[FIRHilbertFilterSettings, AxisArray, AxisArray, FIRHilbertFilterTransformer],
):
    """Hilbert filter without feedback along the stream dimension; see :obj:`FIRHilbertFilterTransformer`."""

    SETTINGS = FIRHilbertFilterSettings  # type: ignore[assignment]


@processor_state
class FIRHilbertEnvelopeState(sigproc.FIRHilbertEnvelopeState):
    """The state of an envelope."""

    # ezmsg-sigproc declares NumPy's only.
    delay_buf: np.ndarray | mx.array | None = None  # type: ignore[assignment]
    """The last samples, for the delay of the filter; time last."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds at the last reset."""


class FIRHilbertEnvelopeTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.FIRHilbertEnvelopeTransformer,
    BaseStatefulTransformer[FIRHilbertFilterSettings, AxisArray, AxisArray, FIRHilbertEnvelopeState],
):
    """The envelope of a stream: the magnitude of its samples and of those that a Hilbert filter makes of them.

    The counterpart of :obj:`ezmsg.sigproc.fir_hilbert.FIRHilbertEnvelopeTransformer`, with its settings and its delay
    of half the order. MLX data comes out as float32 MLX data.

    Raises:
        ValueError: The settings are not those of a filter at this sampling rate.
        TypeError: Complex MLX data; what is given is not a message.
    """

    _state: FIRHilbertEnvelopeState

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        return FIRHilbertFilterTransformer(self.settings).settling_time(tolerance, gain)

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        super()._reset_state(message)
        state = self._state
        state.filter = FIRHilbertFilterTransformer(settings=self.settings)
        state.stream_dim = stream_dimension(self, message, _OPERATION)
        state.gain = getattr(message.axes.get(state.stream_dim), "gain", 0.0)

    def _process(self, message: AxisArray) -> AxisArray:
        state, data = self._state, message.data
        if 0 in data.shape or not self.settings.order:
            # ezmsg-sigproc would lose the samples of before to a message without any, and has no filter of order 0.
            return message if not is_mlx_array(data) else replace(message, data=as_float32(data, _OPERATION))
        delayed = state.delay_buf
        if delayed is not None and is_mlx_array(delayed) != is_mlx_array(data):
            state.delay_buf = np.array(delayed) if is_mlx_array(delayed) else _to_mlx(delayed)
        if not is_mlx_array(data):
            return super()._process(message)
        return self._on_device(message)

    def _on_device(self, message: AxisArray) -> AxisArray:
        state = self._state
        child = known(state.filter)
        axis = message.get_axis_idx(state.stream_dim)
        x = as_float32(message.data, _OPERATION)
        imaginary = known_mlx(child(replace(message, data=x)).data)
        if state.dly is None:
            state.dly = (known(child.get_taps()) - 1) // 2
        before = None if state.delay_buf is None else known_mlx(state.delay_buf)
        magnitude = _on_gpu if uses_gpu() else _on_host
        y, state.delay_buf = magnitude(x, imaginary, before, axis, state.dly)
        return replace(message, data=y)


def _to_mlx(data: np.ndarray | mx.array) -> mx.array:
    import mlx.core as mx

    return mx.array(np.asarray(data, np.float32))


def _on_gpu(
    x: mx.array, imaginary: mx.array, before: mx.array | None, axis: int, delay: int
) -> tuple[mx.array, mx.array]:
    """The magnitude, and the samples for the next one's delay, time last."""
    import mlx.core as mx

    last = mx.moveaxis(x, axis, -1)
    if before is None:
        before = mx.zeros((*last.shape[:-1], delay))
    joined = mx.concatenate([before, last], axis=-1)
    n_samples = last.shape[-1]
    after = mx.contiguous(joined[..., n_samples:])
    mx.async_eval(after)
    real = mx.moveaxis(joined[..., :n_samples], -1, axis)
    return mx.sqrt(mx.square(real) + mx.square(imaginary)), after


def _on_host(
    x: mx.array, imaginary: mx.array, before: mx.array | None, axis: int, delay: int
) -> tuple[mx.array, mx.array]:
    """The same over views of MLX's memory, without a round trip to its thread."""
    import mlx.core as mx

    last = np.moveaxis(np.asarray(x), axis, -1)
    start = np.zeros((*last.shape[:-1], delay), np.float32) if before is None else np.asarray(before)
    joined = np.concatenate([start, last], axis=-1)
    n_samples = last.shape[-1]
    real = np.moveaxis(joined[..., :n_samples], -1, axis)
    y = np.hypot(real, np.asarray(imaginary))
    return mx.array(np.ascontiguousarray(y)), mx.array(np.ascontiguousarray(joined[..., n_samples:]))


class FIRHilbertEnvelopeUnit(
    UnitTakesSettings,
    BaseTransformerUnit[FIRHilbertFilterSettings, AxisArray, AxisArray, FIRHilbertEnvelopeTransformer],
):
    """The envelope of a stream by a Hilbert filter; see :obj:`FIRHilbertEnvelopeTransformer`."""

    SETTINGS = FIRHilbertFilterSettings  # type: ignore[assignment]
