"""Stacks of GRU and LSTM layers whose steps run in kernels, and a decoder made of one."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kernels import default_path, kernel
from ..kernels.cells import (
    GROUP,
    MOST_ROWS,
    N_GATES,
    Cell,
    CellKernel,
    CellWeights,
    Matrix,
    StackKernel,
    StackWeights,
    State,
)
from ..kernels.plain.recurrentcell import after_products, product
from ..stream.unit import check_one_of, one_of

Steps: TypeAlias = "list[Any] | mx.array"
"""The samples of a window, one by one or together."""

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
        check_one_of("cell", cell, N_GATES)
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
        steps, state = self.steps(_steps_of(x), state)
        return _joined(steps).astype(x.dtype), state

    def steps(self, x: Steps, state: State | None) -> tuple[Steps, State]:
        """The results of the samples of a window, and the state after it.

        Args:
            x: float32 of shape (batch, input_size) for each sample; or of all of many samples, (batch, time,
                input_size).
            state: See :meth:`__call__`.

        Returns:
            The same with *hidden_size*, and the state.
        """
        weights, results = self.weights(), []
        n_rows, n_steps = (x[0].shape[0], len(x)) if isinstance(x, list) else x.shape[:2]
        state = tuple(state) if state is not None else self.zero_state(n_rows)
        if isinstance(x, list):
            # Plain operations take arrays of MLX.
            has_kernel = self.has_kernel
            run = cast("CellKernel", kernel("recurrentcell", default_path() if has_kernel else "plain")).run
            for sample in x:
                state = run(sample if has_kernel else mx.array(sample), weights, state)
                results.append(state[0])
            return results, state
        products = product(x, weights.input) + weights.bias
        for step in range(n_steps):
            state = after_products(products[:, step], product(state[0], weights.hidden), weights.bhn, state)
            results.append(state[0])
        return mx.stack(results, axis=1), state

    @property
    def has_kernel(self) -> bool:
        """Whether kernels take weights of this type. They take 16 bits for those of bfloat16."""
        return self.bits in (None, 8) and self["Wx"].dtype != mx.float16

    def weights(self) -> CellWeights:
        """The weights as a kernel takes them; the same object as long as they are the same arrays."""
        arrays = tuple(self.values())
        kept = self._kept
        if kept is None or len(kept.arrays) != len(arrays) or any(map(_is_other, kept.arrays, arrays)):
            bhn = self["bhn"] if self.cell == "GRU" else mx.zeros((self.hidden_size,))
            biases = _float32(self["b" if self.cell == "GRU" else "bias"]), _float32(bhn)
            self._kept = kept = _Kept(arrays, CellWeights(self.cell, self._matrix("Wx"), self._matrix("Wh"), *biases))
        return kept.weights

    def _matrix(self, name: str) -> Matrix:
        return _matrix(self, name, f"{name}_scales", f"{name}_biases")


class _Kept:
    """Not a list or dictionary, which a module would take for parameters."""

    def __init__(self, arrays: tuple[object, ...], weights: CellWeights) -> None:
        self.arrays, self.weights = arrays, weights


def _steps_of(x: mx.array, patch: int = 1) -> Steps:
    """The samples of *x*, (batch, time, features), in float32: one by one where they are few."""
    x = x.astype(mx.float32)
    n_rows, n_steps = x.shape[0], x.shape[1] // patch
    if n_steps > MOST_STEPS or n_rows > MOST_ROWS:
        return x.reshape(n_rows, n_steps, -1)
    # Kernels on the CPU take both, and a view of NumPy's costs no evaluation.
    values = np.asarray(x) if default_path() == "cpu" else x
    if n_steps == 1:
        return [values.reshape(n_rows, -1)]
    values = values.reshape(n_rows, n_steps, -1)
    return [values[:, step] for step in range(n_steps)]


def _joined(steps: Steps) -> mx.array:
    if not isinstance(steps, list):
        return steps
    return mx.stack(steps, axis=1) if len(steps) > 1 else steps[0][:, None]


def _matrix(layer: nn.Module, values: str, scales: str, biases: str) -> Matrix:
    if scales not in layer:
        return Matrix(layer[values])
    return Matrix(layer[values], _float32(layer[scales]), _float32(layer[biases]))


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

    def __call__(
        self, x: mx.array, state: mx.array | list[State] | None = None, patch: int = 1
    ) -> tuple[mx.array, list[State]]:
        """The results of the last layer, and the state of each layer.

        Args:
            x: (batch, time, input_size / patch).
            state: What the window before returned, or as one array (layers, 1 or 2, batch, hidden_size); None: zeros.
            patch: Samples that are the input of one step together.

        Returns:
            (batch, time / patch, hidden_size), and a state for each layer.
        """
        if isinstance(state, mx.array):
            state = [tuple(of_layer) for of_layer in state]
        steps, after = _steps_of(x, patch), []
        for number, layer in enumerate(self.layers):
            steps, of_layer = layer.steps(steps, None if state is None else state[number])
            after.append(of_layer)
        return _joined(steps).astype(x.dtype), after


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
            raise ValueError(f"'rnn_type' must be {one_of(N_GATES)}, got {rnn_type!r}")
        if embedding:
            self.linear_embeddings = nn.Linear(input_size, input_size)
        self.embedding, self.patch, self.has_heads = embedding, patch, isinstance(output_size, dict)
        self.rnn = RecurrentStack(cast(Cell, rnn_type.upper()), patch * input_size, hidden_size, num_layers)
        sizes = output_size if isinstance(output_size, dict) else {"output": output_size}
        self.heads = {name: nn.Linear(hidden_size, size) for name, size in sizes.items()}

    def __call__(
        self, x: mx.array, state: mx.array | list[State] | None = None
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
        x, state = self.rnn(x, state, self.patch)
        results = {name: head(x) for name, head in self.heads.items()}
        return (results if self.has_heads else results["output"]), state

    def in_one_launch(self, n_samples: int) -> DecoderStep | None:
        """What computes a window of *n_samples* in one launch, with the weights that the decoder has now.

        None where that is not done: on a device without such a kernel, and for windows of more than one step.
        """
        make = getattr(kernel("recurrentcell", default_path()), "stack", None)
        layers: list[RecurrentLayer] = self.rnn.layers
        heads = list(self.heads.values())
        if make is None or self.embedding or n_samples != self.patch or not all(layer.has_kernel for layer in layers):
            return None
        matrices = [_matrix(head, "weight", "scales", "biases") for head in heads]
        if len({matrix.bits for matrix in matrices}) > 1:
            return None
        values = mx.concatenate([matrix.values for matrix in matrices])
        scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
        offsets = [matrix.biases for matrix in matrices if matrix.biases is not None]
        rows = Matrix(values, mx.concatenate(scales), mx.concatenate(offsets)) if scales else Matrix(values)
        biases = mx.concatenate([_float32(head["bias"]) for head in heads])
        run = make(StackWeights(tuple(layer.weights() for layer in layers), rows, biases), 1)
        return DecoderStep(self, run) if run is not None else None


class DecoderStep:
    """A step of a :class:`RecurrentDecoder` in one launch.

    Args:
        decoder: Whose heads these are.
        run: Computes the results of all heads.
    """

    def __init__(self, decoder: RecurrentDecoder, run: StackKernel) -> None:
        self._run, self._layers = run, decoder.rnn.layers
        self.heads: dict[str | None, slice] = {}
        """Where the results of each head are; those of the only one without a name under None."""
        first = 0
        for name, head in decoder.heads.items():
            end = first + head["bias"].size
            self.heads[name if decoder.has_heads else None] = slice(first, end)
            first = end
        self.n_results = first

    def __call__(
        self, x: mx.array, state: mx.array | list[State] | None, memory: mx.array | None = None
    ) -> tuple[mx.array | None, mx.array]:
        """The results of all heads, float32 of shape (1, n_results), and the state after them. Lazy.

        Args:
            x: float32 of shape (1, patch, input_size). Where it has a value that is not finite, the state stays.
            state: Float32 of shape (layers, 1 or 2, 1, hidden_size), or as :meth:`RecurrentDecoder.__call__` takes it.
            memory: Bytes on the host, to which the device writes the results in place of an array.
        """
        if not isinstance(state, mx.array):
            states = [layer.zero_state(1) for layer in self._layers] if state is None else state
            state = mx.stack([mx.stack(list(of_layer)) for of_layer in states])
        return self._run(x, state, memory)
