"""Threshold crossings on CUDA, in one launch a message: one thread a channel, see ``sources/crossings.cu``."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from ..crossings import SCALE_ROWS, Crossings
from .kernel import Compiled, cuda_kernel

AHEAD = 8
"""Samples that a thread asks for at a time."""

LANES = 32
"""Channels of a block: the threads of a warp."""


@functools.lru_cache(maxsize=256)
def _launch(crossings: Crossings, n_samples: int, n_channels: int) -> tuple[Compiled, mx.array, dict[str, Any]]:
    """The kernel, its table of parameters, and how it is launched, for messages of one size."""
    table = mx.array(crossings.table(n_samples, n_channels))
    kernel = cuda_kernel("crossings", AHEAD=AHEAD, LANES=LANES, **crossings.constants())
    arguments = {
        "output_shapes": [(crossings.result_rows(n_samples), n_channels), (crossings.n_rows, n_channels)],
        "output_dtypes": [mx.float32 if crossings.gives_floats else mx.bool_, mx.float32],
        "grid": (-(-n_channels // LANES) * LANES, 1, 1),
        "threadgroup": (LANES, 1, 1),
    }
    return kernel, table, arguments


def compile_ahead(coefficients: Crossings, n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Takes seconds in each process."""
    _compile_ahead(tuple(coefficients.constants().values()), min(n_channels, LANES))


@functools.cache
def _compile_ahead(constants: tuple[int, ...], n_channels: int) -> None:
    scale, _, gives_values, is_sparse = constants
    crossings = Crossings(
        np.zeros(n_channels, np.float32), scale=list(SCALE_ROWS)[scale], window=1 + constants[1],
        gives_values=bool(gives_values), is_sparse=bool(is_sparse),
    )  # fmt: skip
    mx.eval(run(mx.zeros((8, n_channels)), crossings, mx.zeros((crossings.n_rows, n_channels)), 0, ()))


def run(
    x: mx.array, crossings: Crossings, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy. Nothing is compiled for a size."""
    kernel, table, arguments = _launch(crossings, *x.shape)
    y, zf = kernel(inputs=[x, zi, table], **arguments)
    return y, zf
