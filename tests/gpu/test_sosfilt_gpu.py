"""The cases of second-order sections, on the kernels of the GPU; and sizes that only a GPU is tried with."""

import numpy as np
import pytest
from helpers.sosfilt_cases import (
    BAND_PASS,
    CASES,
    FILTERS,
    check_close,
    in_pieces,
    noise,
    pairs_of,
    reference,
    settled_state,
    state_of,
    without,
)

mx = pytest.importorskip("mlx.core")

import ezmsg.mlx.sosfilt as module  # noqa: E402
from ezmsg.mlx.kernels.cuda_sosfilt import TILE  # noqa: E402


@pytest.mark.parametrize("path", ["cuda", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_case(case, path):
    CASES[case](path)


def test_cuda_is_what_a_gpu_takes_by_itself():
    assert module.select_path() == "cuda"
    default = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert module.select_path() == "cpu"
    finally:
        mx.set_default_device(default)


@pytest.mark.parametrize("n_channels", [1, 2, 3, 7, 8, 9, 31, 32, 33, 100, 257, 70000])
@pytest.mark.parametrize("n_samples", [1, 15, 16, 17, 511, 512, 513, 577, 4097])
def test_any_size(n_samples, n_channels):
    if n_samples * n_channels > 40_000_000:
        n_samples = 600
    x = noise(n_samples, n_channels) + 5
    # Enough channels to see which block a channel went to; scipy takes seconds for all.
    some = np.unique(np.linspace(0, n_channels - 1, 70).astype(int))
    zi = settled_state(BAND_PASS, x)
    y, zf = in_pieces(mx.array(x), [], BAND_PASS, pairs_of(zi), "cuda")
    expected, last = reference(x[:, some], BAND_PASS, zi[..., some])
    check_close(y[:, some], expected, 1e-6, peak=5.0)
    np.testing.assert_allclose(state_of(zf)[..., some], last, rtol=0, atol=1e-7 * np.abs(last).max())
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", FILTERS)
def test_long_messages_follow_float64(name):
    sos, x = FILTERS[name], noise(100000, 3) + 5
    zi = settled_state(sos, x)
    y, zf = in_pieces(mx.array(x), [99990], sos, pairs_of(zi), "cuda")
    expected, last = reference(x, sos, zi)
    check_close(y, expected, 1e-6, peak=max(5.0, np.abs(expected).max()))
    np.testing.assert_allclose(state_of(zf), last, rtol=0, atol=1e-6 * np.abs(last).max())


def test_bad_samples_in_tiles_of_a_long_message():
    x = noise(9000, 40)
    x[np.random.default_rng(1).random(x.shape) < 0.001] = np.nan
    x[TILE : 2 * TILE, 3] = np.inf
    zi = np.zeros((len(BAND_PASS), 2, 40))
    y, _ = in_pieces(mx.array(x), [], BAND_PASS, pairs_of(zi), "cuda")
    finite = np.isfinite(x)
    np.testing.assert_array_equal(y[~finite], x[~finite])
    check_close(np.where(finite, y, 0), np.where(finite, without(x, BAND_PASS, zi), 0))
