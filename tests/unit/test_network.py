"""A network in a graph: windows, batches, state, and the exchange of weights."""

import asyncio
import pickle
import threading
from typing import ClassVar

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from ezmsg.mlx import (
    AsArrayTransformer,
    ChainTransformer,
    Network,
    NetworkSettings,
    NetworkTransformer,
    PowTransformer,
)
from ezmsg.mlx.network import RecurrentDecoder, windows
from ezmsg.mlx.network.model import Model

FS = 50.0
N_FEATURES = 64
X = np.random.default_rng(0).standard_normal((240, N_FEATURES)).astype(np.float32)


class Heads(nn.Module):
    """Two heads, one with a result a window and one with one a sample. Keeps the shapes that it was called with."""

    shapes: ClassVar[set] = set()

    def __init__(self, input_size):
        super().__init__()
        self.hidden, self.out = nn.Linear(input_size, 64), nn.Linear(64, 3)

    def __call__(self, x):
        type(self).shapes.add(x.shape)
        h = nn.relu(self.hidden(x))
        return {"velocity": self.out(h.mean(axis=1)), "class": self.out(h)}


class Total(nn.Module):
    """Adds up what it sees, and fails on demand."""

    fails_at = None

    def __init__(self):
        super().__init__()
        self.scale = mx.ones(1)
        self.calls = 0

    def __call__(self, x, state=None):
        state = {"total": mx.zeros(x.shape[-1]), "n": mx.array(0)} if state is None else state
        if self.fails_at is not None:
            Total.fails_at -= 1
            if Total.fails_at < 0:
                raise RuntimeError("on demand")
        total = state["total"] + (self.scale * x).sum(axis=(0, 1))
        return total[None], {"total": total, "n": state["n"] + 1}


class Mixing(nn.Module):
    """Looks at other rows of its batch."""

    def __call__(self, x):
        return x - x.mean(axis=0, keepdims=True)


class Leaking(nn.Module):
    """Looks at other rows, which shows where they are not finite."""

    def __call__(self, x):
        return x + 0.0 * x.sum(axis=0, keepdims=True)


RECURRENT = {
    "model_class": RecurrentDecoder,
    "model_kwargs": {"hidden_size": 64, "num_layers": 2, "output_size": 5, "patch": 14},
    "window": 14,
    "hop": 4,
}
STATELESS = {"model_class": Heads, "window": 10, "hop": 5}


def message(data, first=0, **changes):
    axes = {"time": AxisArray.TimeAxis(fs=FS, offset=first / FS)}
    return AxisArray(data, ["time", "ch"], axes=axes, key="spikes", **changes)


def results_of(transformer, lengths, to_backend=np.array, data=X, key=None):
    """The results for the stream in messages of these *lengths*, and their first time stamps."""
    found, first = [], 0
    for length in lengths:
        found += transformer(message(to_backend(data[first : first + length]), first))
        first += length
    found = [result for result in found if key is None or result.key == key]
    return np.concatenate([np.array(result.data) for result in found]), [result.axes["time"] for result in found]


def made(seed=0, **settings):
    """A transformer whose model has the same random weights each time."""
    mx.random.seed(seed)
    transformer = NetworkTransformer(**settings)
    transformer.prepare(N_FEATURES)
    return transformer


CUTS = [[240], [1] * 60 + [3] * 30 + [90], [0, 7, 0, 113, 120]]


@pytest.mark.parametrize("settings", [RECURRENT, STATELESS, {**STATELESS, "hop": 13}, {**RECURRENT, "state": "none"}])
def test_results_do_not_depend_on_how_the_stream_is_cut(settings):
    key = "velocity" if settings["model_class"] is Heads else None
    expected, _ = results_of(made(**settings), CUTS[0], key=key)
    assert len(expected) == (240 - settings["window"]) // settings["hop"] + 1
    for lengths in CUTS[1:]:
        for to_backend in (np.array, mx.array):
            found, _ = results_of(made(**settings), lengths, to_backend, key=key)
            np.testing.assert_array_equal(found, expected)


def test_the_memory_of_a_message_is_used_again_at_once():
    expected, _ = results_of(made(**RECURRENT), CUTS[1])
    transformer, buffer, found, first = made(**RECURRENT), np.empty((90, N_FEATURES), np.float32), [], 0
    for length in CUTS[1]:
        buffer[:length] = X[first : first + length]
        found += transformer(message(buffer[:length], first))
        buffer[:] = np.nan
        first += length
    np.testing.assert_array_equal(np.concatenate([result.data for result in found]), expected)


def test_a_window_sees_the_samples_that_it_should():
    found, axes = results_of(made(model_class=Total, window=6, hop=6, state="none"), CUTS[1])
    np.testing.assert_allclose(found, X.reshape(40, 6, -1).sum(axis=1), rtol=1e-5, atol=1e-5)
    # A result has the time of the last sample of its window.
    assert axes[0].offset == pytest.approx(5 / FS) and axes[0].gain == pytest.approx(6 / FS)
    total, _ = results_of(made(model_class=Total, window=6, hop=6), CUTS[1])
    np.testing.assert_allclose(total, X.reshape(40, 6, -1).sum(axis=1).cumsum(axis=0), rtol=1e-4, atol=1e-4)


def test_heads_are_messages_and_each_sample_has_one_result():
    transformer = made(**STATELESS)
    outputs = transformer(message(X[:30], 0))
    assert [output.key for output in outputs] == ["velocity", "class"]
    velocity, classes = outputs
    assert velocity.data.shape == (5, 3) and velocity.axes["time"].gain == pytest.approx(5 / FS)
    assert velocity.axes["time"].offset == pytest.approx(9 / FS)
    assert classes.data.shape == (25, 3) and classes.axes["time"].gain == pytest.approx(1 / FS)
    assert classes.axes["time"].offset == pytest.approx(5 / FS)
    assert list(velocity.axes["ch"].data) == ["velocity_ch0", "velocity_ch1", "velocity_ch2"]
    later = transformer(message(X[30:35], 30))
    assert later[0].axes["ch"] is velocity.axes["ch"]
    assert later[1].axes["time"].offset == pytest.approx(30 / FS)


def test_padding_is_invisible(monkeypatch):
    expected, _ = results_of(made(**STATELESS), CUTS[2], key="class")
    for padding in (0.0, np.nan):
        monkeypatch.setattr(windows, "PADDING", padding)
        windows._mlx_padding.cache_clear()
        transformer = made(**STATELESS, batch_sizes=(4, 16))
        found, _ = results_of(transformer, CUTS[2], key="class")
        assert transformer._sizes == (4, 16)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [Mixing, Leaking])
def test_a_model_that_looks_at_other_rows_is_given_one_at_a_time(model):
    transformer = made(model_class=model, window=2)
    found, _ = results_of(transformer, [240])
    assert transformer._sizes == (1,)
    np.testing.assert_array_equal(found, 0.0 if model is Mixing else X)


def test_all_shapes_are_run_before_the_first_message():
    Heads.shapes.clear()
    transformer = made(**STATELESS)
    ahead = set(Heads.shapes)
    Heads.shapes.clear()
    results_of(transformer, [1, 2, 99, 12, 61, 65])
    assert Heads.shapes <= ahead and len({shape[0] for shape in ahead}) <= 4


def test_a_message_that_fails_changes_nothing(monkeypatch):
    transformer = made(model_class=Total, window=2)
    transformer(message(X[:5], 0))
    monkeypatch.setattr(Total, "fails_at", 2)
    before = pickle.dumps(vars(transformer.state).copy())
    with pytest.raises(RuntimeError, match="on demand"):
        transformer(message(X[5:40], 5))
    assert pickle.dumps(vars(transformer.state).copy()) == before
    monkeypatch.setattr(Total, "fails_at", None)
    (after,) = transformer(message(X[5:40], 5))
    np.testing.assert_allclose(np.array(after.data)[-1], X[:40].sum(axis=0), rtol=1e-4, atol=1e-4)


def test_a_sample_that_is_not_finite_leaves_the_state_alone():
    data = X.copy()
    data[[0, 21]] = np.nan
    found, _ = results_of(made(model_class=Total, window=2), CUTS[1], data=data)
    is_finite = np.isfinite(found).all(axis=1)
    assert list(np.flatnonzero(~is_finite)) == [0, 10]
    kept = np.delete(X.reshape(120, 2, -1), [0, 10], axis=0)
    np.testing.assert_allclose(found[-1], kept.sum(axis=(0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reset", [False, True])
def test_no_window_lies_across_a_gap(reset):
    transformer = made(model_class=Total, window=4, reset_on_resume=reset)
    transformer(message(X[:6], 0))
    assert transformer(message(X[100:103], 100)) == []
    (after,) = transformer(message(X[103:104], 103))
    expected = X[100:104].sum(axis=0) + (0.0 if reset else X[:4].sum(axis=0))
    np.testing.assert_allclose(after.data[0], expected, rtol=1e-5, atol=1e-5)
    assert after.axes["time"].offset == pytest.approx(103 / FS)


def test_the_state_is_read_set_and_pickled():
    transformer, other = made(**RECURRENT), made(**RECURRENT)
    transformer(message(X[:33], 0))
    state = pickle.loads(pickle.dumps(transformer.state))
    other(message(X[200:240], 200))
    other.state = state
    (expected,), (found,) = (each(message(X[33:80], 33)) for each in (transformer, other))
    np.testing.assert_array_equal(found.data, expected.data)


def test_the_state_is_computed_and_may_be_read_in_another_thread():
    transformer = made(**RECURRENT)
    transformer(message(mx.array(X[:33]), 0))
    found = []
    thread = threading.Thread(target=lambda: found.append(np.array(transformer.state.of_model[0][0])))
    thread.start()
    thread.join()
    assert np.isfinite(found[0]).all()


def test_features_may_lie_anywhere():
    data = X[:40].reshape(40, 4, 16)
    axes = {"time": AxisArray.TimeAxis(fs=FS)}
    expected = made(**RECURRENT)(message(X[:40], 0))[0].data
    for order, dims in (((0, 1, 2), ["time", "ch", "freq"]), ((1, 2, 0), ["ch", "freq", "time"])):
        for to_backend in (np.array, mx.array):
            given = AxisArray(to_backend(data.transpose(order)), dims, axes=axes)
            np.testing.assert_array_equal(np.array(made(**RECURRENT)(given)[0].data), expected)


@pytest.mark.parametrize("quantize", [8, 4])
def test_quantized_weights_give_nearly_the_same(quantize):
    expected, _ = results_of(made(**RECURRENT), [240])
    found, _ = results_of(made(**RECURRENT, quantize=quantize), [240])
    assert 0 < np.abs(found - expected).max() < {8: 0.01, 4: 0.1}[quantize]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_bits_give_nearly_the_same(dtype):
    expected, _ = results_of(made(**RECURRENT), [240])
    found, _ = results_of(made(**RECURRENT, dtype=dtype), [240])
    assert found.dtype == np.float32 and 0 < np.abs(found - expected).max() < 0.02


def test_a_chain_runs_it_between_fused_stages_without_leaving_the_device(monkeypatch):
    def stages():
        return [
            AsArrayTransformer(backend="mlx"),
            PowTransformer(exponent=2.0),
            made(**RECURRENT),
            PowTransformer(exponent=2.0),
            AsArrayTransformer(backend="numpy"),
        ]

    one_by_one, chain = stages(), ChainTransformer(make_chain=stages)
    seen = []
    run = NetworkTransformer._process
    monkeypatch.setattr(NetworkTransformer, "_process", lambda self, given: seen.append(given.data) or run(self, given))
    first = 0
    for length in (30, 30, 1, 50, 20):
        given = message(X[first : first + length], first)
        expected = [given]
        for stage in one_by_one:
            expected = [
                result
                for each in expected
                for output in [stage(each)]
                for result in (output if isinstance(output, list) else [output])
            ]
        found = chain(given)
        found = found if isinstance(found, list) else [found]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.data, other.data, rtol=1e-6, atol=1e-9)
            assert one.axes["time"] == other.axes["time"]
        first += length
    assert all(isinstance(data, mx.array) for data in seen)


def test_a_later_stage_that_fails_takes_back_what_it_did():
    class Fails:
        wanted = False

        def __call__(self, given):
            if self.wanted:
                raise RuntimeError("on demand")
            return given

    fails, alone = Fails(), made(model_class=Total, window=2)
    chain = ChainTransformer(make_chain=lambda: [made(model_class=Total, window=2), fails])
    for number, wanted in enumerate((False, True, False)):
        fails.wanted = wanted
        given = message(X[10 * number : 10 * number + 10], 10 * number)
        if wanted:
            with pytest.raises(RuntimeError, match="on demand"):
                chain(given)
            continue
        (found,) = chain(given)
    alone(message(X[:10], 0))
    (expected,) = alone(message(X[20:30], 20))
    np.testing.assert_array_equal(found.data, expected.data)


def scaled(factor):
    return {"scale": np.full(1, factor, np.float32)}


def test_weights_are_exchanged_between_two_messages(tmp_path):
    transformer = NetworkTransformer(model_class=Total, window=1, state="none")

    def result():
        return transformer(message(np.ones((1, 2), np.float32), 0))[0].data[0, 0]

    early = transformer.exchange_weights(scaled(2.0))
    assert result() in (1.0, 2.0)
    early.result(60)
    assert result() == 2.0
    mx.savez(str(tmp_path / "w.npz"), scale=mx.full(1, 3.0))
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"scale": mx.full(1, 4.0)})
    for path, expected in (("w.npz", 3.0), ("w.safetensors", 4.0)):
        transformer.exchange_weights(str(tmp_path / path)).result(60)
        assert result() == expected
    for wrong in (
        {"scale": np.ones(2)},
        {},
        {"other": np.ones(1), **scaled(1)},
        str(tmp_path / "none.npz"),
        {"scale": 1},
    ):
        assert transformer.exchange_weights(wrong).exception(60) is not None
        assert result() == 4.0
    transformer.exchange_weights({"scale": mx.array([5.0])}).result(60)
    assert result() == 5.0
    # A state has the weights that it was made with.
    state = pickle.dumps(transformer.state)
    transformer.exchange_weights(scaled(6.0)).result(60)
    assert result() == 6.0
    transformer.state = pickle.loads(state)
    assert result() == 5.0


def test_another_checkpoint_in_the_settings_keeps_the_state(tmp_path):
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"scale": mx.full(1, 10.0)})
    transformer = made(model_class=Total, window=1)
    transformer(message(np.ones((3, 1), np.float32), 0))
    settings = NetworkSettings(model_class=Total, window=1, checkpoint_path=str(tmp_path / "w.safetensors"))
    transformer.update_settings(settings)
    # What is asked for after it is done after it.
    transformer.exchange_weights({}).exception(60)
    assert transformer(message(np.ones((1, 1), np.float32), 3))[0].data[0, 0] == 13.0


def test_the_unit_exchanges_weights_and_has_its_model_before_the_first_message():
    unit = Network(NetworkSettings(model_class=Heads, model_kwargs={"input_size": 8}))
    unit._set_name("UNIT")
    unit._set_location(["GRAPH"])
    unit.create_processor()
    assert isinstance(unit.processor._model, Model)
    weights = {"hidden.weight": np.zeros((64, 8)), "hidden.bias": np.zeros(64)}
    weights |= {"out.weight": np.zeros((3, 64)), "out.bias": np.arange(3)}
    asyncio.run(unit.on_weights(weights))
    asyncio.run(unit.on_weights("nothing.npz"))
    np.testing.assert_array_equal(unit.processor(message(X[:1, :8], 0))[0].data, [[0, 1, 2]])


@pytest.mark.parametrize(
    ("settings", "error", "pattern"),
    [
        ({"model_class": "no.such.Model"}, ValueError, "'model_class' must be a class or its dotted name"),
        ({"model_class": "nodots"}, ValueError, "'model_class'"),
        ({"model_class": dict}, TypeError, "'model_class' must be a class derived from mlx.nn.Module"),
        ({"model_class": nn.LSTM}, TypeError, "'model_class' must be called as .* got LSTM"),
        ({"model_class": Heads, "model_kwargs": {"sizes": 3}}, TypeError, "'model_kwargs' must be arguments of Heads"),
        ({"model_class": Heads, "model_kwargs": 3}, TypeError, "'model_kwargs' must be None or a dictionary"),
        ({"model_class": Heads, "checkpoint_path": "a.txt"}, ValueError, "'checkpoint_path' must end in"),
        ({"model_class": Heads, "checkpoint_path": "a.npz"}, FileNotFoundError, "'checkpoint_path' must be a file"),
        ({"model_class": Heads, "dtype": "float64"}, TypeError, "'dtype' must be one of"),
        ({"model_class": Heads, "quantize": 3}, ValueError, "'quantize' must be None or one of 8, 4, got 3"),
        ({"model_class": Heads, "window": 0}, ValueError, "window"),
        ({"model_class": Heads, "hop": 1.5}, TypeError, "hop"),
        ({"model_class": Heads, "state": "keep"}, ValueError, "'state' must be one of"),
        ({"model_class": Heads, "reset_on_resume": 1}, TypeError, "reset_on_resume"),
        ({"model_class": Heads, "batch_sizes": (1, 2, 3, 4, 5)}, ValueError, "'batch_sizes' must be one to 4"),
    ],
)
def test_errors_name_the_setting(settings, error, pattern):
    with pytest.raises(error, match=pattern):
        NetworkSettings(**settings)


class Flat(nn.Module):
    def __call__(self, x):
        return x.sum()


class Growing(nn.Module):
    def __call__(self, x, state=None):
        state = x if state is None else mx.concatenate([state, x], axis=1)
        return state, state


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (
            {"model_class": Heads, "model_kwargs": {"input_size": 5}},
            "'model_kwargs' must have the input_size of the stream",
        ),
        ({"model_class": Flat}, "'model_class' must be called as .* the result must be an array"),
        ({"model_class": Growing}, "'model_class' must be called as .* a state of the form"),
        ({"model_class": RecurrentDecoder, "model_kwargs": {"hidden_size": 4, "rnn_type": "RNN"}}, "'model_kwargs'"),
    ],
)
def test_what_does_not_fit_the_stream_is_refused_with_the_first_message(settings, pattern):
    with pytest.raises((TypeError, ValueError), match=pattern):
        NetworkTransformer(**settings)(message(X[:3], 0))


def test_weights_that_do_not_fit_the_model_are_refused_before_the_first_message(tmp_path):
    path = str(tmp_path / "w.npz")
    np.savez(path, **{"hidden.weight": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="'checkpoint_path' must be a file of weights of Heads"):
        NetworkTransformer(model_class=Heads, checkpoint_path=path).prepare(3)


def test_complex_data_and_irregular_streams_are_refused():
    transformer = made(**STATELESS)
    with pytest.raises(TypeError, match="real"):
        transformer(message(X[:3].astype(np.complex64), 0))
    with pytest.raises(ValueError, match="LinearAxis"):
        transformer(AxisArray(X[:3], ["time", "ch"]))


def test_other_settings_make_another_model():
    transformer = made(model_class=Total, window=1)
    transformer(message(X[:3], 0))
    transformer.update_settings(NetworkSettings(model_class=Total, window=2))
    assert transformer(message(X[:3], 0))[0].data.shape == (1, N_FEATURES)


def test_settings_can_be_a_name_that_a_dashboard_shows():
    settings = NetworkSettings(model_class="ezmsg.mlx.network.RecurrentDecoder", model_kwargs={"hidden_size": 4})
    assert isinstance(settings, ez.Settings) and pickle.loads(pickle.dumps(settings)) == settings
