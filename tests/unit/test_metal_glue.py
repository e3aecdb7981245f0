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

import ezmsg.sigproc.ewma as sigproc
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import (  # noqa: E402
    SHAPES,
    ULP,
    alpha_of,
    check_close,
    corrected,
    filtered,
    in_pieces,
    noise,
    reference,
    state_of,
    zero_state,
)

from ezmsg.mlx.ewma import MAX_CHUNK_SIZE, EWMATransformer, _select_path, ewma  # noqa: E402
from ezmsg.mlx.kernels import metal  # noqa: E402

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


def test_metal_takes_short_time_constants_and_plain_operations_the_long_ones(metal_machine):
    for time_constant, path in ((1e-9, "metal"), (0.01, "metal"), (1.0, "metal"), (60.0, "plain"), (300.0, "plain")):
        assert _select_path(alpha_of(time_constant)) == path


def test_cpu_as_the_default_device_takes_the_cpu_path_on_a_metal_machine(metal_machine, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu, 0))
    assert _select_path(alpha_of(0.01)) == "cpu"


@pytest.mark.parametrize(("time_constant", "launched"), [(0.01, True), (60.0, False)])
def test_transformer_gives_the_results_of_sigproc_on_numpy(metal_machine, kernel, time_constant, launched):
    x = noise(4000, 3) + np.float32([0, 5, -5])
    ours, theirs = EWMATransformer(time_constant=time_constant), sigproc.EWMATransformer(time_constant=time_constant)
    for piece in np.split(x, [1, 2, 300, 1324]):
        check_close(filtered(ours, mx.array(piece)), filtered(theirs, piece.astype(np.float64)))
    assert bool(kernel.alphas) == launched
    assert set(kernel.chunk_sizes) <= {(32, 1024)}


# ------------------------------------------------------------------------------------------------------- coefficients


def test_supported_time_constants_reach_one_second_at_30_khz_and_no_further():
    assert all(metal.supports(alpha_of(time_constant)) for time_constant in np.geomspace(1e-9, 1.0, 2000))
    assert not any(metal.supports(alpha_of(time_constant)) for time_constant in np.geomspace(1.2, 1e6, 2000))


@pytest.mark.parametrize("alpha", [2.0**-20, 2.0**-22, 2.0**-23])
def test_long_time_constant_that_float32_hits_exactly_is_not_supported(alpha):
    # 35 to 280 s at 30 kHz. The kernel's state is float32: steps of the average below its resolution are lost.
    assert metal.snapped(alpha) == alpha
    assert not metal.supports(alpha)


def test_supported_means_that_the_time_constant_moves_by_no_more_than_a_thousandth():
    for time_constant in np.geomspace(1e-5, 1.2, 2000):
        alpha = alpha_of(time_constant)
        if metal.supports(alpha):
            assert math.log1p(-alpha) / math.log1p(-metal.snapped(alpha)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("time_constant", [1e-9, 1e-5, 0.001, 0.01, 0.123, 1.0])
def test_snapped_alpha_and_its_complement_in_float32_add_up_to_one(kernel, time_constant):
    alpha = alpha_of(time_constant)
    snapped = metal.snapped(alpha)
    assert snapped + float(np.float32(1.0 - snapped)) == 1.0
    assert abs(snapped - alpha) <= 2.0**-25
    ewma(mx.zeros((5,)), alpha, path="metal")
    assert kernel.alphas == [snapped]


@pytest.mark.parametrize(("time_constant", "tolerance"), [(0.001, 1e-6), (0.01, 1e-5), (0.1, 1e-5), (0.9, 5e-4)])
def test_constant_stays_constant(time_constant, tolerance):
    # Without the snapping 8e-5 at 0.1 s. Towards 1 s the kernel's own products of coefficients round: 1.5e-4.
    alpha = alpha_of(time_constant)
    for value in (1.0, 777.7):
        x = mx.full((100_000, 1), value)
        y, _ = in_pieces(x, [300, 1, 30000], alpha, state_of([[value]], alpha), "metal")
        np.testing.assert_allclose(y, np.float32(value), rtol=tolerance)


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_axis(shape):
    axis, x, alpha = shape.index(60), noise(*shape), alpha_of(0.001)
    for length in (1, 2):
        zi = zero_state(shape, axis, length)
        first, zi = ewma(mx.array(np.take(x, range(33), axis)), alpha, zi, axis=axis, path="metal")
        last, zf = ewma(mx.array(np.take(x, range(33, 60), axis)), alpha, zi, axis=axis, path="metal")
        check_close(np.concatenate([np.array(first), np.array(last)], axis), reference(x, alpha, axis))
        assert zf.shape == zi.shape and zf.dtype == mx.float32


def test_chunk_sizes_are_handed_on(kernel):
    y, _ = ewma(mx.array(noise(60, 3)), 0.1, axis=0, chunk_sizes=(16, 4), path="metal")
    assert kernel.chunk_sizes == [(4, 16)]
    check_close(y, reference(noise(60, 3), 0.1))


def test_state_is_that_of_lfilter_with_nothing_left_over():
    alpha, x = alpha_of(0.01), noise(700, 3)
    zi = np.concatenate([np.full((1, 3), 0.5), np.full((1, 3), 1e-3)]).astype(np.float32)
    _, zf = ewma(mx.array(x), alpha, mx.array(zi), axis=0, path="metal")
    _, single = ewma(mx.array(x), alpha, mx.full((1, 3), 0.501), axis=0, path="metal")
    check_close(np.array(zf)[:1], np.array(single))
    assert not np.array(zf)[1].any()


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
