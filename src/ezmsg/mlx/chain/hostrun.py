"""A fused run on the CPU: NumPy and numba, on memory that stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ..stream.fusible import Array
from ..stream.integers import is_integer, numpy_to_integers
from .fusedrun import Arrays, FusedRun, Key, Steps

if TYPE_CHECKING:
    import mlx.core as mx

KEPT_FLOATS = 1 << 20
"""Float32 values that a run keeps memory for (4 MiB), so that rare long messages do not hold it for good."""


class HostRun(FusedRun):
    """No MLX evaluation between the stages, each of which would wait for MLX's thread. Takes all lengths."""

    how = "with NumPy and numba"

    _scratch: npt.NDArray[np.float32] | None = None

    def _takes(self, n_samples: int) -> bool:
        return True

    def _is_ready(self, key: Key) -> bool:
        return True

    def _begin(self, data: npt.NDArray | mx.array, state: Arrays, steps: Steps) -> tuple[Array, Arrays]:
        x = self._memory_for(data.shape)
        if self.ends.entry is None:
            data = np.asarray(data)
        # MLX says nothing of what overflows, so neither does this.
        with np.errstate(all="ignore"):
            np.copyto(x, data, casting="unsafe")
            result, arrays = self._apply(x, state, steps.key[1], steps.lengths)
        y = np.empty(self._result_shape(0), np.float32) if result is None else cast(np.ndarray, result)
        if self.ends.exit is None:
            import mlx.core as mx

            return mx.array(y), arrays
        if self._dtype is not None and self._dtype != "float32":
            if self._rounds and is_integer(self._dtype):
                return numpy_to_integers(y, self._dtype), arrays
            return np.array(y, dtype=self._dtype), arrays
        # The result owns its memory, as that of AsArray does.
        return (y if y.base is None and y is not x else y.copy()), arrays

    def _finish(self, begun: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        return begun

    def _memory_for(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        scratch = self._scratch
        if scratch is None or scratch.shape != shape:
            scratch = np.empty(shape, np.float32)
            if scratch.size <= KEPT_FLOATS:
                self._scratch = scratch
        return scratch

    def _from_transformers(self, arrays: Arrays) -> Arrays:
        # Copies, since MLX frees its own when the transformers take others.
        return tuple(tuple(np.array(array) for array in held) for held in arrays)

    def _for_transformers(self, state: Arrays) -> Sequence[tuple[mx.array, ...]]:
        import mlx.core as mx

        return [tuple(mx.array(array) for array in held) for held in state]
