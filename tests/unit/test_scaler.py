"""The adaptive scaler, on both paths that run anywhere. The averages that it is made of: test_ewma_transformer.py."""

import asyncio
import dataclasses
import gc
import itertools
import math
import threading
import warnings
from unittest import mock

import ezmsg.sigproc.scaler as sigproc
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from scipy.signal import lfilter

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import FS, alpha_of, check_close, message, noise  # noqa: E402

import ezmsg.mlx.scaler as module  # noqa: E402
from ezmsg.mlx.scaler import (  # noqa: E402
    AdaptiveStandardScaler,
    AdaptiveStandardScalerSettings,
    AdaptiveStandardScalerTransformer,
    StandardizerTransformer,
)


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


def using(path: str):
    return mock.patch.object(module, "default_path", lambda: path)


@pytest.fixture
def resets(monkeypatch) -> list[AxisArray]:
    """The messages that reset the statistics, up to now."""
    seen: list[AxisArray] = []
    reset = StandardizerTransformer._reset_state

    def noted(self, message):
        seen.append(message)
        reset(self, message)

    monkeypatch.setattr(StandardizerTransformer, "_reset_state", noted)
    return seen


def scaled(transformer, data, call: str = "sync", **fields) -> np.ndarray:
    sent = message(data, **fields)
    result = transformer(sent) if call == "sync" else asyncio.run(transformer.__acall__(sent))
    return np.array(result.data)


def exact(x: np.ndarray, time_constant: float) -> np.ndarray:
    """z-scores in float64, time first: the weighted mean and variance of the samples so far."""
    alpha = alpha_of(time_constant)
    weight = -np.expm1(np.arange(1, len(x) + 1) * np.log1p(-alpha))[:, None]
    centred = np.asarray(x, np.float64) - np.asarray(x[:1], np.float64)
    mean, square = (lfilter([alpha], [1.0, alpha - 1.0], moment, axis=0) / weight for moment in (centred, centred**2))
    variance = square - mean**2
    return np.where(variance > 0, (centred - mean) / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("time_constant", [1e-4, 0.001, 0.01, 1.0, 60.0])
def test_scores_are_those_of_sigproc_on_numpy(path, time_constant, call):
    x = noise(4000, 3) * np.float32([1, 0.1, 20]) + np.float32([0, 5, -50])
    ours = AdaptiveStandardScalerTransformer(time_constant=time_constant)
    theirs = sigproc.AdaptiveStandardScalerTransformer(time_constant=time_constant)
    for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 1324, 4000]):
        y = scaled(ours, mx.array(x[start:stop]), call)
        expected = scaled(theirs, x[start:stop].astype(np.float64))
        check_close(y, expected, 1e-5 if stop > 2 else 1e-3) if stop > start + 1 else None
        assert y.shape == (stop - start, 3) and y.dtype == np.float32


@pytest.mark.parametrize(("offset", "deviation"), [(1e4, 1.0), (3e4, 0.01), (1e6, 1.0), (1e6, 0.1), (-1e6, 1.0)])
def test_small_deviation_on_a_large_offset_is_found(path, offset, deviation):
    # Of the data as float32 has them: 1e6 are 0.06 apart from the next.
    x = (np.random.default_rng(0).standard_normal((6000, 2)) * deviation + offset).astype(np.float32)
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.05)
    y = np.concatenate([scaled(transformer, mx.array(piece)) for piece in np.split(x, 20)])
    check_close(y[100:], exact(x, 0.05)[100:], 1e-3)


def test_offset_that_drifts_away_from_where_it_began_is_followed(path):
    drift = np.linspace(0, 1e4, 30000)[:, None]
    x = (noise(30000, 1) + drift).astype(np.float32)
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    y = np.concatenate([scaled(transformer, mx.array(piece)) for piece in np.split(x, 10)])
    check_close(y, exact(x, 0.01), 5e-3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "bool_", "float16"])
def test_integers_do_not_wrap_when_squared(path, dtype):
    limit = {"int8": 127, "uint8": 255, "int16": 32767, "uint16": 65535, "int32": 1 << 23, "bool_": 1, "float16": 60000}
    values = (np.random.default_rng(0).random((500, 2)) * limit[dtype]).round().astype(np.float32)
    x = mx.array(values).astype(getattr(mx, dtype))
    y = scaled(AdaptiveStandardScalerTransformer(time_constant=0.01), x)
    check_close(y, exact(np.array(x.astype(mx.float32)), 0.01), 2e-4)


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_integers_of_numpy_do_not_wrap_either(dtype):
    values = (np.random.default_rng(0).random((500, 2)) * 30000).astype(dtype)
    y = scaled(AdaptiveStandardScalerTransformer(time_constant=0.01), values)
    np.testing.assert_allclose(y, exact(values, 0.01), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -1234.567, 3e7, 1e-20])
def test_channel_that_does_not_vary_gives_zeros(path, value):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    x = noise(900, 2)
    x[:, 1] = value
    for piece in np.split(x, [1, 2, 300]):
        assert not scaled(transformer, mx.array(piece))[:, 1].any()


@pytest.mark.parametrize("value", [777.7, -3e5])
def test_channel_that_comes_to_rest_ends_at_zero(path, value):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    scaled(transformer, mx.array(noise(600, 2)))
    for _ in range(10):
        y = scaled(transformer, mx.full((300, 2), value))
    assert not y.any()


def test_what_rounding_leaves_of_a_channel_at_rest_is_no_deviation(path, monkeypatch):
    average = StandardizerTransformer._average

    def one_unit_off(self, data, path):
        mean, weights = average(self, data, path)
        return mean * (1 + 2.0**-23), weights

    monkeypatch.setattr(StandardizerTransformer, "_average", one_unit_off)
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    scaled(transformer, mx.array(noise(600, 2)))
    for _ in range(10):
        y = scaled(transformer, mx.full((300, 2), 777.7))
    assert not y.any()


def test_first_sample_scores_zero(path):
    assert not scaled(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(noise(1, 4) * 1e5)).any()


@pytest.mark.parametrize("lengths", [[1] * 40, [0, 7, 0, 0, 33, 1, 0, 1023, 0], [1299, 0]])
def test_cutting_does_not_matter(path, lengths):
    x = noise(1300, 2) + 3
    whole = scaled(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(x))
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    pieces = [scaled(transformer, mx.array(piece)) for piece in np.split(x, np.cumsum(lengths))]
    check_close(np.concatenate(pieces), whole)


@pytest.mark.parametrize("dims", list(itertools.permutations(["time", "ch", "x"])), ids=str)
def test_statistics_run_along_the_stream_dimension_wherever_it_is(path, dims):
    x, place = noise(60, 3, 2) + 5, dims.index("time")
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    pieces = [
        scaled(transformer, mx.array(piece), dims=list(dims))
        for piece in np.split(np.moveaxis(x, 0, place), [1, 30], axis=place)
    ]
    y = np.moveaxis(np.concatenate(pieces, axis=place), place, 0).reshape(60, 6)
    check_close(y, exact(x.reshape(60, 6), 0.001))


# ------------------------------------------------------------------------------------- samples that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_sample_stays_in_its_channel_which_goes_on(path, bad):
    x, results = noise(2000, 3) + 5, []
    for _ in range(2):
        transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
        results.append(np.concatenate([scaled(transformer, mx.array(piece)) for piece in np.split(x, 4)]))
        x[[0, 500, 501, 700], [0, 0, 1, 1]] = bad
    clean, y = results
    np.testing.assert_array_equal(y[~np.isfinite(x)], x[~np.isfinite(x)])
    assert np.isfinite(y).sum() == np.isfinite(x).sum()
    np.testing.assert_array_equal(y[:, 2], clean[:, 2])
    # One sample more or less of a memory of 300.
    np.testing.assert_allclose(y[-1], clean[-1], atol=0.02)


def test_bad_samples_are_left_out_on_the_cpu():
    x = noise(900, 1) + 100
    bad = np.random.default_rng(0).random(900) < 0.1
    x[bad] = math.nan
    with using("cpu"):
        y = scaled(AdaptiveStandardScalerTransformer(time_constant=0.01), mx.array(x))
    check_close(y[~bad], exact(x[~bad], 0.01), 1e-4)


def test_channel_dead_from_the_start_begins_anew_when_it_lives(path):
    dead, x = noise(750, 2), noise(900, 2) + 9
    dead[:, 0] = math.nan
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.001)
    for piece in np.split(dead, 5):
        scaled(transformer, mx.array(piece))
    y = np.concatenate([scaled(transformer, mx.array(piece)) for piece in np.split(x, 3)])
    check_close(y[:, 0], exact(x, 0.001)[:, 0], 1e-4)


# ---------------------------------------------------------------------------------------------------------- settings

SCENARIOS = {
    "accumulate switched off and on": [200, dict(accumulate=False), 50, 50, 7, dict(accumulate=True), 300],
    "accumulate off from the start": [dict(accumulate=False), 40, 40, 7, dict(accumulate=True), 100, 9],
    "passthrough": [200, dict(passthrough=True), 50, 0, dict(passthrough=False), 70, 9],
    "passthrough from the start": [dict(passthrough=True), 50, dict(passthrough=False), 70, 9],
    "reset on resume": [dict(reset_on_resume=True), 200, dict(passthrough=True), 50, dict(passthrough=False), 70, 9],
    "reset on resume, but only empty messages passed": [
        dict(reset_on_resume=True), 200, dict(passthrough=True), 0, dict(passthrough=False), 70, 9,
    ],
    "another time constant": [200, dict(time_constant=0.1), 70, 9],
    "empty messages": [0, 0, 200, 0, 30, 0],
}  # fmt: skip


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_settings_at_run_time_do_what_they_do_in_sigproc(path, scenario, call):
    ours = AdaptiveStandardScalerTransformer(time_constant=0.01)
    theirs = sigproc.AdaptiveStandardScalerTransformer(time_constant=0.01)
    x = noise(1000, 3) + 9
    for step in SCENARIOS[scenario]:
        if isinstance(step, dict):
            for transformer in (ours, theirs):
                transformer.update_settings(dataclasses.replace(transformer.settings, **step))
            continue
        piece, x = x[:step], x[step:]
        y, expected = scaled(ours, mx.array(piece), call), scaled(theirs, piece.astype(np.float64))
        check_close(y, expected, 1e-4) if y.size else None
        assert y.shape == piece.shape


@pytest.mark.parametrize("when", ["before the first message", "in the stream"])
def test_statistics_are_frozen_and_released_by_the_stream_of_the_unit(path, when):
    unit = AdaptiveStandardScaler(AdaptiveStandardScalerSettings(time_constant=0.001))
    unit.create_processor()
    x, far = mx.array(noise(600, 2)), mx.full((300, 2), 50.0)
    if when == "in the stream":
        scaled(unit.processor, x)
    asyncio.run(unit.on_accumulate(False))
    assert unit.processor.accumulate is False
    first = scaled(unit.processor, far)
    np.testing.assert_array_equal(scaled(unit.processor, far), first)
    asyncio.run(unit.on_accumulate(True))
    scaled(unit.processor, far)
    assert np.abs(scaled(unit.processor, mx.zeros((1, 2)))).min() > 1.0


def test_settings_are_found_by_the_framework_and_have_the_defaults_of_sigproc():
    assert AdaptiveStandardScalerTransformer.get_settings_type() is AdaptiveStandardScalerSettings
    assert AdaptiveStandardScaler.SETTINGS is AdaptiveStandardScalerSettings
    assert "INPUT_ACCUMULATE" in AdaptiveStandardScaler.__dict__
    ours = {field.name: field.default for field in dataclasses.fields(AdaptiveStandardScalerSettings)}
    assert ours == {field.name: field.default for field in dataclasses.fields(sigproc.AdaptiveStandardScalerSettings)}


@pytest.mark.parametrize("value", [0.0, math.nan, None, True], ids=repr)
def test_settings_are_checked_when_they_are_built(value):
    with pytest.raises((ValueError, TypeError), match="time_constant is .*allowed"):
        AdaptiveStandardScalerSettings(time_constant=value)


def test_chunk_sizes_and_axis_reach_the_kernels():
    x = noise(100, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = AdaptiveStandardScalerTransformer(time_constant=0.01, axis="win", mlx_metal_chunk_sizes=(8,))
    y = scaled(transformer, mx.array(x), dims=["win", "time"], axes={"win": AxisArray.TimeAxis(fs=FS)})
    check_close(y, exact(x, 0.01))
    assert transformer.state.samps_ewma.settings.mlx_metal_chunk_sizes == (8,)


# ------------------------------------------------------------------------------------------------- messages and resets


@pytest.mark.parametrize("shape", [(0, 3), (40, 0)], ids=str)
def test_dtype_does_not_depend_on_whether_a_message_is_empty(path, shape):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    for dtype in (mx.float32, mx.int16):
        for given in (mx.zeros(shape, dtype=dtype), mx.zeros((7, 3), dtype=dtype), mx.zeros(shape, dtype=dtype)):
            result = transformer(message(given))
            assert (result.data.shape, result.data.dtype) == (given.shape, mx.float32)


def test_passthrough_gives_back_the_message_itself():
    transformer = AdaptiveStandardScalerTransformer(passthrough=True)
    for given in (message(mx.zeros((5, 2), dtype=mx.int16)), message(mx.zeros((0, 2)))):
        assert transformer(given) is given


def labelled(data, labels: str, **fields) -> AxisArray:
    channels = AxisArray.CoordinateAxis(data=np.array(list(labels)), dims=["ch"])
    return message(data, axes={"time": AxisArray.TimeAxis(fs=FS), "ch": channels}, **fields)


@pytest.mark.parametrize(
    ("other", "n_resets"),
    [
        (labelled(mx.zeros((3, 4)), "abcd"), 1),
        (labelled(mx.zeros((3, 4)), "abcd", key="other"), 2),
        (labelled(mx.zeros((3, 4)), "abdc"), 2),
        (message(mx.zeros((3, 4)), fs=FS * 1.001), 2),
        (message(mx.zeros((3, 4)), fs=FS * (1 + 1e-8)), 2),
    ],
    ids=["same", "key", "labels", "rate", "no labels"],
)
def test_another_stream_starts_anew(path, other, n_resets, resets):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    transformer(labelled(mx.ones((300, 4)), "abcd"))
    transformer(other)
    assert len(resets) == n_resets


def test_rate_that_wobbles_by_less_than_1_ppm_keeps_the_statistics(path, resets):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    for wobble in (0, 1e-15, 9e-7, -9e-7, 1e-9, 0):
        scaled(transformer, mx.array(noise(10, 2)), fs=FS * (1 + wobble))
    assert len(resets) == 1


def test_irregular_stream_dimension_and_complex_data_are_refused(path):
    transformer = AdaptiveStandardScalerTransformer(time_constant=0.01)
    axis = AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"])
    with pytest.raises(ValueError, match="stream dimension 'time'.*LinearAxis"):
        transformer(message(mx.zeros((300, 2)), axes={"time": axis}))
    for n in (0, 5):
        with pytest.raises(TypeError, match="complex64"):
            transformer(message(mx.zeros((n, 2), dtype=mx.complex64)))
    check_close(scaled(transformer, mx.array(noise(300, 2))), exact(noise(300, 2), 0.01))


def test_numpy_data_is_left_to_sigproc_and_the_backend_may_change_within_the_stream(path):
    ours, x = AdaptiveStandardScalerTransformer(time_constant=0.01), noise(400, 2) + 5
    for backend in ("numpy", "mlx", "numpy", "mlx"):
        theirs = sigproc.AdaptiveStandardScalerTransformer(time_constant=0.01)
        for piece in np.split(x, 4):
            expected = scaled(theirs, piece.astype(np.float64))
            given = message(piece.astype(np.float64) if backend == "numpy" else mx.array(piece))
            result = ours(given)
            assert type(result.data) is type(given.data)
            if backend == "numpy":
                np.testing.assert_array_equal(result.data, expected)
            check_close(np.array(result.data).astype(np.float32), expected, 1e-4)


# --------------------------------------------------------------------------------------------------------- ownership


def test_inputs_are_left_as_they_are_and_results_are_their_own(path):
    x, given = noise(400, 2) + 5, [mx.array(piece) for piece in np.split(noise(400, 2) + 5, 4)]
    transformer, results = AdaptiveStandardScalerTransformer(time_constant=0.01), []
    for data, piece in zip(given, np.split(x, 4)):
        result = transformer(message(data)).data
        mx.eval(result, transformer.state.samps_ewma.state.variance)
        np.testing.assert_array_equal(np.array(data), piece)
        # Windows into the MLX arrays, which a receiver of either may write to.
        np.asarray(data)[:] = 99
        results.append(np.array(result))
        np.asarray(result)[:] = 99
    check_close(np.concatenate(results), exact(x, 0.01), 1e-4)


@pytest.mark.parametrize("read", [True, False])
def test_transformer_warmed_up_in_one_thread_goes_on_in_another(path, read):
    transformer, x = AdaptiveStandardScalerTransformer(time_constant=0.01), noise(160, 2) + 5

    def warm_up():
        result = transformer(message(mx.array(x[:80])))
        if read:
            mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    check_close(scaled(transformer, mx.array(x[80:])), exact(x, 0.01)[80:], 1e-4)


def test_outputs_that_nobody_reads_do_not_grow_memory(path):
    transformer = AdaptiveStandardScalerTransformer(time_constant=10.0, mlx_metal_chunk_sizes=(1,))

    def drop(n: int) -> int:
        for _ in range(n):
            transformer(message(mx.array(np.ones((1, 256), np.float32))))
        gc.collect()
        return mx.get_active_memory()

    before = drop(20)
    # The messages alone are 256 KiB.
    assert drop(256) - before < 2**17
