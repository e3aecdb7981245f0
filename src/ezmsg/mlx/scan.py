"""Drive a recurrence kernel of fixed sizes over data of any length."""

from __future__ import annotations

import bisect
import functools
import numbers
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import mlx.core as mx

StateT = TypeVar("StateT")


def normalize_axis(axis: int, shape: tuple[int, ...]) -> int:
    """*axis*, counted from the front.

    Raises:
        TypeError: *axis* is not an integer (a bool is not).
        ValueError: An array of *shape* has no such axis.
    """
    n_dims = len(shape)
    if type(axis) is not int and (isinstance(axis, bool) or not isinstance(axis, numbers.Integral)):
        raise TypeError(f"'axis' must be an integer, got {axis!r}")
    if not -n_dims <= axis < n_dims:
        raise ValueError(f"axis is {axis}; x of shape {shape} has {n_dims} dimensions.")
    return int(axis) % n_dims


def normalize_chunk_sizes(
    chunk_sizes: Iterable[int], max_chunk_size: int | None = None, *, name: str = "chunk_sizes"
) -> tuple[int, ...]:
    """Return *chunk_sizes* sorted and without repetition.

    Args:
        chunk_sizes: Sizes in samples, each an integer >= 1.
        max_chunk_size: Largest size that the kernel can be compiled for, in samples; None: no bound.
        name: What the caller calls *chunk_sizes*, for the error.

    Raises:
        ValueError: No size at all, a size that is not an integer (a bool is not), below 1 or above
            *max_chunk_size*.
    """
    if type(chunk_sizes) is tuple and len(chunk_sizes) == 1 and type(size := chunk_sizes[0]) is int and size >= 1:
        # One size, as kernels without compiled sizes give it with each message, is in order as it is.
        if max_chunk_size is None or size <= max_chunk_size:
            return chunk_sizes
    try:
        sizes = tuple(chunk_sizes)
    except TypeError:
        raise ValueError(f"{name!r} must be a sequence of integers of at least 1, got {chunk_sizes!r}") from None
    upper = "" if max_chunk_size is None else f" and <= {max_chunk_size}"
    if not sizes or any(
        isinstance(size, bool)
        or not isinstance(size, numbers.Integral)
        or size < 1
        or (max_chunk_size is not None and size > max_chunk_size)
        for size in sizes
    ):
        raise ValueError(f"{name!r} must be one or more integers of at least 1{upper}, got {chunk_sizes!r}")
    return tuple(sorted({int(size) for size in sizes}))


@functools.lru_cache(maxsize=4096)
def _valid_length(valid: int) -> mx.array:
    # A length seen before costs no upload. Held for good, so bounded, and 4 bytes each.
    import mlx.core as mx

    return mx.array([valid], dtype=mx.uint32)


def _next_chunk(remaining: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Size of the next chunk, and how many of its samples are data: the smallest that holds all, else the largest."""
    largest = sizes[-1]
    if remaining >= largest:
        return largest, largest
    return sizes[bisect.bisect_left(sizes, remaining)], remaining


def _part(x: mx.array, axis: int, start: int, end: int) -> mx.array:
    return x[(*(slice(None),) * axis, slice(start, end))]


def chunked_scan(
    x: mx.array,
    n_samples: int,
    chunk_sizes: Iterable[int],
    state: StateT,
    launch: Callable[[mx.array, StateT, int, mx.array], tuple[mx.array, StateT]],
    *,
    axis: int = -1,
    pad: bool = True,
) -> tuple[mx.array, StateT]:
    """Run a recurrence over *x*, chunk by chunk, through a kernel whose sizes are fixed at compile time.

    Each launch takes the smallest of *chunk_sizes* that holds all remaining samples, else the largest. A short
    chunk is zero-padded. The padded results are concatenated and trimmed once, so that intermediates have
    the few lengths of the chunk grid and not that of *x*. That makes fewer size classes in MLX's buffer cache than
    trimming each chunk would.

    Args:
        x: Data, any number of dimensions; *axis* is the one to scan along.
        n_samples: Length of *axis* in samples.
        chunk_sizes: Sizes in samples that *launch* accepts, each an integer >= 1.
        state: Whatever *launch* takes and returns as its state.
        launch: ``launch(chunk, state, chunk_size, valid_length) -> (y, state)``. *chunk* has *chunk_size*
            samples along *axis*, of which the first *valid_length* (uint32, shape ``(1,)``) are data. The
            state that it returns must be the one after the last valid sample; *y* has *chunk_size* samples
            along *axis*, those past the valid ones are ignored.
        axis: The axis to scan along. With ``axis=0`` the trimmed result is a contiguous view.
        pad: False for a *launch* that reads the valid samples only: it gets the last chunk as short as it is, and
            still returns *chunk_size* samples. Saves a copy of that chunk.

    Returns:
        The result, of *n_samples* samples along *axis*, and the last state. Without samples: an empty array of
        the dtype of *x*, and *state* as it was.

    Raises:
        TypeError: *axis* is not an integer.
        ValueError: *x* has no such *axis*, *n_samples* is not its length, *chunk_sizes* are not sizes, or *launch*
            returned a result of another length than *chunk_size*.
        AssertionError: A chunk before the last was padded, so that trimming the end would leave padding inside.
    """
    sizes = normalize_chunk_sizes(chunk_sizes)
    shape = x.shape
    axis = normalize_axis(axis, shape)
    if n_samples != shape[axis]:
        raise ValueError(f"n_samples is {n_samples}, but x of shape {shape} has {shape[axis]} along axis {axis}.")

    chunks = []
    start = padded_length = 0
    while start < n_samples:
        size, valid = _next_chunk(n_samples - start, sizes)
        end = start + valid
        chunk = x if valid == n_samples else _part(x, axis, start, end)
        if valid < size:
            if end != n_samples:
                # A raise and not an assert statement, which python -O would remove.
                raise AssertionError(
                    f"chunked_scan padded a chunk before the last: {valid} of {size} samples valid at {start} of "
                    f"{n_samples}; the trimmed result would hold padding as data."
                )
            if pad:
                import mlx.core as mx

                chunk = mx.pad(chunk, [(0, size - valid if dim == axis else 0) for dim in range(len(shape))])
        y, state = launch(chunk, state, size, _valid_length(valid))
        y_shape = y.shape
        if len(y_shape) <= axis or y_shape[axis] != size:
            raise ValueError(
                f"launch returned shape {y_shape} for a chunk of shape {chunk.shape}, not {size} along axis {axis}."
            )
        chunks.append(y)
        padded_length += size
        start = end
    if not chunks:
        return x, state
    if len(chunks) > 1:
        import mlx.core as mx

        y = mx.concatenate(chunks, axis=axis)
    return (y if padded_length == n_samples else _part(y, axis, 0, n_samples)), state
