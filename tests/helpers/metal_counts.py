"""What can be counted of a call on Metal without one: nodes of the graph, launches, bytes, operations."""

import dataclasses
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import mlx.core as mx

from . import metal_emulation
from .metal_emulation import COUNTED, DEFAULT_FLAGS, tally, traced, using

VIEWS = {"Slice", "Transpose", "Reshape", "ExpandDims", "Squeeze", "Broadcast", "Flatten", "Unflatten", "Split"}
"""Nodes that compute nothing, of arrays in row order."""

Function = Callable[..., Sequence[mx.array]]


@dataclasses.dataclass(frozen=True)
class Counts:
    nodes: int
    """Of the graph."""

    beyond_views: int
    """Those that are no view."""

    launches: int
    """Kernels that run: those that are written by hand, and the copies, paddings and concatenations around them."""

    bytes: int
    """Read and written by them, each array once a launch."""

    operations: int
    """Of the kernels that are written by hand, on floats. A fused multiply-add is one."""


def graph_of(function: Function, *examples: mx.array) -> Counter[str]:
    """The kinds of nodes in the graph of a call. Kernels for Metal are recorded and not run."""
    with tempfile.TemporaryDirectory() as folder, traced():
        dot = pathlib.Path(folder, "graph.dot")

        def exported(*given: mx.array) -> list[mx.array]:
            results = list(function(*given))
            mx.export_to_dot(str(dot), *results)
            return results

        mx.export_function(str(pathlib.Path(folder, "function.mlxfn")), exported, *examples)
        return Counter(re.findall(r'label ?= ?"(\w+)"', dot.read_text()))


def _noted_pad(x: mx.array, *args: object, **kwargs: object) -> mx.array:
    padded = _pad(x, *args, **kwargs)
    # MLX fills the new array, then copies the old one into it.
    tally.launches += 2
    tally.moved += 2 * x.nbytes + padded.nbytes
    return padded


def _noted_concatenate(arrays: Sequence[mx.array], *args: object, **kwargs: object) -> mx.array:
    joined = _concatenate(arrays, *args, **kwargs)
    tally.launches += len(arrays)
    tally.moved += 2 * joined.nbytes
    return joined


_pad, _concatenate = mx.pad, mx.concatenate


def _reset() -> None:
    for field in dataclasses.fields(tally):
        setattr(tally, field.name, 0)


def counts_of(function: Function, *examples: mx.array, narrow: int = 128) -> Counts:
    """Of a call of *function* on data and a state with channels last, all zeros.

    The call is traced, and run in the emulation: operations for *narrow* channels and as many samples as there are, but
    3000 at most.
    """
    kinds = graph_of(function, *examples)
    data, state = examples
    n_samples, n_channels = min(data.shape[0], 3000), min(data.shape[1], narrow)
    _reset()
    with using(flags=(*DEFAULT_FLAGS, COUNTED)):
        mx.eval(*function(mx.zeros((n_samples, n_channels)), mx.zeros((*state.shape[:-1], n_channels))))
    operations = tally.operations * data.size // (n_samples * n_channels)
    _reset()
    with (
        mock.patch.object(mx, "pad", _noted_pad),
        mock.patch.object(mx, "concatenate", _noted_concatenate),
        mock.patch.object(metal_emulation, "run", lambda launch, inputs, results: None),
    ):
        mx.eval(*function(*examples))
    return Counts(
        nodes=kinds.total(),
        beyond_views=sum(n for kind, n in kinds.items() if kind not in VIEWS),
        launches=tally.launches + tally.copies,
        bytes=tally.moved + tally.copied,
        operations=operations,
    )
