"""Chains as on a GPU, on a machine without one: compiled functions of plain MLX operations, on MLX's CPU device."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import types
from collections.abc import Callable, Iterator
from unittest import mock

import mlx.core as mx
import numpy as np

from ezmsg.mlx import ChainTransformer
from ezmsg.mlx.chain import compiledrun
from ezmsg.mlx.chain.compiledrun import CompiledRun

PATHS = ("kernels", "ewma", "filter", "scaler", "chain.fusions.recurrences")

# At once, so that none takes over what another one has been given.
for _name in (*PATHS, "chain.runner"):
    importlib.import_module(f"ezmsg.mlx.{_name}")


@contextlib.contextmanager
def as_on_a_gpu(path: str = "plain") -> Iterator[None]:
    """Fuse chains as on a GPU, with the kernels of *path*."""
    with contextlib.ExitStack() as stack:
        for module in PATHS:
            stack.enter_context(mock.patch(f"ezmsg.mlx.{module}.default_path", lambda: path))
        for module in ("runner", "fusions.rates", "fusions.recurrences", "fusions.spatial"):
            stack.enter_context(mock.patch(f"ezmsg.mlx.chain.{module}.uses_gpu", lambda: True))
        yield


def compiled_run(chain: ChainTransformer) -> CompiledRun:
    """The one that a chain consists of, after its first message."""
    (run,) = chain._runner._found[0]
    assert isinstance(run, CompiledRun)
    return run


@contextlib.contextmanager
def device_replaced(run: CompiledRun) -> Iterator[None]:
    """Leave out all that computes, copies to the device or from it: what is left is the host's time.

    Instead of it, a message gives what *run* gives for zeros.
    """
    zeros = {key: _zeros_of(run, key) for key in run._functions}
    results = {id(y): np.array(y) for outputs in zeros.values() for y in outputs}
    functions = {key: _giving(outputs) for key, outputs in zeros.items()}
    replaced = types.SimpleNamespace(**{**vars(mx), "eval": _nothing, "async_eval": _nothing})
    x = mx.zeros(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(run, "_functions", functions))
        stack.enter_context(mock.patch.object(compiledrun, "mx", replaced))
        stack.enter_context(mock.patch.object(compiledrun, "mlx_to_numpy", lambda y, dtype, **rounding: results[id(y)]))
        stack.enter_context(mock.patch.object(compiledrun, "numpy_to_mlx", lambda data, dtype: (x, "")))
        if getattr(run, "_staging", None) is not None:
            stack.enter_context(mock.patch.object(run._staging, "filled", lambda data: x, create=True))
        yield


def _zeros_of(run: CompiledRun, key: tuple) -> list[mx.array]:
    state = run._resident.arrays
    # A list of arrays, or of tuples of them in versions before.
    flat = state if isinstance(state, list) else list(itertools.chain(*state))
    outputs = list(run._functions[key](mx.zeros(run._likeness.shape(key[0]), mx.int16), *flat))
    mx.eval(outputs)
    return outputs


def _giving(outputs: list[mx.array]) -> Callable[..., list[mx.array]]:
    return lambda *arrays: list(outputs)


def _nothing(*arrays: object) -> None: ...
