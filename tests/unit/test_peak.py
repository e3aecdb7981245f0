"""Threshold crossings: the samples that ezmsg-event finds, whatever the messages, the backend and the form."""

import dataclasses
import pickle

import ezmsg.event.peak as event
import numpy as np
import pytest
import sparse
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.processes import RecordedLog
from helpers.recurrences import noise
from scipy.signal import lfilter

mx = pytest.importorskip("mlx.core")

from helpers.crossing_cases import signal

from ezmsg.mlx import AsArrayTransformer, SparseEvents, ThresholdCrossingTransformer, ThresholdSettings
from ezmsg.mlx.kernels import use_plain_kernels
from ezmsg.mlx.kernels.crossings import NORMAL

FS = 30000.0

CUTS = {"whole": [], "odd": [1, 2, 3, 100, 130, 131, 900], "1 ms": list(range(30, 3000, 30))}

SETTINGS = [
    {"threshold": -0.5},
    {"threshold": 0.5, "refrac_dur": 0.0},
    {"threshold": 0.0, "refrac_dur": 2 / FS},
    {"threshold": 0.5, "min_peak_dur": 3.01 / FS},
    {"threshold": -0.5, "align_on_peak": True, "refrac_dur": 3.01 / FS},
    {"threshold": -0.5, "return_peak_val": True, "refrac_dur": 0.0003},
    {"threshold": 0.5, "return_peak_val": True, "align_on_peak": True, "min_peak_dur": 0.0001},
    {"threshold": -1.0, "auto_scale_tau": 0.05},
    {"threshold": 1.0, "auto_scale_tau": 0.05, "return_peak_val": True, "align_on_peak": True},
]
"""Durations are such that no rounding decides how many samples they have."""


def message(data, first: int = 0, dims: tuple[str, ...] = ("time", "ch")) -> AxisArray:
    return AxisArray(data, list(dims), axes={"time": AxisArray.TimeAxis(fs=FS, offset=first / FS)}, key="amp")


def stream() -> np.ndarray:
    x = lfilter([0.3], [1, -0.7], np.random.default_rng(1).standard_normal((3000, 7)), axis=0).astype(np.float32)
    # Often just at the threshold.
    x[:, 0] = np.round(2 * x[:, 0]) / 2
    return x


def dense(data) -> np.ndarray:
    return np.array(data.todense() if hasattr(data, "todense") else data)


def events(transformer, x: np.ndarray, cuts, to_backend=mx.array) -> np.ndarray:
    """Dense results of a stream, put where they belong; the last ones are not known yet."""
    results, first, delay = [], 0, 0
    for piece in np.split(x, cuts):
        result = transformer(message(to_backend(piece), first))
        delay = round(first - result.axes["time"].offset * FS)
        first += len(piece)
        results.append(dense(result.data))
    return np.concatenate(results)[delay:]


@pytest.mark.parametrize("output_format", ["dense", "sparse"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_events_are_those_of_ezmsg_event(settings, output_format):
    x = stream()
    reference = event.ThresholdCrossingTransformer(event.ThresholdSettings(**settings, output_format=output_format))
    expected = dense(reference(message(x)).data)
    assert np.count_nonzero(expected) > 50
    for to_backend in (np.array, mx.array):
        for cuts in CUTS.values():
            transformer = ThresholdCrossingTransformer(**settings, output_format=output_format)
            found = events(transformer, x, cuts, to_backend)
            assert found.dtype == (np.float32 if settings.get("return_peak_val") else bool)
            n = min(len(found), len(expected))
            assert n > 2900
            np.testing.assert_array_equal(found[:n], expected[:n])


def test_settings_of_ezmsg_event_are_taken():
    given = event.ThresholdSettings(threshold=-2.0, output_format=event.OutputFormat.DENSE)
    transformer = ThresholdCrossingTransformer(given)
    assert transformer.settings == ThresholdSettings(threshold=-2.0, output_format="dense")


@pytest.mark.parametrize("settings", SETTINGS[:7:3], ids=str)
def test_plain_operations_find_the_same(settings, monkeypatch):
    x, results = stream()[:400], []
    for plain in (False, True):
        use_plain_kernels(plain)
        try:
            results.append(events(ThresholdCrossingTransformer(**settings), x, [1, 130]))
        finally:
            use_plain_kernels(False)
    np.testing.assert_array_equal(*results)


def test_a_sample_that_equals_the_threshold_has_reached_it():
    below, above = np.nextafter(np.float32(-3.5), [0, -9], dtype=np.float32)
    x = np.array([[0, 0, 0], [-3.5, below, above], [0, 0, 0], [3.5, -below, -above], [0, 0, 0]], np.float32)
    for threshold, row in ((-3.5, 1), (3.5, 3)):
        found = events(ThresholdCrossingTransformer(threshold=threshold, refrac_dur=0.0), x, [])
        np.testing.assert_array_equal(np.argwhere(found), [[row, 0], [row, 2]])
    found = events(ThresholdCrossingTransformer(threshold=0.0, refrac_dur=0.0), x[:3], [])
    np.testing.assert_array_equal(np.argwhere(found), [[2, 0], [2, 1], [2, 2]])


def test_the_first_sample_of_a_stream_begins_no_event_and_the_first_of_a_message_may():
    x = np.array([[-9.0], [0.0], [-9.0], [-9.0]], np.float32)
    for cuts in ([], [1], [2], [3], [1, 2, 3]):
        found = events(ThresholdCrossingTransformer(), x, cuts)
        np.testing.assert_array_equal(found[:, 0], [False, False, True, False])


def test_each_channel_may_have_a_threshold_of_its_own():
    x, thresholds = stream(), [-0.5, 0.5, -1.0, 0.2, 3.0, -0.1, 0.0]
    for given in (thresholds, np.array(thresholds), tuple(thresholds)):
        found = events(ThresholdCrossingTransformer(threshold=given), x, [40])
        for channel, threshold in enumerate(thresholds):
            alone = ThresholdCrossingTransformer(threshold=threshold)
            np.testing.assert_array_equal(found[:, channel], events(alone, x[:, [channel]], [])[:, 0])
    with pytest.raises(ValueError, match=r"'threshold' must be a number, or one for each channel of shape \(6,\)"):
        ThresholdCrossingTransformer(threshold=thresholds)(message(mx.array(x[:, :6])))


@pytest.mark.parametrize("scale", ["rms", "mad"])
def test_thresholds_follow_the_running_scale_of_each_channel(scale):
    x = noise(20000, 4) * np.float32([1, 10, 0.01, 1])
    x[::400, 3] -= 30
    transformer = ThresholdCrossingTransformer(threshold=-3.5, auto_scale_tau=0.05, auto_scale=scale)
    found = events(transformer, x, [7, 3000])
    # As the definition says, in float64.
    alpha, weight, now = -np.expm1(-1 / (0.05 * FS)), 0.0, np.zeros(4)
    scales = np.empty(x.shape)
    for sample, result in zip(x.astype(float), scales, strict=True):
        weight += alpha * (1 - weight)
        size, share = np.abs(sample), alpha / weight
        if scale == "rms":
            now += share * (size**2 - now)
            result[:] = np.sqrt(now)
        else:
            gain = min(0.5, 1.1664 * share * (1 + 7 * (1 - weight)))
            now = np.where(now == 0, size, now * (1 + gain * np.sign(size - now)))
            result[:] = NORMAL * now
    of_event = event.ThresholdCrossingTransformer(event.ThresholdSettings(threshold=-3.5, output_format="dense"))
    expected = of_event(message(x / scales)).data
    np.testing.assert_array_equal(found, expected)
    settled = scales[10000:] / [1, 10, 0.01, 1]
    # Spikes of 30 deviations in one sample of 400 raise the one, and hardly the other.
    np.testing.assert_allclose(settled[:, :3].mean(axis=0), 1, atol=0.1)
    assert (settled[:, 3].mean() > 1.5) == (scale == "rms") and settled[:, 3].mean() < 2.5


def test_a_scale_that_begins_at_a_tiny_sample_is_right_soon():
    x = noise(3000, 50)
    x[0] = 1e-7
    transformer = ThresholdCrossingTransformer(threshold=-3.0, auto_scale_tau=10.0, auto_scale="mad")
    transformer(message(mx.array(x)))
    median = np.array(transformer.state.zi)[2]
    np.testing.assert_allclose(NORMAL * median.mean(), 1, atol=0.05)


def test_samples_that_are_not_finite_have_not_reached_a_threshold_and_do_not_scale():
    x = signal()
    with np.errstate(invalid="ignore"):
        expected = event.ThresholdCrossingTransformer(event.ThresholdSettings(threshold=0.5, output_format="dense"))(
            message(x)
        ).data
    found = events(ThresholdCrossingTransformer(threshold=0.5), x, [105])
    np.testing.assert_array_equal(found, expected)
    assert found[:, 3].sum() and not found[np.isnan(x)].any()
    for scale in ("zscore", "rms", "mad"):
        transformer = ThresholdCrossingTransformer(threshold=1.0, auto_scale_tau=0.001, auto_scale=scale)
        found = events(transformer, x, [105])
        assert not found[~np.isfinite(x)].any() and found[400:].sum() > 20
        assert np.isfinite(np.array(transformer.state.zi)).all()


def test_an_event_that_does_not_end_counts_and_holds_nothing_back():
    x = np.zeros((400, 2), np.float32)
    x[50:250, 0], x[60:63, 1], x[100, 0] = -5, -6, -7
    transformer = ThresholdCrossingTransformer(threshold=-3.5, return_peak_val=True, align_on_peak=True)
    found = events(transformer, x, list(range(30, 400, 30)))
    assert sorted(zip(*np.nonzero(found), strict=True)) == [(60, 1), (100, 0)] and found[100, 0] == -7


def test_any_dimension_may_stream_and_there_may_be_any_number():
    x = stream()[:600, :6].reshape(600, 2, 3)
    expected = events(ThresholdCrossingTransformer(threshold=-0.5), x.reshape(600, 6), [])
    for axis, dims in enumerate([("time", "a", "b"), ("a", "time", "b"), ("a", "b", "time")]):
        for output_format in ("dense", "sparse"):
            transformer = ThresholdCrossingTransformer(threshold=-0.5, output_format=output_format)
            result = transformer(message(mx.array(np.moveaxis(x, 0, axis)), dims=dims))
            assert result.dims == ["time", "a", "b"] and result.data.shape == (600, 2, 3)
            np.testing.assert_array_equal(dense(result.data).reshape(600, 6), expected)
    alone = ThresholdCrossingTransformer(threshold=-0.5)(message(mx.array(x[:, 0, 0]), dims=("time",)))
    np.testing.assert_array_equal(dense(alone.data), expected[:, 0])


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float16", "float64"])
def test_data_of_any_real_dtype_is_taken(dtype):
    x = np.round(noise(300, 3) * 10).clip(0).astype(dtype)
    expected = events(ThresholdCrossingTransformer(threshold=5.0), x.astype(np.float32), [])
    for to_backend in (np.array, mx.array) if dtype != "float64" else (np.array,):
        found = events(ThresholdCrossingTransformer(threshold=5.0), x, [], to_backend)
        np.testing.assert_array_equal(found, expected)


def test_the_state_goes_on_over_a_gap_and_begins_anew_with_other_channels():
    x = np.zeros((4, 2), np.float32)
    x[3] = -9
    transformer = ThresholdCrossingTransformer()
    assert dense(transformer(message(mx.array(x))).data).sum() == 2
    # In the refractory period, whatever the clock says.
    assert not dense(transformer(message(mx.array(x), first=90000)).data).any()
    assert dense(transformer(message(mx.array(x[:, :1]), first=90004)).data).sum() == 1


def test_thresholds_change_while_it_runs():
    transformer = ThresholdCrossingTransformer(threshold=-1.0, refrac_dur=0.0)
    x = mx.array(np.array([[0.0], [-2.0], [0.0], [-2.0]], np.float32))
    assert dense(transformer(message(x)).data).sum() == 2
    transformer.update_settings(ThresholdSettings(threshold=-3.0, refrac_dur=0.0))
    n_seen = transformer.state.n_seen
    assert not dense(transformer(message(x, 4)).data).any() and transformer.state.n_seen == n_seen + 4


def test_sparse_events_stay_on_the_device_and_become_those_of_ezmsg_event_on_the_host():
    x = stream()
    result = ThresholdCrossingTransformer(threshold=-0.5, return_peak_val=True)(message(mx.array(x)))
    assert isinstance(result.data, SparseEvents) and result.data.ndim == 2 and result.data.nbytes < x.nbytes / 5
    reference = event.ThresholdCrossingTransformer(event.ThresholdSettings(threshold=-0.5, return_peak_val=True))
    # Those that are out by now, the others being behind.
    delay = round(-result.axes["time"].offset * FS)
    expected = reference(message(x)).data[: len(x) - delay]
    for found in (
        result.data.tocoo(),
        pickle.loads(pickle.dumps(result.data)),
        AsArrayTransformer(backend="numpy")(result).data,
    ):
        assert isinstance(found, sparse.COO)
        np.testing.assert_array_equal(found.coords[0] - delay, expected.coords[0])
        np.testing.assert_array_equal(found.coords[1], expected.coords[1])
        np.testing.assert_array_equal(found.data, expected.data)


@pytest.mark.parametrize("output_format", ["dense", "sparse"])
def test_a_message_without_samples_has_the_form_of_the_others(output_format):
    for to_backend in (np.array, mx.array):
        transformer = ThresholdCrossingTransformer(output_format=output_format)
        for first, n in ((0, 0), (0, 5), (5, 0)):
            result = transformer(message(to_backend(np.zeros((n, 3), np.float32)), first))
            assert result.data.shape == (n, 3) and dense(result.data).dtype == bool
            assert result.axes["time"].offset == first / FS


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"threshold": "low"}, TypeError, "'threshold' must be a number"),
        ({"threshold": (1.0, True)}, TypeError, "'threshold' must be a number"),
        ({"threshold": np.nan}, ValueError, "'threshold' must be a finite number"),
        ({"threshold": ()}, ValueError, "'threshold' must be a finite number"),
        ({"max_peak_dur": 0}, ValueError, "'max_peak_dur' must be a finite number > 0"),
        ({"refrac_dur": -1.0}, ValueError, "'refrac_dur' must be a finite number >= 0"),
        ({"auto_scale_tau": np.inf}, ValueError, "'auto_scale_tau' must be"),
        ({"align_on_peak": 1}, TypeError, "'align_on_peak' must be True or False"),
        ({"output_format": "full"}, ValueError, "'output_format' must be one of 'sparse', 'dense', got 'full'"),
        ({"auto_scale": "std"}, ValueError, "'auto_scale' must be one of 'zscore', 'rms', 'mad', got 'std'"),
    ],
)
def test_bad_settings_are_refused_when_they_are_built(fields, error, words):
    with pytest.raises(error, match=words):
        ThresholdSettings(**fields)


def test_a_scale_without_a_time_constant_is_warned_of_once():
    def warnings(*lengths: int, **settings) -> list[str]:
        transformer = ThresholdCrossingTransformer(threshold=-4.5, **settings)
        with RecordedLog() as log:
            for number, n in enumerate(lengths):
                transformer(message(mx.zeros((n, 2))))
                transformer.update_settings(dataclasses.replace(transformer.settings, threshold=-5.0 - number))
        return log.warnings

    (warning,) = warnings(30, 30, 30, auto_scale="mad")
    assert "takes -4.5 for an absolute value" in warning and "('mad'), since 'auto_scale_tau' is 0" in warning
    assert not warnings(30, auto_scale="mad", auto_scale_tau=1.0)
    # That of ezmsg-event, which has no other.
    assert not warnings(30)


def test_complex_data_is_refused():
    x = np.zeros((3, 2), np.complex64)
    for data in (x, mx.array(x)):
        with pytest.raises(TypeError, match="complex64"):
            ThresholdCrossingTransformer()(message(data))


@pytest.mark.parametrize("backend", [np.array, mx.array])
def test_another_rate_and_other_channels_have_parameters_of_their_own(backend):
    settings = {"max_peak_dur": 0.002, "return_peak_val": True, "output_format": "dense", "auto_scale_tau": 0.05}
    used = ThresholdCrossingTransformer(threshold=1.5, **settings)
    for fs, n_channels in ((500.0, 2), (1000.0, 2), (1000.0, 4), (2000.0, 3)):
        fresh, offset = ThresholdCrossingTransformer(threshold=1.5, **settings), 0.0
        for n in (50, 7, 64):
            data = np.random.default_rng(n).standard_normal((n, n_channels)).astype(np.float32)
            axes = {"time": AxisArray.TimeAxis(fs=fs, offset=offset)}
            message = AxisArray(backend(data), ["time", "ch"], axes=axes)
            result, expected = used(message), fresh(message)
            np.testing.assert_array_equal(np.array(result.data), np.array(expected.data))
            assert result.axes == expected.axes
            offset += n / fs
    # Settings that need no reset are worked out for the present rate.
    for transformer in (used, fresh):
        transformer.update_settings(replace(transformer.settings, threshold=-0.5))
    np.testing.assert_array_equal(np.array(used(message).data), np.array(fresh(message).data))
