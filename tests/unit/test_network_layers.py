"""Layers of networks: recurrent ones against MLX's own, rings of keys and values against full attention."""

import numpy as np
import pytest
from mlx.utils import tree_flatten

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from ezmsg.mlx import NetworkTransformer
from ezmsg.mlx.network import RecurrentDecoder, RecurrentLayer, RecurrentStack, RingAttention, RingKVCache


def close(found, expected, atol=1e-5):
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=atol)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("n_steps", [3, 9])
def test_a_layer_gives_the_values_of_mlx(cell, n_steps):
    layer, own = RecurrentLayer(cell, 6, 8), getattr(nn, cell)(6, 8)
    layer.update(own.parameters())
    x = mx.random.normal((2, n_steps, 6))
    expected = own(x)
    y, state = layer(x)
    close(y, expected if cell == "GRU" else expected[0])
    close(state[-1], (expected if cell == "GRU" else expected[1])[:, -1])
    # And in two halves.
    first, state = layer(x[:, :1])
    close(mx.concatenate([first, layer(x[:, 1:], state)[0]], axis=1), y)


def test_names_of_weights_are_those_of_mlx():
    for cell in ("GRU", "LSTM"):
        own, ours = getattr(nn, cell)(4, 8).parameters(), RecurrentLayer(cell, 4, 8).parameters()
        assert {k: v.shape for k, v in tree_flatten(own)} == {k: v.shape for k, v in tree_flatten(ours)}


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_are_those_of_mlx(bits):
    layer = RecurrentLayer("GRU", 128, 64)
    quantized = layer.to_quantized(64, bits)
    for name in ("Wx", "Wh"):
        values = mx.dequantize(
            quantized[name], quantized[f"{name}_scales"], quantized[f"{name}_biases"], group_size=64, bits=bits
        )
        layer[name] = values
    x = mx.random.normal((1, 3, 128))
    close(quantized(x)[0], layer(x)[0])


def test_sizes_that_are_no_multiples_of_a_group_keep_their_bits():
    decoder = RecurrentDecoder(10, 64, 2, output_size=3)
    nn.quantize(decoder.rnn.layers[1], 64, 8)
    with pytest.raises(ValueError, match="must be multiples of 64"):
        decoder.rnn.layers[0].to_quantized(64, 8)
    settings = {"model_class": RecurrentDecoder, "model_kwargs": {"hidden_size": 64, "num_layers": 2}}
    transformer = NetworkTransformer(**settings, quantize=8)
    transformer.prepare(10)
    weights = transformer._model.weights
    assert weights["rnn.layers.0.Wx"].dtype == mx.float32 and weights["rnn.layers.1.Wx"].dtype == mx.uint32


def test_new_weights_are_seen():
    layer = RecurrentLayer("GRU", 4, 8)
    x = mx.random.normal((1, 1, 4))
    layer(x)
    layer.update({"Wx": 2 * layer.Wx})
    expected = RecurrentLayer("GRU", 4, 8)
    expected.update(layer.parameters())
    close(layer(x)[0], expected(x)[0], atol=0)


def test_a_stack_is_one_layer_on_the_other():
    stack = RecurrentStack("LSTM", 4, 8, 3)
    x = mx.random.normal((2, 2, 4))
    y, state = stack(x)
    expected = x
    for layer in stack.layers:
        expected, _ = layer(expected)
    close(y, expected, atol=0)
    assert len(state) == 3


def test_a_decoder_has_heads_patches_and_an_embedding():
    heads = RecurrentDecoder(6, 8, output_size={"a": 2, "b": 3}, embedding=True, patch=5)
    y, _ = heads(mx.zeros((2, 10, 6)))
    assert {name: value.shape for name, value in y.items()} == {"a": (2, 2, 2), "b": (2, 2, 3)}
    with pytest.raises(ValueError, match="'rnn_type' must be one of"):
        RecurrentDecoder(6, 8, rnn_type="RNN-Tanh")


def full_attention(attention, x, size):
    """Attention of each sample to the last *size* ones, with positions counted from the first sample."""
    n, n_heads = x.shape[1], attention.cache.n_heads
    q, k, v = (
        of(x).reshape(1, n, n_heads, -1).swapaxes(1, 2)
        for of in (attention.query_proj, attention.key_proj, attention.value_proj)
    )
    if attention.cache.positions == "rotary":
        q, k = (
            mx.fast.rope(part, part.shape[-1], traditional=False, base=10000.0, scale=1.0, offset=0) for part in (q, k)
        )
    before = mx.arange(n)[:, None] - mx.arange(n)[None, :]
    mask = (before >= 0) & (before < size)
    y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
    return attention.out_proj(y.swapaxes(1, 2).reshape(1, n, -1))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("lengths", [[1] * 40, [5, 8, 1, 1, 3, 8, 8, 6], [8] * 5])
def test_a_ring_gives_the_results_of_full_attention(positions, lengths):
    attention = RingAttention(32, 4, 8, positions)
    x = mx.random.normal((1, 40, 32))
    state, found, first = None, [], 0
    for n in lengths:
        y, state = attention(x[:, first : first + n], state)
        found.append(y)
        first += n
    close(mx.concatenate(found, axis=1), full_attention(attention, x, 8), atol=2e-6)


def test_a_late_step_is_an_early_one():
    """Results depend on the last samples alone, however many there were: shapes and values do not drift."""
    attention = RingAttention(16, 2, 4)
    x = mx.random.normal((1, 4, 16))
    _, early = attention(x)
    late = (early[0], early[1], early[2])
    for _ in range(25):
        _, late = attention(x, late)
    assert [array.shape for array in late] == [array.shape for array in early]
    assert late[2].item() < 8
    one = mx.random.normal((1, 1, 16))
    close(attention(one, late)[0], attention(one, early)[0], atol=1e-6)


def test_learned_positions_go_around():
    cache = RingKVCache(4, 1, 2, "learned")
    state = cache.zero_state(1)
    seen = []
    for _ in range(9):
        seen.append(cache.places(state, 1).item())
        one = mx.ones((1, 1, 1, 2))
        _, state = cache.attend(one, one, one, state)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"size": 0}, "'size' must be an integer of at least 1"),
        ({"positions": "none"}, "'positions' must be"),
        ({"head_dim": 3}, "'head_dim' must be even"),
    ],
)
def test_rings_are_checked(arguments, pattern):
    with pytest.raises(ValueError, match=pattern):
        RingKVCache(**{"size": 4, "n_heads": 1, "head_dim": 2, **arguments})


def test_more_samples_than_the_ring_holds_are_refused():
    with pytest.raises(ValueError, match="at most 4 samples"):
        RingAttention(8, 2, 4)(mx.zeros((1, 5, 8)))
