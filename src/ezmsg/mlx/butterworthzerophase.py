"""Butterworth filter forwards and backwards in a stream, without a shift of phase, on every MLX backend."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import ezmsg.core as ez
import ezmsg.sigproc.butterworthzerophase as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, CompositeProcessor, processor_state
from ezmsg.sigproc.filter import FilterByDesignState
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from scipy.signal import sosfilt_zi

from .butterworthfilter import ButterworthFilterTransformer, check_butterworth_fields
from .filter import not_a_filter
from .kernels import default_path, kernel
from .kernels.layout import LARGEST_SAMPLE, to_pairs
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.device import uses_gpu
from .stream.segments import first_samples, linear_axis, sampling_period, stream_dimension
from .stream.unit import TakesMessages, TransformerTakesSettings, UnitTakesSettings, check_number, known

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "filtering"


class ButterworthZeroPhaseSettings(sigproc.ButterworthZeroPhaseSettings):
    """The settings of :obj:`ezmsg.sigproc.butterworthzerophase.ButterworthZeroPhase`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_butterworth_fields(self)
        check_number("settle_cutoff", self.settle_cutoff)
        if self.max_pad_duration is not None:
            check_number("max_pad_duration", self.max_pad_duration, zero=True)


@processor_state
class BackwardState(FilterByDesignState):
    """The state of a backward pass, which ezmsg-sigproc's transformer has among its attributes."""

    tail: npt.NDArray | mx.array | None = None
    """Samples whose results wait for later ones."""

    tail_offset: float = 0.0
    """Time of the first of these."""

    coefs: npt.NDArray | tuple[npt.NDArray, npt.NDArray] | None = None
    """The filter for NumPy data; None if there is none."""

    sections: npt.NDArray[np.float64] | None = None
    """The filter for MLX data."""

    settled: npt.NDArray[np.float64] | None = None
    """Its state for ones that have been there for ever."""

    zi_tiled: npt.NDArray | None = None
    """The state of the filter for ones that have been there for ever, for NumPy data."""

    sos_mx: None = None
    """Without use here."""

    pad_length: int = 0
    """How many samples a result waits for."""


def _in_state(name: str) -> Any:
    return property(lambda self: getattr(self._state, name), lambda self, value: setattr(self._state, name, value))


class ButterworthBackwardFilterTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.ButterworthBackwardFilterTransformer,
    BaseStatefulTransformer[ButterworthZeroPhaseSettings, AxisArray, AxisArray, BackwardState],
):
    """The backward pass: each message is filtered from its end to its beginning, with what came before it.

    The counterpart of :obj:`ezmsg.sigproc.butterworthzerophase.ButterworthBackwardFilterTransformer`. Results come when
    enough samples after them are known for the filter to have settled, as many as there. MLX data is filtered by
    sections. New settings count from the next message on, and the samples that are kept stay.
    """

    _state: BackwardState

    _tail, _tail_offset = _in_state("tail"), _in_state("tail_offset")
    _coefs_cache, _zi_tiled = _in_state("coefs"), _in_state("zi_tiled")
    _sos_mx, _pad_length = _in_state("sos_mx"), _in_state("pad_length")

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields, from the next message on."""
        super().update_settings(new_settings, **kwargs)
        # ezmsg-sigproc's looks for a filter inside, which this one does not have.
        self._state.needs_redesign = True

    def _process(self, message: AxisArray) -> AxisArray:
        tail = self._tail
        if self._state.needs_redesign or self._coefs_cache is None:
            self._redesign(message)
        if tail is not None and is_mlx_array(tail) != is_mlx_array(message.data):
            self._tail, self._zi_tiled = _in_library_of(tail, message.data), None
        if not is_mlx_array(message.data) or self._coefs_cache is None or self.settings.order <= 0:
            return super()._process(message)
        return self._on_device(message)

    def _redesign(self, message: AxisArray) -> None:
        """Design both forms for the rate of *message*. What is kept of the stream stays, which is lost otherwise."""
        dim = stream_dimension(self, message, _OPERATION)
        rate = 1.0 / sampling_period(message, dim, _OPERATION)
        design = cast("functools.partial[Any]", self.get_design_function())
        try:
            sections = self._state.sections = design(rate, coef_type="sos")
            self._state.settled = None if sections is None else sosfilt_zi(sections)
            self._coefs_cache = design(rate)
        except (ValueError, TypeError) as error:
            raise not_a_filter(self.settings, rate, error) from error
        self._zi_tiled = None
        self._pad_length = self._compute_pad_length(rate)
        self._state.needs_redesign = False

    def _on_device(self, message: AxisArray) -> AxisArray:

        dim = stream_dimension(self, message, _OPERATION)
        axis, stream = message.get_axis_idx(dim), linear_axis(message.axes, dim)
        data = as_float32(message.data, _OPERATION)
        if not data.size:
            return replace(message, data=data)
        offset = stream.offset if self._tail is None else self._tail_offset
        n_kept = 0 if self._tail is None else self._tail.shape[axis]
        n_results = max(n_kept + data.shape[axis] - self._pad_length, 0)
        run = self._on_gpu if uses_gpu() else self._on_host
        y, tail = run(data, axis, n_results)
        if n_results:
            message = replace(message, axes={**message.axes, dim: replace(stream, offset=offset)})
        self._tail, self._tail_offset = tail, offset + n_results * stream.gain
        return replace(message, data=y)

    def _on_gpu(self, data: mx.array, axis: int, n_results: int) -> tuple[mx.array, mx.array]:
        """The results that are known, and the samples of the others."""
        import mlx.core as mx

        before = None if self._tail is None else known_mlx(self._tail)
        joined = data if before is None else mx.concatenate([before, data], axis=axis)
        tail = mx.contiguous(joined[_along(axis, slice(n_results, None))])
        mx.async_eval(tail)
        if not n_results:
            return data[_along(axis, slice(0, 0))], tail
        backwards = _along(axis, slice(None, None, -1))
        return self._filtered(joined[backwards], axis)[backwards][_along(axis, slice(0, n_results))], tail

    def _on_host(self, data: mx.array, axis: int, n_results: int) -> tuple[mx.array, mx.array]:
        """The same over views of MLX's memory, without a round trip to its thread."""
        import mlx.core as mx

        parts = [np.asarray(data)] if self._tail is None else [np.asarray(self._tail), np.asarray(data)]
        # From the end on at once: a copy less.
        backwards = _along(axis, slice(None, None, -1))
        joined = np.array(
            np.concatenate([part[backwards] for part in reversed(parts)], axis=axis), order="C", copy=None
        )
        n_waiting = joined.shape[axis] - n_results
        # Not only contiguous: of a single sample NumPy would keep the step back, which MLX refuses.
        tail = np.array(joined[_along(axis, slice(0, n_waiting))][backwards], order="C")
        if not n_results:
            return mx.array(tail[_along(axis, slice(0, 0))]), mx.array(tail)
        y = np.asarray(self._filtered(mx.array(np.array(joined, order="C", copy=None)), axis))[
            _along(axis, slice(n_waiting, None))
        ][backwards]
        return mx.array(np.array(y, order="C")), mx.array(tail)

    def _filtered(self, x: mx.array, axis: int) -> mx.array:
        """*x* filtered, as if its first sample had been there for ever."""
        state, path = self._state, default_path()
        zi = _started(known(state.settled), x, axis)
        sections, sizes = known(state.sections), self.settings.mlx_metal_chunk_sizes
        return kernel("sosfilt", path).run(x, sections, zi, axis, sizes)[0]


def _started(settled: npt.NDArray[np.float64], x: mx.array, axis: int) -> mx.array:
    """The state of a filter for which the first finite sample of each channel has been there for ever, as pairs."""
    import mlx.core as mx

    shape = (len(settled), *(2 if i == axis else 1 for i in range(x.ndim)))
    if not uses_gpu():
        first = np.asarray(x)[_along(axis, slice(0, 1))].astype(np.float64)
        if not (np.abs(first) <= LARGEST_SAMPLE).all():
            first, _ = first_samples(x, axis, LARGEST_SAMPLE)
        return mx.array(to_pairs(settled.reshape(shape) * first, axis=axis + 1))
    # Nothing is read on the host for it.
    taken = mx.abs(x) <= LARGEST_SAMPLE
    index = mx.argmax(taken, axis=axis, keepdims=True)
    value = mx.take_along_axis(mx.where(taken, x, 0.0), index, axis=axis)
    pairs = mx.array(to_pairs(settled.reshape(shape), axis=axis + 1))
    return pairs * value


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, part)


def _in_library_of(tail: npt.NDArray | mx.array, data: npt.NDArray | mx.array) -> npt.NDArray | mx.array:
    import mlx.core as mx

    return mx.array(np.asarray(tail, np.float32)) if is_mlx_array(data) else np.array(tail)


class ButterworthZeroPhaseTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.ButterworthZeroPhaseTransformer,
    CompositeProcessor[ButterworthZeroPhaseSettings, AxisArray, AxisArray],
):
    """Butterworth filter forwards and backwards along the stream dimension, for which a result waits for later samples.

    :obj:`ezmsg.sigproc.butterworthzerophase.ButterworthZeroPhaseTransformer` with the filters of this package in it,
    and with as many samples of delay. The backward pass begins anew in each message, at its last sample: results depend
    on how the stream is cut, by ``settle_cutoff`` at most, as there; with the same messages they are the same.

    Raises:
        ValueError: As :obj:`ezmsg.mlx.butterworthfilter.ButterworthFilterTransformer`.
        TypeError: Complex MLX data; what is given is not a message.
    """

    @staticmethod
    def _initialize_processors(settings: sigproc.ButterworthZeroPhaseSettings) -> dict[str, Any]:
        return {
            "forward": ButterworthFilterTransformer(settings),
            "backward": ButterworthBackwardFilterTransformer(settings),
        }


class ButterworthZeroPhase(
    UnitTakesSettings,
    BaseTransformerUnit[ButterworthZeroPhaseSettings, AxisArray, AxisArray, ButterworthZeroPhaseTransformer],
):
    """Butterworth filter without a shift of phase; see :obj:`ButterworthZeroPhaseTransformer`."""

    SETTINGS = ButterworthZeroPhaseSettings  # type: ignore[assignment]
