"""Subtract a common reference, with a median that costs no more on the CPU than the other stages of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import ezmsg.sigproc.affinetransform as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state, resolve_feature_dim
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import is_mlx_array
from .stream.device import uses_gpu
from .stream.unit import TransformerTakesSettings, UnitTakesSettings, check_fields, check_message

if TYPE_CHECKING:
    import mlx.core as mx

_MODES = ("mean", "median", "passthrough")


class CommonRereferenceSettings(sigproc.CommonRereferenceSettings):
    """The settings of :obj:`ezmsg.sigproc.affinetransform.CommonRereference`, checked when they are built.

    Raises:
        TypeError: ``axis`` or ``include_current`` has the wrong type.
        ValueError: ``mode`` is not ``"mean"``, ``"median"`` or ``"passthrough"``.
    """

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"'mode' must be one of {', '.join(map(repr, _MODES))}, got {self.mode!r}")
        check_fields(self, flags=("include_current",), names=("axis",))


class Groups(NamedTuple):
    """The channels that share a reference, as :func:`ezmsg.mlx.kernels.cpu.median.subtract_medians` takes them."""

    members: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    gains: npt.NDArray[np.float32]

    @classmethod
    def of(cls, state: sigproc.CommonRereferenceState) -> Groups:
        """Those that ezmsg-sigproc has found for a stream."""
        groups = [np.asarray(group, np.intp) for group in state.groups or ()]
        if isinstance(state.scale, float):
            gains = np.full(len(groups), state.scale, np.float32)
        else:
            # The same for all channels of a group.
            gains = np.asarray(state.scale, np.float32)[[group[0] for group in groups]]
        ends = np.cumsum([group.size for group in groups], dtype=np.intp)
        return cls(np.concatenate(groups), ends, gains)

    def subtract(self, x: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
        """*x* with the medians over *axis* subtracted, in new memory."""
        from .kernels.cpu.median import subtract_medians

        rows = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        result = np.empty_like(rows)
        n_channels = rows.shape[-1]
        subtract_medians(rows.reshape(-1, n_channels), result.reshape(-1, n_channels), *self)
        return np.ascontiguousarray(np.moveaxis(result, -1, axis))


@processor_state
class CommonRereferenceState(sigproc.CommonRereferenceState):
    """That of ezmsg-sigproc, with its groups as the kernel for medians takes them."""

    members: npt.NDArray[np.intp] | None = None
    """The channels of all groups, one group after the other; None where no median is computed."""

    ends: npt.NDArray[np.intp] | None = None
    """Where in ``members`` each group ends."""

    gains: npt.NDArray[np.float32] | None = None
    """By what the differences of each group are multiplied."""


class CommonRereferenceTransformer(
    TransformerTakesSettings,
    sigproc.CommonRereferenceTransformer,
    BaseStatefulTransformer[CommonRereferenceSettings, AxisArray, AxisArray, CommonRereferenceState],
):
    """A common reference, as :obj:`ezmsg.sigproc.affinetransform.CommonRereferenceTransformer` has it.

    ezmsg-sigproc computes means. A kernel computes the medians of float32 data, of NumPy and of MLX on its CPU device:
    it counts instead of sorting, with the same values. On a GPU a median over all channels is one sort and one
    subtraction. A median within groups is left to ezmsg-sigproc there.

    Raises:
        TypeError: What is given is not a message.
    """

    _state: CommonRereferenceState

    def _reset_state(self, message: AxisArray) -> None:
        super()._reset_state(message)
        state = self._state
        state.members = state.ends = state.gains = None
        if self.settings.mode == "median" and not state.passthrough:
            state.members, state.ends, state.gains = Groups.of(state)

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: a reference is that of one sample."""
        return 0.0

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        # What is worked out for a stream are arrays in its library and of its type.
        return self._message_hash(message, extra=(type(message.data), message.data.dtype))

    def _process(self, message: AxisArray) -> AxisArray:
        state = self._state
        if self.settings.mode != "median" or state.passthrough:
            return super()._process(message)
        data = message.data
        axis = message.get_axis_idx(self.settings.axis or resolve_feature_dim(message))
        if is_mlx_array(data):
            import mlx.core as mx

            if data.dtype != mx.float32 or (uses_gpu() and not state.single):
                return super()._process(message)
            return replace(message, data=self._of_mlx(data, axis))
        if type(data) is np.ndarray and data.dtype == np.float32:
            return replace(message, data=self._known_groups().subtract(data, axis))
        return super()._process(message)

    def _of_mlx(self, data: mx.array, axis: int) -> mx.array:
        import mlx.core as mx

        if uses_gpu():
            # ezmsg-sigproc gathers and scatters all channels besides.
            y = data - mx.median(data, axis=axis, keepdims=True)
            return y if self._state.scale == 1.0 else y * self._state.scale
        groups, samples = self._known_groups(), np.asarray(data)
        if axis != samples.ndim - 1 or not samples.flags.c_contiguous:
            return mx.array(groups.subtract(samples, axis))
        from .kernels.cpu.compiled import computed
        from .kernels.cpu.median import subtract_medians

        return computed(
            samples.reshape(-1, samples.shape[axis]),
            data.shape,
            lambda source, target: subtract_medians(source, target, *groups),
        )

    def _known_groups(self) -> Groups:
        state = self._state
        assert state.members is not None and state.ends is not None and state.gains is not None
        return Groups(state.members, state.ends, state.gains)


class CommonRereference(
    UnitTakesSettings,
    BaseTransformerUnit[CommonRereferenceSettings, AxisArray, AxisArray, CommonRereferenceTransformer],
):
    """Subtracts a common reference from the channels; see :obj:`CommonRereferenceTransformer`."""

    SETTINGS = CommonRereferenceSettings  # type: ignore[assignment]
