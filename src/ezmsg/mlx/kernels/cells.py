"""The weights of recurrent cells, as their kernels take them, and what a step of a cell computes.

A kernel of the recurrence ``"recurrentcell"`` is a module with one function, ``run(x, weights, state) -> state``: one
step of one layer. *x* is float32 of shape (batch, input). A state is a tuple of float32 arrays of shape
(batch, hidden): ``(h,)`` of a GRU and ``(h, c)`` of an LSTM. The result is ``h``. Where a second function,
``stack(weights, n_rows) -> StackKernel | None``, is there, it makes what computes several layers in one launch. With
the products
``a = Wx x + b`` and ``u = Wh h``, split into gates, in the order of both MLX and PyTorch:

- GRU: ``r = sigmoid(a_r + u_r)``, ``z = sigmoid(a_z + u_z)``, ``n = tanh(a_n + r * (u_n + bhn))``,
  ``h' = (1 - z) * n + z * h`` (Cho et al., EMNLP 2014, with the bias inside the reset gate as in cuDNN).
- LSTM: ``i, f, o = sigmoid(a + u)``, ``g = tanh(a_g + u_g)``, ``c' = f * c + i * g``, ``h' = o * tanh(c')``, the gates
  in the order i, f, g, o (Hochreiter and Schmidhuber, Neural Computation 9, 1735, 1997).

All of it is computed in float32, whatever the type of the weights.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, Protocol, TypeAlias

import mlx.core as mx

Cell = Literal["GRU", "LSTM"]
"""Kinds of recurrent cells that have kernels."""

N_GATES: dict[str, int] = {"GRU": 3, "LSTM": 4}

GROUP = 64
"""Weights in a row that share a scale and an offset, where they have 8 bits."""

MOST_ROWS = 16
"""Largest batch that a kernel is made for. Larger ones are a matter of matrix products."""

State: TypeAlias = "tuple[mx.array, ...]"
"""``(h,)`` or ``(h, c)``, float32 of shape (batch, hidden)."""


class Matrix(NamedTuple):
    """A matrix of weights, shape (rows, columns)."""

    values: mx.array
    """float32 or bfloat16 of that shape; or what ``mx.quantize`` makes of it in groups of :data:`GROUP`, uint32 of
    shape (rows, columns * bits / 32)."""

    scales: mx.array | None = None
    """float32 of shape (rows, columns / GROUP), of weights that are quantized."""

    biases: mx.array | None = None
    """The same, added to each weight of the group."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        if self.scales is not None:
            return 32 * self.values.shape[1] // (GROUP * self.scales.shape[1])
        return 8 * self.values.itemsize

    @property
    def n_columns(self) -> int:
        """Length of the vectors that it multiplies."""
        return 32 * self.values.shape[1] // self.bits if self.scales is not None else self.values.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class CellWeights:
    """The weights of one layer, known by identity: kernels keep what they work out of them as long as they live."""

    cell: Cell
    input: Matrix
    """(gates * hidden, input)"""
    hidden: Matrix
    """(gates * hidden, hidden)"""
    bias: mx.array
    """float32 of shape (gates * hidden,)"""
    bhn: mx.array
    """float32 of shape (hidden,): the bias inside the reset gate of a GRU, zeros of an LSTM."""

    @property
    def hidden_size(self) -> int:
        """Length of the state of one batch row."""
        return self.bhn.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class StackWeights:
    """The weights of layers, each on the results of the one before, and of a linear layer on those of the last."""

    layers: tuple[CellWeights, ...]
    head: Matrix
    """(output, hidden)"""
    head_bias: mx.array
    """float32 of shape (output,)"""


class StackKernel(Protocol):
    """A step of a stack in one launch, of weights that it was made for."""

    def __call__(
        self, x: mx.array, state: mx.array, memory: mx.array | None = None
    ) -> tuple[mx.array | None, mx.array]:
        """The results of a step, and the state after it. Lazy.

        Args:
            x: float32 of shape (batch, input), or of as many values in that order; also on the host.
            state: float32 of shape (layers, 1 or 2, batch, hidden), those of all layers. It stays as it is where *x*
                has a sample that is not finite.
            memory: Bytes on the host that the results are written to, as float32, in place of an array.
        """
        ...


class CellKernel(Protocol):
    """One step of a recurrent cell on one backend."""

    def run(self, x: mx.array, weights: CellWeights, state: State) -> State:
        """The state after a step.

        Args:
            x: float32 of shape (batch, input), with 1 to :data:`MOST_ROWS` rows.
            weights: Of one layer; 8 bits, bfloat16 or float32.
            state: Before the step.
        """
        ...
