"""What a filter keeps between messages, and in which of two places it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ezmsg.sigproc.filter as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import processor_state
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .coefficients import Form
from .convert import as_float32, is_mlx_array

if TYPE_CHECKING:
    import mlx.core as mx

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
    """What ``zi`` is the state of."""

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
    """*message* as ezmsg-sigproc filters it right in *place*: MLX data as floats, on the host as a NumPy array."""
    if not is_mlx_array(message.data):
        return message
    data = as_float32(message.data, "filtering")
    return replace(message, data=np.array(data) if place == HOST else data)


def to_mlx(data: npt.NDArray | mx.array) -> mx.array:
    """*data* as an MLX array of float32."""
    import mlx.core as mx

    return mx.array(data.astype(np.float32)) if isinstance(data, np.ndarray) else as_float32(data, "filtering")
