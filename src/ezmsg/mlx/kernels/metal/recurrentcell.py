"""A step of a recurrent cell on Metal, in one launch a layer: see ``sources/recurrentcell.h``."""

from __future__ import annotations

import functools

import mlx.core as mx

from ..cells import GROUP, CellWeights, State
from ..plain import recurrentcell as plain
from .kernel import THREADS, Compiled, metal_kernel

INPUTS = ("wx", "wx_scales", "wx_offsets", "wh", "wh_scales", "wh_offsets", "bias", "bhn")

LEAST = 8
"""Values from which on MLX passes an array in the address space that the kernel reads weights from."""


@functools.cache
def _launch(cell: str, bits: int, n_rows: int, n_input: int, n_hidden: int) -> Compiled:
    state = ("h", "c") if cell == "LSTM" else ("h",)
    kernel = metal_kernel(
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
    if min(n_input, n_hidden) < LEAST or (bits == 16 and (n_input % 2 or n_hidden % 2)):
        # Too small, or rows that begin within a word.
        return plain.run(x, weights, state)
    launch = _launch(weights.cell, bits, n_rows, n_input, n_hidden)
    # What is not quantized has no scales, and the kernel asks for none.
    matrices = (
        part if part is not None else weights.bias for matrix in (weights.input, weights.hidden) for part in matrix
    )
    return tuple(launch(inputs=[x, *state, *matrices, weights.bias, weights.bhn]))
