"""The ready chains give what their stages give, in any number of processes, with wrong parameters refused."""

import functools
import math
import pickle

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from scipy import signal

pytest.importorskip("mlx.core")

from ezmsg.mlx import RechunkTransformer, chains, run_chain

RATE = 20000.0
COUNTS = np.random.default_rng(0).integers(-3000, 3000, (3000, 5), dtype=np.int16)


def results_of(chain, dtype: str = "float32") -> np.ndarray:
    def messages():
        for start in range(0, len(COUNTS), 300):
            time = AxisArray.TimeAxis(fs=RATE, offset=start / RATE)
            yield AxisArray(COUNTS[start : start + 300], dims=["time", "ch"], axes={"time": time}, stream_dim="time")

    results = [np.asarray(message.data) for message in run_chain(chain, messages())]
    assert {result.dtype for result in results} == {np.dtype(dtype)}
    return np.concatenate(results)


def filtered(x: np.ndarray, low: float, high: float, order: int) -> np.ndarray:
    sos = signal.butter(order, (low, high), "bandpass", fs=RATE, output="sos")
    # As after a long time at the first sample.
    return signal.sosfilt(sos, x, axis=0, zi=signal.sosfilt_zi(sos)[:, :, None] * x[0])[0]


def binned(power: np.ndarray, n: int) -> np.ndarray:
    return power[: len(power) - len(power) % n].reshape(-1, n, power.shape[1]).mean(axis=1)


@pytest.mark.parametrize("reference", ["none", "mean", "median"])
def test_band_pass_is_the_filter_and_then_the_reference(reference):
    expected = filtered(COUNTS.astype(float), 200.0, 600.0, 3)
    if reference != "none":
        expected -= getattr(np, reference)(expected, axis=1, keepdims=True)
    found = results_of(chains.band_pass(low=200.0, high=600.0, order=3, reference=reference))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("reference", ["mean", "median"])
def test_int16_is_the_nearest(reference):
    parameters = {"low": 200.0, "high": 600.0, "reference": reference}
    found = results_of(chains.band_pass(**parameters, dtype="int16"), "int16")
    np.testing.assert_array_equal(found, np.rint(results_of(chains.band_pass(**parameters))))


def test_spike_band_power_is_the_mean_square_in_the_band():
    x = COUNTS.astype(float)
    expected = binned(filtered(x - np.median(x, axis=1, keepdims=True), 200.0, 600.0, 2) ** 2, 1000)
    found = results_of(chains.spike_band_power(low=200.0, high=600.0, reference="median"))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    logs = results_of(chains.spike_band_power(low=200.0, high=600.0, reference="median", log=True))
    np.testing.assert_allclose(logs, np.log10(expected), rtol=1e-4)


def test_ewma_features_are_the_smoothed_power_of_what_is_left():
    x = COUNTS - COUNTS.mean(axis=1, keepdims=True)
    rest = x - average(x, 1.0)
    expected = np.log10(binned(average(rest**2, 0.1), 200))
    np.testing.assert_allclose(results_of(chains.ewma_features()), expected, rtol=1e-4)


def average(x: np.ndarray, seconds: float) -> np.ndarray:
    """An exponentially weighted one with its bias corrected, in float64."""
    alpha = 1 - math.exp(-1 / (seconds * RATE))
    smooth = signal.lfilter([alpha], [1, alpha - 1], x, axis=0)
    return smooth / (1 - (1 - alpha) ** np.arange(1, len(x) + 1))[:, None]


@pytest.mark.parametrize("name", chains.READY)
def test_a_chain_with_parameters_can_be_sent_to_another_process(name):
    factory = functools.partial(chains.READY[name], reference="mean")
    assert type(pickle.loads(pickle.dumps(factory))()) is type(factory())


@pytest.mark.parametrize("name", chains.READY)
def test_cutting_changes_nothing(name):
    # Within rounding: filters in long messages may round otherwise.
    found = results_of([RechunkTransformer(sizes=(70,)), chains.READY[name]()])
    expected = results_of(chains.READY[name]())
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"low": -1.0}, "'low' must be a finite number > 0, got -1.0"),
        ({"low": 900.0, "high": 800.0}, "'low' must be a frequency below high, which is 800.0, got 900.0"),
        ({"order": 0}, "'order' must be an integer of at least 1, got 0"),
        ({"reference": "mode"}, "'reference' must be one of 'none', 'mean', 'median', got 'mode'"),
        ({"bin_seconds": math.nan}, "'bin_seconds' must be a finite number > 0, got nan"),
    ],
)
def test_wrong_parameters_are_refused_when_the_chain_is_built(parameters, said):
    with pytest.raises(ValueError) as error:
        chains.spike_band_power(**parameters)
    assert str(error.value) == said


def test_results_are_float32_or_int16():
    with pytest.raises(TypeError, match="'dtype' must be one of 'float32', 'int16', got 'int8'"):
        chains.band_pass(dtype="int8")


def test_a_switch_is_true_or_false():
    with pytest.raises(TypeError, match="'log' must be True or False, got 1"):
        chains.ewma_features(log=1)
