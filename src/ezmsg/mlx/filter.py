"""Filters in a stream, as second-order sections on every MLX backend."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, cast

import ezmsg.core as ez
import ezmsg.sigproc.filter as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    processor_state,
    resolve_stream_dim,
    suppress_axis_deprecation,
)
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from scipy.signal import sosfilt_zi

from .kernels import default_path, in_stream, kernel, recursion
from .scan import normalize_chunk_sizes
from .sosfilt import MAX_CHUNK_SIZE
from .stream.coefficients import Coefficients, Form, carried_state
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.fusible import Array, FusedStage, PassesThrough, filter_time
from .stream.segments import first_samples, is_same_rate, sampling_period, stream_dimension, with_known_rate
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_message,
    check_one_of,
    own_settings,
)

if TYPE_CHECKING:
    import mlx.core as mx

    from .kernels.convolution import FilterBank

KERNEL = "kernel"
"""Where a filter is computed by a kernel of this package, with its state as float32 pairs on MLX's device."""

HOST = "numpy"
"""Where a filter is computed by scipy, with its state in a NumPy array."""


@processor_state
class FilterState(sigproc.FilterState):
    """The state of a filter with given coefficients."""

    # ezmsg-sigproc declares NumPy's only, and keeps those of other libraries in it, too.
    zi: npt.NDArray | mx.array | None = None  # type: ignore[assignment]
    """The state of the filter, in the array library of :attr:`place`."""

    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Name of the stream dimension."""

    gain: float = 0.0
    """Sampling period in seconds at the last reset; 0 where the stream dimension has no regular axis."""

    place: str = ""
    """:data:`KERNEL`, :data:`HOST`, or the package of another array type that ezmsg-sigproc filters."""

    form: Form = "ba"
    """The coefficients that ``zi`` is the state of."""

    sections: npt.NDArray[np.float64] | None = None
    """The coefficients that a kernel computes with; None in another place."""

    not_begun: npt.NDArray[np.bool_] | None = None
    """Channels without a finite sample so far, with length 1 along the stream dimension; None if there are none."""

    is_fresh: bool = True
    """No message has been filtered since the last reset."""


def as_scipy(state: FilterState) -> npt.NDArray | None:
    """``zi`` as a NumPy array in scipy's form; None where there is none, or one of another array library."""
    if state.zi is None or not (isinstance(state.zi, np.ndarray) or is_mlx_array(state.zi)):
        return None
    z = np.asarray(state.zi)
    if state.place != KERNEL:
        return z
    high, low = np.split(z, 2, axis=state.axis_idx + 1)
    return high.astype(np.float64) + low


def for_sigproc(message: AxisArray, place: str) -> AxisArray:
    """The message that ezmsg-sigproc filters in *place*: MLX data become floats, and on the host a NumPy array."""
    if not is_mlx_array(message.data):
        return message
    data = as_float32(message.data, "filtering")
    return replace(message, data=np.array(data) if place == HOST else data)


def to_mlx(data: npt.NDArray | mx.array) -> mx.array:
    """*data* as an MLX array of float32."""
    import mlx.core as mx

    return mx.array(data.astype(np.float32)) if isinstance(data, np.ndarray) else as_float32(data, "filtering")


_OPERATION = "filtering"


def check_filter_fields(settings: sigproc.FilterBaseSettings) -> None:
    """Check what the settings of all filters have.

    Raises:
        ValueError: ``coef_type`` is not one of its two values, or ``mlx_metal_chunk_sizes`` are not sizes.
        TypeError: Another field is not of its type.
    """
    check_one_of("coef_type", settings.coef_type, ("ba", "sos"))
    check_fields(settings, flags=("use_fast_sosfilt", "use_mlx_metal"), names=("axis",))
    normalize_chunk_sizes(settings.mlx_metal_chunk_sizes, MAX_CHUNK_SIZE, name="mlx_metal_chunk_sizes")


class FilterSettings(sigproc.FilterSettings):
    """The settings of :obj:`ezmsg.sigproc.filter.Filter`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_filter_fields(self)
        if self.coefs is not None:
            Coefficients(self.coefs, self.coef_type)


class _Filters(BaseStatefulTransformer[FilterSettings, AxisArray, AxisArray, FilterState]):
    """Says whose settings and whose state it is, before ezmsg-sigproc's transformer says the same of its own."""


class FilterTransformer(TransformerTakesSettings, _Filters, sigproc.FilterTransformer):
    """Filter along the stream dimension with given coefficients.

    Takes the settings of :obj:`ezmsg.sigproc.filter.FilterTransformer` and gives its results. NumPy data is left to
    ezmsg-sigproc. MLX data comes out as float32 MLX data:

    - Sections (``coef_type="sos"``), and *b* and *a* that determine their sections well enough
      (:func:`ezmsg.mlx.stream.coefficients.sections_of`), are computed on the device, on every MLX backend; see
      :func:`ezmsg.mlx.sosfilt.sosfilt` for accuracy and for samples that are not finite.
    - Other *b* and *a* with feedback go through scipy on the host, in float64, and the log warns once. So does all
      with feedback where ``use_mlx_metal`` is False, without a warning.
    - Taps without feedback are computed on the device, too: :mod:`ezmsg.mlx.kernels.convolution`. A sample that is not
      finite leaves no result where it takes part.

    Like there, each channel begins as if its first sample (on the device: the first finite one) had been there for
    ever, so that an offset makes no transient.

    Settings may change in a running stream, and so may its array library. The state stays if the new coefficients have
    as many sections (or as many coefficients) as the old ones, or are the same filter in the other form. Otherwise the
    filter begins anew at the next message.

    Raises:
        ValueError: ``coefs`` are not as scipy returns them; the message has no dimension.
        TypeError: Complex MLX data; what is given is not a message.
    """

    _in_force: FilterSettings | None = None
    """The settings that the state belongs to."""

    _coefficients: Coefficients | None = None
    """Those of the settings in force."""

    _warned_of: Coefficients | None = None

    _bank: tuple[Coefficients, FilterBank] | None = None
    """The taps of a filter without feedback, ready to compute with, and what they were given by."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """Filter *message*; without coefficients it comes back as it is."""
        if self._is_to_skip(message):
            return self._skipped(message)
        return super().__call__(message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if self._is_to_skip(message):
            return self._skipped(message)
        return await super().__acall__(message)

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        return filter_time(self.settings.coefs, self.settings.coef_type, tolerance, gain)

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`; a filter that is computed elsewhere than on the device is not fused."""
        return PassesThrough(self, message) if self.settings.coefs is None else FusedSections.of(self, message)

    def _is_to_skip(self, message: AxisArray) -> bool:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self.settings.coefs is None or 0 in message.data.shape

    def _skipped(self, message: AxisArray) -> AxisArray:
        """A message without samples has the dtype of those with samples; ezmsg-sigproc lets it through as it is."""
        if self.settings.coefs is None or not is_mlx_array(message.data):
            return message
        data = as_float32(message.data, _OPERATION)
        return message if data is message.data else replace(message, data=data)

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields, from the next message on."""
        # Not as in ezmsg-baseproc, which compares arrays for equality and drops the state.
        given = self.settings if new_settings is None else own_settings(self.get_settings_type(), new_settings)
        with suppress_axis_deprecation():
            self.settings = replace(given, **kwargs) if kwargs else given

    def update_coefficients(
        self,
        coefs: sigproc.FilterCoefficients | tuple[npt.NDArray, npt.NDArray] | npt.NDArray,
        coef_type: str | None = None,
    ) -> None:
        """Take other coefficients. The state stays if they have the shape of the old ones, and starts anew if not."""
        self.update_settings(coefs=coefs, coef_type=coef_type or self.settings.coef_type)

    def _given(self) -> Coefficients:
        if self._coefficients is not None and self.settings is self._in_force:
            return self._coefficients
        return Coefficients(self.settings.coefs, self.settings.coef_type)

    def _place_of(self, data: npt.NDArray | mx.array, coefficients: Coefficients) -> str:
        """Where *data* is filtered, and where the state is kept."""
        if isinstance(data, np.ndarray):
            return HOST
        if not is_mlx_array(data) or coefficients.is_fir:
            return type(data).__module__.partition(".")[0]
        if not self.settings.use_mlx_metal:
            return HOST
        if coefficients.sections is not None:
            return KERNEL
        if coefficients.ba is not None and self._warned_of is not coefficients:
            self._warned_of = coefficients
            ez.logger.warning(
                f"{type(self).__name__} filters MLX data on the host, with scipy: coefs are b and a of order "
                f"{max(map(len, coefficients.ba)) - 1}, which do not determine a filter to 1e-5 in float64. Give "
                "second-order sections instead: design with output='sos' and set coef_type='sos'."
            )
        return HOST

    def _take_up(self, message: AxisArray) -> None:
        """Put the settings, and the array library of *message*, in force; with the state so far where it fits."""
        before, coefficients_before = self._state, self._coefficients or self._given()
        self._state = copy.copy(before)
        try:
            if stream_dimension(self, message, _OPERATION) != before.stream_dim:
                self._reset_state(message)
                return
            self._start(message, before)
            is_same_form = (coefficients_before.ba is None) == (self._given().ba is None)
            if not (before.place == self._state.place == KERNEL and is_same_form):
                self._carry(before, coefficients_before)
        except BaseException:
            # The next message, or other settings, may go on from there.
            self._state = before
            raise

    def _reset_state(self, message: AxisArray) -> None:
        state = self._state
        dim = stream_dimension(self, message, _OPERATION)
        gain = getattr(message.axes.get(dim), "gain", 0.0)
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            # Otherwise the known one stays, with which the hash of this message was taken.
            state.gain = gain
        state.stream_dim = dim
        state.axis_idx = message.get_axis_idx(dim)
        self._start(message)

    def _start(self, message: AxisArray, before: FilterState | None = None) -> None:
        """Begin at the first samples of *message*; between kernels and with as many sections go on from *before*."""
        state, coefficients = self._state, self._given()
        place = self._place_of(message.data, coefficients)
        if place == KERNEL:
            sections = coefficients.sections
            assert sections is not None
            state.sections, state.form = sections, "sos"
            known = None if before is None or before.place != KERNEL else before.sections
            if known is None or len(known) != len(sections):
                n_channels = message.data.size // message.data.shape[state.axis_idx]
                kernel("sosfilt", default_path()).compile_ahead(sections, n_channels)
                state.zi, state.not_begun, state.is_fresh = None, None, True
                self._begin(as_float32(message.data, _OPERATION))
        else:
            super()._reset_state(for_sigproc(message, place))
            state.form = "sos" if self.settings.coef_type == "sos" else "ba"
            if state.fir_method is not None:
                state.form = "fir"
            state.sections = state.not_begun = None
        state.place = place
        self._in_force, self._coefficients = self.settings, coefficients

    def _begin(self, data: mx.array) -> None:
        """Begin each channel that has not begun yet, as if its first sample in *data* had been there for ever."""
        import mlx.core as mx

        from .kernels.layout import LARGEST_SAMPLE, to_pairs

        state = self._state
        # A start at a sample that the filter itself leaves out would never be forgotten.
        first, found = first_samples(data, state.axis_idx, LARGEST_SAMPLE, state.not_begun)
        assert state.sections is not None
        settled = sosfilt_zi(state.sections)
        shape = (len(settled), *(2 if axis == state.axis_idx else 1 for axis in range(first.ndim)))
        pairs = mx.array(to_pairs(settled.reshape(shape) * first, axis=state.axis_idx + 1))
        state.zi = pairs if state.zi is None else mx.where(mx.array(found), pairs, known_mlx(state.zi))
        not_begun = ~found if state.not_begun is None else state.not_begun & ~found
        state.not_begun = not_begun if not_begun.any() else None

    def _carry(self, before: FilterState, coefficients_before: Coefficients) -> None:
        """Go on from *before*, which has another form or is in another place, where that can be a state of this one."""
        state, axis = self._state, self._state.axis_idx
        z, new = as_scipy(before), as_scipy(state)
        if z is not None and new is not None:
            z = carried_state(z, axis, before.form, coefficients_before, state.form, self._given())
        if z is None or new is None or z.shape != new.shape or not np.can_cast(z.dtype, new.dtype, "same_kind"):
            return
        begun = np.True_ if before.not_begun is None else ~before.not_begun
        if state.place == KERNEL:
            # ezmsg-sigproc loses a channel to its first NaN for ever. Here it begins anew.
            begun = begun & np.isfinite(z).all(axis=(0, axis + 1), keepdims=True)[0]
        z = np.where(begun, z, new).astype(new.dtype)
        if state.place != KERNEL:
            state.zi = z if state.place == HOST else to_mlx(z)
            return
        from .kernels.layout import to_pairs

        state.zi = to_mlx(to_pairs(z, axis=axis + 1))
        if state.not_begun is not None:
            not_begun = state.not_begun & ~begun
            state.not_begun = not_begun if not_begun.any() else None

    def _process(self, message: AxisArray) -> AxisArray:
        if self.settings is not self._in_force or self._place_of(message.data, self._given()) != self._state.place:
            self._take_up(message)
        state = self._state
        if isinstance(message.data, np.ndarray):
            return super()._process(message)
        if state.place != KERNEL:
            if (bank := self._bank_for(message)) is not None:
                x = as_float32(message.data, _OPERATION)
                y, state.zi = bank.run_one(x, as_float32(known_mlx(state.zi), _OPERATION), state.axis_idx)
                return replace(message, data=y)
            result = super()._process(for_sigproc(message, state.place))
            return replace(message, data=to_mlx(result.data)) if is_mlx_array(message.data) else result
        data = as_float32(message.data, _OPERATION)
        if state.not_begun is not None:
            self._begin(data)
        sizes, sections = self.settings.mlx_metal_chunk_sizes, state.sections
        assert sections is not None
        zi, n_messages = known_mlx(state.zi), 0 if state.is_fresh else 1
        y, state.zi = in_stream("sosfilt", data, sections, zi, state.axis_idx, sizes, n_messages)
        state.is_fresh = False
        return replace(message, data=y)

    def _bank_for(self, message: AxisArray) -> FilterBank | None:
        """The taps, for MLX data that they are to filter without feedback; None in all other cases."""
        coefficients = self._given()
        if self._state.form != "fir" or not is_mlx_array(message.data) or coefficients.ba is None:
            return None
        if self._bank is None or self._bank[0] is not coefficients:
            b, a = coefficients.ba
            if b.dtype.kind == "c" or a.dtype.kind == "c":
                return None
            from .kernels.convolution import FilterBank

            self._bank = coefficients, FilterBank([b / a[0]])
        return self._bank[1]


class FusedSections(FusedStage["FilterTransformer | FilterByDesign"]):
    """Second-order sections as a function of arrays. Array: their state.

    Args:
        transformer: The filter, or one that designs it and keeps it in its state.
        message: As it came into the transformer.
        sections: Those of the filter.
        gain: The sampling period that its state is for.
    """

    def __init__(
        self,
        transformer: FilterTransformer | FilterByDesign,
        message: AxisArray,
        sections: npt.NDArray[np.float64],
        gain: float,
    ) -> None:
        super().__init__(transformer, message)
        self._sections, self._known_gain = sections, gain
        self._run, self._sizes = recursion("sosfilt", default_path()), transformer.settings.mlx_metal_chunk_sizes

    @classmethod
    def of(cls, transformer: FilterTransformer | FilterByDesign, message: AxisArray) -> FusedSections | None:
        """The filter that *transformer* is, if a kernel computes it."""
        found = filter_of(transformer)
        state = None if found is None else found.state
        if state is None or state.sections is None or message.dims[state.axis_idx] != resolve_stream_dim(message):
            return None
        return cls(transformer, message, state.sections, state.gain)

    def allows_rate(self, gain: float) -> bool:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        return is_same_rate(gain, self._known_gain)

    def load(self) -> tuple[tuple[mx.array, ...], None] | None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        found = filter_of(self.transformer)
        state = FilterState() if found is None else found.state
        zi: object = state.zi
        # Other sections, and channels that have not begun, are for the transformer itself.
        if state.sections is None or state.not_begun is not None or not is_mlx_array(zi):
            return None
        return ((zi,), None) if np.array_equal(state.sections, self._sections) else None

    def store(self, arrays: tuple[mx.array, ...], counts: None) -> None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        if (found := filter_of(self.transformer)) is not None:
            found.state.zi = arrays[0]

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        y, zf = self._run(x, self._sections, arrays[0], self.axis, self._sizes)
        return y, (zf,)


def filter_of(transformer: FilterTransformer | FilterByDesign) -> FilterTransformer | None:
    """The filter that *transformer* is, or has designed, which is another one after each reset; None before."""
    return transformer if isinstance(transformer, FilterTransformer) else transformer.state.filter


class Filter(UnitTakesSettings, BaseTransformerUnit[FilterSettings, AxisArray, AxisArray, FilterTransformer]):
    """Filters messages along their stream dimension with given coefficients; see :obj:`FilterTransformer`."""

    SETTINGS = FilterSettings  # type: ignore[assignment]


SettingsT = TypeVar("SettingsT", bound=sigproc.FilterBaseSettings)

_DESIGNING = "designing a filter"

_FORWARDED = tuple(
    field.name for field in dataclasses.fields(sigproc.FilterBaseSettings) if field.name not in ("axis", "coef_type")
)


class _Designer(Protocol):
    """Properties that ezmsg-sigproc's transformer adds, whose function takes ``coef_type``, too."""

    def get_design_function(
        self,
    ) -> Callable[..., tuple[npt.NDArray, npt.NDArray] | npt.NDArray | None]: ...


def not_a_filter(settings: ez.Settings, rate: float, error: Exception) -> ValueError:
    """The error for settings of which no filter can be designed at a sampling rate in Hz, for the reason *error*."""
    for name in ("cuton", "cutoff", "Wn", "fundamental_freq"):
        value = getattr(settings, name, None)
        if value is not None and getattr(settings, "wn_hz", True) and np.max(value) >= rate / 2:
            return ValueError(f"{name!r} must be below half the sampling rate ({rate / 2:g} Hz), got {value!r}")
    if (q_factor := getattr(settings, "q_factor", None)) is not None:
        return ValueError(
            f"'q_factor' must give bands that a filter can have at {rate:g} Hz, got {q_factor!r}: {error}"
        )
    return ValueError(f"{settings!r} does not describe a filter at {rate:g} Hz: {error}")


@processor_state
class FilterByDesignState(sigproc.FilterByDesignState):
    """The state of a filter that is designed for the sampling rate of its stream."""

    filter: FilterTransformer | None = None
    """The filter as it was designed; None before the first message."""


class FilterByDesign(
    TransformerTakesSettings, BaseStatefulTransformer[SettingsT, AxisArray, AxisArray, FilterByDesignState]
):
    """Make a transformer of ezmsg-sigproc that designs its filter use :obj:`FilterTransformer` for it.

    To be named before that transformer among the bases. For MLX data a digital filter is designed as second-order
    sections, whatever ``coef_type`` says: it is the same filter, which *b* and *a* describe less well. Other data gets
    the coefficients that ``coef_type`` names.

    New settings are designed for the sampling rate of the next message; the state stays if the filter has as many
    sections (or coefficients) as before. While a design is not possible, each message raises the reason.

    Raises:
        ValueError: The settings in force are not those of a filter at this sampling rate; the stream dimension has no
            regular axis, or one whose gain is not a finite number > 0; the message has no dimension.
        TypeError: What is given is not a message.
    """

    _AS_SECTIONS: ClassVar[bool] = True
    """Whether MLX data is filtered by sections; not where the design has no feedback."""

    _designed_for: SettingsT | None = None
    """The settings that the filter in use was designed for."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """Filter *message*; with an order of 0 it comes back as it is."""
        if type(message) is not AxisArray:
            check_message(message, self)
        return super().__call__(message) if self._filters() else message

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return await super().__acall__(message) if self._filters() else message

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields, from the next message on."""
        super().update_settings(new_settings, **kwargs)
        # The filter in use is compared with the settings at each message instead.
        self._state.needs_redesign = False

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        if not self._filters():
            return 0.0
        coef_type = "sos" if self._AS_SECTIONS else self.settings.coef_type
        return filter_time(self._designed(1.0 / gain, coef_type), coef_type, tolerance, gain)

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`; a filter that is computed elsewhere than on the device is not fused."""
        return FusedSections.of(self, message) if self._filters() else PassesThrough(self, message)

    def _hash_message(self, message: AxisArray) -> int:
        if self._state.filter is not None:
            known = self._state.filter.state
            message = with_known_rate(message, known.stream_dim, known.gain)
        return self._message_hash(message)

    def _reset_state(self, message: AxisArray) -> None:
        before, settings = self._state.filter, self._filter_settings(message)
        self._state.filter = child = FilterTransformer(settings=settings)
        if before is not None:
            child.state.stream_dim = before.state.stream_dim
            child.state.gain = before.state.gain
        self._designed_for = self.settings

    def _process(self, message: AxisArray) -> AxisArray:
        child = self._state.filter
        assert child is not None
        if self.settings is not self._designed_for or child.settings.coef_type != self._coef_type_for(message):
            child.update_settings(self._filter_settings(message))
            self._designed_for = self.settings
        return child(message)

    def _filters(self) -> bool:
        """Whether the settings are those of a filter: not all of them have an order."""
        return bool(getattr(self.settings, "order", 1))

    def _coef_type_for(self, message: AxisArray) -> str:
        # An analog design has no use on samples. It stays what ezmsg-sigproc makes of it.
        is_digital = self._AS_SECTIONS and not getattr(self.settings, "analog", False)
        return "sos" if is_digital and is_mlx_array(message.data) else self.settings.coef_type

    def _designed(self, rate: float, coef_type: str) -> tuple[npt.NDArray, npt.NDArray] | npt.NDArray | None:
        """The coefficients for a sampling rate in Hz, in the form *coef_type*."""
        design = cast(_Designer, self).get_design_function()
        try:
            return design(rate) if coef_type == self.settings.coef_type else design(rate, coef_type=coef_type)
        except (ValueError, TypeError) as error:
            raise not_a_filter(self.settings, rate, error) from error

    def _filter_settings(self, message: AxisArray) -> FilterSettings:
        """The filter that the settings describe, for the sampling rate and the kind of data of *message*."""
        dim = stream_dimension(self, message, _DESIGNING)
        rate = 1.0 / sampling_period(message, dim, _DESIGNING)
        coef_type = self._coef_type_for(message)
        coefs = self._designed(rate, coef_type)
        with suppress_axis_deprecation():
            return FilterSettings(
                axis=dim,
                coef_type=coef_type,
                # ezmsg-sigproc declares FilterCoefficients only, and takes what its own designs return.
                coefs=coefs,  # type: ignore[arg-type]
                **{field: getattr(self.settings, field) for field in _FORWARDED},
            )
