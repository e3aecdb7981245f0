"""Adaptive cancellation of line noise, on every MLX backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ezmsg.sigproc.adaptive_lnc as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .kernels import default_path, kernel
from .kernels.layout import to_pairs
from .stream.convert import as_float32, is_mlx_array
from .stream.device import uses_gpu
from .stream.segments import stream_dimension, with_known_rate
from .stream.unit import (
    TakesMessages,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_count,
    check_fields,
    check_member,
    check_number,
    known,
)

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "cancelling line noise"

_CHUNK_SIZES = (512,)
"""Samples a launch, of the kernel of plain operations."""


class AdaptiveLNCSettings(sigproc.AdaptiveLNCSettings):
    """The settings of :obj:`ezmsg.sigproc.adaptive_lnc.AdaptiveLNC`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("line_freq", self.line_freq)
        check_count("num_harmonics", self.num_harmonics)
        check_number("adapt_time_constant", self.adapt_time_constant)
        if self.max_freq_deviation is not None:
            check_number("max_freq_deviation", self.max_freq_deviation, zero=True)
        check_member("cancel_method", self.cancel_method, sigproc.CancelMethod)
        check_fields(self, names=("axis",))


@processor_state
class AdaptiveLNCState(sigproc.AdaptiveLNCState):
    """The state of a canceller."""

    # ezmsg-sigproc declares NumPy's only.
    zi: npt.NDArray | mx.array | None = None  # type: ignore[assignment]
    """The state of the notches: scipy's for NumPy data, and float32 pairs for MLX data."""

    gain: float = 0.0
    """Sampling period in seconds at the last reset."""


class AdaptiveLNCTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.AdaptiveLNCTransformer,
    BaseStatefulTransformer[AdaptiveLNCSettings, AxisArray, AxisArray, AdaptiveLNCState],
):
    """Cancels a line frequency and its harmonics, which it follows as they drift.

    :obj:`ezmsg.sigproc.adaptive_lnc.AdaptiveLNCTransformer` with the sections of this package as its notches, and with
    phases in float64 for MLX data, too: in float32 the phase of a line is lost after some minutes. MLX data comes out
    as float32 MLX data; on a GPU the host waits once a period of the line for the frequency to be followed. The state
    goes on if the array library of the stream changes.

    A sample that is not finite comes out as it is, and does not count.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    _state: AdaptiveLNCState

    def _hash_message(self, message: AxisArray) -> int:
        return self._message_hash(with_known_rate(message, self._state.axis or None, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        dim = stream_dimension(self, message, _OPERATION)
        axis = message.get_axis_idx(dim)
        shape = (*message.data.shape[:axis], 0, *message.data.shape[axis + 1 :])
        super()._reset_state(replace(message, data=np.zeros(shape, np.float32)))
        self._state.gain = getattr(message.axes.get(dim), "gain", 0.0)

    def _process(self, message: AxisArray) -> AxisArray:
        data = message.data
        if self.settings.cancel_method == sigproc.CancelMethod.PASSTHROUGH:
            return message
        if not is_mlx_array(data):
            if not data.size:
                return message
            self._adopt(is_mlx=False, on_device=False)
            return super()._process(message)
        x = as_float32(data, _OPERATION)
        if not x.size:
            return replace(message, data=x)
        on_device = uses_gpu()
        self._adopt(is_mlx=True, on_device=on_device)
        if on_device:
            result = super()._process(replace(message, data=x))
            self._schedule()
            return result
        import mlx.core as mx

        # Over a view of MLX's memory, so that nothing waits for its thread.
        result = super()._process(replace(message, data=np.asarray(x)))
        return replace(result, data=mx.array(np.ascontiguousarray(result.data)))

    def _adopt(self, *, is_mlx: bool, on_device: bool) -> None:
        """Have the state of the notches as the stream needs it, and the sums where they are added up."""
        state = self._state
        if is_mlx_array(state.zi) != is_mlx:
            import mlx.core as mx

            z = np.asarray(state.zi)
            # The notches run along the first axis of the samples, so that theirs is the second.
            if is_mlx:
                state.zi = mx.array(to_pairs(z.astype(np.float64), axis=1))
            else:
                high, low = np.split(z, 2, axis=1)
                state.zi = high.astype(np.float64) + low
        if is_mlx_array(state.z_acc_real) != on_device:
            for name in ("z_acc_real", "z_acc_imag"):
                setattr(state, name, _placed(getattr(state, name), on_device))
            for name in ("sub_z_real", "sub_z_imag"):
                setattr(state, name, [_placed(sums, on_device) for sums in getattr(state, name) or ()])

    def _schedule(self) -> None:
        """Begin to compute the state, which would otherwise hold the graph of messages that nobody reads."""
        import mlx.core as mx

        state = self._state
        lists = [*(state.sub_z_real or ()), *(state.sub_z_imag or ())]
        mx.async_eval(state.zi, state.z_acc_real, state.z_acc_imag, *lists)

    def _ensure_sos(self, mu: float, n_harm: int, is_mlx: bool) -> npt.NDArray:
        # In float64: a kernel of this package makes of them what its device needs.
        return super()._ensure_sos(mu, n_harm, False)

    def _sosfilt(self, sos: npt.NDArray, x_seg: Any, is_mlx: bool) -> Any:
        state = self._state
        if not is_mlx_array(state.zi):
            return super()._sosfilt(sos, x_seg, is_mlx)
        import mlx.core as mx

        x = x_seg if is_mlx_array(x_seg) else mx.array(x_seg)
        y, state.zi = kernel("sosfilt", default_path()).run(x, sos, state.zi, 0, _CHUNK_SIZES)
        return y if is_mlx_array(x_seg) else np.asarray(y)

    def _accumulate_demod(self, removed: Any, seg_len: int, xp: Any) -> None:
        state = self._state
        cosine, sine = self._waves(1, seg_len, removed)
        removed = xp.where(xp.isfinite(removed), removed, 0.0)
        state.z_acc_real = state.z_acc_real + (removed * cosine).sum(axis=0)
        state.z_acc_imag = state.z_acc_imag + (removed * sine).sum(axis=0)

    def _accumulate_subtract(self, x_seg: Any, seg_len: int, n_harm: int, xp: Any) -> None:
        real, imag = known(self._state.sub_z_real), known(self._state.sub_z_imag)
        x_seg = xp.where(xp.isfinite(x_seg), x_seg, 0.0)
        for k in range(n_harm):
            cosine, sine = self._waves(k + 1, seg_len, x_seg)
            real[k] = real[k] + (x_seg * cosine).sum(axis=0)
            imag[k] = imag[k] + (x_seg * sine).sum(axis=0)

    def _commit_subtract(self, n_harm: int, beta: float, alpha: float, tracking: bool, xp: Any) -> None:
        # What is worked out of the sums are a few numbers a channel, which stay on the host.
        super()._commit_subtract(n_harm, beta, alpha, tracking, np)

    def _reconstruct(self, seg_len: int, n_harm: int, xp: Any) -> Any:
        state = self._state
        if xp.__name__ != "mlx.core" or state.sub_amp is None:
            return super()._reconstruct(seg_len, n_harm, xp)
        import mlx.core as mx

        base = state.phase + state.omega * np.arange(seg_len)
        waves = [np.cos((k + 1) * base + known(state.sub_phase_off)[k]) for k in range(n_harm)]
        amplitudes = np.stack([np.asarray(amplitude) for amplitude in state.sub_amp]).astype(np.float32)
        return (mx.array(np.stack(waves, axis=1).astype(np.float32))[:, :, None] * mx.array(amplitudes)).sum(axis=1)

    def _waves(self, harmonic: int, seg_len: int, like: Any) -> tuple[Any, Any]:
        """Cosine and sine of the line at the next samples, of the dimensions and in the array library of *like*."""
        state = self._state
        # Whole turns are left out while numbers are in float64.
        phase = np.mod(harmonic * (state.phase + state.omega * np.arange(seg_len)), 2 * np.pi)
        phase = phase.reshape(seg_len, *(1,) * (like.ndim - 1))
        if not is_mlx_array(like):
            return np.cos(phase), np.sin(phase)
        import mlx.core as mx

        return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))


def _placed(sums: Any, on_device: bool) -> Any:
    import mlx.core as mx

    return mx.array(np.asarray(sums, np.float32)) if on_device else np.asarray(sums, np.float64)


class AdaptiveLNC(
    UnitTakesSettings, BaseTransformerUnit[AdaptiveLNCSettings, AxisArray, AxisArray, AdaptiveLNCTransformer]
):
    """Cancels line noise as it drifts; see :obj:`AdaptiveLNCTransformer`."""

    SETTINGS = AdaptiveLNCSettings  # type: ignore[assignment]
