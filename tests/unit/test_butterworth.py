"""Filters in a stream, on both paths that run anywhere. Values of the kernels: helpers/sosfilt_cases.py."""

import asyncio
import copy
import dataclasses
import gc
import itertools
import math
import pickle
import threading
import warnings
from unittest import mock

import ezmsg.sigproc.butterworthfilter as sigproc
import numpy as np
import pytest
from ezmsg.sigproc.cheby import ChebyshevFilterTransformer as SigprocChebyshev
from ezmsg.sigproc.filter import FilterTransformer as SigprocFilter
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import message  # noqa: E402
from helpers.sosfilt_cases import BAND_PASS, FS, HIGH_PASS, check_close, noise, reference  # noqa: E402

import ezmsg.mlx.filter as module  # noqa: E402
from ezmsg.mlx.butterworth import (  # noqa: E402
    ButterworthFilter,
    ButterworthFilterSettings,
    ButterworthFilterTransformer,
)
from ezmsg.mlx.chebyshev import ChebyshevFilterTransformer  # noqa: E402
from ezmsg.mlx.filter import FilterSettings, FilterTransformer  # noqa: E402

BAND = dict(order=4, cuton=300.0, cutoff=5000.0, coef_type="sos")


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


def using(path: str):
    return mock.patch.object(module, "select_path", lambda: path)


@pytest.fixture
def resets(monkeypatch) -> list[AxisArray]:
    """The messages that reset the state of a filter, up to now."""
    seen: list[AxisArray] = []
    reset = FilterTransformer._reset_state

    def noted(self, message):
        seen.append(message)
        reset(self, message)

    monkeypatch.setattr(FilterTransformer, "_reset_state", noted)
    return seen


def filtered(transformer, data, call: str = "sync", **fields) -> np.ndarray:
    sent = message(data, **fields)
    result = transformer(sent) if call == "sync" else asyncio.run(transformer.__acall__(sent))
    return np.array(result.data)


def expected_of(x: np.ndarray, **settings) -> np.ndarray:
    """ezmsg-sigproc's result on NumPy float64."""
    return filtered(sigproc.ButterworthFilterTransformer(**{**BAND, **settings}), x.astype(np.float64))


# ------------------------------------------------------------------------------------------------------------ values

DESIGNS = {
    "band-pass": {},
    "band-stop": dict(cuton=5000.0, cutoff=300.0),
    "low-pass": dict(cuton=None, cutoff=3000.0),
    "high-pass": dict(cuton=0.5, cutoff=None, order=2),
    "normalised": dict(cuton=0.02, cutoff=0.3, wn_hz=False),
}


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("design", DESIGNS)
def test_results_are_those_of_sigproc_on_numpy(path, design, call):
    x = noise(2000, 3) + np.float32([0, 5, -50])
    ours = ButterworthFilterTransformer(**{**BAND, **DESIGNS[design]})
    pieces = [
        filtered(ours, mx.array(x[start:stop]), call) for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 2000])
    ]
    check_close(np.concatenate(pieces), expected_of(x, **DESIGNS[design]))


@pytest.mark.parametrize("order", [0, 4])
def test_no_order_or_no_frequency_is_no_filter(path, order):
    transformer = ButterworthFilterTransformer(order=order, coef_type="sos")
    for data in (mx.array(noise(5, 2)), noise(5, 2), mx.zeros((0, 2), dtype=mx.int16)):
        sent = message(data)
        assert transformer(sent) is sent
        assert asyncio.run(transformer.__acall__(sent)) is sent


def test_offset_makes_no_transient(path):
    y = filtered(ButterworthFilterTransformer(**BAND), mx.full((300, 2), 1e4))
    assert np.abs(y).max() < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_channel_begins_with_its_first_finite_sample(path, bad):
    x = noise(600, 3) + 100
    x[:5, 0] = bad
    x[:, 1] = bad
    transformer = ButterworthFilterTransformer(**BAND)
    y = filtered(transformer, mx.array(x))
    np.testing.assert_array_equal(y[:5, 0], x[:5, 0])
    np.testing.assert_array_equal(y[:, 1], x[:, 1])
    check_close(y[5:, 0], expected_of(x[5:, :1])[:, 0], 1e-6, peak=100.0)
    check_close(y[:, 2], expected_of(x[:, 2:])[:, 0], 1e-6, peak=100.0)
    # One that was dead from the start begins with a state of zero.
    x = noise(600, 3, seed=1)
    check_close(filtered(transformer, mx.array(x))[:, 1], reference(x[:, 1], BAND_PASS)[0])


def test_given_coefficients_and_chebyshev_filters_work_alike(path):
    x = noise(500, 3) + 20
    chebyshev = dict(order=3, ripple_tol=1.0, Wn=(300.0, 5000.0), btype="bandpass", coef_type="sos")
    for ours, theirs in (
        (FilterTransformer(coefs=BAND_PASS, coef_type="sos"), SigprocFilter(coefs=BAND_PASS, coef_type="sos")),
        (ChebyshevFilterTransformer(**chebyshev), SigprocChebyshev(**chebyshev)),
    ):
        for piece in np.split(x, [200]):
            check_close(filtered(ours, mx.array(piece)), filtered(theirs, piece.astype(np.float64)))


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_are_found_by_the_framework_and_have_the_defaults_of_sigproc():
    assert ButterworthFilterTransformer.get_settings_type() is ButterworthFilterSettings
    assert ButterworthFilter.SETTINGS is ButterworthFilterSettings
    ours = {field.name: field.default for field in dataclasses.fields(ButterworthFilterSettings)}
    assert ours == {field.name: field.default for field in dataclasses.fields(sigproc.ButterworthFilterSettings)}


@pytest.mark.parametrize("order", [-1, 2.0, True, None, "2"], ids=repr)
def test_order_must_be_an_integer_of_0_or_more(order):
    with pytest.raises(ValueError, match="order is .*allowed"):
        ButterworthFilterSettings(order=order)


@pytest.mark.parametrize("field", ["cuton", "cutoff"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1", True, [1.0]], ids=repr)
def test_frequencies_must_be_finite_and_above_0(field, value):
    with pytest.raises((ValueError, TypeError), match=f"{field} is .*allowed"):
        ButterworthFilterSettings(**{field: value})


@pytest.mark.parametrize("field", ["coef_type", "mlx_metal_chunk_sizes"])
@pytest.mark.parametrize("value", ["zpk", None, (0,)], ids=repr)
def test_other_settings_are_checked_as_well(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*allowed"):
        ButterworthFilterSettings(**{field: value})


CHANGES = {
    "other frequencies": [400, dict(cuton=500.0), 300],
    "another kind of filter": [400, dict(cuton=5000.0, cutoff=300.0), 300],
    "another order": [400, dict(order=2), 300, dict(order=3), 99],
    "off and on again": [400, dict(order=0), 50, dict(order=4), 300],
    "before the first message": [dict(cuton=500.0), 300],
    "chunk sizes": [200, dict(mlx_metal_chunk_sizes=(8, 64)), 100, 3],
    "empty messages": [0, 0, 200, 0, dict(cuton=500.0), 0, 30, 0],
}


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("scenario", CHANGES)
def test_settings_at_run_time_do_what_they_do_in_sigproc_called_bare(path, scenario, call):
    # In a graph, that is in an asynchronous call, ezmsg-sigproc starts the filter anew, which makes a click.
    ours, theirs = ButterworthFilterTransformer(**BAND), sigproc.ButterworthFilterTransformer(**BAND)
    x = noise(1000, 3) + 9
    for step in CHANGES[scenario]:
        if isinstance(step, dict):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for transformer in (ours, theirs):
                    transformer.update_settings(dataclasses.replace(transformer.settings, **step))
            continue
        piece, x = x[:step], x[step:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = filtered(theirs, piece.astype(np.float64))
        check_close(filtered(ours, mx.array(piece), call), expected) if step else filtered(ours, mx.array(piece), call)


def test_new_coefficients_make_no_warning_of_the_axis(path):
    transformer = ButterworthFilterTransformer(**BAND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cuton in (300.0, 500.0):
            transformer.update_settings(dataclasses.replace(transformer.settings, cuton=cuton))
            filtered(transformer, mx.array(noise(10, 2)))


def test_coefficients_of_a_running_filter_can_be_replaced(path):
    x = noise(900, 2) + 5
    ours, theirs = FilterTransformer(coefs=BAND_PASS, coef_type="sos"), SigprocFilter(coefs=BAND_PASS, coef_type="sos")
    new = (BAND_PASS[::-1].copy(), HIGH_PASS)
    for call, coefs, piece in zip(("sync", "async", "async"), (None, *new), np.split(x, 3), strict=True):
        if coefs is not None:
            ours.update_coefficients(coefs)
            theirs.update_coefficients(coefs)
        check_close(filtered(ours, mx.array(piece), call), filtered(theirs, piece.astype(np.float64)))


@pytest.mark.parametrize("coefs", [np.ones((2, 5)), np.full((1, 6), math.nan)], ids=["shape", "nan"])
def test_wrong_coefficients_are_refused(path, coefs):
    with pytest.raises(ValueError, match="sos has"):
        filtered(FilterTransformer(coefs=coefs, coef_type="sos"), mx.zeros((5, 2)))


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("call", ["sync", "async"])
def test_everything_but_the_data_goes_through_and_the_message_stays_as_it_is(path, call):
    x = mx.array(noise(50, 4))
    given = labelled(x, "abcd", attrs={"a": 1}, key="k", stream_dim="time")
    before = dict(given.axes), np.array(x).tobytes()
    transformer = ButterworthFilterTransformer(**BAND)
    for _ in range(2):
        result = transformer(given) if call == "sync" else asyncio.run(transformer.__acall__(given))
    assert given.data is x and given.axes == before[0] and np.array(x).tobytes() == before[1]
    assert all(result.axes[dim] is given.axes[dim] for dim in given.axes)
    assert (result.dims, result.attrs, result.key, result.stream_dim) == (["time", "ch"], {"a": 1}, "k", "time")
    assert isinstance(result.data, mx.array)


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("shape", [(0, 3), (40, 0)], ids=str)
def test_dtype_does_not_depend_on_whether_a_message_is_empty(path, shape, call):
    transformer = ButterworthFilterTransformer(**BAND)
    for dtype in (mx.float32, mx.int16, mx.float16):
        for given in (mx.zeros(shape, dtype=dtype), mx.zeros((7, 3), dtype=dtype), mx.zeros(shape, dtype=dtype)):
            sent = message(given)
            result = transformer(sent) if call == "sync" else asyncio.run(transformer.__acall__(sent))
            assert (result.data.shape, result.data.dtype) == (given.shape, mx.float32)


@pytest.mark.parametrize("dims", list(itertools.permutations(["time", "ch", "x"])) + [("win", "time", "ch")], ids=str)
def test_filter_runs_along_the_stream_dimension_wherever_it_is(path, dims):
    x = noise(60, 3, 2) + 5
    stream = "win" if "win" in dims else "time"
    place = dims.index(stream)
    transformer = ButterworthFilterTransformer(**BAND)
    fields = dict(dims=list(dims), stream_dim=stream, axes={stream: AxisArray.TimeAxis(fs=FS)})
    pieces = [
        filtered(transformer, mx.array(piece), **fields)
        for piece in np.split(np.moveaxis(x, 0, place), [1, 30], axis=place)
    ]
    check_close(np.moveaxis(np.concatenate(pieces, axis=place), place, 0), expected_of(x))


# ------------------------------------------------------------------------------------------------------------ resets


def labelled(data, labels: str, **fields) -> AxisArray:
    channels = AxisArray.CoordinateAxis(data=np.array(list(labels)), dims=["ch"])
    return message(data, axes={"time": AxisArray.TimeAxis(fs=FS), "ch": channels}, **fields)


@pytest.mark.parametrize(
    ("other", "n_resets"),
    [
        (labelled(mx.zeros((3, 4)), "abcd"), 1),
        (labelled(mx.zeros((3, 4), dtype=mx.int16), "abcd", attrs={"new": 1}), 1),
        (labelled(mx.zeros((3, 4)), "abcd", key="other"), 2),
        (labelled(mx.zeros((3, 4)), "abdc"), 2),
        (labelled(mx.zeros((3, 3)), "abc"), 2),
        (labelled(mx.zeros((4, 4)), "abcd", dims=["ch", "time"]), 2),
        (labelled(np.zeros((3, 4)), "abcd"), 2),
        (message(mx.zeros((3, 4)), fs=FS * 1.001), 2),
    ],
    ids=["same", "dtype and attributes", "key", "labels", "channels", "dimensions", "backend", "rate"],
)
def test_another_stream_starts_anew(path, other, n_resets, resets):
    transformer = ButterworthFilterTransformer(**BAND)
    transformer(labelled(mx.ones((300, 4)), "abcd"))
    transformer(other)
    assert len(resets) == n_resets


@pytest.mark.parametrize("make", [ButterworthFilterTransformer, FilterTransformer], ids=["by design", "given"])
def test_rate_that_wobbles_by_less_than_1_ppm_keeps_the_state(path, make, resets):
    given = dict(coefs=BAND_PASS, coef_type="sos")
    transformer = make(**(BAND if make is ButterworthFilterTransformer else given))
    x, pieces = noise(1000, 2) + 5, []
    for piece, wobble in zip(np.split(x, 10), [0, 1e-15, 9e-7, -9e-7, 1e-9, 0, 5e-7, -1e-12, 9e-7, 0], strict=True):
        pieces.append(filtered(transformer, mx.array(piece), fs=FS * (1 + wobble)))
    check_close(np.concatenate(pieces), expected_of(x))
    assert len(resets) == 1


@pytest.mark.parametrize("change", [1e-3, -2e-6])
def test_real_change_of_rate_designs_the_filter_anew(path, change, resets):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(300, 2)
    rates = (FS, FS, FS * (1 + change), FS * (1 + change) * (1 + 1e-9), FS * (1 + change))
    y = [filtered(transformer, mx.array(x), fs=fs) for fs in rates]
    assert len(resets) == 2
    theirs = sigproc.ButterworthFilterTransformer(**BAND)
    check_close(y[2], filtered(theirs, x.astype(np.float64), fs=FS * (1 + change)))


def test_wobbling_rate_resets_no_further_once_something_else_did(path, resets):
    transformer = ButterworthFilterTransformer(**BAND)
    rates = iter(FS * (1 + 1e-8 * noise(40).astype(np.float64)))
    for key in ("a", "b"):
        for _ in range(5):
            filtered(transformer, mx.ones((10, 2)), fs=next(rates), key=key)
    assert len(resets) == 2


# ------------------------------------------------------------------------------------------- messages that are refused


@pytest.mark.parametrize("data", ["mlx", "numpy"])
@pytest.mark.parametrize(
    "axis",
    [None, AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"]), AxisArray.LinearAxis(gain=0.0)],
    ids=["none", "irregular", "gain 0"],
)
def test_stream_dimension_without_a_rate_is_refused_and_loses_that_message_only(path, axis, data):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(300, 2) + 5
    given = mx.array if data == "mlx" else np.array
    refused = message(given(x), axes={"time": axis} if axis else {})
    pieces = []
    for piece in np.split(x, 3):
        with pytest.raises(ValueError, match="stream dimension 'time'.*(LinearAxis|gain)"):
            transformer(refused)
        pieces.append(filtered(transformer, given(piece)))
    check_close(np.concatenate(pieces).astype(np.float32), expected_of(x))


def test_given_coefficients_need_no_rate(path):
    axis = AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"])
    transformer = FilterTransformer(coefs=BAND_PASS, coef_type="sos")
    check_close(filtered(transformer, mx.array(noise(300, 2)), axes={"time": axis}), expected_of(noise(300, 2)))


@pytest.mark.parametrize("n", [0, 5])
def test_complex_data_is_refused_and_loses_that_message_only(path, n):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(300, 2) + 5
    pieces = []
    for piece in np.split(x, 3):
        with pytest.raises(TypeError, match="Filtering of complex64"):
            transformer(message(mx.zeros((n, 2), dtype=mx.complex64)))
        pieces.append(filtered(transformer, mx.array(piece)))
    check_close(np.concatenate(pieces), expected_of(x))


# -------------------------------------------------------------------------------------------- left to ezmsg-sigproc


def test_numpy_data_is_left_to_sigproc_and_the_backend_may_change_within_the_stream(path):
    ours, x = ButterworthFilterTransformer(**BAND), noise(400, 2) + 5
    for backend in ("numpy", "mlx", "numpy", "mlx"):
        theirs = sigproc.ButterworthFilterTransformer(**BAND)
        for piece in np.split(x, 4):
            expected = filtered(theirs, piece)
            given = message(piece if backend == "numpy" else mx.array(piece))
            result = ours(given)
            assert type(result.data) is type(given.data)
            if backend == "numpy":
                np.testing.assert_array_equal(result.data, expected)
            check_close(np.array(result.data).astype(np.float32), expected)


@pytest.mark.parametrize(
    "settings", [dict(coef_type="ba", order=2), dict(use_mlx_metal=False)], ids=["ba", "no kernels"]
)
def test_other_coefficients_and_other_kernels_are_left_to_sigproc(settings):
    x = noise(400, 2)
    ours = ButterworthFilterTransformer(**{**BAND, **settings})
    theirs = sigproc.ButterworthFilterTransformer(**{**BAND, **settings})
    with mock.patch.object(module, "run_kernel", side_effect=AssertionError):
        for piece in np.split(x, 4):
            result = ours(message(mx.array(piece)))
            assert isinstance(result.data, mx.array)
            np.testing.assert_array_equal(np.array(result.data), filtered(theirs, mx.array(piece)))


def test_kernels_may_be_switched_off_and_on(path):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(300, 2)
    for call, on in (("sync", True), ("sync", False), ("async", True)):
        transformer.update_settings(dataclasses.replace(transformer.settings, use_mlx_metal=on))
        check_close(filtered(transformer, mx.array(x), call), expected_of(x))


# --------------------------------------------------------------------------------------------- state: path, ownership


def test_path_may_change_within_the_stream():
    transformer, x = ButterworthFilterTransformer(**BAND), noise(900, 2) + 5
    pieces = []
    for piece, path in zip(np.split(x, 9), itertools.cycle(["cpu", "plain", "plain"])):
        with using(path):
            pieces.append(filtered(transformer, mx.array(piece)))
    check_close(np.concatenate(pieces), expected_of(x))


@pytest.mark.parametrize("read", [True, False])
def test_transformer_warmed_up_in_one_thread_goes_on_in_another(path, read):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(160, 2) + 5

    def warm_up():
        result = transformer(message(mx.array(x[:80])))
        if read:
            mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    check_close(filtered(transformer, mx.array(x[80:])), expected_of(x)[80:])


def test_buffers_overwritten_after_the_call_change_neither_results_nor_state(path):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(400, 2) + 5
    results = []
    for piece in np.split(x, 4):
        data = mx.array(piece)
        result = transformer(message(data)).data
        mx.eval(result, transformer.state.filter.state.zi)
        # Windows into the MLX arrays, which a receiver of either may write to.
        np.asarray(data)[:] = 99
        results.append(np.array(result))
        np.asarray(result)[:] = 99
    check_close(np.concatenate(results), expected_of(x))


def test_outputs_that_nobody_reads_do_not_grow_memory(path):
    transformer = FilterTransformer(FilterSettings(coefs=BAND_PASS[:1], coef_type="sos", mlx_metal_chunk_sizes=(1,)))

    def drop(n: int) -> int:
        for _ in range(n):
            transformer(message(mx.array(np.ones((1, 256), np.float32))))
        gc.collect()
        return mx.get_active_memory()

    before = drop(20)
    # The messages alone are 256 KiB.
    assert drop(256) - before < 2**17


def test_state_can_be_pickled_and_taken_up_by_another_transformer(path):
    x = noise(1200, 2) + 5
    state, pieces = None, []
    for piece in np.split(x, 4):
        transformer = FilterTransformer(coefs=BAND_PASS, coef_type="sos")
        state, result = transformer.stateful_op(state, message(mx.array(piece)))
        pieces.append(np.array(result.data))
        state = pickle.loads(pickle.dumps(state))
    check_close(np.concatenate(pieces), expected_of(x))


def test_a_copy_of_the_state_goes_its_own_way(path):
    x = noise(300, 2) + 5
    transformer, other = (FilterTransformer(coefs=BAND_PASS, coef_type="sos") for _ in range(2))
    first = filtered(transformer, mx.array(x[:100]))
    other.stateful_op((copy.deepcopy(transformer.state), transformer._hash), message(mx.zeros((500, 2))))
    check_close(np.concatenate([first, filtered(transformer, mx.array(x[100:]))]), expected_of(x))


def test_axis_of_the_message_is_not_changed_by_a_wobbling_rate(path):
    transformer = ButterworthFilterTransformer(**BAND)
    transformer(message(mx.ones((5, 2))))
    given = message(mx.ones((5, 2)), fs=FS * (1 + 1e-8))
    assert transformer(replace(given)).axes["time"] is given.axes["time"]
