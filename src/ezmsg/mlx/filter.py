"""Filters of second-order sections in a stream, on every MLX backend."""

from __future__ import annotations

import ezmsg.sigproc.filter as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    SettingsType,
    processor_state,
    suppress_axis_deprecation,
)
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from scipy.signal import sosfilt_zi

from .kernels import default_path, kernel
from .kernels.scheduling import schedule_after, schedule_before
from .scan import normalize_chunk_sizes
from .sosfilt import MAX_CHUNK_SIZE, check_sos
from .stream.checks import check_fields, check_message
from .stream.convert import as_float32, is_mlx_array
from .stream.sampling import (
    first_finite_samples,
    is_same_rate,
    sampling_period,
    stream_dimension,
    with_known_rate,
)
from .stream.settings import TransformerTakesSettings, UnitTakesSettings

_OPERATION = "filtering"


def check_filter_fields(settings: sigproc.FilterBaseSettings) -> None:
    """Check what the settings of all filters have.

    Raises:
        ValueError: ``coef_type`` is none of its two values, or ``mlx_metal_chunk_sizes`` are no sizes.
        TypeError: Another field is not of its type.
    """
    if settings.coef_type not in ("ba", "sos"):
        raise ValueError(f"coef_type is {settings.coef_type!r}; allowed are 'ba' and 'sos'.")
    check_fields(settings, flags=("use_fast_sosfilt", "use_mlx_metal"), names=("axis",))
    normalize_chunk_sizes(settings.mlx_metal_chunk_sizes, MAX_CHUNK_SIZE, name="mlx_metal_chunk_sizes")


class FilterSettings(sigproc.FilterSettings):
    """The settings of :obj:`ezmsg.sigproc.filter.Filter`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_filter_fields(self)
        if self.coef_type == "sos" and self.coefs is not None:
            check_sos(self.coefs, name="coefs")


@processor_state
class FilterState(sigproc.FilterState):
    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds at the last reset; 0 where the stream dimension has no regular axis."""

    sections: npt.NDArray[np.float64] | None = None
    """The coefficients in force, checked; None after they have changed."""

    is_fresh: bool = True
    """No message has been filtered since the last reset."""


class FilterTransformer(
    TransformerTakesSettings,
    sigproc.FilterTransformer,
    BaseStatefulTransformer[FilterSettings, AxisArray, AxisArray, FilterState],
):
    """Filter along the stream dimension with given coefficients.

    Takes the settings of :obj:`ezmsg.sigproc.filter.FilterTransformer` and gives its results. MLX data with
    ``coef_type="sos"`` is filtered on every MLX backend, float32 out; see :func:`ezmsg.mlx.sosfilt.sosfilt` for
    accuracy and for samples that are not finite. Everything else is left to ezmsg-sigproc: NumPy data, other
    coefficients, and MLX data with ``use_mlx_metal=False``, which goes to scipy and back.

    Like there, each channel begins as if its first sample (the first finite one) had been there for ever, so that an
    offset makes no transient.

    Raises:
        ValueError: ``coefs`` are no sections as scipy returns them; the message has no dimension.
        TypeError: Complex MLX data with sections; what is given is no message.
    """

    def __call__(self, message: AxisArray) -> AxisArray:
        if self._is_to_skip(message):
            return self._skipped(message)
        return BaseStatefulTransformer.__call__(self, message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if self._is_to_skip(message):
            return self._skipped(message)
        return await BaseStatefulTransformer.__acall__(self, message)

    def _is_to_skip(self, message: AxisArray) -> bool:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self.settings.coefs is None or 0 in message.data.shape

    def _skipped(self, message: AxisArray) -> AxisArray:
        """A message without samples has the dtype of those with samples; ezmsg-sigproc lets it through as it is."""
        if self.settings.coefs is None or not self._is_ours(message):
            return message
        data = as_float32(message.data, _OPERATION)
        return message if data is message.data else replace(message, data=data)

    def _is_ours(self, message: AxisArray) -> bool:
        return self.settings.coef_type == "sos" and self.settings.use_mlx_metal and is_mlx_array(message.data)

    def _hash_message(self, message: AxisArray) -> int:
        message = with_known_rate(message, self._state.stream_dim, self._state.gain)
        return self._message_hash(message, extra=(is_mlx_array(message.data), self._is_ours(message)))

    def _reset_state(self, message: AxisArray) -> None:
        state = self._state
        dim = stream_dimension(self, message, _OPERATION)
        gain = getattr(message.axes.get(dim), "gain", 0.0)
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            # Otherwise the known one stays, with which the hash of this message was taken.
            state.gain = gain
        state.stream_dim = dim
        state.axis_idx = message.get_axis_idx(dim)
        state.is_fresh = True
        if not self._is_ours(message):
            super()._reset_state(message)
            return
        import mlx.core as mx

        from .kernels.layout import LARGEST_SAMPLE, to_pairs

        state.sections = check_sos(self.settings.coefs)
        n_channels = message.data.size // message.data.shape[state.axis_idx]
        kernel("sosfilt", default_path()).compile_ahead(state.sections, n_channels)
        data = as_float32(message.data, _OPERATION)
        # A start at a sample that the filter itself leaves out would never be forgotten.
        data = mx.where(mx.abs(data) < LARGEST_SAMPLE, data, np.nan)
        first = first_finite_samples(data, state.axis_idx)
        settled = sosfilt_zi(state.sections)
        shape = (len(settled), *(2 if axis == state.axis_idx else 1 for axis in range(first.ndim)))
        state.zi = mx.array(to_pairs(settled.reshape(shape) * first, axis=state.axis_idx + 1))

    def update_coefficients(self, coefs: npt.NDArray, coef_type: str | None = None) -> None:
        """Take other coefficients. The state stays if they have the shape of the old ones, and starts anew if not."""
        with suppress_axis_deprecation():
            super().update_coefficients(coefs, coef_type)
        self._state.sections = None
        if self._state.zi is None:
            self._request_reset()

    def _process(self, message: AxisArray) -> AxisArray:
        if not self._is_ours(message):
            return super()._process(message)
        state = self._state
        if state.sections is None:
            state.sections = check_sos(self.settings.coefs)
        path = default_path()
        schedule_before(path, state.zi)
        data = as_float32(message.data, _OPERATION)
        sizes = self.settings.mlx_metal_chunk_sizes
        data, state.zi = kernel("sosfilt", path).run(data, state.sections, state.zi, state.axis_idx, sizes)
        schedule_after(path, state.zi, first=state.is_fresh)
        state.is_fresh = False
        return replace(message, data=data)


class Filter(UnitTakesSettings, BaseTransformerUnit[FilterSettings, AxisArray, AxisArray, FilterTransformer]):
    SETTINGS = FilterSettings


class FilterByDesign(
    TransformerTakesSettings, BaseStatefulTransformer[SettingsType, AxisArray, AxisArray, sigproc.FilterByDesignState]
):
    """What makes a transformer of ezmsg-sigproc that designs its filter take :obj:`FilterTransformer` for it.

    To be named before that transformer among the bases. New settings are designed for the sampling rate of the next
    message, and the state stays if the coefficients keep their shape; in ezmsg-sigproc's units the filter starts anew.

    Raises:
        ValueError: The stream dimension has no regular axis, or one whose gain is not a finite number > 0; the message
            has no dimension.
        TypeError: What is given is no message.
    """

    def __call__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return BaseStatefulTransformer.__call__(self, message) if self.settings.order else message

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return await BaseStatefulTransformer.__acall__(self, message) if self.settings.order else message

    def _hash_message(self, message: AxisArray) -> int:
        if self._state.filter is not None:
            known = self._state.filter.state
            message = with_known_rate(message, known.stream_dim, known.gain)
        return self._message_hash(message)

    def _reset_state(self, message: AxisArray) -> None:
        operation = "designing a filter"
        sampling_period(message, stream_dimension(self, message, operation), operation)
        before = self._state.filter
        super()._reset_state(message)
        self._state.filter = FilterTransformer(settings=self._state.filter.settings)
        if before is not None:
            self._state.filter.state.stream_dim = before.state.stream_dim
            self._state.filter.state.gain = before.state.gain

    def _process(self, message: AxisArray) -> AxisArray:
        child = self._state.filter
        if self._state.needs_redesign:
            self._state.needs_redesign = False
            period = sampling_period(message, child.settings.axis, "designing a filter")
            child.update_coefficients(self.get_design_function()(1.0 / period), self.settings.coef_type)
            with suppress_axis_deprecation():
                child.settings = replace(
                    child.settings,
                    use_mlx_metal=self.settings.use_mlx_metal,
                    mlx_metal_chunk_sizes=self.settings.mlx_metal_chunk_sizes,
                )
        return child(message)
