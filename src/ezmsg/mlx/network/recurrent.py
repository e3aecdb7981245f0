"""Stacks of GRU and LSTM layers whose steps run in kernels, and a decoder made of one."""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ..kernels import default_path, kernel
from ..kernels.cells import GROUP, MOST_ROWS, N_GATES, Cell, CellKernel, CellWeights, Matrix, State
from ..kernels.plain.recurrentcell import after_products, product

MOST_STEPS = 4
"""Samples of a window up to which each is a step of the kernel. From more, one product multiplies all of them with the
weights of the input, and reads these once."""


class RecurrentLayer(nn.Module):
    """One layer of GRU or LSTM cells: the values of ``mlx.nn.GRU`` and ``mlx.nn.LSTM``, and their names of weights.

    Args:
        cell: "GRU" or "LSTM".
        input_size: Features of a sample.
        hidden_size: Features of the result.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx.network import RecurrentLayer
        >>> layer = RecurrentLayer("GRU", 3, 8)
        >>> y, state = layer(mx.zeros((1, 5, 3)))
        >>> y.shape
        (1, 5, 8)
    """

    def __init__(self, cell: Cell, input_size: int, hidden_size: int) -> None:
        super().__init__()
        if cell not in N_GATES:
            raise ValueError(f"'cell' must be one of {', '.join(map(repr, N_GATES))}, got {cell!r}")
        self.cell, self.input_size, self.hidden_size = cell, input_size, hidden_size
        self.bits: int | None = None
        scale, n_rows = 1.0 / math.sqrt(hidden_size), N_GATES[cell] * hidden_size
        self.Wx = mx.random.uniform(-scale, scale, (n_rows, input_size))
        self.Wh = mx.random.uniform(-scale, scale, (n_rows, hidden_size))
        # Named as in MLX: that of an LSTM is "bias", that of a GRU "b", and "bhn" inside its reset gate.
        if cell == "GRU":
            self.b = mx.random.uniform(-scale, scale, (n_rows,))
            self.bhn = mx.random.uniform(-scale, scale, (hidden_size,))
        else:
            self.bias = mx.random.uniform(-scale, scale, (n_rows,))
        self._kept: _Kept | None = None

    def to_quantized(self, group_size: int | None = None, bits: int | None = None, **_: object) -> RecurrentLayer:
        """The layer with weights of few bits, in groups of 64; the biases stay as they are.

        Called by ``mlx.nn.quantize``.

        Raises:
            ValueError: A size is no multiple of 64, or *group_size* is another.
        """
        if group_size not in (None, GROUP) or self.input_size % GROUP or self.hidden_size % GROUP:
            raise ValueError(
                f"'input_size' and 'hidden_size' must be multiples of {GROUP} for weights in groups of {GROUP}, got "
                f"{self.input_size} and {self.hidden_size} in groups of {group_size}"
            )
        made = RecurrentLayer(self.cell, self.input_size, self.hidden_size)
        made.bits = bits or 8
        made.update({name: value for name, value in self.parameters().items() if name not in ("Wx", "Wh")})
        for name in ("Wx", "Wh"):
            values, scales, biases = mx.quantize(self[name], group_size=GROUP, bits=made.bits)
            made[name], made[f"{name}_scales"], made[f"{name}_biases"] = values, scales, biases
        return made

    def zero_state(self, n_rows: int) -> State:
        """The state before the first sample."""
        return tuple(mx.zeros((n_rows, self.hidden_size)) for _ in range(2 if self.cell == "LSTM" else 1))

    def __call__(self, x: mx.array, state: State | None = None) -> tuple[mx.array, State]:
        """The results of a window, and the state after it.

        Args:
            x: (batch, time, input_size); computed in float32, and returned in its dtype.
            state: What the window before returned; None: zeros.

        Returns:
            (batch, time, hidden_size), and the state: float32 of shape (batch, hidden_size), one array or two.
        """
        weights, dtype = self._weights(), x.dtype
        n_rows, n_steps, _ = x.shape
        state = tuple(state) if state is not None else self.zero_state(n_rows)
        x = x.astype(mx.float32)
        results = []
        if n_steps <= MOST_STEPS and n_rows <= MOST_ROWS:
            # Kernels take 16 bits for those of bfloat16.
            has_kernel = self.bits in (None, 8) and self["Wx"].dtype != mx.float16
            path = default_path() if has_kernel else "plain"
            run = cast("CellKernel", kernel("recurrentcell", path)).run
            for step in range(n_steps):
                state = run(x[:, step], weights, state)
                results.append(state[0])
        else:
            products = product(x, weights.input) + weights.bias
            for step in range(n_steps):
                state = after_products(products[:, step], product(state[0], weights.hidden), weights.bhn, state)
                results.append(state[0])
        return mx.stack(results, axis=1).astype(dtype), state

    def _weights(self) -> CellWeights:
        """The weights as a kernel takes them; the same object as long as they are the same arrays."""
        arrays = tuple(self.values())
        kept = self._kept
        if kept is None or len(kept.arrays) != len(arrays) or any(map(_is_other, kept.arrays, arrays)):
            matrices = (
                Matrix(self[name], *(_float32(self[f"{name}_{part}"]) for part in ("scales", "biases") if self.bits))
                for name in ("Wx", "Wh")
            )
            bhn = self["bhn"] if self.cell == "GRU" else mx.zeros((self.hidden_size,))
            bias = self["b" if self.cell == "GRU" else "bias"]
            self._kept = kept = _Kept(arrays, CellWeights(self.cell, *matrices, _float32(bias), _float32(bhn)))
        return kept.weights


class _Kept:
    """Not a list or dictionary, which a module would take for parameters."""

    def __init__(self, arrays: tuple[object, ...], weights: CellWeights) -> None:
        self.arrays, self.weights = arrays, weights


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _float32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.float32 else array.astype(mx.float32)


class RecurrentStack(nn.Module):
    """Layers of GRU or LSTM cells, each on the results of the one before: the values of ``torch.nn.GRU`` and ``LSTM``.

    Args:
        cell: "GRU" or "LSTM".
        input_size: Features of a sample.
        hidden_size: Features of a layer.
        num_layers: How many layers.
    """

    def __init__(self, cell: Cell, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        self.layers = [RecurrentLayer(cell, size, hidden_size) for size in sizes]

    def __call__(self, x: mx.array, state: list[State] | None = None) -> tuple[mx.array, list[State]]:
        """The results of the last layer, (batch, time, hidden_size), and the state of each layer."""
        after = []
        for number, layer in enumerate(self.layers):
            x, of_layer = layer(x, None if state is None else state[number])
            after.append(of_layer)
        return x, after


class RecurrentDecoder(nn.Module):
    """A recurrent decoder: features in, one or several heads out, from a stack of GRU or LSTM layers.

    The counterpart of ``ezmsg.learn.model.rnn.RNNModel``, with its arguments and the names of its weights. It takes
    windows as they are, or each as one step: with ``patch=True``, all samples of a window are the input of one step, as
    in the decoder of the nejm brain-to-text study (Card et al., N Engl J Med 391, 609, 2024).

    Args:
        input_size: Features of a sample.
        hidden_size: Features of a layer.
        num_layers: Recurrent layers.
        output_size: Features of the result; or of each head, by its name.
        rnn_type: "GRU" or "LSTM".
        embedding: Whether a linear layer comes before the recurrent ones, as in ``RNNModel``.
        patch: Samples that are the input of one step together. A window has a multiple of it.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx.network import RecurrentDecoder
        >>> model = RecurrentDecoder(512, 64, num_layers=2, output_size=41, patch=14)
        >>> y, state = model(mx.zeros((1, 14, 512)))
        >>> y.shape
        (1, 1, 41)
        >>> y, state = model(mx.zeros((1, 14, 512)), state)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        output_size: int | dict[str, int] = 2,
        rnn_type: str = "GRU",
        embedding: bool = False,
        patch: int = 1,
    ) -> None:
        super().__init__()
        if rnn_type.upper() not in N_GATES:
            raise ValueError(f"'rnn_type' must be one of {', '.join(map(repr, N_GATES))}, got {rnn_type!r}")
        if embedding:
            self.linear_embeddings = nn.Linear(input_size, input_size)
        self.embedding, self.patch, self.has_heads = embedding, patch, isinstance(output_size, dict)
        self.rnn = RecurrentStack(cast(Cell, rnn_type.upper()), patch * input_size, hidden_size, num_layers)
        sizes = output_size if isinstance(output_size, dict) else {"output": output_size}
        self.heads = {name: nn.Linear(hidden_size, size) for name, size in sizes.items()}

    def __call__(
        self, x: mx.array, state: list[State] | None = None
    ) -> tuple[mx.array | dict[str, mx.array], list[State]]:
        """The results of a window, and the state after it.

        Args:
            x: (batch, time, input_size), where time is a multiple of ``patch``.
            state: What the window before returned; None: zeros.

        Returns:
            (batch, time / patch, output_size), or a dictionary of such arrays where there are several heads; and the
            state.
        """
        if self.embedding:
            x = self.linear_embeddings(x)
        if self.patch > 1:
            x = x.reshape(x.shape[0], x.shape[1] // self.patch, -1)
        x, state = self.rnn(x, state)
        results = {name: head(x) for name, head in self.heads.items()}
        return (results if self.has_heads else results["output"]), state
