"""Settings and array libraries that change while a stream runs: the new ones are in force, or each message says why."""

import numpy as np
import pytest
from scipy.signal import butter, sosfilt, sosfilt_zi

mx = pytest.importorskip("mlx.core")

from helpers.changed_settings_cases import CHANGES, IMPOSSIBLE, Change, Running, stream
from helpers.recurrences import BAND_PASS, FS, noise

import ezmsg.mlx as package
from ezmsg.mlx import FilterSettings
from ezmsg.mlx.stream.unit import differing_fields

HOW = ["bare", "unit"]
KINDS = ["mlx", "numpy"]
# Of ezmsg-baseproc: the setting "axis" is deprecated. A dimension that no message has is configured here.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def results_of(running: Running, messages) -> list:
    return [result for message in messages for result in running(message)]


def check_in_force(change: Change, ours: list, fresh: list) -> None:
    """What comes out at the end is what comes out where the settings have always been the new ones."""
    assert len(ours) == len(fresh) or change.name in ("Rechunk", "ReadLate")
    peak = max(np.abs(np.array(result.data)).max() for result in fresh)
    for got, want in zip(reversed(ours[-3:]), reversed(fresh[-3:]), strict=True):
        assert type(got.data) is type(want.data) and got.data.dtype == want.data.dtype
        if change.name == "Rechunk":
            continue
        assert got.axes["time"].offset == want.axes["time"].offset
        np.testing.assert_allclose(np.array(got.data), np.array(want.data), rtol=0, atol=change.tolerance * peak)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_new_settings_are_in_force(change, kind, how):
    x = noise(3900, 2) + np.float32([0, 3])
    running = Running(change.name, change.before, how)
    fresh = Running(change.name, {**change.before, **change.after}, how)
    results_of(running, stream(x[:900], kind))
    running.change(**change.after)
    ours = results_of(running, stream(x[900:], kind, start=900))
    check_in_force(change, ours, results_of(fresh, stream(x[900:], kind, start=900)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_settings_that_cannot_be_are_an_error_of_each_message_until_there_are_others(change, kind, how):
    x = noise(3900, 2)
    running = Running(change.name, change.before, how)
    results_of(running, stream(x[:900], kind))
    before = {field: getattr(running.transformer.settings, field) for field in change.after}
    running.change(**change.after)
    for message in stream(x[:900], kind):
        with pytest.raises((ValueError, KeyError), match=r"nowhere|does not describe a filter|below half the sampling"):
            running(message)
    running.change(**before)
    ours = results_of(running, stream(x[900:], kind, start=900))
    check_in_force(change, ours, results_of(Running(change.name, change.before, how), stream(x[900:], kind, start=900)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_sizes_loses_no_sample(kind, how):
    x = noise(2000, 2)
    running, pieces = Running("Rechunk", {"sizes": (128,)}, how), []
    for start, sizes in ((0, (128,)), (500, (64, 300)), (1000, (7,)), (1500, (301,))):
        running.change(sizes=sizes)
        given = results_of(running, stream(x[start : start + 500], kind, length=250, start=start))
        assert {len(piece.data) for piece in given} <= set(sizes)
        pieces += given
    pieces += running.transformer.flush()
    np.testing.assert_array_equal(np.concatenate([np.array(piece.data) for piece in pieces]), x)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_depth_loses_no_message(kind, how):
    x = noise(3000, 2)
    running, results = Running("ReadLate", {"depth": 2}, how), []
    for start, depth in ((0, 3), (1000, 0), (2000, 1)):
        running.change(depth=depth)
        results += results_of(running, stream(x[start : start + 1000], kind, length=100, start=start))
        assert len(results) == (start + 1000) / 100 - depth
    results += running.transformer.flush()
    np.testing.assert_array_equal(np.concatenate([result.data for result in results]), x)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_dtype_is_in_force_for_what_is_read_late(kind, depth):
    running = Running("ReadLate", {"depth": depth}, "bare")
    results_of(running, stream(noise(900, 2), kind))
    running.change(dtype="int16")
    for result in results_of(running, stream(noise(900, 2) * 100, kind)):
        assert type(result.data) is np.ndarray and result.data.dtype == np.int16


# -------------------------------------------------------------------------------------------------- the state goes on


def reference(x: np.ndarray, designs: list[np.ndarray]) -> np.ndarray:
    """scipy's result in float64 where the design changes at equal distances and the state stays."""
    zi, pieces = sosfilt_zi(designs[0])[:, :, None] * x[0].astype(np.float64), []
    for sos, piece in zip(designs, np.split(x.astype(np.float64), len(designs)), strict=True):
        y, zi = sosfilt(sos, piece, axis=0, zi=zi)
        pieces.append(y)
    return np.concatenate(pieces)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("kind", "coef_type"), [("mlx", "ba"), ("mlx", "sos"), ("numpy", "sos")])
def test_the_state_stays_over_a_change_of_design_with_as_many_sections(kind, coef_type, how):
    x = noise(2700, 2) + 5
    settings = {"order": 2, "cuton": 300.0, "cutoff": 3000.0}
    running, results = Running("ButterworthFilter", {**settings, "coef_type": coef_type}, how), []
    bands = [(300.0, 3000.0), (500.0, 4000.0), (400.0, 2000.0)]
    for (cuton, cutoff), piece in zip(bands, np.split(x, 3), strict=True):
        running.change(cuton=cuton, cutoff=cutoff)
        results += results_of(running, stream(piece, kind))
    y = np.concatenate([np.array(result.data) for result in results])
    want = reference(x, [butter(2, band, "bandpass", fs=FS, output="sos") for band in bands])
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


BUTTERWORTH = {"order": 4, "cuton": 300.0, "cutoff": 5000.0}
GOES_ON = {
    "Butterworth, default": ("ButterworthFilter", BUTTERWORTH),
    "Butterworth, sections": ("ButterworthFilter", {**BUTTERWORTH, "coef_type": "sos"}),
    "high-pass of 5 Hz": ("ButterworthFilter", {"order": 2, "cuton": 5.0}),
    "odd order": ("ButterworthFilter", {"order": 5, "cutoff": 1000.0}),
    "Chebyshev": ("ChebyshevFilter", {"order": 3, "ripple_tol": 30.0, "Wn": 2000.0, "cheby_type": "cheby2"}),
    "on the host": ("ButterworthFilter", {**BUTTERWORTH, "use_mlx_metal": False}),
    "given sections": ("Filter", {"coefs": BAND_PASS, "coef_type": "sos"}),
    "given b and a": ("Filter", {"coefs": butter(4, (300.0, 5000.0), "bandpass", fs=FS)}),
    "given b and a of a slow filter": ("Filter", {"coefs": butter(4, 5.0, "highpass", fs=FS)}),
    "longer b": ("Filter", {"coefs": (np.array([0.1, 0.2, 0.3, 0.2]), np.array([1.0, -0.5]))}),
    "taps": ("Filter", {"coefs": (np.ones(9) / 9, np.array([1.0]))}),
}


@pytest.mark.filterwarnings("ignore::scipy.signal.BadCoefficients")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", GOES_ON)
def test_a_filter_goes_on_when_the_array_library_changes(case, how):
    name, settings = GOES_ON[case]
    x = noise(2400, 3) + np.float32([0, 3, -3])
    running, always_numpy, ours, want = Running(name, settings, how), Running(name, settings, how), [], []
    for message in stream(x, "numpy"):
        (expected,) = always_numpy(message)
        want.append(expected.data)
    for number in range(8):
        kind = ("mlx", "mlx", "numpy", "mlx", "numpy", "numpy", "mlx", "numpy")[number]
        (message,) = stream(x[300 * number : 300 * (number + 1)], kind, start=300 * number)
        (result,) = running(message)
        assert type(result.data) is type(message.data)
        ours.append(np.array(result.data))
    y, want = np.concatenate(ours), np.concatenate(want)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_filter_goes_on_when_its_coefficients_are_given_in_the_other_form():
    x = noise(1200, 2) + 5
    sos = BAND_PASS
    ba = butter(4, (300.0, 5000.0), "bandpass", fs=FS)
    want = reference(x, [sos])
    for kind in KINDS:
        running, results = Running("Filter", {"coefs": sos, "coef_type": "sos"}, "bare"), []
        for (coefs, coef_type), piece in zip([(sos, "sos"), (ba, "ba")] * 2, np.split(x, 4), strict=True):
            running.transformer.update_coefficients(coefs, coef_type)
            results += results_of(running, stream(piece, kind))
        y = np.concatenate([np.array(result.data) for result in results])
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_channel_lost_to_scipy_begins_anew_in_mlx():
    x = noise(900, 2) + 5
    x[250, 1] = np.nan
    transformer = package.FilterTransformer(coefs=BAND_PASS, coef_type="sos")
    for kind, begin in (("numpy", 0), ("mlx", 300)):
        (message,) = stream(x[begin : begin + 300], kind, start=begin)
        y = np.array(transformer(message).data)
    want = np.stack(
        [reference(x[:, :1], [BAND_PASS])[300:600, 0], reference(x[300:600, 1:], [BAND_PASS])[:, 0]], axis=1
    )
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_channel_that_has_begun_goes_on_after_a_message_without_it():
    x = noise(1200, 1) + 5
    transformer, results = package.FilterTransformer(coefs=BAND_PASS, coef_type="sos"), []
    for kind, piece in zip(("numpy", "mlx", "mlx"), (x[:600], np.full((300, 1), np.nan, "f4"), x[600:]), strict=True):
        results += [np.array(transformer(message).data) for message in stream(piece, kind)]
    assert np.isnan(results[1]).all()
    want = reference(x, [BAND_PASS])
    np.testing.assert_allclose(np.concatenate(results[::2]), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_channel_that_has_not_begun_begins_wherever_its_first_sample_comes():
    x = noise(900, 2) + 5
    x[:300, 1] = np.nan
    want = reference(x[300:, 1:], [BAND_PASS])
    ba = butter(4, (300.0, 5000.0), "bandpass", fs=FS)
    for kinds, coefs in (("mlx", "numpy", "mlx"), None), (("mlx", "mlx", "mlx"), ba):
        transformer, results = package.FilterTransformer(coefs=BAND_PASS, coef_type="sos"), []
        for kind, piece in zip(kinds, np.split(x, 3), strict=True):
            results += [np.array(transformer(message).data) for message in stream(piece, kind)]
            if coefs is not None:
                transformer.update_coefficients(coefs, "ba")
        y = np.concatenate(results)[300:, 1:]
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_another_axis_is_another_stream(kind):
    x = noise(40, 60)
    transformer = package.ButterworthFilterTransformer(order=2, cutoff=3000.0, coef_type="sos")
    fresh = package.ButterworthFilterTransformer(order=2, cutoff=3000.0, coef_type="sos", axis="ch")
    (message,) = stream(x, kind)
    message.axes["ch"] = message.axes["time"]
    transformer(message)
    transformer.update_settings(axis="ch")
    np.testing.assert_array_equal(np.array(transformer(message).data), np.array(fresh(message).data))


def test_coefficients_of_the_same_values_are_the_same_settings():
    taps = np.ones(3), np.array([1.0, 0.5, 0.25])
    before = FilterSettings(coefs=taps)
    same = FilterSettings(coefs=tuple(map(np.copy, taps)))
    assert not differing_fields(before, same)
    for other in ((taps[0], taps[1][:2]), (taps[0], 2 * taps[1])):
        assert differing_fields(before, FilterSettings(coefs=other)) == {"coefs"}
