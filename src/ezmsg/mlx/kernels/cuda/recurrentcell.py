"""Steps of recurrent cells on CUDA, in one launch a layer or a stack: see ``sources/recurrentcell.cuh``."""

from __future__ import annotations

import functools
import weakref

import mlx.core as mx

from ..cells import GROUP, N_GATES, CellWeights, Matrix, StackWeights, State
from ..plain import recurrentcell as plain
from .kernel import Compiled, cuda_kernel

THREADS = 256
"""Of a block."""

UNITS = 8
"""Hidden units of a block where rows of weights are short."""

LONG_UNITS = 2
"""The same where they are long."""

LONG = 4096
"""Bytes from which on a row of weights is a long one."""

MOST_ROWS = 4
"""Largest batch of a stack that is computed in one launch."""

_COUNTS_APART, _FIRST_STAGE = 32, 2
"""As in the source: entries from one count to the next, and which of them is the first stage's."""

_ROOM = 300_000
"""Floats that are added to what layers hand on, so that hardly any array from the host has the size of it.

MLX uses freed memory again for arrays of about the same size. Where an array came from the host, that memory is managed
and its pages may lie there, and the counts that blocks wait for would be read and added to over the bus.
"""


def _units(bits: int, n_columns: int) -> int:
    return UNITS if n_columns * bits // 8 < LONG else LONG_UNITS


def _parts(matrix: Matrix, name: str) -> dict[str, mx.array]:
    """The arrays of *matrix*, by the names that the source is given for them."""
    parts = zip((name, f"{name}_scales", f"{name}_offsets"), matrix, strict=True)
    return {part: array for part, array in parts if array is not None}


def _matrices_of(number: int, weights: CellWeights) -> dict[str, mx.array]:
    return {**_parts(weights.input, f"wx{number}"), **_parts(weights.hidden, f"wh{number}")}


def _matrix(name: str, is_quantized: bool) -> str:
    return f"Matrix{{{name}, {f'{name}_scales, {name}_offsets' if is_quantized else 'nullptr, nullptr'}}}"


@functools.cache
def _layer_text(cell: str, is_quantized: bool) -> str:
    """What gives the source the pointers of a single layer."""
    state = "h, h_after, " + ("c, c_after" if cell == "LSTM" else "nullptr, nullptr")
    matrices = f"{_matrix('wx0', is_quantized)}, {_matrix('wh0', is_quantized)}"
    return f"using namespace ezmsg_mlx;\nconst Layer layer{{{matrices}, bias, bhn, {state}}};\n"


@functools.cache
def _stack_text(cell: str, n_layers: int, is_quantized: bool, writes: bool) -> str:
    """What gives the source the pointers of a layer by its number, those of the head, and where its results go."""
    is_lstm = cell == "LSTM"
    lines = [
        "using namespace ezmsg_mlx;",
        f"constexpr int STATES = {1 + is_lstm}, STATE = BATCH * HIDDEN, BIASES = {N_GATES[cell] + 1} * HIDDEN;",
        "const auto layer_of = [&](int number) -> Layer {",
        "  const float *bias = biases + number * BIASES, *bhn = bias + BIASES - HIDDEN;",
        "  const float *h = state + number * STATES * STATE, *c = h + STATE;",
        "  float *h_after = state_after + number * STATES * STATE, *c_after = h_after + STATE;",
    ]
    for n in range(n_layers):
        matrices = f"{_matrix(f'wx{n}', is_quantized)}, {_matrix(f'wh{n}', is_quantized)}"
        lines.append(f"  if (number == {n}) return Layer{{{matrices}, bias, bhn, h, h_after, c, c_after}};")
    lines += [
        "  return Layer{};",
        "};",
        f"const auto head_weights = [&] {{ return {_matrix('head', is_quantized)}; }};",
        f"const auto results_at = [&] {{ return {'(float*)(memory)' if writes else 'y'}; }};",
    ]
    return "\n".join([*lines, ""])


def _kernel(
    name: str,
    weights: CellWeights,
    n_rows: int,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    text: str,
    **constants: int,
) -> Compiled:
    n_input, bits = weights.input.n_columns, weights.input.bits
    return cuda_kernel(
        name,
        inputs,
        outputs,
        text,
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
        states = ("h", "c") if weights.cell == "LSTM" else ("h",)
        arrays = {**_matrices_of(0, weights), "bias": weights.bias, "bhn": weights.bhn}
        inputs, outputs = ("x", *states, *arrays), tuple(f"{name}_after" for name in states)
        text = _layer_text(weights.cell, weights.input.scales is not None)
        self._kernel = _kernel("recurrentcell", weights, n_rows, inputs, outputs, text)
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
    for it, so that they cost no launch, and no two launches have the same, in whatever order a device runs them. Few
    arrays go in and out, since each takes MLX a while.
    """

    def __init__(self, weights: StackWeights, n_rows: int) -> None:
        first, n_layers = weights.layers[0], len(weights.layers)
        bits, n_hidden, n_input = first.input.bits, first.hidden_size, first.input.n_columns
        n_out, is_quantized = weights.head_bias.shape[0], first.input.scales is not None
        matrices = {name: a for n, layer in enumerate(weights.layers) for name, a in _matrices_of(n, layer).items()}
        matrices |= _parts(weights.head, "head")
        biases = [bias for layer in weights.layers for bias in (layer.bias, layer.bhn)]
        self._weights = [mx.concatenate([*biases, weights.head_bias]), *matrices.values()]
        inputs = ("x", "zeros", "memory", "state", "biases", *matrices)
        sizes = {"UNITS": UNITS, "LAYERS": n_layers, "OUT": n_out}
        n_counts = (_FIRST_STAGE + n_layers + 1) * _COUNTS_APART
        tiles = [-(-n_rows * n_input // (4 * THREADS)), -(-n_hidden // _units(bits, n_input))]
        tiles += [-(-n_hidden // UNITS)] * (n_layers - 1) + [-(-n_out // UNITS)]
        shapes = [
            (n_layers, 2 if first.cell == "LSTM" else 1, n_rows, n_hidden),
            (n_counts + n_rows * (n_input + n_layers * n_hidden) + _ROOM,),
            (n_rows, n_out),
        ]
        self._launches = []
        for writes in (False, True):
            text, outputs = _stack_text(first.cell, n_layers, is_quantized, writes), ("state_after", "kept", "y")
            n_results = 2 if writes else 3
            kernel = _kernel(
                "recurrentstack", first, n_rows, inputs, outputs[:n_results], text, **sizes, WRITES=int(writes)
            )
            launch = functools.partial(
                kernel,
                output_shapes=shapes[:n_results],
                output_dtypes=[mx.float32] * n_results,
                grid=(sum(tiles) * THREADS, 1, 1),
                threadgroup=(THREADS, 1, 1),
            )
            self._launches.append(launch)
        self._zeros = mx.zeros(n_counts)
        mx.eval(self._zeros, self._weights[0])

    def __call__(
        self, x: mx.array, state: mx.array, memory: mx.array | None = None
    ) -> tuple[mx.array | None, mx.array]:
        """See :class:`~ezmsg.mlx.kernels.cells.StackKernel`."""
        zeros = self._zeros
        if memory is None:
            after, self._zeros, y = self._launches[0](inputs=[x, zeros, zeros, state, *self._weights])
            return y, after
        after, self._zeros = self._launches[1](inputs=[x, zeros, memory, state, *self._weights])
        return None, after


def stack(weights: StackWeights, n_rows: int) -> Stack | None:
    """What computes a step of a batch of *n_rows* in one launch; None where that is not done."""
    matrices = [matrix for layer in weights.layers for matrix in (layer.input, layer.hidden)]
    if n_rows > MOST_ROWS or len({matrix.bits for matrix in [*matrices, weights.head]}) > 1:
        return None
    is_right = matrices[0].bits in (8, 16, 32) and all(map(_has_whole_words, weights.layers))
    return Stack(weights, n_rows) if is_right else None
