"""A step of a recurrent cell on the CPU: dot products in vectors of 16, over MLX's memory, shared by a few threads.

A step reads each weight once, so that memory sets its time, which a BLAS reaches, too. But its threads wait for each
other whenever something else runs; here, nobody waits for a thread that comes late. The vectors are written out for the
compiler, since it sums quantized groups one by one otherwise, and so that sums are taken in the same order on every
processor.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..cells import GROUP, CellWeights, Matrix, State
from .compiled import compiled

LANES = 16
"""Values of a vector, the widest of any processor. Elsewhere a compiler takes several for one."""

UNROLLED = 4
"""Vectors that are summed side by side, so that one need not wait for another."""

AHEAD = 8192
"""Values, floats or halves of them, that the processor is asked for before they are needed: a single core gets more
from memory then."""

ROWS_AHEAD = 16
"""The same of bytes, in rows: those of a layer may be short, and follow each other."""

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_BYTES = ir.IntType(8).as_pointer()
_PREFETCH = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
# A product and a sum may become one operation; nothing else is reordered.
_CONTRACT = ("contract",)

_compiled = compiled()

# A function of compiled code, which takes its arguments without the first. Typed as something else.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


def _load(builder: ir.IRBuilder, start: ir.Value, index: ir.Value, item: ir.Type) -> ir.Value:
    """The vector of items from number *index* on."""
    address = builder.gep(builder.bitcast(start, item.as_pointer()), [index])
    vector = ir.VectorType(item, LANES)
    return builder.load(
        builder.bitcast(address, vector.as_pointer()),
        align=max(item.width // 8, 1) if isinstance(item, ir.IntType) else 4,
    )


def _floats(builder: ir.IRBuilder, start: ir.Value, index: ir.Value, item: ir.Type) -> ir.Value:
    """The same as float32: floats, the upper halves of some (bfloat16), or bytes."""
    vector = _load(builder, start, index, item)
    if item == _FLOAT:
        return vector
    if item.width == 8:
        return builder.uitofp(vector, _FLOATS)
    wide = ir.VectorType(_INT32, LANES)
    shift = ir.Constant(wide, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(vector, wide), shift), _FLOATS)


def _ask_for(builder: ir.IRBuilder, start: ir.Value, index: ir.Value) -> None:
    """Have the processor bring the item at *index* to its second cache, which need not be there at all."""
    address = builder.bitcast(builder.gep(start, [index]), _BYTES)
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], _PREFETCH)
    builder.call(prefetch, [address, _INT32(0), _INT32(2), _INT32(1)])


def _multiplied(builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.fadd(total, builder.fmul(one, other, flags=_CONTRACT), flags=_CONTRACT)


def _sum_of(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of the lanes, halves on halves."""
    n = LANES
    while n > 1:
        n //= 2
        halves = [
            builder.shuffle_vector(
                vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(ir.VectorType(_INT32, n), list(part))
            )
            for part in (range(n), range(n, 2 * n))
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, _INT32(0))


def _starts(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> list[ir.Value]:
    """Where the data of arrays begins."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def _summed(builder: ir.IRBuilder, n_vectors: int) -> list[ir.Value]:
    totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(n_vectors)]
    for total in totals:
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
    return totals


@_intrinsic
def _dot_of_vectors(typingctx: Any, weights: Any, x: Any, n: Any) -> Any:
    """The dot product of the first *n* values, a multiple of LANES * UNROLLED."""
    item = _FLOAT if weights.dtype == types.float32 else ir.IntType(16)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        row, values, count = _starts(context, builder, signature, args)
        totals = _summed(builder, UNROLLED)
        step = _INT64(LANES * UNROLLED)
        with cgutils.for_range(builder, builder.udiv(count, step), intp=_INT64) as loop:
            first = builder.mul(loop.index, step)
            for number, total in enumerate(totals):
                at = builder.add(first, _INT64(LANES * number))
                product = _floats(builder, row, at, item), _floats(builder, values, at, _FLOAT)
                builder.store(_multiplied(builder, builder.load(total), *product), total)
                _ask_for(builder, builder.bitcast(row, item.as_pointer()), builder.add(at, _INT64(AHEAD)))
        a, b, c, d = map(builder.load, totals)
        return _sum_of(builder, builder.fadd(builder.fadd(a, b), builder.fadd(c, d)))

    return types.float32(weights, x, types.int64), codegen


def _dots_of_groups(n_rows: int) -> Callable[..., Any]:
    """What computes *n_rows* rows side by side, and reads the values that they are multiplied with once."""

    @_intrinsic
    def dots(typingctx: Any, weights: Any, scales: Any, x: Any, n_groups: Any) -> Any:
        """For each row, the sum over the groups of their scale times the dot product of their bytes."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            rows, factors, values, count = _starts(context, builder, signature, args)
            totals = _summed(builder, n_rows)
            zeros = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
            with cgutils.for_range(builder, count, intp=_INT64) as loop:
                first = builder.mul(loop.index, _INT64(GROUP))
                of_group: list[ir.Value] = [ir.Constant(_FLOATS, [0.0] * LANES)] * n_rows
                starts = [builder.mul(count, _INT64(number)) for number in range(n_rows)]
                for begin in range(0, GROUP, LANES):
                    at = builder.add(first, _INT64(begin))
                    others = _floats(builder, values, at, _FLOAT)
                    for number, start in enumerate(starts):
                        index = builder.add(builder.mul(start, _INT64(GROUP)), at)
                        bytes_ = _floats(builder, rows, index, ir.IntType(8))
                        of_group[number] = _multiplied(builder, of_group[number], bytes_, others)
                for number, start in enumerate(starts):
                    group = builder.add(start, loop.index)
                    ahead = builder.mul(builder.add(group, builder.mul(count, _INT64(ROWS_AHEAD))), _INT64(GROUP))
                    _ask_for(builder, builder.bitcast(rows, _BYTES), ahead)
                    scale = builder.load(builder.gep(factors, [group]))
                    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scale, _INT32(0))
                    scale = builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), zeros)
                    total = _multiplied(builder, builder.load(totals[number]), of_group[number], scale)
                    builder.store(total, totals[number])
            sums = [_sum_of(builder, builder.load(total)) for total in totals]
            return context.make_tuple(builder, signature.return_type, sums)

        return types.UniTuple(types.float32, n_rows)(weights, scales, x, types.int64), codegen

    return dots


_dots_of_one, _dots_of_four = _dots_of_groups(1), _dots_of_groups(4)


@_compiled
def _dot(weights: np.ndarray, x: np.ndarray) -> float:
    n = x.size - x.size % (LANES * UNROLLED)
    total: float = _dot_of_vectors(weights, x, n)
    for k in range(n, x.size):
        total += _as_float(weights[k]) * x[k]
    return total


@_intrinsic
def _as_float(typingctx: Any, value: Any) -> Any:
    """A float32, or the bits of a bfloat16, as a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if value == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _INT32), _INT32(16)), _FLOAT)

    return types.float32(value), codegen


@_intrinsic
def _add(typingctx: Any, counts: Any, index: Any, value: Any) -> Any:
    """Add to an entry of *counts* at once for all threads; what it was before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        start, at, more = _starts(context, builder, signature, args)
        return builder.atomic_rmw("add", builder.gep(start, [at]), more, "seq_cst")

    return types.int64(counts, types.int64, types.int64), codegen


@_compiled
def _rows(weights: Any, x: np.ndarray, y: np.ndarray, begin: int, end: int) -> None:
    """Rows *begin* to *end* of ``weights @ x.T``, as columns of *y*; float32, or bfloat16 as uint16."""
    for row in range(begin, min(end, weights.shape[0])):
        for b in range(x.shape[0]):
            y[b, row] = _dot(weights[row], x[b])


@_compiled
def _rows_of_groups(weights: Any, x: Any, y: np.ndarray, begin: int, end: int) -> None:
    """The same of bytes in groups."""
    values, scales, biases = weights
    vectors, sums = x
    end, n_groups = min(end, values.shape[0]), scales.shape[1]
    for b in range(vectors.shape[0]):
        row = begin
        # Each result is written once, as a whole: another thread may write the same.
        while row + 4 <= end:
            four = _dots_of_four(values[row], scales[row], vectors[b], n_groups)
            for k in range(4):
                y[b, row + k] = four[k] + _dot(biases[row + k], sums[b])
            row += 4
        while row < end:
            y[b, row] = _dots_of_one(values[row], scales[row], vectors[b], n_groups)[0] + _dot(biases[row], sums[b])
            row += 1


@_compiled
def _sums(x: np.ndarray, sums: np.ndarray) -> None:
    """The sum of each group of *x*."""
    for b in range(sums.shape[0]):
        for group in range(sums.shape[1]):
            total = np.float32(0.0)
            for k in range(group * GROUP, (group + 1) * GROUP):
                total += x[b, k]
            sums[b, group] = total


def _shared(rows: Callable[..., None]) -> Callable[..., None]:
    """A function by which several threads share the products of a layer, of which the first makes up the rest.

    *counts* has the number of the next chunk of rows, and whether each has been done.
    """

    @_compiled
    def one(chunk: int, sizes: Any, wx: Any, x: Any, a: np.ndarray, wh: Any, h: Any, u: np.ndarray) -> None:
        n_first, of_input, of_hidden = sizes
        if chunk < n_first:
            rows(wx, x, a, chunk * of_input, (chunk + 1) * of_input)
        else:
            rows(wh, h, u, (chunk - n_first) * of_hidden, (chunk - n_first + 1) * of_hidden)

    @_compiled
    def share(
        first: bool, counts: np.ndarray, sizes: Any, wx: Any, x: Any, a: np.ndarray, wh: Any, h: Any, u: np.ndarray
    ) -> None:
        while True:
            chunk: int = _add(counts, 0, 1)
            if chunk >= counts.size - 1:
                break
            one(chunk, sizes, wx, x, a, wh, h, u)
            _add(counts, chunk + 1, 1)
        if first:
            for chunk in range(counts.size - 1):
                if _add(counts, chunk + 1, 0) == 0:
                    one(chunk, sizes, wx, x, a, wh, h, u)

    return share


_SHARED = {False: _shared(_rows), True: _shared(_rows_of_groups)}
"""By whether weights are quantized."""


@_compiled
def _sigmoid(x: float) -> float:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@_compiled
def _after_gru(a: np.ndarray, u: np.ndarray, bias: np.ndarray, bhn: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
    n = h.shape[1]
    for b in range(h.shape[0]):
        for j in range(n):
            r = _sigmoid(a[b, j] + bias[j] + u[b, j])
            z = _sigmoid(a[b, n + j] + bias[n + j] + u[b, n + j])
            candidate = np.tanh(a[b, 2 * n + j] + bias[2 * n + j] + r * (u[b, 2 * n + j] + bhn[j]))
            out[0, b, j] = (np.float32(1.0) - z) * candidate + z * h[b, j]


@_compiled
def _after_lstm(a: np.ndarray, u: np.ndarray, bias: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    n = c.shape[1]
    for b in range(c.shape[0]):
        for j in range(n):
            taken = _sigmoid(a[b, j] + bias[j] + u[b, j])
            kept = _sigmoid(a[b, n + j] + bias[n + j] + u[b, n + j])
            candidate = np.tanh(a[b, 2 * n + j] + bias[2 * n + j] + u[b, 2 * n + j])
            shown = _sigmoid(a[b, 3 * n + j] + bias[3 * n + j] + u[b, 3 * n + j])
            cell = kept * c[b, j] + taken * candidate
            out[1, b, j] = cell
            out[0, b, j] = shown * np.tanh(cell)


CHUNK = 1 << 18
"""Bytes of weights that a thread takes at a time: some 10 microseconds."""

HELPERS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4) - 1
"""Threads that help the one that calls. A few read memory as fast as it gives."""


class _Helpers:
    """Threads that may take a share of the work, and that nobody waits for.

    One that the processor is not free for comes late, finds all chunks taken, and goes. One that has stopped inside its
    chunk has that chunk done by the caller, too: both write the same values to memory that is used for nothing else.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...]]] = queue.SimpleQueue()
        for number in range(HELPERS):
            threading.Thread(target=self._run, name=f"ezmsg-mlx recurrent cells {number}", daemon=True).start()

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Have all of them call *function*, unless work that they have not begun waits already."""
        for _ in range(HELPERS - self._work.qsize()):
            self._work.put((function, args))

    def _run(self) -> None:
        while True:
            function, args = self._work.get()
            function(*args)
            # Until there is more, it keeps no arrays.
            del function, args


@functools.cache
def _helpers_of(process: int) -> _Helpers:
    # A forked child has none of the threads of its parent.
    return _Helpers()


def _arrays(matrix: Matrix) -> Any:
    """The weights as NumPy arrays, in the memory of MLX's."""
    if matrix.scales is not None:
        return np.asarray(matrix.values).view(np.uint8), np.asarray(matrix.scales), np.asarray(matrix.biases)
    return np.asarray(matrix.values if matrix.values.dtype == mx.float32 else matrix.values.view(mx.uint16))


class _Layer(NamedTuple):
    """The weights of a layer, prepared once."""

    input: Any
    hidden: Any
    bias: npt.NDArray[np.float32]
    bhn: npt.NDArray[np.float32]
    sizes: tuple[int, int, int]
    """Chunks of rows of the first, and how many rows they have of the first and of the second."""
    n_chunks: int

    @classmethod
    def of(cls, weights: CellWeights) -> _Layer:
        matrices = weights.input, weights.hidden
        n_rows = [max(CHUNK * matrix.values.shape[0] // matrix.values.nbytes, 1) for matrix in matrices]
        n_chunks = [-(-matrix.values.shape[0] // n) for matrix, n in zip(matrices, n_rows, strict=True)]
        bias, bhn = np.asarray(weights.bias), np.asarray(weights.bhn)
        sizes = n_chunks[0], n_rows[0], n_rows[1]
        return cls(_arrays(weights.input), _arrays(weights.hidden), bias, bhn, sizes, sum(n_chunks))


_layers: weakref.WeakKeyDictionary[CellWeights, _Layer] = weakref.WeakKeyDictionary()


def _vectors(x: mx.array, matrix: Matrix) -> Any:
    """*x*, with the sums of its groups where the weights have groups."""
    values = np.ascontiguousarray(x, np.float32)
    if matrix.scales is None:
        return values
    sums = np.empty((len(values), matrix.scales.shape[1]), np.float32)
    _sums(values, sums)
    return values, sums


def run(x: mx.array, weights: CellWeights, state: State) -> State:
    """See :class:`~ezmsg.mlx.kernels.cells.CellKernel`. Evaluates *x*."""
    layer = _layers.get(weights)
    if layer is None:
        layer = _layers[weights] = _Layer.of(weights)
    n_batch, n_rows = x.shape[0], weights.bias.shape[0]
    a, u = np.empty((2, n_batch, n_rows), np.float32)
    counts = np.zeros(layer.n_chunks + 1, np.int64)
    share = _SHARED[weights.input.scales is not None]
    h = _vectors(state[0], weights.hidden)
    work = counts, layer.sizes, layer.input, _vectors(x, weights.input), a, layer.hidden, h, u
    if HELPERS and layer.n_chunks > 1:
        _helpers_of(os.getpid()).call(share, False, *work)
    share(True, *work)
    out = np.empty((len(state), *state[0].shape), np.float32)
    if weights.cell == "GRU":
        _after_gru(a, u, layer.bias, layer.bhn, h if isinstance(h, np.ndarray) else h[0], out)
    else:
        _after_lstm(a, u, layer.bias, np.ascontiguousarray(state[1]), out)
    return tuple(map(mx.array, out))
