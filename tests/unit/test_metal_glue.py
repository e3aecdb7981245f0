"""What surrounds ezmsg-sigproc's Metal kernel, with a stand-in for it that does its arithmetic in NumPy.

The real module cannot be imported without Metal.
"""

import ast
import importlib.util
import inspect
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import (  # noqa: E402
    CASES,
    ULP,
    alpha_of,
    check_close,
    corrected,
    filtered,
    noise,
    reference,
    state_of,
)

from ezmsg.mlx.ewma import MAX_CHUNK_SIZE, EWMATransformer, ewma  # noqa: E402
from ezmsg.mlx.kernels import default_path  # noqa: E402

KERNEL = "ezmsg.sigproc.util.ewma_mlx_metal"


class StandIn:
    """The kernel of ezmsg-sigproc in float32: a prefix scan over ``z -> m * z + v`` inside each chunk."""

    def __init__(self) -> None:
        self.alphas: list[float] = []
        self.chunk_sizes: list[tuple[int, ...]] = []

    def ewma_mlx_metal(self, x, alpha: float, zi, chunk_size: int = 1024, *, chunk_sizes=None):
        assert x.dtype == zi.dtype == mx.float32 and zi.shape == (*x.shape[:-1], 1)
        self.alphas.append(alpha)
        self.chunk_sizes.append(chunk_sizes)
        sizes = sorted(chunk_sizes or (chunk_size,))
        a, b = np.float32(alpha), np.float32(1.0 - alpha)
        samples = np.array(x).reshape(-1, x.shape[-1])
        z = np.array(zi).reshape(-1, 1)
        y = np.empty_like(samples)
        start = 0
        while start < samples.shape[1]:
            rest = samples.shape[1] - start
            size = next((size for size in sizes if size >= rest), sizes[-1])
            valid = min(rest, size)
            chunk = np.zeros((len(samples), size), np.float32)
            chunk[:, :valid] = samples[:, start : start + valid]
            m, v = np.full_like(chunk, b), b * a * chunk
            v[:, :1] += b * z
            stride = 1
            while stride < size:
                v[:, stride:] = m[:, stride:] * v[:, :-stride] + v[:, stride:]
                m[:, stride:] = m[:, stride:] * m[:, :-stride]
                stride *= 2
            y[:, start : start + valid] = (a * chunk + np.concatenate([z, v[:, :-1]], axis=1))[:, :valid]
            z = v[:, valid - 1 : valid]
            start += valid
        return mx.array(y.reshape(x.shape)), mx.array(z.reshape(zi.shape))


@pytest.fixture(autouse=True)
def kernel(monkeypatch) -> StandIn:
    stand_in = StandIn()
    module = types.ModuleType(KERNEL)
    module.ewma_mlx_metal = stand_in.ewma_mlx_metal
    monkeypatch.setitem(sys.modules, KERNEL, module)
    return stand_in


@pytest.fixture
def metal_machine(monkeypatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)


# --------------------------------------------------------------------------------------------------- the real kernel


def test_installed_kernel_is_called_as_it_is_here():
    source = Path(importlib.util.find_spec("ezmsg.sigproc").origin).parent / "util" / "ewma_mlx_metal.py"
    tree = ast.parse(source.read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "ewma_mlx_metal")
    stand_in = inspect.signature(StandIn().ewma_mlx_metal)
    kinds = {kind: [p.name for p in stand_in.parameters.values() if p.kind is kind] for kind in inspect._ParameterKind}
    assert [arg.arg for arg in function.args.args] == kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [arg.arg for arg in function.args.kwonlyargs] == kinds[inspect.Parameter.KEYWORD_ONLY]
    assert (function.args.vararg, function.args.kwarg, function.args.posonlyargs) == (None, None, [])
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert constants["MAX_CHUNK_SIZE"] == MAX_CHUNK_SIZE


# -------------------------------------------------------------------------------------------------------------- path


def test_a_metal_machine_takes_the_kernel_by_itself(metal_machine, kernel):
    assert default_path() == "metal"
    ewma(mx.zeros((5,)), 0.1)
    assert kernel.alphas == [0.1]


def test_cpu_as_the_default_device_takes_the_cpu_path_on_a_metal_machine(metal_machine, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu, 0))
    assert default_path() == "cpu"


@pytest.mark.parametrize("case", CASES)
def test_case(metal_machine, case):
    CASES[case]("metal")


# ------------------------------------------------------------------------------------------------------------ layouts


def test_kernel_gets_one_chunk_at_a_time(kernel):
    y, _ = ewma(mx.array(noise(60, 3)), 0.1, axis=0, chunk_sizes=(16, 4), path="metal")
    assert kernel.chunk_sizes == [(16,), (16,), (16,), (16,)]
    check_close(y, reference(noise(60, 3), 0.1))


# ------------------------------------------------------------------------------------- samples that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_sample_counts_as_one_at_the_average_before_the_message(bad):
    alpha, x = alpha_of(0.01), noise(400, 4) + 3
    state = state_of(np.full((1, 4), 2.5), alpha)
    where = (np.array([0, 250, 251, 399]), np.array([0, 1, 1, 2]))
    filled = x.copy()
    filled[where] = 2.5
    x[where] = bad
    expected, last = ewma(mx.array(filled), alpha, state, axis=0, path="metal")
    y, zf = ewma(mx.array(x), alpha, state, axis=0, path="metal")
    expected = np.array(expected)
    expected[where] = bad
    np.testing.assert_allclose(np.array(y), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.array(zf), np.array(last), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.array(y)[:, 3], expected[:, 3])


@pytest.mark.parametrize("alpha", [alpha_of(0.01), 1.0])
def test_channel_bad_for_a_whole_message_keeps_its_average(alpha):
    x = np.full((300, 2), 6.0, np.float32)
    x[:, 0] = math.nan
    y, zf = ewma(mx.array(x), alpha, state_of([[5.0, 6.0]], alpha), axis=0, path="metal")
    np.testing.assert_array_equal(np.isnan(np.array(y)), np.isnan(x))
    np.testing.assert_allclose(np.array(zf).sum(axis=0), (1 - alpha) * np.array([5.0, 6.0]), rtol=1e-5)


def test_channel_dead_from_the_start_begins_anew_when_it_lives(metal_machine):
    dead, x = np.full((750, 2), 2.0, np.float32), noise(300, 2) + 9
    dead[:, 0] = math.nan
    transformer = EWMATransformer(time_constant=0.001)
    for piece in np.split(dead, 5):
        np.testing.assert_allclose(filtered(transformer, mx.array(piece)), piece, rtol=4 * ULP)
    check_close(filtered(transformer, mx.array(x))[:, :1], corrected(x[:, :1], alpha_of(0.001)))
