"""Several filters without feedback of the same stream, on every MLX backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ezmsg.core as ez
import ezmsg.sigproc.filterbank as sigproc
import numpy as np
import numpy.typing as npt
import scipy.signal
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformerUnit,
    processor_state,
    suppress_axis_deprecation,
)
from ezmsg.sigproc.filterbank import FilterbankMode, MinPhaseMode
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .kernels.convolution import FilterBank
from .stream.convert import as_float32, is_mlx_array
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

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "a bank of filters"


class FilterbankSettings(sigproc.FilterbankSettings):
    """The settings of :obj:`ezmsg.sigproc.filterbank.Filterbank`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.kernels, (list, tuple)) or not self.kernels:
            raise TypeError(f"'kernels' must be a list of one or more arrays of taps, got {self.kernels!r}")
        for kernel in self.kernels:
            taps = np.asarray(kernel)
            if taps.dtype.kind not in "fciu":
                raise TypeError(f"'kernels' must be arrays of finite numbers with one dimension, got {kernel!r}")
            if taps.ndim != 1 or not taps.size or not np.isfinite(taps).all():
                raise ValueError(f"'kernels' must be arrays of finite numbers with one dimension, got {kernel!r}")
        check_member("mode", self.mode, FilterbankMode)
        check_member("min_phase", self.min_phase, MinPhaseMode)
        check_fields(self, names=("axis", "new_axis"))


@processor_state
class FilterbankState(sigproc.FilterbankState):
    """The state of a bank of filters."""

    bank: FilterBank | None = None
    """The filters for MLX data; None for other data."""

    before: mx.array | None = None
    """The last samples, as many as the longest filter needs; time where it is in the messages."""

    pending: mx.array | None = None
    """Samples that wait for a whole window, in the mode that computes by windows."""

    axis_idx: int = 0
    """Position of the stream dimension."""

    stream_dim: str = ""
    """Its name."""


class FilterbankTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.FilterbankTransformer,
    BaseStatefulTransformer[FilterbankSettings, AxisArray, AxisArray, FilterbankState],
):
    """Several filters without feedback along the stream dimension.

    The counterpart of :obj:`ezmsg.sigproc.filterbank.FilterbankTransformer`, with its settings. The result has the
    filters before time, which is last. MLX data comes out as MLX data, float32, or complex64 where it or a filter is
    complex; how it is computed is up to :mod:`ezmsg.mlx.kernels.convolution` in both modes. In the mode ``FFT`` results
    come in windows as long as ezmsg-sigproc's. NumPy data is left to ezmsg-sigproc, and a stream that changes from one
    to the other begins anew.

    Raises:
        TypeError: What is given is not a message.
    """

    _state: FilterbankState

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, or other values of single fields; the stream begins anew."""
        # Not as in ezmsg-baseproc, which compares arrays for equality.
        given = self.settings if new_settings is None else own_settings(self.get_settings_type(), new_settings)
        with suppress_axis_deprecation():
            self.settings = replace(given, **kwargs) if kwargs else given
        self._request_reset()

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(message, extra=(type(message.data), _is_complex(message.data)))

    def _reset_state(self, message: AxisArray) -> None:
        state, data = self._state, message.data
        state.bank = state.before = state.pending = state.template = None
        state.stream_dim = stream_dimension(self, message, _OPERATION)
        if not is_mlx_array(data):
            super()._reset_state(message)
            return
        state.axis_idx = message.get_axis_idx(state.stream_dim)
        # What ezmsg-sigproc works out for such a stream: its template, and how it computes. Without its samples, which
        # it would make room for.
        shape = (*data.shape[: state.axis_idx], 0, *data.shape[state.axis_idx + 1 :])
        super()._reset_state(replace(message, data=np.zeros(shape, complex if _is_complex(data) else float)))
        state.bank = FilterBank(minimum_phase(self.settings.kernels, self.settings.min_phase))
        state.tail = state.dest_arr = state.prep_kerns = state.windower = None

    def _process(self, message: AxisArray) -> AxisArray:
        import mlx.core as mx

        state, data = self._state, message.data
        if state.template is None:
            # The message before could not be begun with.
            self._reset_state(message)
        if not is_mlx_array(data) or state.bank is None:
            return super()._process(message) if data.size else _without_samples(self._state.template, message)
        x = data if _is_complex(data) else as_float32(data, _OPERATION)
        axis, bank = state.axis_idx, state.bank
        if state.mode == FilterbankMode.FFT:
            x = self._windows(x)
        if 0 in x.shape:
            is_complex = bank.is_complex or x.dtype == mx.complex64
            return self._result(message, mx.zeros(self._shape(x), mx.complex64 if is_complex else mx.float32))
        if state.before is None:
            state.before = bank.before(x, axis)
        y, state.before = bank.run(x, state.before, axis)
        return self._result(message, y)

    def _windows(self, x: mx.array) -> mx.array:
        """The samples of the windows that are complete, of those that wait and *x*."""
        import mlx.core as mx

        state, axis = self._state, self._state.axis_idx
        if state.pending is not None:
            x = mx.concatenate([state.pending, x], axis=axis)
        length = known(state.nfft) - known(state.overlap)
        n_samples = x.shape[axis] // length * length
        before = (slice(None),) * axis
        state.pending = mx.contiguous(x[(*before, slice(n_samples, None))])
        mx.async_eval(state.pending)
        return x[(*before, slice(0, n_samples))]

    def _shape(self, x: mx.array) -> tuple[int, ...]:
        axis = self._state.axis_idx
        return (*x.shape[:axis], *x.shape[axis + 1 :], len(self.settings.kernels), x.shape[axis])

    def _result(self, message: AxisArray, y: mx.array) -> AxisArray:
        state, template = self._state, known(self._state.template)
        axes = {**template.axes, state.stream_dim: message.axes[state.stream_dim]}
        return replace(template, data=y, axes=axes)


def minimum_phase(kernels: list[npt.NDArray] | tuple[npt.NDArray, ...], mode: MinPhaseMode) -> list[npt.NDArray]:
    """*kernels* of minimum phase, as ezmsg-sigproc makes them.

    Raises:
        ValueError: One of them is complex, and has none.
    """
    if mode == MinPhaseMode.NONE:
        return [np.asarray(kernel) for kernel in kernels]
    if any(np.iscomplexobj(kernel) for kernel in kernels):
        raise ValueError(f"'min_phase' must be MinPhaseMode.NONE for complex kernels, got {mode!r}")
    method = {MinPhaseMode.HILBERT: "hilbert", MinPhaseMode.HOMOMORPHIC: "homomorphic"}[mode]
    return [scipy.signal.minimum_phase(kernel, method=method) for kernel in kernels]


def _is_complex(data: npt.NDArray | mx.array) -> bool:
    return "complex" in str(data.dtype)


def _without_samples(template: AxisArray | None, message: AxisArray) -> AxisArray:
    """The result of a NumPy message without samples, which has no state yet to begin with in ezmsg-sigproc."""
    like = known(template)
    dim = like.dims[-1]
    return replace(like, axes={**like.axes, dim: message.axes[dim]})


class Filterbank(
    UnitTakesSettings, BaseTransformerUnit[FilterbankSettings, AxisArray, AxisArray, FilterbankTransformer]
):
    """Several filters without feedback of the same stream; see :obj:`FilterbankTransformer`."""

    SETTINGS = FilterbankSettings  # type: ignore[assignment]
