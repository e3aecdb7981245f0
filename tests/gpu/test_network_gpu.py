"""Networks on a GPU: kernels of recurrent cells, compiled models, and MLX data that stays on the device."""

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import NetworkTransformer
from ezmsg.mlx.kernels import kernel
from ezmsg.mlx.kernels.cuda import recurrentcell
from ezmsg.mlx.kernels.plain.recurrentcell import difference_after_steps, random_cell, random_stack, stack_difference
from ezmsg.mlx.network import RingAttention

X = np.random.default_rng(0).standard_normal((240, 512)).astype(np.float32)
KWARGS = {"hidden_size": 256, "num_layers": 3, "output_size": 41, "patch": 14}


def results_of(lengths, to_backend=np.array, **settings):
    mx.random.seed(0)
    transformer = NetworkTransformer(
        model_class="ezmsg.mlx.network.RecurrentDecoder", model_kwargs=KWARGS, window=14, hop=4, **settings
    )
    transformer.prepare(512)
    found, first = [], 0
    for length in lengths:
        axes = {"time": AxisArray.TimeAxis(fs=50.0, offset=first / 50.0)}
        found += transformer(AxisArray(to_backend(X[first : first + length]), ["time", "ch"], axes=axes))
        first += length
    assert all(isinstance(result.data, mx.array if to_backend is mx.array else np.ndarray) for result in found)
    return np.concatenate([np.array(result.data) for result in found])


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("n_rows", [1, 16])
def test_a_step_is_that_of_float64(cell, bits, n_rows):
    for sizes in ((7168, 768), (768, 768)):
        assert difference_after_steps(recurrentcell, random_cell(cell, bits, *sizes), n_rows) < 5e-6


def test_odd_sizes():
    for sizes in ((13, 9), (3, 5), (1000, 301)):
        assert difference_after_steps(recurrentcell, random_cell("GRU", 32, *sizes), 3) < 5e-6
    # Rows that begin within a word are left to plain operations, whose products are TF32.
    assert difference_after_steps(recurrentcell, random_cell("GRU", 16, 13, 9), 3) < 1e-3


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_a_stack_is_that_of_float64(cell, bits, n_rows):
    for sizes in ((7168, 768, 5, 41), (768, 256, 1, 600)):
        weights = random_stack(cell, bits, *sizes)
        assert stack_difference(recurrentcell.stack(weights, n_rows), weights, n_rows, 20) < 2e-5


def test_small_stacks():
    """Run by compute-sanitizer, too."""
    for cell, bits, n_rows in (("GRU", 32, 1), ("LSTM", 8, 2), ("GRU", 16, 1)):
        weights = random_stack(cell, bits, 128, 64, 3, 5)
        assert stack_difference(recurrentcell.stack(weights, n_rows), weights, n_rows, 3) < 2e-6
    weights = random_stack("GRU", 32, 13, 9, 2, 3)
    assert stack_difference(recurrentcell.stack(weights, 1), weights, 1, 3) < 2e-6


def test_the_kernel_is_taken():
    assert kernel("recurrentcell", "cuda") is recurrentcell


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantize": 8}, {"quantize": 4}, {"state": "none"}])
def test_however_the_stream_is_cut(settings):
    expected = results_of([240], **settings)
    for lengths in ([1] * 100 + [140], [120, 7, 113]):
        for to_backend in (np.array, mx.array):
            # Batches go through products in TF32.
            tolerance = 2e-2 if "dtype" in settings else 1e-3 if "state" in settings else 1e-5
            np.testing.assert_allclose(results_of(lengths, to_backend, **settings), expected, atol=tolerance)


def test_a_ring_is_full_attention_to_the_last_samples():
    attention = RingAttention(64, 4, 16)
    x = mx.random.normal((1, 40, 64))
    state, found = None, []
    for n in range(40):
        y, state = attention(x[:, n : n + 1], state)
        found.append(y)
    whole, _ = RingAttention.__call__(attention, x[:, :16])
    np.testing.assert_allclose(np.array(mx.concatenate(found, axis=1)[:, :16]), np.array(whole), atol=2e-3)
