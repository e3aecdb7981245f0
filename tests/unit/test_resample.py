"""Resampling and joining: results of ezmsg-sigproc on NumPy, sample for sample, while MLX data stays on the device."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import ezmsg.sigproc.resample as sigproc
import ezmsg.sigproc.resampleconcat as sigproc_concat
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import ResampleConcatProcessor, ResampleProcessor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FS = 1000.0
LENGTHS = (200, 7, 0, 1, 300, 200, 65, 400)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    with mock.patch("ezmsg.mlx.resample.uses_gpu", lambda: device == "gpu"):
        yield


def stream(dims: list[str], kind: str, fs: float = FS, first: float = 0.0, lengths=LENGTHS, key: str = "amp"):
    rng, start = np.random.default_rng(len(key)), 0
    channels = AxisArray.CoordinateAxis(data=np.array([f"{key}{i}" for i in range(3)]), dims=["ch"])
    for n in lengths:
        data = rng.standard_normal((n, 3)).astype(np.float32).astype(np.float64)
        time = AxisArray.TimeAxis(fs=fs, offset=first + start / fs)
        if kind == "coordinates":
            time = AxisArray.CoordinateAxis(data=first + (start + np.arange(n)) / fs, dims=["time"], unit="s")
        data = data if dims[0] == "time" else np.ascontiguousarray(data.T)
        axes = {"time": time, "ch": channels}
        yield AxisArray(data, dims, axes=axes, key=key, attrs={"unit": "uV"}, stream_dim="time")
        start += n


def as_mlx(message: AxisArray) -> AxisArray:
    return replace(message, data=mx.array(message.data.astype(np.float32)))


def assert_same(found: AxisArray, expected: AxisArray) -> None:
    names = ("dims", "key", "attrs", "stream_dim", "axes")
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    assert isinstance(found.data, mx.array) and found.data.shape == expected.data.shape
    np.testing.assert_allclose(np.array(found.data), expected.data, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["regular", "coordinates"])
@pytest.mark.parametrize("dims", [["time", "ch"], ["ch", "time"]], ids="-".join)
@pytest.mark.parametrize(
    "settings",
    [
        {"resample_rate": 500.0},
        {"resample_rate": 333.3, "fill_value": "last"},
        {"resample_rate": 1500.0, "fill_value": 7.0},
        {"resample_rate": 1500.0, "fill_value": (5.0, 7.0), "max_chunk_delay": 1e-9},
    ],
    ids=["slower", "last", "faster", "ahead"],
)
def test_results_are_those_of_sigproc(settings, dims, kind, device):
    theirs, ours, n_compared = sigproc.ResampleProcessor(**settings), ResampleProcessor(**settings), 0
    with on(device):
        for message in stream(dims, kind):
            expected = theirs.send(message)
            assert_same(ours.send(as_mlx(message)), expected)
            n_compared += expected.data.size > 0
    assert n_compared >= 5


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["regular", "coordinates"])
@pytest.mark.parametrize("dims", [["time", "ch"], ["ch", "time"]], ids="-".join)
def test_a_signal_at_the_times_of_a_reference_and_both_joined(dims, kind, device):
    theirs = sigproc_concat.ResampleConcatProcessor(sigproc_concat.ResampleConcatSettings())
    ours = ResampleConcatProcessor(sigproc_concat.ResampleConcatSettings())
    signal = stream(dims, kind)
    # A little faster, and some samples ahead.
    reference = stream(dims, kind, 1003.0, 0.0101, [n + 3 for n in LENGTHS], "reference")
    n_compared = 0
    with on(device):
        for message, times in zip(signal, reference, strict=True):
            theirs.push_reference(times)
            ours.push_reference(as_mlx(times))
            expected, found = theirs(message), ours(as_mlx(message))
            if expected is None or 0 in expected.data.shape:
                assert found is None
            else:
                assert_same(found, expected)
                n_compared += 1
    assert n_compared >= 5


@pytest.mark.parametrize("kind", ["regular", "coordinates", "one that is late"])
def test_results_between_samples_need_no_interpolation_of_numbers(kind, monkeypatch):
    """It takes longer than that of the samples. Times are those of a clock, which float64 has to 0.2 µs."""
    theirs = sigproc_concat.ResampleConcatProcessor(sigproc_concat.ResampleConcatSettings())
    ours = ResampleConcatProcessor(sigproc_concat.ResampleConcatSettings())
    of_samples = "regular" if kind == "regular" else "coordinates"
    messages = list(stream(["time", "ch"], of_samples, FS, 1.7e9))
    references = list(stream(["time", "ch"], of_samples, 803.0, 1.7e9 + 0.0101, key="reference"))
    if kind == "one that is late":
        references[4].axes["time"].data[7] -= 5.0
    expected = []
    for message, times in zip(messages, references, strict=True):
        theirs.push_reference(times)
        expected.append(theirs(message))
    monkeypatch.setattr("scipy.interpolate.interp1d", mock.Mock(side_effect=AssertionError))
    for message, times, wanted in zip(messages, references, expected, strict=True):
        ours.push_reference(as_mlx(times))
        found = ours(as_mlx(message))
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert_same(found, wanted)


def test_settings_change_in_a_running_stream():
    theirs, ours = sigproc.ResampleProcessor(resample_rate=500.0), ResampleProcessor(resample_rate=500.0)
    for number, message in enumerate(stream(["time", "ch"], "regular")):
        if number == 5:
            for processor in (theirs, ours):
                processor.update_settings(replace(processor.settings, resample_rate=250.0))
        assert_same(ours.send(as_mlx(message)), theirs.send(message))


def test_no_more_is_kept_than_is_needed():
    ours = ResampleProcessor(resample_rate=500.0)
    for message in stream(["time", "ch"], "regular", lengths=(100,) * 50):
        ours.send(as_mlx(message))
    assert ours.state.signal._data.shape[0] < 10


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_all_that_was_kept_may_have_been_used(device):
    """Not a sample of the reference is left then, whose number could be asked for. Results at samples are these."""
    ours = ResampleConcatProcessor(sigproc_concat.ResampleConcatSettings())
    n_results = 0
    with on(device):
        for message in stream(["time", "ch"], "regular", lengths=(50,) * 6):
            ours.push_reference(as_mlx(replace(message, key="reference")))
            result = np.array(ours(as_mlx(message)).data)
            n_results += len(result)
            np.testing.assert_array_equal(result[:, :3], message.data.astype(np.float32))
    assert n_results == 300


def test_what_is_no_message_is_refused():
    for call in (ResampleProcessor(resample_rate=500.0), ResampleProcessor().push_reference):
        with pytest.raises(TypeError, match="^ResampleProcessor takes an AxisArray as its message, got a list"):
            call([1.0])
