"""Run a chain over messages and watch MLX's buffer cache."""

from collections.abc import Callable, Iterable

from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from ..stream.convert import is_mlx_array
from ..stream.sampling import value_at
from ..stream.steps import Chain, run_steps
from .found import steps_left_as_found


def length_of(message: AxisArray) -> int:
    """The length of *message* in samples along its stream dimension.

    Raises:
        TypeError: *message* is not an AxisArray.
        ValueError: It has no dimension.
    """
    if not isinstance(message, AxisArray):
        raise TypeError(f"A message is a {type(message).__name__}; allowed is an AxisArray.")
    if not message.dims:
        raise ValueError("A message has no dimension; allowed is one with a dimension to stream along.")
    return message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]


def fill_cache(
    chain: Chain | Callable[[], Chain], factory: bool | None, rounds: Iterable[tuple[AxisArray, int]]
) -> list[int]:
    """Run *chain* over each message so often, as one stream; after each, the most bytes that MLX's cache has held."""
    import mlx.core as mx

    filled: list[int] = []
    most, offset = 0, None
    with steps_left_as_found(chain, factory) as steps:
        for message, repetitions in rounds:
            for _ in range(repetitions):
                message, offset = _moved(message, offset)
                # No name for what a step returns: what has a name is kept alive, and MLX computes in place otherwise.
                for output in run_steps(steps, message):
                    mx.eval(_mlx_arrays(output))
                    del output
                # What the last operations used comes back when the stream is done with them, not with their results.
                mx.synchronize()
                most = max(most, mx.get_cache_memory())
            filled.append(most)
    return filled


def _moved(message: AxisArray, offset: float | None) -> tuple[AxisArray, float | None]:
    """The message at *offset* (None: at its own) along its stream axis, and the offset of the one that follows."""
    length, dim = length_of(message), resolve_stream_dim(message)
    axis = message.axes.get(dim)
    if not isinstance(axis, LinearAxis):
        return message, offset
    axis = replace(axis, offset=axis.offset if offset is None else offset)
    return replace(message, axes={**message.axes, dim: axis}), value_at(axis, length)


def first_samples(message: AxisArray, n_samples: int) -> AxisArray:
    """A message of the first samples of *message*."""
    dim = resolve_stream_dim(message)
    place = message.get_axis_idx(dim)
    index = (slice(None),) * place + (slice(n_samples),)
    axes = dict(message.axes)
    if isinstance(axis := axes.get(dim), AxisArray.CoordinateAxis):
        axes[dim] = replace(axis, data=axis.data[:n_samples])
    return replace(message, data=message.data[index], axes=axes)


def _mlx_arrays(output: object) -> list[object]:
    if not isinstance(output, AxisArray):
        return [output] if is_mlx_array(output) else []
    coordinates = [getattr(axis, "data", None) for axis in output.axes.values()]
    return [array for array in (output.data, *coordinates, *output.attrs.values()) if is_mlx_array(array)]
