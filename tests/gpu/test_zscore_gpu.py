"""The cases of z-scores alone, on the kernels of the GPU; and sizes that only a GPU is tried with."""

import numpy as np
import pytest
from helpers.recurrences import CORRECTED, ZSCORE, alpha_of, check_close, check_state, noise
from helpers.zscore_cases import OWN_CASES

mx = pytest.importorskip("mlx.core")


@pytest.mark.parametrize("path", ["cuda", "plain"])
@pytest.mark.parametrize("case", OWN_CASES)
def test_case(case, path):
    OWN_CASES[case](path)


@pytest.mark.parametrize("recurrence", [CORRECTED, ZSCORE], ids=lambda recurrence: recurrence.name)
@pytest.mark.parametrize("n_channels", [1, 2, 3, 31, 32, 33, 100, 257, 70000])
@pytest.mark.parametrize("n_samples", [1, 31, 32, 33, 511, 512, 513, 1025])
def test_any_size(recurrence, n_samples, n_channels):
    x, alpha = noise(n_samples, n_channels) + 5, alpha_of(0.01)
    # Enough channels to see which block a channel went to.
    some = np.unique(np.linspace(0, n_channels - 1, 70).astype(int))
    y, zf = recurrence.in_pieces(mx.array(x), [], alpha, None, "cuda")
    expected, last = recurrence.reference(x[:, some], alpha)
    check_close(y[:, some], expected, peak=1.0 if n_samples == 1 else None)
    check_state(recurrence.state_of(zf)[..., some], last)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("recurrence", [CORRECTED, ZSCORE], ids=lambda recurrence: recurrence.name)
@pytest.mark.parametrize("time_constant", [0.01, 1.0, 300.0])
def test_long_messages_follow_float64(recurrence, time_constant):
    x, alpha = noise(100000, 4) + 5, alpha_of(time_constant)
    y, zf = recurrence.in_pieces(mx.array(x), [99990], alpha, None, "cuda")
    expected, last = recurrence.reference(x, alpha)
    check_close(y, expected)
    check_state(recurrence.state_of(zf), last)
