"""Read results from the device some messages late, so that host and device work at the same time.

Reading a result waits for the device. Where the next message is already there (a file, a replay), the host can
prepare it meanwhile, which raises the throughput. A live stream gains nothing and gets its results ``depth`` messages
later, which at 100 messages a second are 20 ms for a depth of 2. Leave it out there.
"""

from collections import deque

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import BaseStatefulTransformer, processor_state
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import (
    NUMPY_DTYPES,
    ROUNDINGS,
    Rounding,
    Unread,
    begin_reading,
    is_integer,
    is_mlx_array,
    mlx_to_numpy,
    numpy_to_integers,
)
from .stream.segments import owned_message
from .stream.unit import PublishesEach, check_count, check_message, check_one_of, show_settings


class ReadLateSettings(ez.Settings):
    """Settings for :obj:`ReadLate`."""

    depth: int = 2
    """How many messages the device may be behind. 0 reads each message at once, as AsArray does."""

    dtype: str | None = None
    """NumPy dtype of the result, by name. None keeps the dtype (bfloat16 becomes float32)."""

    rounding: Rounding = "truncate"
    """How values become integers, as in :obj:`ezmsg.mlx.AsArraySettings`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", check_count("depth", self.depth, 0))
        check_one_of("dtype", self.dtype, NUMPY_DTYPES, none=True, error=TypeError)
        check_one_of("rounding", self.rounding, ROUNDINGS)


@processor_state
class ReadLateState:
    """The messages that have not been read."""

    waiting: tuple[AxisArray, ...] = ()
    """Messages that the device has been given to compute and that have not been read, oldest first. Their NumPy arrays
    own their memory: ezmsg reuses the buffers that messages live in."""


@show_settings
class ReadLateTransformer(BaseStatefulTransformer[ReadLateSettings, AxisArray, list[AxisArray], ReadLateState]):
    """MLX to NumPy, like :obj:`ezmsg.mlx.AsArrayTransformer`, but ``depth`` messages late.

    A call hands its message to the device and returns the messages that are due: usually the one of ``depth`` calls
    ago, none at first. Order, number and values are those of a conversion at once. Put it at the end of the MLX
    segment, and call :meth:`flush` at the end of an offline run; a graph must be stopped by what it has received, since
    its unit keeps the last ``depth`` messages.

    Raises:
        TypeError: What is given is not a message.
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"depth", "dtype", "rounding"})

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        return 0

    def _reset_state(self, message: AxisArray) -> None:
        """Messages that wait are still due, whatever comes after them."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Beside the state, which can be saved: what has been begun of the messages that wait.
        self._begun: deque[tuple[AxisArray, ReadLateSettings, Unread]] = deque()

    def _process(self, message: AxisArray) -> list[AxisArray]:
        settings = self.settings
        waiting = owned_message(message) if settings.depth else message
        if settings.depth and is_mlx_array(message.data):
            unread = begin_reading(message.data, settings.dtype, rounds=settings.rounding == "nearest")
            self._begun.append((waiting, settings, unread))
        self._state.waiting += (waiting,)
        return self._read(settings.depth)

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: values do not depend on the messages before."""
        return 0.0

    def flush(self) -> list[AxisArray]:
        """Read what still waits."""
        return self._read(0)

    def _read(self, depth: int) -> list[AxisArray]:
        waiting = self._state.waiting
        n_due = max(len(waiting) - depth, 0)
        due, self._state.waiting = waiting[:n_due], waiting[n_due:]
        return [self._as_numpy(message) for message in due]

    def _as_numpy(self, message: AxisArray) -> AxisArray:
        data, dtype, rounds = message.data, self.settings.dtype, self.settings.rounding == "nearest"
        if is_mlx_array(data):
            while self._begun:
                begun, settings, unread = self._begun.popleft()
                if begun is message:
                    if settings is self.settings and not unread.is_read:
                        return replace(message, data=unread.read())
                    break
            return replace(message, data=mlx_to_numpy(data, dtype, rounds=rounds))
        if dtype is None or not isinstance(data, np.ndarray) or data.dtype == dtype:
            return message
        if rounds and is_integer(dtype) and data.dtype.kind in "biuf":
            return replace(message, data=numpy_to_integers(data, dtype))
        return replace(message, data=data.astype(dtype))


class ReadLate(PublishesEach[ReadLateSettings, list[AxisArray], ReadLateTransformer]):
    """Converts MLX messages to NumPy some messages late; see :obj:`ReadLateTransformer`."""

    SETTINGS = ReadLateSettings  # type: ignore[assignment]
