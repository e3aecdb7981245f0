"""Steps of recurrent cells on CUDA, in one launch a layer or a stack: see ``sources/recurrentcell.cuh``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import mlx.core as mx

from ..cells import GROUP, CellWeights, Matrix, StackWeights, State
from ..plain import recurrentcell as plain
from .kernel import Compiled, cuda_kernel

THREADS = 256
"""Of a block."""

UNITS = 8
"""Hidden units of a block where rows of weights are short."""

LONG = 4096
"""Bytes from which on a row of weights is a long one, for which a block has fewer units."""

MOST_ROWS = 4
"""Largest batch of a stack that is computed in one launch."""

_COUNTS_APART, _FIRST_STAGE = 32, 2
"""As in the source: entries from one count to the next, and which of them is the first stage's."""


def _units(bits: int, n_columns: int) -> int:
    return UNITS if n_columns * bits // 8 < LONG else 2


def _parts(matrix: Matrix, name: str) -> dict[str, mx.array]:
    """The arrays of *matrix*, by the names that the source is given for them."""
    parts = zip((name, f"{name}_scales", f"{name}_offsets"), matrix, strict=True)
    return {part: array for part, array in parts if array is not None}


def _arrays_of(number: int, weights: CellWeights) -> dict[str, mx.array]:
    return {
        **_parts(weights.input, f"wx{number}"),
        **_parts(weights.hidden, f"wh{number}"),
        f"bias{number}": weights.bias,
        f"bhn{number}": weights.bhn,
    }


def _matrix(name: str, is_quantized: bool) -> str:
    return f"Matrix{{{name}, {f'{name}_scales, {name}_offsets' if is_quantized else 'nullptr, nullptr'}}}"


@functools.cache
def _text(cell: str, n_layers: int, is_quantized: bool, has_head: bool) -> str:
    """What gives the source the pointers of a layer by its number, and those of the head."""
    cases = []
    for n in range(n_layers):
        state = f"h{n}, h{n}_after, " + (f"c{n}, c{n}_after" if cell == "LSTM" else "nullptr, nullptr")
        matrices = f"{_matrix(f'wx{n}', is_quantized)}, {_matrix(f'wh{n}', is_quantized)}"
        cases.append(f"  if (number == {n}) return Layer{{{matrices}, bias{n}, bhn{n}, {state}}};\n")
    text = "".join(["const auto layer_of = [&](int number) -> Layer {\n", *cases, "  return Layer{};\n};\n"])
    if has_head:
        text += f"const auto head_weights = [&] {{ return {_matrix('head', is_quantized)}; }};\n"
    return f"using namespace ezmsg_mlx;\n{text}"


def _states(cell: str, n_layers: int) -> tuple[str, ...]:
    return tuple(f"{name}{n}" for n in range(n_layers) for name in ("hc" if cell == "LSTM" else "h"))


def _kernel(
    name: str,
    weights: CellWeights,
    n_rows: int,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    n_layers: int = 1,
    **constants: int,
) -> Compiled:
    n_input, bits = weights.input.n_columns, weights.input.bits
    return cuda_kernel(
        name,
        inputs,
        outputs,
        _text(weights.cell, n_layers, bits == 8, "OUT" in constants),
        BITS=bits,
        IS_LSTM=int(weights.cell == "LSTM"),
        BATCH=n_rows,
        INPUT=n_input,
        HIDDEN=weights.hidden_size,
        GROUP=GROUP,
        THREADS=THREADS,
        FIRST_UNITS=_units(bits, n_input),
        **constants,
    )


class _Launch:
    """Of one layer, with its weights."""

    def __init__(self, weights: CellWeights, n_rows: int) -> None:
        states, arrays = _states(weights.cell, 1), _arrays_of(0, weights)
        outputs = tuple(f"{name}_after" for name in states)
        self._kernel = _kernel("recurrentcell", weights, n_rows, ("x", *states, *arrays), outputs)
        self._weights = list(arrays.values())
        n_blocks = -(-weights.hidden_size // _units(weights.input.bits, weights.input.n_columns))
        self._arguments = {
            "output_shapes": [(n_rows, weights.hidden_size)] * len(states),
            "output_dtypes": [mx.float32] * len(states),
            "grid": (n_blocks * THREADS, 1, 1),
            "threadgroup": (THREADS, 1, 1),
        }

    def __call__(self, x: mx.array, state: State) -> State:
        return tuple(self._kernel(inputs=[x, *state, *self._weights], **self._arguments))


_launches: weakref.WeakKeyDictionary[CellWeights, dict[int, _Launch]] = weakref.WeakKeyDictionary()


def run(x: mx.array, weights: CellWeights, state: State) -> State:
    """See :class:`~ezmsg.mlx.kernels.cells.CellKernel`. Lazy."""
    if not _has_whole_words(weights):
        return plain.run(x, weights, state)
    of_weights = _launches.setdefault(weights, {})
    launch = of_weights.get(x.shape[0])
    if launch is None:
        launch = of_weights[x.shape[0]] = _Launch(weights, x.shape[0])
    return launch(x, state)


def _has_whole_words(weights: CellWeights) -> bool:
    """Whether no row of weights begins within a word."""
    return weights.input.bits != 16 or not (weights.input.n_columns % 2 or weights.hidden_size % 2)


class Stack:
    """See :class:`~ezmsg.mlx.kernels.cells.StackKernel`: a step in one launch.

    The blocks of a launch count what they have done, from zero. Each launch is given zeros that the one before has left
    for it, so that they cost no launch, and no two launches have the same, in whatever order a device runs them.
    """

    def __init__(self, weights: StackWeights, n_rows: int) -> None:
        first, n_layers = weights.layers[0], len(weights.layers)
        bits, n_hidden, n_input = first.input.bits, first.hidden_size, first.input.n_columns
        n_out = weights.head_bias.shape[0]
        states = _states(first.cell, n_layers)
        arrays = {name: a for n, layer in enumerate(weights.layers) for name, a in _arrays_of(n, layer).items()}
        arrays |= {**_parts(weights.head, "head"), "head_bias": weights.head_bias}
        inputs = ("x", "counts", "memory", *states, *arrays)
        outputs = ("y", "between", "counts_after", *(f"{name}_after" for name in states))
        sizes = {"UNITS": UNITS, "LAYERS": n_layers, "OUT": n_out}
        self._kernels = [
            _kernel("recurrentstack", first, n_rows, inputs, outputs, n_layers, **sizes, WRITES=writes)
            for writes in (0, 1)
        ]
        self._weights, self._n_states = list(arrays.values()), len(states) // n_layers
        n_counts = (_FIRST_STAGE + n_layers + 1) * _COUNTS_APART
        self._zeros = mx.zeros(n_counts, mx.uint32)
        tiles = [-(-n_rows * n_input // (4 * THREADS)), -(-n_hidden // _units(bits, n_input))]
        tiles += [-(-n_hidden // UNITS)] * (n_layers - 1) + [-(-n_out // UNITS)]
        between = n_rows * (n_input + n_layers * n_hidden)
        shapes = [(n_rows, n_out), (between,), (n_counts,), *[(n_rows, n_hidden)] * len(states)]
        self._arguments = {
            "output_shapes": shapes,
            "output_dtypes": [mx.float32, mx.float32, mx.uint32, *[mx.float32] * len(states)],
            "grid": (sum(tiles) * THREADS, 1, 1),
            "threadgroup": (THREADS, 1, 1),
        }

    def __call__(
        self, x: mx.array, states: Sequence[State], memory: mx.array | None = None
    ) -> tuple[mx.array, list[State]]:
        """See :class:`~ezmsg.mlx.kernels.cells.StackKernel`. Evaluations have to be begun in the order of calls."""
        flat = [array for state in states for array in state]
        zeros = self._zeros
        inputs = [x, zeros, zeros if memory is None else memory, *flat, *self._weights]
        y, _, self._zeros, *after = self._kernels[memory is not None](inputs=inputs, **self._arguments)
        n = self._n_states
        return y, [tuple(after[at : at + n]) for at in range(0, len(after), n)]


def stack(weights: StackWeights, n_rows: int) -> Stack | None:
    """What computes a step of a batch of *n_rows* in one launch; None where that is not done."""
    matrices = [matrix for layer in weights.layers for matrix in (layer.input, layer.hidden)]
    if n_rows > MOST_ROWS or len({matrix.bits for matrix in [*matrices, weights.head]}) > 1:
        return None
    is_right = matrices[0].bits in (8, 16, 32) and all(map(_has_whole_words, weights.layers))
    return Stack(weights, n_rows) if is_right else None
