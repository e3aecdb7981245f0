"""Chains as on a GPU, on a machine without one: compiled functions of plain MLX operations, on MLX's CPU device."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from unittest import mock

import mlx.core as mx
import numpy as np

from ezmsg.mlx import ChainTransformer
from ezmsg.mlx.chain import compiledrun
from ezmsg.mlx.chain.compiledrun import CompiledRun
from ezmsg.mlx.stream import convert, device
from ezmsg.mlx.stream.device import Bus
from ezmsg.mlx.stream.hostmemory import Block
from helpers.processes import RecordedLog


@contextlib.contextmanager
def as_on_a_gpu(backend: str = "gpu") -> Iterator[None]:
    """Compute as on a GPU: chains are fused into functions, with the kernels of *backend* or plain operations."""
    with mock.patch.object(device, "backend_in_use", lambda: backend):
        yield


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Fail where a chain has left messages to its stages one by one, since one of them could not be fused."""
    with RecordedLog() as log:
        yield
    found = [text for text in log.errors if "could not be fused" in text or "could not be compiled" in text]
    assert not found, found


def compiled_run(chain: ChainTransformer) -> CompiledRun:
    """The one that a chain consists of, after its first message."""
    (run,) = chain._runner._found[0]
    assert isinstance(run, CompiledRun)
    return run


@contextlib.contextmanager
def results_written() -> Iterator[None]:
    """Have messages and results copied as by the kernels for CUDA, where functions are not compiled."""

    def write(x: mx.array, memory: mx.array) -> mx.array:
        values = np.asarray(x).reshape(-1).view(np.uint8)
        np.asarray(memory)[: values.size] = values
        return mx.zeros(1)

    def read(x: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return (x * 1).astype(dtype), mx.zeros(1) + 1

    with contextlib.ExitStack() as stack:
        for module in (compiledrun, convert):
            stack.enter_context(mock.patch.object(module, "bus", lambda: Bus(write, read)))
        yield


@contextlib.contextmanager
def device_replaced(run: CompiledRun) -> Iterator[None]:
    """Leave out all that computes, copies to the device or from it: what is left is the host's time.

    Instead of it, a message gives what *run* gives for zeros.
    """
    zeros = {key: _zeros_of(run, key) for key in run._functions}
    functions = {key: run._functions[key]._replace(call=_giving(outputs)) for key, outputs in zeros.items()}
    replaced = types.SimpleNamespace(**{**vars(mx), "eval": _nothing, "async_eval": _nothing})
    x = mx.zeros(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(run, "_functions", functions))
        stack.enter_context(mock.patch.object(compiledrun, "mx", replaced))
        stack.enter_context(mock.patch.object(compiledrun, "copied", lambda y, dtype, rounds: y))
        stack.enter_context(mock.patch.object(Block, "filled", lambda block, data, dtype: x))
        yield


def _zeros_of(run: CompiledRun, key: tuple) -> list[mx.array]:
    outputs = list(run._functions[key].call(mx.zeros(run._likeness.shape(key[0]), mx.int16), *run._resident.arrays))
    mx.eval(outputs)
    return outputs


def _giving(outputs: list[mx.array]) -> Callable[..., list[mx.array]]:
    return lambda *arrays: list(outputs)


def _nothing(*arrays: object) -> None: ...
