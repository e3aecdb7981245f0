"""Continuous wavelet transform of a stream, on every MLX backend."""

from __future__ import annotations

import ezmsg.core as ez
import ezmsg.sigproc.wavelets as sigproc
import numpy as np
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    processor_state,
    suppress_axis_deprecation,
)
from ezmsg.sigproc.filterbank import FilterbankMode, MinPhaseMode
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .filterbank import FilterbankSettings, FilterbankTransformer, minimum_phase
from .stream.convert import is_mlx_array, known_mlx
from .stream.segments import stream_dimension
from .stream.unit import (
    TakesMessages,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_member,
    known,
    own_settings,
)

_OPERATION = "a wavelet transform"


class CWTSettings(sigproc.CWTSettings):
    """The settings of :obj:`ezmsg.sigproc.wavelets.CWT`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.frequencies is None) == (self.scales is None):
            raise ValueError(f"'scales' must be given if 'frequencies' are not, and only then, got {self.scales!r}")
        name = "scales" if self.frequencies is None else "frequencies"
        values = np.asarray(getattr(self, name))
        if values.dtype.kind not in "fiu":
            raise TypeError(f"{name!r} must be numbers > 0, one or more, got {getattr(self, name)!r}")
        if values.ndim != 1 or not values.size or not (values > 0).all():
            raise ValueError(f"{name!r} must be numbers > 0, one or more, got {getattr(self, name)!r}")
        check_member("min_phase", self.min_phase, MinPhaseMode)
        check_fields(self, names=("axis",))


@processor_state
class CWTState(sigproc.CWTState):
    """The state of a wavelet transform."""

    bank: FilterbankTransformer | None = None
    """The wavelets as filters, for MLX data; None for other data."""


class CWTTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.CWTTransformer,
    BaseStatefulTransformer[CWTSettings, AxisArray, AxisArray, CWTState],
):
    """Continuous wavelet transform along the stream dimension, as :obj:`ezmsg.sigproc.wavelets.CWTTransformer` has it.

    The result has the frequencies before time, which is last. It is the difference from sample to sample of the
    convolutions with the integrals of the wavelets, which for MLX data are convolutions with the differences of these:
    the same, without the loss of a difference between large numbers in float32. MLX data comes out as MLX data, float32
    for a real wavelet, else complex64. NumPy data is left to ezmsg-sigproc, and a stream that changes from one to the
    other begins anew.

    Raises:
        ValueError: The message has a dimension ``freq`` already.
        TypeError: What is given is not a message.
    """

    _state: CWTState

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields; the stream begins anew."""
        # Not as in ezmsg-baseproc, which compares arrays for equality.
        given = self.settings if new_settings is None else own_settings(self.get_settings_type(), new_settings)
        with suppress_axis_deprecation():
            self.settings = replace(given, **kwargs) if kwargs else given
        self._request_reset()

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(message, extra=(type(message.data), "complex" in str(message.data.dtype)))

    def _reset_state(self, message: AxisArray) -> None:
        state = self._state
        state.bank = state.template = None
        dim = stream_dimension(self, message, _OPERATION)
        if not is_mlx_array(message.data):
            super()._reset_state(message)
            return
        axis = message.get_axis_idx(dim)
        shape = (*message.data.shape[:axis], 0, *message.data.shape[axis + 1 :])
        is_complex = "complex" in str(message.data.dtype)
        # What ezmsg-sigproc works out for such a stream, in float64.
        super()._reset_state(replace(message, data=np.zeros(shape, complex if is_complex else float)))
        integrals = minimum_phase(known(state.int_psi_scales), self.settings.min_phase)
        weights = known(state.neg_rt_scales)[:, 0]
        kernels = [
            weight * np.diff(integral, prepend=0.0, append=0.0)
            for weight, integral in zip(weights, integrals, strict=True)
        ]
        state.fbgen = state.last_conv_samp = None
        with suppress_axis_deprecation():
            settings = FilterbankSettings(kernels=kernels, mode=FilterbankMode.CONV, axis=state.axis, new_axis="freq")
        state.bank = FilterbankTransformer(settings=settings)

    def _process(self, message: AxisArray) -> AxisArray:
        state = self._state
        if state.template is None:
            # The message before could not be begun with.
            self._reset_state(message)
        if state.bank is None:
            return super()._process(message) if message.data.size else self._without_samples(message)
        import mlx.core as mx

        y = known_mlx(state.bank(message).data)
        template = known(state.template)
        if template.data.dtype.kind != "c" and y.dtype == mx.complex64:
            y = mx.real(y)
        return replace(template, data=y, axes={**template.axes, state.axis: message.axes[state.axis]})

    def _without_samples(self, message: AxisArray) -> AxisArray:
        template = known(self._state.template)
        return replace(template, axes={**template.axes, self._state.axis: message.axes[self._state.axis]})


class CWT(UnitTakesSettings, BaseTransformerUnit[CWTSettings, AxisArray, AxisArray, CWTTransformer]):
    """Continuous wavelet transform; see :obj:`CWTTransformer`."""

    SETTINGS = CWTSettings  # type: ignore[assignment]
