"""A step of a recurrent cell on CUDA, in one launch a layer: see ``sources/recurrentcell.cuh``."""

from __future__ import annotations

import functools

import mlx.core as mx

from ..cells import GROUP, CellWeights, State
from ..plain import recurrentcell as plain
from .kernel import Compiled, cuda_kernel

THREADS = 256
"""Of a block, which has one hidden unit."""

INPUTS = ("wx", "wx_scales", "wx_offsets", "wh", "wh_scales", "wh_offsets", "bias", "bhn")


@functools.cache
def _launch(cell: str, bits: int, n_rows: int, n_input: int, n_hidden: int) -> Compiled:
    state = ("h", "c") if cell == "LSTM" else ("h",)
    kernel = cuda_kernel(
        f"recurrentcell_{cell.lower()}",
        ("x", *state, *INPUTS),
        tuple(f"{name}_after" for name in state),
        BITS=bits,
        BATCH=n_rows,
        INPUT=n_input,
        HIDDEN=n_hidden,
        GROUP=GROUP,
        THREADS=THREADS,
    )
    return functools.partial(
        kernel,
        output_shapes=[(n_rows, n_hidden)] * len(state),
        output_dtypes=[mx.float32] * len(state),
        grid=(n_hidden * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
    )


def run(x: mx.array, weights: CellWeights, state: State) -> State:
    """See :class:`~ezmsg.mlx.kernels.cells.CellKernel`. Lazy."""
    n_rows, n_input, n_hidden, bits = *x.shape, weights.hidden_size, weights.input.bits
    if bits == 16 and (n_input % 2 or n_hidden % 2):
        # Rows that begin within a word.
        return plain.run(x, weights, state)
    launch = _launch(weights.cell, bits, n_rows, n_input, n_hidden)
    # What is not quantized has no scales, and the kernel asks for none.
    matrices = (
        part if part is not None else weights.bias for matrix in (weights.input, weights.hidden) for part in matrix
    )
    return tuple(launch(inputs=[x, *state, *matrices, weights.bias, weights.bhn]))
