"""Filters without feedback: banks of them, and Filter with taps, however the stream is cut and on every path."""

import contextlib
from unittest import mock

import ezmsg.sigproc.filter as sigproc
import numpy as np
import pytest
from scipy.signal import firwin

mx = pytest.importorskip("mlx.core")

from helpers.transformers import message

from ezmsg.mlx.filter import FilterTransformer
from ezmsg.mlx.kernels import convolution
from ezmsg.mlx.kernels.convolution import FilterBank

N_SAMPLES, N_CHANNELS = 1500, 3


def on(path: str) -> contextlib.AbstractContextManager:
    """The loop, scipy's FFT, or MLX's FFT as on a GPU."""
    if path == "gpu":
        return mock.patch.object(convolution, "uses_gpu", lambda: True)
    return mock.patch.object(convolution, "DIRECT_COST", 0.0 if path == "loop" else 1e9)


def kernels(kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    lengths = {"one": [1], "several": [31, 170, 2], "complex": [31, 5], "long": [900]}[kind]
    phase = 1j if kind == "complex" else 0.0
    return [
        rng.standard_normal(n) + phase * rng.standard_normal(n) if phase else rng.standard_normal(n) for n in lengths
    ]


def filtered(bank: FilterBank, x: np.ndarray, axis: int, length: int) -> np.ndarray:
    before, results = None, []
    for start in range(0, N_SAMPLES, length):
        part = x[start : start + length]
        data = mx.array(np.ascontiguousarray(np.moveaxis(part, 0, axis)))
        before = bank.before(data, axis) if before is None else before
        y, before = bank.run(data, before, axis)
        results.append(np.array(y))
    return np.concatenate(results, axis=-1)


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize("path", ["loop", "fft", "gpu"])
@pytest.mark.parametrize("kind", ["one", "several", "complex", "long"])
def test_bank_is_convolution_however_it_is_cut(kind, path):
    taps = kernels(kind)
    x = (np.random.default_rng(2).standard_normal((N_SAMPLES, N_CHANNELS)) + 100.0).astype(np.float32)
    expected = np.stack([[np.convolve(channel, one)[:N_SAMPLES] for one in taps] for channel in x.T.astype(np.float64)])
    bank = FilterBank(taps)
    with on(path):
        for length, axis in ((N_SAMPLES, 0), (7, 1), (400, 0)):
            found = filtered(bank, x, axis, length)
            assert found.dtype == (np.complex64 if kind == "complex" else np.float32)
            assert_close(found, expected)


@pytest.mark.parametrize("path", ["loop", "fft", "gpu"])
def test_bank_takes_complex_samples(path):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((N_SAMPLES, 1)) + 1j * rng.standard_normal((N_SAMPLES, 1))).astype(np.complex64)
    taps = kernels("complex")
    with on(path):
        found = filtered(FilterBank(taps), x, 0, 400)
    assert_close(found, np.stack([[np.convolve(x[:, 0].astype(complex), one)[:N_SAMPLES] for one in taps]]))


@pytest.mark.parametrize("path", ["loop", "fft", "gpu"])
def test_a_sample_that_is_not_finite_takes_the_results_that_it_takes_part_in(path):
    x = np.random.default_rng(2).standard_normal((N_SAMPLES, N_CHANNELS)).astype(np.float32)
    x[300, 1] = np.nan
    expected = np.stack([[np.convolve(channel, np.ones(9))[:N_SAMPLES]] for channel in x.T.astype(np.float64)])
    with on(path):
        assert_close(filtered(FilterBank([np.ones(9)]), x, 0, 128), expected)


def test_lengths_of_an_fft_are_few():
    """MLX keeps a plan for each shape."""
    shapes = set()
    rfft = mx.fft.rfft

    def noting(x, **fields):
        shapes.add(x.shape)
        return rfft(x, **fields)

    bank, before = FilterBank(kernels("several")), None
    with on("gpu"), mock.patch.object(mx.fft, "rfft", noting):
        for n in range(1, 6000, 37):
            x = mx.zeros((n, N_CHANNELS))
            _, before = bank.run(x, bank.before(x, 0) if before is None else before, 0)
    assert 1 < len(shapes) <= 6


@pytest.mark.parametrize("path", ["loop", "fft", "gpu"])
@pytest.mark.parametrize("dims", [["time", "ch"], ["ch", "time"]], ids="-".join)
def test_filter_with_taps_is_that_of_sigproc_in_float64(dims, path):
    taps, other = firwin(31, 0.2), firwin(31, 0.4)
    settings = {"coef_type": "ba"}
    theirs = sigproc.FilterTransformer(sigproc.FilterSettings(coefs=(taps, np.array([1.0])), **settings))
    ours = FilterTransformer(sigproc.FilterSettings(coefs=(taps, np.array([1.0])), **settings))
    x = (np.random.default_rng(3).standard_normal((600, N_CHANNELS)) + 50.0).astype(np.float32)
    found, expected = [], []
    with on(path):
        for number, length in enumerate((30, 1, 300, 200, 69)):
            if number == 3:
                for each in (theirs, ours):
                    each.update_coefficients((other, np.array([1.0])))
            part = x[:length] if dims[0] == "time" else x[:length].T
            x = x[length:]
            expected.append(theirs(message(part.astype(np.float64), dims=dims, stream_dim="time")).data)
            # In the middle NumPy data, and on with the same state.
            data = np.ascontiguousarray(part) if number == 2 else mx.array(part)
            found.append(np.array(ours(message(data, dims=dims, stream_dim="time")).data))
            assert_close(found[-1], expected[-1])
