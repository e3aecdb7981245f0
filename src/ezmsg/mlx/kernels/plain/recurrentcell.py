"""A step of a recurrent cell in MLX operations, for any device, any batch and any bits."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cells import GROUP, N_GATES, Cell, CellKernel, CellWeights, Matrix, StackKernel, StackWeights, State

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


def _values(matrix: Matrix) -> _Float64:
    if matrix.scales is None:
        return np.array(matrix.values.astype(mx.float32), np.float64)
    values = mx.dequantize(matrix.values, matrix.scales, matrix.biases, group_size=GROUP, bits=matrix.bits)
    return np.array(values, np.float64)


def _in_float64(x: _Float64, weights: CellWeights, state: tuple[_Float64, ...]) -> tuple[_Float64, ...]:
    """The state after a step in float64."""

    def sigmoid(value: _Float64) -> _Float64:
        return 1.0 / (1.0 + np.exp(-value))

    n_gates = N_GATES[weights.cell]
    a = np.split(x @ _values(weights.input).T + np.array(weights.bias, np.float64), n_gates, axis=1)
    u = np.split(state[0] @ _values(weights.hidden).T, n_gates, axis=1)
    if weights.cell == "LSTM":
        i, f, g, o = (one + other for one, other in zip(a, u, strict=True))
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    r, z = sigmoid(a[0] + u[0]), sigmoid(a[1] + u[1])
    return ((1.0 - z) * np.tanh(a[2] + r * (u[2] + np.array(weights.bhn, np.float64))) + z * state[0],)


def _random_matrix(generator: np.random.Generator, bits: int, n_rows: int, n_columns: int) -> Matrix:
    values = mx.array(generator.uniform(-1.0, 1.0, (n_rows, n_columns)).astype(np.float32) / math.sqrt(n_columns))
    if bits == 8:
        return Matrix(*mx.quantize(values, group_size=GROUP, bits=bits))
    return Matrix(values.astype(mx.bfloat16 if bits == 16 else mx.float32))


def random_cell(cell: Cell, bits: int, n_input: int, n_hidden: int) -> CellWeights:
    """Weights of a layer with random values, for a proof."""
    generator = np.random.default_rng(0)
    n_rows = N_GATES[cell] * n_hidden
    of_input, of_hidden = (_random_matrix(generator, bits, n_rows, n) for n in (n_input, n_hidden))
    bias, bhn = (mx.array(generator.uniform(-1.0, 1.0, n).astype(np.float32)) for n in (n_rows, n_hidden))
    return CellWeights(cell, of_input, of_hidden, bias, bhn)


def random_stack(cell: Cell, bits: int, n_input: int, n_hidden: int, n_layers: int, n_out: int) -> StackWeights:
    """The same of a stack."""
    generator = np.random.default_rng(0)
    layers = [random_cell(cell, bits, n, n_hidden) for n in (n_input, *[n_hidden] * (n_layers - 1))]
    head = _random_matrix(generator, bits, n_out, n_hidden)
    return StackWeights(tuple(layers), head, mx.array(generator.uniform(-1.0, 1.0, n_out).astype(np.float32)))


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


def stack_difference(run: StackKernel, weights: StackWeights, n_rows: int, n_steps: int = 3) -> float:
    """The same of a stack, of its states and results. Steps follow each other without being waited for."""
    generator, first = np.random.default_rng(1), weights.layers[0]
    zeros = np.zeros((n_rows, first.hidden_size))
    expected: list[tuple[_Float64, ...]] = [(zeros,) * (2 if first.cell == "LSTM" else 1) for _ in weights.layers]
    state = mx.array(np.array(expected, np.float32))
    found: list[mx.array] = []
    wanted: list[_Float64] = []
    for _ in range(n_steps):
        x = generator.standard_normal((n_rows, first.input.n_columns)).astype(np.float32)
        y, state = run(mx.array(x), state)
        assert y is not None
        mx.async_eval(y)
        values = x.astype(np.float64)
        for number, layer in enumerate(weights.layers):
            expected[number] = _in_float64(values, layer, expected[number])
            values = expected[number][0]
        found += [y, state]
        wanted += [values @ _values(weights.head).T + np.array(weights.head_bias, np.float64)]
        wanted += [np.array(expected)]
    differences = [np.abs(np.array(one) - other).max() for one, other in zip(found, wanted, strict=True)]
    return float(max(differences)) if np.isfinite(differences).all() else math.inf


_PROVED: tuple[tuple[Cell, int], ...] = tuple((cell, bits) for cell in ("GRU", "LSTM") for bits in (32, 16, 8))


def difference_of(kernel: CellKernel) -> float:
    """Largest difference of *kernel* from float64, of all cells and types of weights; see `kernels.proof`."""
    found = [difference_after_steps(kernel, random_cell(cell, bits, 2 * GROUP, GROUP), 2) for cell, bits in _PROVED]
    make = getattr(kernel, "stack", None)
    if make is not None:
        stacks = [random_stack(cell, bits, 2 * GROUP, GROUP, 3, 5) for cell, bits in _PROVED]
        found += [stack_difference(make(weights, 1), weights, 1) for weights in stacks]
    return max(found)
