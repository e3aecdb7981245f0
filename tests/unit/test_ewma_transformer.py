"""EWMATransformer: what is particular to it. What it has in common with other filters: test_filter_habits.py."""

import dataclasses
import math
import pickle
import threading

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import alpha_of, corrected
from helpers.recurrences import FS, check_close, noise
from helpers.transformers import filtered, message, using

from ezmsg.mlx.detrend import DetrendTransformer
from ezmsg.mlx.ewma import EWMASettings, EWMATransformer
from ezmsg.mlx.scaler import AdaptiveStandardScalerTransformer


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "value",
    [0.0, -1.0, math.nan, math.inf, -math.inf, pytest.param(10**400, id="10**400"), None, "1", True, 1j, [1.0]],
    ids=repr,
)
def test_time_constant_must_be_a_finite_number_above_0(value):
    with pytest.raises((ValueError, TypeError), match="'time_constant' must be"):
        EWMASettings(time_constant=value)
    with pytest.raises((ValueError, TypeError), match="'time_constant' must be"):
        dataclasses.replace(EWMASettings(), time_constant=value)


@pytest.mark.parametrize("value", [1, 1e-320, 1e30, 1e300, np.float32(0.5), np.int64(2)], ids=repr)
def test_time_constant_may_be_any_real_number(path, value):
    y = filtered(EWMATransformer(time_constant=value), mx.full((9, 2), 3.0))
    np.testing.assert_allclose(y, 3.0, rtol=1e-6)


@pytest.mark.parametrize("kind", [EWMATransformer, DetrendTransformer, AdaptiveStandardScalerTransformer])
@pytest.mark.parametrize("to_backend", [mx.array, np.asarray])
def test_time_constants_without_end_weigh_all_samples_alike(path, kind, to_backend):
    x = noise(600, 2) + 3
    outputs = []
    # Of the last, not even the weight of a sample at 30 kHz is a float64.
    for value in (1e9, 1e12, 1e40, 1e300, 1.7e308):
        transformer = kind(time_constant=value)
        pieces = [filtered(transformer, to_backend(piece), fs=3e4) for piece in np.split(x.astype(np.float32), 3)]
        outputs.append(np.concatenate(pieces))
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-5, atol=1e-5)
    if kind is EWMATransformer:
        mean = np.cumsum(x, axis=0, dtype=np.float64) / np.arange(1, 601)[:, np.newaxis]
        np.testing.assert_allclose(outputs[-1], mean, rtol=1e-5)


@pytest.mark.parametrize("field", ["accumulate", "passthrough", "reset_on_resume"])
@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
def test_switches_must_be_true_or_false(field, value):
    with pytest.raises(TypeError, match=f"^'{field}' must be True or False, got {value!r}"):
        EWMASettings(**{field: value})
    assert getattr(EWMASettings(**{field: np.bool_(True)}), field)


def test_axis_must_be_a_name():
    with pytest.raises(TypeError, match="^'axis' must be None or a name, got 0"), pytest.warns(FutureWarning):
        EWMASettings(axis=0)


# ------------------------------------------------------------------------------------------------------------ resets


@pytest.mark.parametrize("change", [1e-3, -1e-3, 1e-5, -2e-6])
def test_real_change_of_rate_changes_the_weight_of_a_sample(change):
    transformer = EWMATransformer(time_constant=0.5)
    for fs in (FS, FS * (1 + change), FS * (1 + change) * (1 + 1e-9)):
        filtered(transformer, mx.array(noise(100, 2)), fs=fs)
    assert transformer.state.alpha == pytest.approx(alpha_of(0.5, FS * (1 + change)), rel=1e-12)


@pytest.mark.parametrize("cause", ["settings", "gap"])
def test_wobbling_rate_resets_no_further_once_something_else_did(cause):
    transformer = EWMATransformer(time_constant=0.5, reset_on_resume=True)
    x, rates = noise(80, 2), iter(FS * (1 + 1e-8 * noise(40).astype(np.float64)))

    def average(pieces: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([filtered(transformer, mx.array(piece), fs=next(rates)) for piece in pieces])

    average(np.split(x + 50, 8))
    if cause == "settings":
        transformer.update_settings(dataclasses.replace(transformer.settings, time_constant=0.4))
    if cause == "gap":
        transformer.update_settings(dataclasses.replace(transformer.settings, passthrough=True))
        average([x[:10]])
        transformer.update_settings(dataclasses.replace(transformer.settings, passthrough=False))
    expected = corrected(x, alpha_of(transformer.settings.time_constant))
    check_close(average(np.split(x, 8)), expected)


# ------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("n_messages", [1, 3])
def test_what_was_seen_in_one_thread_without_accumulating_is_forgotten_in_another(path, read, n_messages):
    transformer, x = EWMATransformer(time_constant=0.01, accumulate=False), noise(160, 2) + 5

    def warm_up():
        for piece in np.split(x[: 40 * n_messages], n_messages):
            result = transformer(message(mx.array(piece)))
            if read:
                mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    check_close(filtered(transformer, mx.array(x[-40:])), corrected(x[-40:], alpha_of(0.01)))


def test_correction_ends_after_some_17_time_constants(path):
    transformer = EWMATransformer(time_constant=0.001)
    for _ in range(17):
        filtered(transformer, mx.ones((30, 2)))
    assert transformer.state.zi.shape == (4, 2)
    filtered(transformer, mx.ones((30, 2)))
    assert transformer.state.zi.shape == (2, 2)


def test_looking_whether_the_correction_has_settled_costs_no_wait_a_message(path, monkeypatch):
    waits, item = [], EWMATransformer._drop_settled_weight
    monkeypatch.setattr(EWMATransformer, "_drop_settled_weight", lambda self: (waits.append(1), item(self))[1])
    transformer, dead = EWMATransformer(time_constant=0.001), mx.array(np.float32([[math.nan, 1.0]] * 30))
    for _ in range(100):
        filtered(transformer, dead)
    # A channel that is dead is looked at again after as long a time as it took the others.
    assert 1 < len(waits) <= 6 and transformer.state.zi.shape == (4, 2)


def test_state_that_needs_no_correction_goes_on_as_well(path):
    x, state, pieces = noise(1200, 2) + 5, None, []
    for piece in np.split(x, 4):
        state, result = EWMATransformer(time_constant=0.001).stateful_op(state, message(mx.array(piece)))
        pieces.append(np.array(result.data))
        state = pickle.loads(pickle.dumps(state))
    check_close(np.concatenate(pieces), corrected(x, alpha_of(0.001)))
    assert state[0].zi.shape == (2, 2)


def test_a_pickle_goes_on_where_the_original_is():
    x = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    first, second = (
        AxisArray(part, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=100.0, offset=offset)}, stream_dim="time")
        for part, offset in ((x[:10], 0.0), (x[10:], 0.1))
    )
    transformer = EWMATransformer(time_constant=0.1)
    transformer(first)
    copied = pickle.loads(pickle.dumps(transformer))
    np.testing.assert_array_equal(copied(second).data, transformer(second).data)
