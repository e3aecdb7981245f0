"""The adaptive scaler: what is particular to it. What it has in common with other filters: test_filter_habits.py."""

import asyncio
import itertools
import math
import threading
from unittest import mock

import ezmsg.sigproc.scaler as sigproc
import numpy as np
import pytest
from scipy.signal import lfilter

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import alpha_of
from helpers.recurrences import check_close, noise, scores_in_turn
from helpers.transformers import filtered, message, using
from helpers.zscore_cases import OWN_CASES

import ezmsg.mlx.scaler
from ezmsg.mlx.kernels.layout import LARGEST_SCORED
from ezmsg.mlx.kernels.plain import zscore as plain_zscore
from ezmsg.mlx.scaler import AdaptiveStandardScaler, AdaptiveStandardScalerSettings, AdaptiveStandardScalerTransformer


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


def exact(x: np.ndarray, time_constant: float) -> np.ndarray:
    """z-scores in float64, time first: the weighted mean and variance of the samples so far."""
    alpha = alpha_of(time_constant)
    weight = -np.expm1(np.arange(1, len(x) + 1) * np.log1p(-alpha))[:, None]
    centred = np.asarray(x, np.float64) - np.asarray(x[:1], np.float64)
    mean, square = (lfilter([alpha], [1.0, alpha - 1.0], moment, axis=0) / weight for moment in (centred, centred**2))
    variance = square - mean**2
    return np.where(variance > 0, (centred - mean) / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("time_constant", [1e-4, 0.001, 0.01, 1.0, 60.0])
def test_scores_are_those_of_sigproc_on_numpy(path, time_constant, how):
    x = noise(4000, 3) * np.float32([1, 0.1, 20]) + np.float32([0, 5, -50])
    ours = AdaptiveStandardScalerTransformer(time_constant=time_constant)
    theirs = sigproc.AdaptiveStandardScalerTransformer(time_constant=time_constant)
    for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 1324, 4000]):
        y = filtered(ours, mx.array(x[start:stop]), how)
        expected = filtered(theirs, x[start:stop].astype(np.float64))
        check_close(y, expected, 1e-5 if stop > 2 else 1e-3) if stop > start + 1 else None
        assert y.shape == (stop - start, 3) and y.dtype == np.float32


def test_offset_that_drifts_away_from_where_it_began_is_followed(path):
    drift = np.linspace(0, 1e4, 30000)[:, None]
    x = (noise(30000, 1) + drift).astype(np.float32)
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 10)])
    check_close(y, exact(x, 0.01))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "bool_", "float16"])
def test_integers_do_not_wrap_when_squared(path, dtype):
    limit = {"int8": 127, "uint8": 255, "int16": 32767, "uint16": 65535, "int32": 1 << 23, "bool_": 1, "float16": 60000}
    values = (np.random.default_rng(0).random((500, 2)) * limit[dtype]).round().astype(np.float32)
    x = mx.array(values).astype(getattr(mx, dtype))
    y = filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), x)
    check_close(y, exact(np.array(x.astype(mx.float32)), 0.01))


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_integers_of_numpy_do_not_wrap_either(dtype):
    values = (np.random.default_rng(0).random((500, 2)) * 30000).astype(dtype)
    y = filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), values)
    np.testing.assert_allclose(y, exact(values, 0.01), atol=1e-6)


def test_first_sample_scores_zero(path):
    assert not filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(noise(1, 4) * 1e5)).any()


@pytest.mark.parametrize("lengths", [[1] * 40, [0, 7, 0, 0, 33, 1, 0, 1023, 0], [1299, 0]])
def test_cutting_does_not_matter(path, lengths):
    x = noise(1300, 2) + 3
    whole = filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(x))
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    pieces = [filtered(transformer, mx.array(piece)) for piece in np.split(x, np.cumsum(lengths))]
    check_close(np.concatenate(pieces), whole)


# ------------------------------------------------------------------------------------------------------ first samples


def in_turn(x: np.ndarray, time_constant: float) -> np.ndarray:
    return scores_in_turn(x.astype(np.float64), alpha_of(time_constant), np.zeros((3, *x.shape[1:])), 0)[0]


@pytest.mark.parametrize("dead", ["whole message", "some samples"])
def test_channel_begins_at_its_first_finite_sample(path, dead):
    x = (noise(3000, 3) * np.float32(0.1) + np.float32([0, 1e6, 1e4])).astype(np.float32)
    n = 300 if dead == "whole message" else 40
    x[:n, 1:] = math.nan
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 10)])
    check_close(y[n:, 1:], in_turn(x[n:, 1:], 0.01))
    check_close(y[:, :1], in_turn(x[:, :1], 0.01))
    assert not y[n, 1:].any()


def test_largest_sample_counts_and_a_larger_one_does_not(path):
    limit = np.float32(LARGEST_SCORED)
    x = noise(300, 2)
    x[100] = limit, np.nextafter(limit, np.float32(math.inf))
    y = filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(x))
    assert y[100, 0] < 1e3 and y[100, 1] == x[100, 1]
    assert np.abs(y[101:, 0]).max() < 0.2 and np.abs(y[101:, 1]).max() > 1.0


# ------------------------------------------------------------------------------------- samples that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_sample_stays_in_its_channel_which_goes_on(path, bad):
    x, results = noise(2000, 3) + 5, []
    for _ in range(2):
        transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
        results.append(np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 4)]))
        x[[0, 500, 501, 700], [0, 0, 1, 1]] = bad
    clean, y = results
    np.testing.assert_array_equal(y[~np.isfinite(x)], x[~np.isfinite(x)])
    assert np.isfinite(y).sum() == np.isfinite(x).sum()
    np.testing.assert_array_equal(y[:, 2], clean[:, 2])
    # One sample more or less of a memory of 300.
    np.testing.assert_allclose(y[-1], clean[-1], atol=0.02)


def test_bad_samples_are_left_out(path):
    x = noise(900, 1) + 100
    bad = np.random.default_rng(0).random(900) < 0.1
    x[bad] = math.nan
    y = filtered(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(x))
    check_close(y[~bad], exact(x[~bad], 0.01))


def test_channel_dead_from_the_start_begins_anew_when_it_lives(path):
    dead, x = noise(750, 2), noise(900, 2) + 9
    dead[:, 0] = math.nan
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    for piece in np.split(dead, 5):
        filtered(transformer, mx.array(piece))
    y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 3)])
    check_close(y[:, 0], exact(x, 0.001)[:, 0])


@pytest.mark.parametrize("case", OWN_CASES)
def test_case(case, path):
    OWN_CASES[case](path)


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("when", ["before the first message", "in the stream"])
def test_statistics_are_frozen_and_released_by_the_stream_of_the_unit(path, when):
    unit = AdaptiveStandardScaler(AdaptiveStandardScalerSettings(time_constant=0.001))
    unit.create_processor()
    x, far = mx.array(noise(600, 2)), mx.full((300, 2), 50.0)
    if when == "in the stream":
        filtered(unit.processor, x)
    asyncio.run(unit.on_accumulate(False))
    assert unit.processor.accumulate is False
    first = filtered(unit.processor, far)
    np.testing.assert_array_equal(filtered(unit.processor, far), first)
    asyncio.run(unit.on_accumulate(True))
    filtered(unit.processor, far)
    assert np.abs(filtered(unit.processor, mx.zeros((1, 2)))).min() > 1.0


@pytest.mark.parametrize("read", [True, False])
def test_what_was_seen_in_one_thread_without_accumulating_is_forgotten_in_another(path, read):
    transformer, x = AdaptiveStandardScalerTransformer(time_constant=0.01, accumulate=False), noise(160, 2) + 5

    def warm_up():
        for piece in np.split(x[:120], 3):
            result = transformer(message(mx.array(piece)))
            if read:
                mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    check_close(filtered(transformer, mx.array(x[-40:])), in_turn(x[-40:], 0.01))


@pytest.mark.parametrize("value", [0.0, math.nan, None, True], ids=repr)
def test_settings_are_checked_when_they_are_built(value):
    with pytest.raises((ValueError, TypeError), match="'time_constant' must be"):
        AdaptiveStandardScalerSettings(time_constant=value)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.5, math.nan])
def test_weight_of_the_newest_sample_is_checked(alpha):
    with pytest.raises(ValueError, match="'alpha' must be"):
        ezmsg.mlx.scaler.zscore(mx.zeros((4, 1)), alpha, axis=0)


def test_unit_can_be_frozen_from_outside():
    assert "INPUT_ACCUMULATE" in AdaptiveStandardScaler.__dict__


def test_chunk_sizes_reach_the_kernels():
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01, mlx_metal_chunk_sizes=(8,))
    x = mx.array(noise(100, 3))
    lengths = []

    def run(data, alpha, zi, axis, chunk_sizes):
        lengths.append(chunk_sizes)
        return data, zi

    with mock.patch.object(plain_zscore, "run", run), using("plain"):
        filtered(transformer, x)
    assert lengths == [(8,)]
