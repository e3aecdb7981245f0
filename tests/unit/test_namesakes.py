"""Units composed of this package's filters: the values and the metadata of ezmsg-sigproc on NumPy, on every backend."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from ezmsg.sigproc.adaptive_lnc import CancelMethod
from ezmsg.sigproc.butterworthfilter import ButterworthFilterSettings
from ezmsg.sigproc.downsample import DownsampleSettings
from ezmsg.sigproc.filterbank import FilterbankMode, MinPhaseMode
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from scipy.signal import firwin

mx = pytest.importorskip("mlx.core")

from helpers.on_no_gpu import as_on_a_gpu

import ezmsg.mlx

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FS = 1000.0
N_CHANNELS = 4
LENGTHS = (200, 7, 1, 300, 200, 65)
BAND = {"order": 4, "cuton": 30.0, "cutoff": 100.0, "coef_type": "sos"}
BAND_PASS = ButterworthFilterSettings(**BAND)
LOW_PASS = ButterworthFilterSettings(order=4, cutoff=10.0, coef_type="sos")
OTHER_BAND = {"order": 4, "cuton": 60.0, "cutoff": 200.0, "coef_type": "sos"}
TAPS = firwin(31, [30.0, 100.0], fs=FS, pass_zero=False)
HILBERT = {"order": 30, "f_lo": 50.0, "f_hi": 300.0, "trans_lo": 20.0, "trans_hi": 20.0}

CASES: dict[str, tuple[str, dict, dict]] = {
    "sigmoid": ("activation.ActivationTransformer", {"function": "sigmoid"}, {"function": "log_expit"}),
    "log_expit": ("activation.ActivationTransformer", {"function": "LOG_EXPIT"}, {"function": "none"}),
    "line": ("adaptive_lnc.AdaptiveLNCTransformer", {}, {"adapt_time_constant": 0.3}),
    "line of constant frequency": (
        "adaptive_lnc.AdaptiveLNCTransformer",
        {"num_harmonics": 2, "freq_time_constant": None},
        {"line_freq": 50.0},
    ),
    "common line": (
        "adaptive_lnc.AdaptiveLNCTransformer",
        {"num_harmonics": 2, "cancel_method": CancelMethod.SUBTRACT},
        {"cancel_method": CancelMethod.PASSTHROUGH},
    ),
    "zero phase": ("butterworthzerophase.ButterworthZeroPhaseTransformer", BAND, {}),
    "zero phase, ba": ("butterworthzerophase.ButterworthZeroPhaseTransformer", {"order": 2, "cutoff": 60.0}, {}),
    "comb": ("combfilter.CombFilterTransformer", {"coef_type": "sos"}, {"q_factor": 10.0}),
    "comb of peaks": (
        "combfilter.CombFilterTransformer",
        {"filter_type": "peak", "num_harmonics": 1},
        {"fundamental_freq": 700.0, "filter_type": "notch"},
    ),
    "decimate": (
        "decimate.ChebyForDecimateTransformer",
        {"order": 8, "ripple_tol": 0.05, "Wn": 0.2, "wn_hz": False, "coef_type": "sos"},
        {"Wn": 0.1},
    ),
    "decimate by less than 2": (
        "decimate.ChebyForDecimateTransformer",
        {"order": 8, "ripple_tol": 0.05, "Wn": 300.0},
        {"Wn": 100.0, "coef_type": "sos"},
    ),
    "bank": ("filterbank.FilterbankTransformer", {"kernels": [TAPS, TAPS[5:]]}, {"kernels": [TAPS]}),
    "bank, windows": (
        "filterbank.FilterbankTransformer",
        {"kernels": [TAPS, 1j * TAPS[5:]], "mode": FilterbankMode.FFT},
        {"mode": FilterbankMode.CONV},
    ),
    "bank of minimum phase": (
        "filterbank.FilterbankTransformer",
        {"kernels": [TAPS, TAPS[4:]], "mode": FilterbankMode.AUTO, "min_phase": MinPhaseMode.HOMOMORPHIC},
        {"new_axis": "filter"},
    ),
    "Hilbert": ("fir_hilbert.FIRHilbertFilterTransformer", HILBERT, {"f_lo": 100.0}),
    "envelope": ("fir_hilbert.FIRHilbertEnvelopeTransformer", HILBERT, {"norm_freq": 100.0}),
    "RMS": ("singlebandpow.RMSBandPowerTransformer", {"bandpass": BAND_PASS}, {"apply_sqrt": False}),
    "square law": (
        "singlebandpow.SquareLawBandPowerTransformer",
        {"bandpass": BAND_PASS, "lowpass": LOW_PASS, "downsample": DownsampleSettings(factor=4)},
        {"bandpass": ButterworthFilterSettings(**OTHER_BAND)},
    ),
    "wavelets": (
        "wavelets.CWTTransformer",
        {"frequencies": [20.0, 40.0], "wavelet": "cmor1.5-1.0"},
        {"wavelet": "mexh"},
    ),
    "real wavelets": (
        "wavelets.CWTTransformer",
        {"frequencies": [40.0], "wavelet": "mexh"},
        {"frequencies": [30.0, 50.0]},
    ),
}
"""Module and transformer, its settings, and those that change."""

MODULES = ("activation", "adaptive_lnc", "butterworthzerophase", "fir_hilbert", "kernels.convolution", "resample")


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """The paths of this machine's CPU, or the MLX operations that a GPU computes, with plain kernels."""
    with contextlib.ExitStack() as stack:
        if device == "gpu":
            for module in MODULES:
                stack.enter_context(mock.patch(f"ezmsg.mlx.{module}.uses_gpu", lambda: True))
            for module in ("adaptive_lnc", "butterworthzerophase", "filter", "kernels"):
                stack.enter_context(mock.patch(f"ezmsg.mlx.{module}.default_path", lambda: "plain"))
        yield


def make(package: str, name: str, settings: dict) -> Callable[[AxisArray], AxisArray]:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(f"ezmsg.{package}.{module}"), kind)(**settings)


def stream(dims: list[str], lengths: tuple[int, ...] = LENGTHS) -> Iterator[AxisArray]:
    """NumPy data in float64, with values that float32 has: noise, an offset and a line."""
    rng = np.random.default_rng(0)
    channels = AxisArray.CoordinateAxis(data=np.array(list("abcd")), dims=["ch"])
    first = 0
    for n in lengths:
        time = (first + np.arange(n))[:, None] / FS
        data = rng.standard_normal((n, N_CHANNELS)) + 3.0 + np.cos(2 * np.pi * 59.7 * time) * np.arange(N_CHANNELS)
        data = data.astype(np.float32).astype(np.float64)
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=first / FS), "ch": channels}
        data = data if dims[0] == "time" else np.ascontiguousarray(data.T)
        yield AxisArray(data, dims, axes=axes, key="amp", attrs={"unit": "uV"}, stream_dim="time")
        first += n


def as_mlx(message: AxisArray) -> AxisArray:
    return replace(message, data=mx.array(message.data.astype(np.float32)))


def assert_same(found: AxisArray, expected: AxisArray, tolerance: float = 1e-5) -> None:
    assert (found.dims, found.key, found.attrs, found.stream_dim) == (
        expected.dims,
        expected.key,
        expected.attrs,
        expected.stream_dim,
    )
    assert found.axes.keys() == expected.axes.keys()
    for name, axis in expected.axes.items():
        if isinstance(axis, AxisArray.LinearAxis):
            assert (found.axes[name].gain, found.axes[name].unit) == (axis.gain, axis.unit)
            # Where nothing has come out yet, there is no first sample.
            assert found.axes[name].offset == pytest.approx(axis.offset, abs=1e-9) or not expected.data.size
        else:
            assert found.axes[name] == axis
    assert isinstance(found.data, mx.array)
    y, z = np.array(found.data), np.asarray(expected.data)
    assert y.shape == z.shape and y.dtype == (np.complex64 if z.dtype.kind == "c" else np.float32)
    if z.size:
        np.testing.assert_allclose(y, z, rtol=0, atol=tolerance * np.abs(z).max())


def changed(transformer, changes: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer.update_settings(replace(transformer.settings, **changes))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("dims", [["time", "ch"], ["ch", "time"]], ids="-".join)
@pytest.mark.parametrize("case", CASES)
def test_values_and_metadata_are_those_of_sigproc_on_numpy(case, dims, device):
    name, settings, _ = CASES[case]
    theirs, ours = make("sigproc", name, settings), make("mlx", name, settings)
    n_compared = 0
    with on(device):
        for message in stream(dims):
            expected = theirs(message)
            assert_same(ours(as_mlx(message)), expected)
            n_compared += expected.data.size > 0
    assert n_compared >= 3


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero phase")])
def test_results_do_not_depend_on_how_the_stream_is_cut(case, device):
    name, settings, _ = CASES[case]
    whole, cut = make("mlx", name, settings), make("mlx", name, settings)
    everything = list(stream(["time", "ch"], (sum(LENGTHS),)))
    parts = [everything[0].data[first : first + 77] for first in range(0, sum(LENGTHS), 77)]
    with on(device):
        expected = whole(as_mlx(everything[0]))
        axis = expected.dims.index("time")
        # Once in between nothing comes.
        parts.insert(2, parts[0][:0])
        results = [np.array(cut(as_mlx(replace(everything[0], data=part))).data) for part in parts]
    y, z = np.concatenate(results, axis=axis), np.array(expected.data)
    assert y.shape == z.shape
    np.testing.assert_allclose(y, z, rtol=0, atol=1e-5 * np.abs(z).max())


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2]])
def test_settings_change_in_a_running_stream(case):
    name, settings, changes = CASES[case]
    theirs, ours = make("sigproc", name, settings), make("mlx", name, settings)
    before = [(ours(as_mlx(message)), theirs(message)) for message in stream(["time", "ch"])][-1]
    for transformer in (ours, theirs):
        changed(transformer, changes)
    differs = False
    for message in stream(["time", "ch"]):
        found, expected = ours(as_mlx(message)), theirs(message)
        assert_same(found, expected)
        differs |= found.data.shape != before[0].data.shape or not np.allclose(found.data, before[0].data)
    assert differs


def test_zero_phase_takes_other_corners_in_both_directions():
    """In ezmsg-sigproc 3.11.1 the backward pass goes on with the old ones. No sample is lost either."""
    ours = make("mlx", "butterworthzerophase.ButterworthZeroPhaseTransformer", BAND)
    messages = list(stream(["time", "ch"], (2000, 2000, 2000)))
    results = [ours(as_mlx(messages[0]))]
    changed(ours, OTHER_BAND)
    results += [ours(as_mlx(message)) for message in messages[1:]]
    theirs = make("sigproc", "butterworthzerophase.ButterworthZeroPhaseTransformer", OTHER_BAND)
    expected = [theirs(message) for message in messages]
    np.testing.assert_allclose(results[2].data, expected[2].data[-len(results[2].data) :], rtol=0, atol=1e-4)
    ends = [result.axes["time"].value(len(result.data)) for result in results]
    assert [result.axes["time"].offset for result in results[1:]] == pytest.approx(ends[:-1])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "case", ["line", "common line", "zero phase", "comb", "square law", "envelope", "bank", "wavelets"]
)
def test_a_sample_that_is_not_finite_spoils_no_other_channel_and_is_forgotten(case, device):
    name, settings, _ = CASES[case]
    clean, dirty = make("mlx", name, settings), make("mlx", name, settings)
    with on(device):
        for number, message in enumerate(stream(["time", "ch"], (200,) * 12)):
            expected = np.array(clean(as_mlx(message)).data)
            data = message.data.copy()
            if number == 3:
                data[40, 1] = np.nan
            found = np.array(dirty(as_mlx(replace(message, data=data))).data)
            axis = 0 if found.shape[0] == N_CHANNELS and found.ndim == 3 else 1
            others = np.arange(N_CHANNELS) != 1
            if case.endswith("line"):
                # All channels follow one frequency.
                assert np.isfinite(np.compress(others, found, axis)).all()
            else:
                np.testing.assert_allclose(
                    np.compress(others, found, axis), np.compress(others, expected, axis), atol=1e-5
                )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_line_is_followed_for_hours():
    """In float32 its phase would be lost: after a day at 30 kHz it is off by a radian."""
    settings = {"line_freq": 60.0}
    for device in ("cpu", "gpu"):
        with on(device):
            late, early = (make("mlx", "adaptive_lnc.AdaptiveLNCTransformer", settings) for _ in range(2))
            for number, message in enumerate(stream(["time", "ch"], (300,) * 4)):
                found, expected = late(as_mlx(message)), early(as_mlx(message))
                if number == 0:
                    late.state.phase += 2 * np.pi * 60 * 86400
            np.testing.assert_allclose(found.data, expected.data, atol=1e-4)
            assert late.state.omega == pytest.approx(early.state.omega, rel=1e-7)


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("activation.ActivationSettings", {"function": "relu"}, "'function' must be one of"),
        ("adaptive_lnc.AdaptiveLNCSettings", {"line_freq": 0.0}, "'line_freq' must be"),
        ("adaptive_lnc.AdaptiveLNCSettings", {"cancel_method": "x"}, "'cancel_method' must be one of .*, got 'x'"),
        ("butterworthzerophase.ButterworthZeroPhaseSettings", {"settle_cutoff": 0.0}, "'settle_cutoff' must be"),
        ("combfilter.CombFilterSettings", {"num_harmonics": 0}, "'num_harmonics' must be an integer of at least 1"),
        (
            "combfilter.CombFilterSettings",
            {"filter_type": "x"},
            "'filter_type' must be one of 'notch', 'peak', got 'x'",
        ),
        ("filterbank.FilterbankSettings", {"kernels": []}, "'kernels' must be a list"),
        ("filterbank.FilterbankSettings", {"kernels": [np.zeros((2, 2))]}, "'kernels' must be arrays"),
        ("fir_hilbert.FIRHilbertFilterSettings", {"coef_type": "sos"}, "'coef_type' must be 'ba'"),
        ("singlebandpow.RMSBandPowerSettings", {"bin_duration": 0.0}, "'bin_duration' must be"),
        ("wavelets.CWTSettings", {"frequencies": None, "wavelet": "mexh"}, "'scales' must be given"),
        ("wavelets.CWTSettings", {"frequencies": [-1.0], "wavelet": "mexh"}, "'frequencies' must be numbers > 0"),
        ("resample.ResampleSettings", {"resample_rate": 0.0}, "'resample_rate' must be"),
        ("resample.ResampleSettings", {"fill_value": "x"}, "'fill_value' must be"),
    ],
)
def test_settings_are_checked(name, settings, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make("mlx", name, settings)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_comb_filter_at_its_corners(backend):
    (message,) = stream(["time", "ch"], (200,))
    message = as_mlx(message) if backend == "mlx" else message

    def run(**settings):
        return make("mlx", "combfilter.CombFilterTransformer", settings)(message)

    # All harmonics are at half the sampling rate and above.
    assert run(fundamental_freq=FS / 2) is message
    assert not np.array_equal(run(fundamental_freq=FS / 2 - 0.1).data, message.data)
    nyquist = rf"'fundamental_freq' must be below half the sampling rate \({FS / 2:g} Hz\), got {FS / 2}$"
    with pytest.raises(ValueError, match=nyquist):
        run(fundamental_freq=FS / 2, filter_type="peak")
    # Both are no filters that forget: the first one's results are NaN soon, the poles of the others are at 1.
    for settings in ({"q_factor": 0.1, "filter_type": "peak"}, {"q_factor": 1e17}, {"fundamental_freq": 1e-9}):
        with pytest.raises(ValueError, match=rf"'q_factor' must give bands that a filter can have at {FS:g} Hz, got "):
            run(**settings)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("case", ["sigmoid", "comb", "square law", "RMS"])
def test_they_are_fused_in_a_chain(case, device):
    name, settings, changes = CASES[case]
    alone = make("mlx", name, settings)
    stages = [
        ezmsg.mlx.AsArrayTransformer(backend="mlx"),
        make("mlx", name, settings),
        ezmsg.mlx.AsArrayTransformer(backend="numpy"),
    ]
    chain = ezmsg.mlx.ChainTransformer(stages.copy, lengths=(30,))
    with as_on_a_gpu() if device == "gpu" else contextlib.nullcontext():
        for number, message in enumerate(stream(["time", "ch"], (30, 30, 30, 7, 30, 30, 30, 30))):
            if number == 6:
                for transformer in (alone, stages[1]):
                    changed(transformer, changes)
            given = replace(message, data=message.data.astype(np.float32))
            found, expected = chain(given), alone(as_mlx(given))
            assert found.axes == expected.axes
            np.testing.assert_allclose(
                found.data, expected.data, rtol=0, atol=1e-6 * np.abs(expected.data).max(initial=0.0)
            )
            if number == 5:
                assert chain._runner._usual is not None


@pytest.mark.parametrize("in_chain", [False, True])
def test_power_in_bins_declares_its_stream_dimension_as_sigproc_does(in_chain):
    name, settings, _ = CASES["RMS"]
    theirs, ours = make("sigproc", name, settings), make("mlx", name, settings)
    if in_chain:
        to_mlx, to_numpy = (ezmsg.mlx.AsArrayTransformer(backend=backend) for backend in ("mlx", "numpy"))
        ours = ezmsg.mlx.ChainTransformer([to_mlx, ours, to_numpy].copy)
    for message in stream(["time", "ch"], (60,) * 6):
        undeclared = replace(message, stream_dim=None)
        expected = theirs(undeclared)
        found = ours(undeclared)
        assert (found.dims, found.stream_dim, found.data.shape) == (["time", "ch"], "time", expected.data.shape)
