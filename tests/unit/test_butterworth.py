"""Filters by coefficients and by design: what is particular to them. What filters have in common:
test_filter_habits.py; values of the kernels: helpers/sosfilt_cases.py.
"""

import dataclasses
import itertools
import math
import warnings
from unittest import mock

import ezmsg.sigproc.butterworthfilter as sigproc
import numpy as np
import pytest
from ezmsg.sigproc.cheby import ChebyshevFilterTransformer as SigprocChebyshev
from ezmsg.sigproc.filter import FilterTransformer as SigprocFilter
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from helpers.recurrences import BAND_PASS, FS, HIGH_PASS, check_close, noise
from helpers.transformers import TRANSFORMERS, filtered, message, using

import ezmsg.mlx.filter as module
from ezmsg.mlx.butterworthfilter import ButterworthFilterSettings, ButterworthFilterTransformer
from ezmsg.mlx.cheby import ChebyshevFilterSettings, ChebyshevFilterTransformer
from ezmsg.mlx.filter import FilterSettings, FilterTransformer

BAND = TRANSFORMERS["Butterworth"].settings


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


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


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("design", DESIGNS)
def test_results_are_those_of_sigproc_on_numpy(path, design, how):
    x = noise(2000, 3) + np.float32([0, 5, -50])
    ours = ButterworthFilterTransformer(**{**BAND, **DESIGNS[design]})
    pieces = [
        filtered(ours, mx.array(x[start:stop]), how) for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 2000])
    ]
    check_close(np.concatenate(pieces), expected_of(x, **DESIGNS[design]))


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
    # One that was dead in the whole first message begins in a later one, like the others.
    x = noise(600, 3, seed=1) + 100
    x[:7, 1] = bad
    y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, [3, 50])])
    np.testing.assert_array_equal(y[:7, 1], x[:7, 1])
    check_close(y[7:, 1], expected_of(x[7:, 1:2])[:, 0], 1e-6, peak=100.0)
    check_close(y[:, 2], expected_of(np.concatenate([noise(600, 3)[:, 2:] + 100, x[:, 2:]]))[600:, 0], 1e-6, peak=100.0)


@pytest.mark.parametrize("sample", [1e30, -1e30])
def test_a_channel_may_begin_with_the_largest_sample(path, sample):
    x = np.float32(sample) * np.ones((4, 1), np.float32)
    y = filtered(ButterworthFilterTransformer(**{**BAND, "cuton": None}), mx.array(x))
    # Taken by the filter and by its start alike: it has been there for ever.
    np.testing.assert_allclose(y, x, rtol=1e-5)
    above = np.nextafter(np.float32(sample), np.float32(sample) * 2)
    y = filtered(ButterworthFilterTransformer(**BAND), mx.array(np.array([[above], [1.0], [1.0]], np.float32)))
    np.testing.assert_allclose(y, [[above], [0.0], [0.0]], atol=1e-6)


def test_channels_that_begin_late_are_those_along_the_other_axes(path):
    x = noise(3, 40, 2).astype(np.float32) + 50
    x[1, :20, 0] = x[2, :, 1] = math.nan
    transformer, pieces = FilterTransformer(coefs=BAND_PASS, coef_type="sos"), []
    for piece in np.split(x, [10, 25], axis=1):
        pieces.append(filtered(transformer, mx.array(piece), dims=["ch", "time", "x"]))
    y = np.concatenate(pieces, axis=1)
    for channel in itertools.product(range(3), range(2)):
        taken = np.isfinite(x[channel[0], :, channel[1]])
        one = x[channel[0], taken, channel[1]]
        if taken.any():
            check_close(y[channel[0], taken, channel[1]], expected_of(one[:, None])[:, 0], 1e-6, peak=50.0)
    assert np.isnan(y[2, :, 1]).all()


def test_given_coefficients_and_chebyshev_filters_work_alike(path):
    x = noise(500, 3) + 20
    chebyshev = dict(order=3, ripple_tol=1.0, Wn=(300.0, 5000.0), btype="bandpass", coef_type="sos")
    for ours, theirs in (
        (FilterTransformer(coefs=BAND_PASS, coef_type="sos"), SigprocFilter(coefs=BAND_PASS, coef_type="sos")),
        (ChebyshevFilterTransformer(**chebyshev), SigprocChebyshev(**chebyshev)),
    ):
        for piece in np.split(x, [200]):
            check_close(filtered(ours, mx.array(piece)), filtered(theirs, piece.astype(np.float64)))


@pytest.mark.parametrize("cheby_type", ["cheby1", "cheby2"])
@pytest.mark.parametrize("to", [mx.array, np.array])
def test_frequencies_of_both_types_may_be_normalised(cheby_type, to):
    settings = dict(order=3, ripple_tol=20.0, cheby_type=cheby_type, coef_type="sos")
    x = to(noise(300, 2))
    in_hz = ChebyshevFilterTransformer(**settings, Wn=3000.0)
    normalised = ChebyshevFilterTransformer(**settings, Wn=0.2, wn_hz=False)
    np.testing.assert_allclose(filtered(normalised, x), filtered(in_hz, x), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("order", [-1, 2.0, True, None, "2"], ids=repr)
def test_order_must_be_an_integer_of_0_or_more(order):
    with pytest.raises(ValueError, match="'order' must be"):
        ButterworthFilterSettings(order=order)


@pytest.mark.parametrize("field", ["cuton", "cutoff"])
@pytest.mark.parametrize(
    "value", [0.0, -1.0, math.nan, math.inf, pytest.param(10**400, id="10**400"), "1", True, [1.0]], ids=repr
)
def test_frequencies_must_be_finite_and_above_0(field, value):
    with pytest.raises((ValueError, TypeError), match=f"'{field}' must be"):
        ButterworthFilterSettings(**{field: value})


@pytest.mark.parametrize("kind", [ButterworthFilterSettings, ChebyshevFilterSettings, FilterSettings])
@pytest.mark.parametrize("value", ["zpk", None, (0,)], ids=repr)
def test_kind_of_coefficients_must_be_one_of_two(kind, value):
    with pytest.raises(ValueError, match="'coef_type' must be"):
        kind(coef_type=value)


@pytest.mark.parametrize("kind", [ButterworthFilterSettings, ChebyshevFilterSettings, FilterSettings])
def test_what_all_filters_have_is_checked(kind):
    for field in ("use_mlx_metal", "use_fast_sosfilt", *(["wn_hz"] if kind is not FilterSettings else [])):
        with pytest.raises(TypeError, match=f"^'{field}' must be True or False, got 'no'"):
            kind(**{field: "no"})
    with pytest.raises(ValueError, match="'mlx_metal_chunk_sizes' must be .*, got 32"):
        kind(mlx_metal_chunk_sizes=32)
    with pytest.raises(TypeError, match="'axis' must be .*, got 0"), pytest.warns(FutureWarning):
        kind(axis=0)


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "order": (-1, 2.0, True, "2"),
        "ripple_tol": (0.0, "1", True, math.inf),
        "Wn": (0.0, "1", True, (1.0, "2"), (1.0, 2.0, 3.0), ()),
        "btype": ("band", None),
        "cheby_type": ("cheby3", 1),
    }.items(),
)
def test_fields_of_a_chebyshev_filter_are_checked(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"'{field}' must be .*, got .*"):
            ChebyshevFilterSettings(**{field: value})
    ChebyshevFilterSettings(order=2, Wn=[300.0, 5000.0], btype="bandpass", ripple_tol=1, cheby_type="cheby2")


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


@pytest.mark.parametrize(
    "coefs, error, text",
    [
        (np.ones((2, 5)), ValueError, r"'coefs' must have the shape \(n_sections, 6\).*\(2, 5\)"),
        (np.full((1, 6), math.nan), ValueError, "not finite"),
        ([[1.0, 2.0], [3.0]], TypeError, "coefs is not an array"),
        (np.ones((1, 6), complex), TypeError, "'coefs' must hold real numbers, got dtype complex128"),
    ],
    ids=["shape", "nan", "ragged", "complex"],
)
def test_wrong_coefficients_are_refused_when_settings_are_built(coefs, error, text):
    with pytest.raises(error, match=text):
        FilterSettings(coefs=coefs, coef_type="sos")


def test_wrong_coefficients_of_a_running_filter_are_refused(path):
    transformer = FilterTransformer(coefs=BAND_PASS, coef_type="sos")
    filtered(transformer, mx.zeros((5, 2)))
    with pytest.raises(ValueError, match=r"'coefs' must have the shape \(n_sections, 6\).*\(2, 5\)"):
        transformer.update_coefficients(np.ones((2, 5)))
    assert filtered(transformer, mx.ones((5, 2))).shape == (5, 2)


# ------------------------------------------------------------------------------------------------------ sampling rate


def test_given_coefficients_need_no_rate(path):
    axis = AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"])
    transformer = FilterTransformer(coefs=BAND_PASS, coef_type="sos")
    check_close(filtered(transformer, mx.array(noise(300, 2)), axes={"time": axis}), expected_of(noise(300, 2)))


@pytest.mark.parametrize("change", [1e-3, -2e-6])
def test_real_change_of_rate_designs_the_filter_anew(path, change):
    transformer, x = ButterworthFilterTransformer(**BAND), noise(300, 2)
    for fs in (FS, FS * (1 + change)):
        y = filtered(transformer, mx.array(x), fs=fs)
    check_close(y, TRANSFORMERS["Butterworth"].expected_of(x, fs=FS * (1 + change)))


def test_all_that_the_settings_say_of_filtering_reaches_the_filter():
    transformer = ButterworthFilterTransformer(**BAND)
    values = dict(
        use_fast_sosfilt=False,
        use_mlx_metal=False,
        mlx_metal_chunk_sizes=(8, 64),
        thread_min_bytes=0,
        fir_fft_min_taps=7,
    )
    for fields in ({}, values):
        transformer.update_settings(dataclasses.replace(transformer.settings, **fields))
        filtered(transformer, mx.ones((5, 2)))
        for field in values:
            assert getattr(transformer.state.filter.settings, field) == getattr(transformer.settings, field)


# -------------------------------------------------------------------------------------------- left to ezmsg-sigproc


def test_numpy_data_is_filtered_by_the_coefficients_that_the_settings_name():
    transformer = ButterworthFilterTransformer(**{**BAND, "coef_type": "ba"})
    for data, coef_type in ((mx.ones((5, 2)), "sos"), (np.ones((5, 2)), "ba"), (mx.ones((5, 2)), "sos")):
        filtered(transformer, data)
        assert transformer.state.filter.settings.coef_type == coef_type


def test_an_analog_design_is_not_taken_for_another_filter():
    # As sections it would be another one on samples, so it stays what ezmsg-sigproc makes of it.
    settings = dict(order=3, ripple_tol=20.0, Wn=0.5, cheby_type="cheby1", analog=True, wn_hz=False)
    x = noise(20, 2)
    y = filtered(ChebyshevFilterTransformer(**settings), mx.array(x))
    np.testing.assert_allclose(y, filtered(SigprocChebyshev(**settings), x.astype(np.float64)), rtol=1e-5)


def test_without_kernels_sections_are_left_to_sigproc():
    x = noise(400, 2)
    ours = ButterworthFilterTransformer(**BAND, use_mlx_metal=False)
    theirs = sigproc.ButterworthFilterTransformer(**BAND, use_mlx_metal=False)
    with mock.patch.object(module, "kernel", side_effect=AssertionError):
        for piece in np.split(x, 4):
            result = ours(message(mx.array(piece)))
            assert isinstance(result.data, mx.array)
            np.testing.assert_array_equal(np.array(result.data), filtered(theirs, mx.array(piece)))


def test_kernels_may_be_switched_off_and_on(path):
    transformer, x, pieces = ButterworthFilterTransformer(**BAND), noise(900, 2) + 5, []
    for piece, call, on in zip(np.split(x, 3), ("sync", "sync", "async"), (True, False, True), strict=True):
        transformer.update_settings(dataclasses.replace(transformer.settings, use_mlx_metal=on))
        pieces.append(filtered(transformer, mx.array(piece), call))
    check_close(np.concatenate(pieces), expected_of(x))


def test_a_corner_that_the_rate_does_not_allow_is_named():
    transformer = ButterworthFilterTransformer(order=2, cuton=30.0, cutoff=700.0)
    with pytest.raises(ValueError, match=r"^'cutoff' must be below half the sampling rate \(500 Hz\), got 700.0$"):
        filtered(transformer, noise(9, 2), fs=1000.0)
