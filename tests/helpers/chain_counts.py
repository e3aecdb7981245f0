"""What can be counted of a compiled chain without a GPU: nodes of its graph, and launches."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import mlx.core as mx

from ezmsg.mlx import kernels
from ezmsg.mlx.chain.compiledrun import CompiledRun

from .metal_counts import VIEWS


@dataclasses.dataclass(frozen=True)
class ChainCounts:
    nodes: int
    """Of the graph that MLX makes of a message, once its operations are fused."""

    launches: int
    """Nodes that are no view."""

    kinds: Counter[str]
    """The nodes by their name."""


def stand_in(
    *, inputs: Sequence[mx.array], output_shapes: Sequence[tuple[int, ...]], **arguments: object
) -> list[mx.array]:
    """Takes the place of a kernel that a GPU compiles: two nodes, of which one is called ``Split``."""
    if len(inputs) < 2:
        return [mx.zeros(output_shapes[0], mx.int64)]
    x, zi = inputs[:2]
    n_samples = output_shapes[0][0]
    if len(x) < n_samples:
        x = mx.pad(x, [(0, n_samples - len(x)), (0, 0)])
    return mx.split(mx.concatenate([x, zi]), [n_samples])


@contextlib.contextmanager
def kernels_replaced(path: str) -> Iterator[None]:
    """Have the kernels of averages for CUDA or Metal, as *path* says, on a machine without either."""
    average = importlib.import_module(f"ezmsg.mlx.kernels.{path}.ewma")
    made = getattr(importlib.import_module(f"ezmsg.mlx.kernels.{path}.kernel"), f"{path}_kernel")

    def forget() -> None:
        for cached in (kernels.kernel, made, average._launch, average._compile_ahead):
            cached.cache_clear()

    forget()
    # A stand-in would not pass the proof that a kernel has to pass on its own device.
    with (
        mock.patch.object(mx.fast, f"{path}_kernel", lambda **arguments: stand_in),
        mock.patch.object(kernels, "PROVED", ()),
    ):
        yield
    forget()


def graph_of(function: Callable[..., Sequence[mx.array]], *given: mx.array) -> ChainCounts:
    """What a call of a compiled function takes; nothing is evaluated but what is given."""
    mx.eval(*given)
    with tempfile.TemporaryDirectory() as folder:
        dot = pathlib.Path(folder, "graph.dot")
        mx.export_to_dot(str(dot), *function(*given))
        kinds = Counter(re.findall(r'label ?= ?"(\w+)"', dot.read_text()))
    # The two nodes of a stand-in are one.
    kinds["kernel"] = kinds.pop("Split", 0)
    kinds["Concatenate"] -= kinds["kernel"]
    kinds += Counter()
    return ChainCounts(kinds.total(), sum(n for kind, n in kinds.items() if kind not in VIEWS), kinds)


def counts_of(run: CompiledRun) -> dict[object, ChainCounts]:
    """By what tells the functions of *run* apart."""
    return {
        key: graph_of(
            function.call,
            mx.zeros(run._likeness.shape(key[0]), getattr(mx, str(run._likeness.dtype))),
            *run._resident.arrays,
        )
        for key, function in run._functions.items()
    }
