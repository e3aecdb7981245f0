"""A step of a recurrent cell in MLX operations, for any device, any batch and any bits."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cells import GROUP, N_GATES, Cell, CellKernel, CellWeights, Matrix, State

_Float64 = npt.NDArray[np.float64]


def product(x: mx.array, matrix: Matrix) -> mx.array:
    """``x @ matrix.T`` in float32."""
    if matrix.scales is None:
        return x @ matrix.values.astype(mx.float32).T
    return mx.quantized_matmul(
        x, matrix.values, matrix.scales, matrix.biases, transpose=True, group_size=GROUP, bits=matrix.bits
    )


def after_products(a: mx.array, u: mx.array, bhn: mx.array, state: State) -> State:
    """The state after a step, of the products with the input, bias included, and with the state (see `cells`)."""
    h = state[0]
    n = h.shape[-1]
    if len(state) == 2:
        gates = a + u
        i, f, o = mx.sigmoid(gates[..., :n]), mx.sigmoid(gates[..., n : 2 * n]), mx.sigmoid(gates[..., 3 * n :])
        c = f * state[1] + i * mx.tanh(gates[..., 2 * n : 3 * n])
        return o * mx.tanh(c), c
    rz = mx.sigmoid(a[..., : 2 * n] + u[..., : 2 * n])
    candidate = mx.tanh(a[..., 2 * n :] + rz[..., :n] * (u[..., 2 * n :] + bhn))
    z = rz[..., n:]
    return ((1.0 - z) * candidate + z * h,)


def run(x: mx.array, weights: CellWeights, state: State) -> State:
    """See :class:`~ezmsg.mlx.kernels.cells.CellKernel`. Lazy."""
    a = product(x, weights.input) + weights.bias
    return after_products(a, product(state[0], weights.hidden), weights.bhn, state)


def _in_float64(x: _Float64, weights: CellWeights, state: tuple[_Float64, ...]) -> tuple[_Float64, ...]:
    """The state after a step in float64."""

    def values(matrix: Matrix) -> _Float64:
        if matrix.scales is None:
            return np.array(matrix.values.astype(mx.float32), np.float64)
        values = mx.dequantize(matrix.values, matrix.scales, matrix.biases, group_size=GROUP, bits=matrix.bits)
        return np.array(values, np.float64)

    def sigmoid(value: _Float64) -> _Float64:
        return 1.0 / (1.0 + np.exp(-value))

    n_gates = N_GATES[weights.cell]
    a = np.split(x @ values(weights.input).T + np.array(weights.bias, np.float64), n_gates, axis=1)
    u = np.split(state[0] @ values(weights.hidden).T, n_gates, axis=1)
    if weights.cell == "LSTM":
        i, f, g, o = (one + other for one, other in zip(a, u, strict=True))
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    r, z = sigmoid(a[0] + u[0]), sigmoid(a[1] + u[1])
    return ((1.0 - z) * np.tanh(a[2] + r * (u[2] + np.array(weights.bhn, np.float64))) + z * state[0],)


def random_cell(cell: Cell, bits: int, n_input: int, n_hidden: int) -> CellWeights:
    """Weights of a layer with random values, for a proof."""
    generator = np.random.default_rng(0)

    def matrix(n_columns: int) -> Matrix:
        shape = N_GATES[cell] * n_hidden, n_columns
        values = mx.array(generator.uniform(-1.0, 1.0, shape).astype(np.float32) / math.sqrt(n_columns))
        if bits == 8:
            return Matrix(*mx.quantize(values, group_size=GROUP, bits=bits))
        return Matrix(values.astype(mx.bfloat16 if bits == 16 else mx.float32))

    bias, bhn = (generator.uniform(-1.0, 1.0, n).astype(np.float32) for n in (N_GATES[cell] * n_hidden, n_hidden))
    return CellWeights(cell, matrix(n_input), matrix(n_hidden), mx.array(bias), mx.array(bhn))


def difference_after_steps(kernel: CellKernel, weights: CellWeights, n_rows: int, n_steps: int = 3) -> float:
    """Largest difference from float64 after some steps, relative to 1, which no result is larger than."""
    generator = np.random.default_rng(1)
    zeros = np.zeros((n_rows, weights.hidden_size))
    expected: tuple[_Float64, ...] = (zeros, zeros) if weights.cell == "LSTM" else (zeros,)
    state = tuple(mx.array(array.astype(np.float32)) for array in expected)
    for _ in range(n_steps):
        x = generator.standard_normal((n_rows, weights.input.n_columns)).astype(np.float32)
        state = kernel.run(mx.array(x), weights, state)
        expected = _in_float64(x.astype(np.float64), weights, expected)
    differences = [np.abs(np.array(one) - other).max() for one, other in zip(state, expected, strict=True)]
    return float(max(differences)) if np.isfinite(differences).all() else math.inf


_PROVED: tuple[tuple[Cell, int], ...] = tuple((cell, bits) for cell in ("GRU", "LSTM") for bits in (32, 16, 8))


def difference_of(kernel: CellKernel) -> float:
    """Largest difference of *kernel* from float64, of all cells and types of weights; see `kernels.proof`."""
    return max(difference_after_steps(kernel, random_cell(cell, bits, 2 * GROUP, GROUP), 2) for cell, bits in _PROVED)
