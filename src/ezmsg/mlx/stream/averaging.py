"""What transformers that average along the stream dimension do alike: messages, resets, and another backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .checks import check_message
from .convert import as_float32, is_mlx_array
from .sampling import is_same_rate, sampling_period, stream_dimension, with_known_rate

if TYPE_CHECKING:
    import ezmsg.sigproc.ewma as sigproc
    import mlx.core as mx

MIN_ALPHA = 2.0**-52
"""Least weight of the newest sample in a stream: with half of it, ``1 - alpha`` may be 1 in float64, and far below it
the weights that correct the bias are lost in float32. After 4e10 samples the first weighs 1e-5 less than the last."""


def alpha_of(time_constant: float, period: float) -> float:
    """Weight of the newest sample, for a time constant and a sampling period in seconds."""
    return max(-math.expm1(-period / time_constant), MIN_ALPHA)


def weight_after(n_samples: int, alpha: float) -> float:
    """Weight of *n_samples* samples since the start, ``1 - (1 - alpha)**n_samples``."""
    if alpha >= 1.0:
        return float(n_samples > 0)
    return -math.expm1(n_samples * math.log1p(-alpha))


def pairs_of(*values: npt.NDArray[np.float64], axis: int) -> mx.array:
    """An array of float32 pairs, each of *values* with length 1 along *axis*; evaluated.

    Evaluated, since only the thread that made a lazy array can do so later.
    """
    import mlx.core as mx

    halves = []
    for value in values:
        high = value.astype(np.float32)
        halves += [high, (value - high).astype(np.float32)]
    pairs = mx.array(np.concatenate(halves, axis=axis))
    mx.eval(pairs)
    return pairs


def values_of(pairs: mx.array, axis: int) -> list[npt.NDArray[np.float64]]:
    """The inverse of :func:`pairs_of`."""
    halves = np.split(np.array(pairs, dtype=np.float64), pairs.shape[axis], axis=axis)
    return [high + low for high, low in zip(halves[::2], halves[1::2], strict=True)]


class AveragingState(Protocol):
    """What all states of moving averages have."""

    axis_idx: int
    stream_dim: str
    gain: float


SettingsT = TypeVar("SettingsT", bound="sigproc.EWMASettings")
StateT = TypeVar("StateT", bound=AveragingState)


class AveragesStream(BaseStatefulTransformer[SettingsT, AxisArray, AxisArray, StateT]):
    """To be named among the bases of a transformer before its counterpart in ezmsg-sigproc."""

    _OPERATION: ClassVar[str]
    """What the errors call it."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """The result of *message*; with ``passthrough`` it comes back as it is."""
        if type(message) is not AxisArray:
            check_message(message, self)
        if self.settings.passthrough:
            return super().__call__(message)
        if 0 in message.data.shape:
            return self._without_samples(message)
        # Past that of ezmsg-sigproc, which looks for the same two again, by a product that NumPy takes of the shape:
        # nearly half of the time of a short message.
        return BaseStatefulTransformer.__call__(self, message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        if self.settings.passthrough:
            return await super().__acall__(message)
        if 0 in message.data.shape:
            return self._without_samples(message)
        return await BaseStatefulTransformer.__acall__(self, message)

    def _without_samples(self, message: AxisArray) -> AxisArray:
        """A message without samples has the dtype of those with samples."""
        if not is_mlx_array(message.data):
            return message
        data = as_float32(message.data, self._OPERATION)
        return message if data is message.data else replace(message, data=data)

    def _hash_message(self, message: AxisArray) -> int:
        # Not of the backend, which may change within a stream.
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        dim = stream_dimension(self, message, self._OPERATION)
        gain = sampling_period(message, dim, self._OPERATION)
        state = self._state
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            # Otherwise the known one stays: the hash of this message was taken with it, and would not be that of the
            # next, so that a wobbling rate would reset the state at each message from here on.
            state.gain = gain
        state.stream_dim = dim
        state.axis_idx = message.get_axis_idx(dim)
        self._begin(message)

    def _begin(self, message: AxisArray) -> None:
        """A state of no samples, for data of the backend of *message*."""
        raise NotImplementedError
