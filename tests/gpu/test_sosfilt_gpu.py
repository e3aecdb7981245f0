"""The cases of second-order sections alone, on the kernels of the GPU; and sizes that only a GPU is tried with."""

import numpy as np
import pytest
from helpers.recurrences import BAND_PASS, FILTERS, SOSFILT, check_close, check_state, noise
from helpers.sosfilt_cases import CASES

mx = pytest.importorskip("mlx.core")


@pytest.mark.parametrize("path", ["cuda", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_case(case, path):
    CASES[case](path)


@pytest.mark.parametrize("n_channels", [1, 2, 3, 7, 8, 9, 31, 32, 33, 100, 257, 70000])
@pytest.mark.parametrize("n_samples", [1, 15, 16, 17, 511, 512, 513, 577, 4097])
def test_any_size(n_samples, n_channels):
    if n_samples * n_channels > 40_000_000:
        n_samples = 600
    x = noise(n_samples, n_channels) + 5
    # Enough channels to see which block a channel went to; scipy takes seconds for all.
    some = np.unique(np.linspace(0, n_channels - 1, 70).astype(int))
    zi = SOSFILT.settled_state(BAND_PASS, x)
    y, zf = SOSFILT.in_pieces(mx.array(x), [], BAND_PASS, SOSFILT.pairs_of(zi), "cuda")
    expected, last = SOSFILT.reference(x[:, some], BAND_PASS, zi[..., some])
    check_close(y[:, some], expected, 1e-6, peak=5.0)
    check_state(SOSFILT.state_of(zf)[..., some], last, 1e-7)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", FILTERS)
def test_long_messages_follow_float64(name):
    sos, x = FILTERS[name], noise(100000, 3) + 5
    zi = SOSFILT.settled_state(sos, x)
    y, zf = SOSFILT.in_pieces(mx.array(x), [99990], sos, SOSFILT.pairs_of(zi), "cuda")
    expected, last = SOSFILT.reference(x, sos, zi)
    check_close(y, expected, 1e-6, peak=max(5.0, np.abs(expected).max()))
    check_state(SOSFILT.state_of(zf), last, 1e-6)
