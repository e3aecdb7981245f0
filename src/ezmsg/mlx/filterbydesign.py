"""What the filters that are designed for the sampling rate of a stream have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import ezmsg.core as ez
import ezmsg.sigproc.filter as sigproc
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, processor_state, suppress_axis_deprecation
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterSettings, FilterTransformer
from .stream.checks import check_message
from .stream.convert import is_mlx_array
from .stream.sampling import sampling_period, stream_dimension, with_known_rate
from .stream.settings import TransformerTakesSettings
from .stream.settling import filter_time

if TYPE_CHECKING:
    from ezmsg.sigproc.butterworthfilter import ButterworthFilterSettings
    from ezmsg.sigproc.cheby import ChebyshevFilterSettings

SettingsT = TypeVar("SettingsT", bound="ButterworthFilterSettings | ChebyshevFilterSettings")

_OPERATION = "designing a filter"

_FORWARDED = tuple(
    field.name for field in dataclasses.fields(sigproc.FilterBaseSettings) if field.name not in ("axis", "coef_type")
)


class _Designer(Protocol):
    """What ezmsg-sigproc's transformer adds, whose function takes ``coef_type``, too."""

    def get_design_function(
        self,
    ) -> Callable[..., tuple[npt.NDArray, npt.NDArray] | npt.NDArray | None]: ...


@processor_state
class FilterByDesignState(sigproc.FilterByDesignState):
    """The state of a filter that is designed for the sampling rate of its stream."""

    filter: FilterTransformer | None = None
    """The filter as it was designed; None before the first message."""


class FilterByDesign(
    TransformerTakesSettings, BaseStatefulTransformer[SettingsT, AxisArray, AxisArray, FilterByDesignState]
):
    """What makes a transformer of ezmsg-sigproc that designs its filter take :obj:`FilterTransformer` for it.

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

    _designed_for: SettingsT | None = None
    """The settings that the filter in use was designed for."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """Filter *message*; with an order of 0 it comes back as it is."""
        if type(message) is not AxisArray:
            check_message(message, self)
        return super().__call__(message) if self.settings.order else message

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return await super().__acall__(message) if self.settings.order else message

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields, from the next message on."""
        super().update_settings(new_settings, **kwargs)
        # The filter in use is compared with the settings at each message instead.
        self._state.needs_redesign = False

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.settling.Settles`."""
        if not self.settings.order:
            return 0.0
        coefs = cast(_Designer, self).get_design_function()(1.0 / gain, coef_type="sos")
        return filter_time(coefs, "sos", tolerance, gain)

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
        child = cast(FilterTransformer, self._state.filter)
        if self.settings is not self._designed_for or child.settings.coef_type != self._coef_type_for(message):
            child.update_settings(self._filter_settings(message))
            self._designed_for = self.settings
        return child(message)

    def _coef_type_for(self, message: AxisArray) -> str:
        # An analog design has no use on samples. It stays what ezmsg-sigproc makes of it.
        is_digital = not getattr(self.settings, "analog", False)
        return "sos" if is_digital and is_mlx_array(message.data) else self.settings.coef_type

    def _filter_settings(self, message: AxisArray) -> FilterSettings:
        """The filter that the settings describe, for the sampling rate and the kind of data of *message*."""
        dim = stream_dimension(self, message, _OPERATION)
        rate = 1.0 / sampling_period(message, dim, _OPERATION)
        coef_type = self._coef_type_for(message)
        design = cast(_Designer, self).get_design_function()
        try:
            coefs = design(rate) if coef_type == self.settings.coef_type else design(rate, coef_type=coef_type)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.settings!r} does not describe a filter at {rate:g} Hz: {error}") from error
        with suppress_axis_deprecation():
            return FilterSettings(
                axis=dim,
                coef_type=coef_type,
                # ezmsg-sigproc declares FilterCoefficients only, and takes what its own designs return.
                coefs=coefs,  # type: ignore[arg-type]
                **{field: getattr(self.settings, field) for field in _FORWARDED},
            )
