"""Products with a fixed matrix to the precision of float32, on every device.

On a GPU, MLX multiplies matrices of float32 in TF32, which keeps 11 bits of each factor: errors of 1e-3 of the largest
product. Here each factor becomes a sum of two numbers of 11 bits, ``x = x1 + x2``, and the product one of a matrix that
is three times as high, ``[x1, x1, x2] @ [w1; w2; w1]``, whose factors TF32 takes as they are. What is left out,
``x2 @ w2``, is 2**-22 of the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ..stream.convert import is_mlx_array, known_mlx
from ..stream.device import uses_gpu

if TYPE_CHECKING:
    import mlx.core as mx

    Array: TypeAlias = mx.array | npt.NDArray

_KEPT_BITS = 0xFFFFE000
"""Those of float32 that TF32 keeps."""


class Factor:
    """A matrix to multiply data with from the right, and a row to add.

    Args:
        weights: (n_in, n_out), in any real dtype.
        offset: (n_out,), or None for zeros.
    """

    def __init__(self, weights: npt.ArrayLike, offset: npt.ArrayLike | None = None) -> None:
        self._weights = np.asarray(weights, np.float64)
        self._offset = np.zeros(self._weights.shape[1]) if offset is None else np.asarray(offset, np.float64).ravel()
        self._of_gpu: dict[bool, tuple[mx.array, ...]] = {}
        self._of_host: dict[np.dtype, tuple[npt.NDArray, npt.NDArray]] = {}

    def of(self, x: Array, axis: int) -> Array:
        """The product of *x* along *axis*, in the array library of *x*; of MLX data in float32."""
        if not is_mlx_array(x):
            return self._on_host(np.asarray(x), axis)
        if uses_gpu():
            return times(x, axis, self.arrays())
        import mlx.core as mx

        return mx.array(self._on_host(np.asarray(x), axis))

    def arrays(self) -> tuple[mx.array, ...]:
        """The factors on MLX's default device, as :func:`times` takes them."""
        import mlx.core as mx

        gpu = uses_gpu()
        if gpu not in self._of_gpu:
            weights = self._weights.astype(np.float32)
            if gpu:
                first = (weights.view(np.uint32) & np.uint32(_KEPT_BITS)).view(np.float32)
                rest = (self._weights - first).astype(np.float32)
                weights = np.concatenate([first, rest, first])
            made = mx.array(weights), mx.array(self._offset.astype(np.float32))
            mx.eval(*made)
            self._of_gpu[gpu] = made
        return self._of_gpu[gpu]

    def _on_host(self, x: npt.NDArray, axis: int) -> npt.NDArray:
        dtype = x.dtype if x.dtype.kind in "fc" else np.dtype(np.float64)
        if dtype not in self._of_host:
            self._of_host[dtype] = self._weights.astype(dtype), self._offset.astype(dtype)
        return _along(x, axis, *self._of_host[dtype])


def times(x: Array, axis: int, arrays: tuple[Array, ...]) -> Array:
    """The product of float32 *x* with what :meth:`Factor.arrays` has given, in the array library of both."""
    weights, offset = arrays
    if isinstance(x, np.ndarray):
        return _along(x, axis, np.asarray(weights), np.asarray(offset))
    import mlx.core as mx

    moved = x
    if axis != x.ndim - 1:
        moved = mx.moveaxis(moved, axis, -1)
    if weights.shape[0] != moved.shape[-1]:
        first = (moved.view(mx.uint32) & _KEPT_BITS).view(mx.float32)
        # Infinity minus itself would make NaN of what is infinite.
        rest = mx.where(mx.isfinite(moved), moved - first, 0.0)
        moved = mx.concatenate([first, first, rest], axis=-1)
    y = known_mlx(moved @ weights + offset)
    return mx.moveaxis(y, -1, axis) if axis != x.ndim - 1 else y


def _along(x: npt.NDArray, axis: int, weights: npt.NDArray, offset: npt.NDArray) -> npt.NDArray:
    moved = np.moveaxis(x, axis, -1) if axis != x.ndim - 1 else x
    y = moved @ weights
    y += offset
    return np.ascontiguousarray(np.moveaxis(y, -1, axis)) if axis != x.ndim - 1 else y
