"""Second-order-section filters of MLX data, on every MLX backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy.typing as npt

from .kernels import Path, check_kernel_path, default_path, kernel
from .scan import normalize_axis, normalize_chunk_sizes
from .stream.coefficients import check_sos
from .stream.convert import as_float32
from .stream.unit import check_mlx

if TYPE_CHECKING:
    import mlx.core as mx

MAX_CHUNK_SIZE = 512
"""Most samples that one launch of the kernel of plain operations takes; as many as ezmsg-sigproc's Metal kernel."""


def sosfilt(
    x: mx.array,
    sos: npt.ArrayLike,
    zi: mx.array | None = None,
    *,
    axis: int = -1,
    chunk_sizes: tuple[int, ...] = (32, MAX_CHUNK_SIZE),
    path: Path | None = None,
) -> tuple[mx.array, mx.array]:
    """Filter along one axis with a cascade of second-order sections, carrying its state.

    The counterpart of ``scipy.signal.sosfilt(sos, x, axis, zi)``, transposed direct form II, of any number of
    sections. Results follow scipy's in float64 within 1e-5 of the largest value, high-passes down to 0.5 Hz at 30 kHz
    included, whatever the cutting of the stream. Arithmetic is float64 on the paths ``"cpu"`` and
    ``"cuda"``, and float32 on a state that it is enough for on the paths ``"metal"`` and ``"plain"``.

    A sample that is not finite, or whose magnitude is above 1e30, comes out as it is, and the filter of its channel
    goes on as if it had not been there; other channels do not notice.

    Args:
        x: Data of any real dtype and any number of dimensions; computed from float32.
        sos: Coefficients as scipy's design functions return them, ``(n_sections, 6)``, in float64.
        zi: State in scipy's layout: ``(n_sections, ..., 2, ...)``, the shape of *x* with 2 in the place of *axis*,
            behind the number of sections; or with 4 in that place, the last two being what the first two lost in
            rounding to float32. Without these a high-pass of 0.5 Hz at 30 kHz is 3e-4 off where its data comes in
            single samples, and 1e-2 where that has an offset of 50 standard deviations. None: zero, with 4.
        axis: The axis to filter along.
        chunk_sizes: Samples a launch, on the path ``"plain"``: integers from 1 to 512.
        path: Kernels to use: ``"cpu"`` (numba), ``"cuda"``, ``"metal"`` or ``"plain"`` (MLX operations, on any
            device). None: the ones for MLX's default device at the time of the call.

    Returns:
        The filtered data, float32, of the shape of *x*; and the state after the last sample, of the form of *zi*.

    Raises:
        ValueError: *sos*, *axis*, *chunk_sizes*, *path* or the shape of *zi* is not as above.
        TypeError: *x* or *zi* is complex, or not an MLX array; *sos* is not real; *axis* is not an integer.
    """
    import mlx.core as mx

    check_kernel_path(path)
    check_mlx(x=x, zi=zi)
    sections = check_sos(sos)
    axis = normalize_axis(axis, x.shape)
    sizes = normalize_chunk_sizes(chunk_sizes, MAX_CHUNK_SIZE)
    x = as_float32(x, "filtering")
    state_shape, pair_shape = ((len(sections), *x.shape[:axis], length, *x.shape[axis + 1 :]) for length in (2, 4))
    if zi is None:
        zi = mx.zeros(pair_shape)
    if zi.shape not in (state_shape, pair_shape):
        raise ValueError(
            f"zi has shape {zi.shape}; allowed with {len(sections)} sections and x of shape {x.shape} are "
            f"{state_shape} and {pair_shape}."
        )
    zi = as_float32(zi, "filtering with a state")
    if x.size == 0:
        return x, zi
    is_pair = zi.shape == pair_shape
    pairs = zi if is_pair else mx.concatenate([zi, mx.zeros_like(zi)], axis=axis + 1)
    y, pairs = kernel("sosfilt", path or default_path()).run(x, sections, pairs, axis, sizes)
    return y, pairs if is_pair else mx.split(pairs, 2, axis=axis + 1)[0]
