"""The function ewma(): the cases of its own on the paths that run anywhere, and what is particular to one."""

import math
from functools import partial

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import OWN_CASES, alpha_of, state_of
from helpers.recurrences import EWMA, check_close, noise

from ezmsg.mlx.ewma import ewma


@pytest.mark.parametrize("path", ["cpu", "plain"])
@pytest.mark.parametrize("case", OWN_CASES)
def test_case(case, path):
    OWN_CASES[case](path)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0000001, math.nan, math.inf, True, "0.1", None, 0.1 + 0j], ids=repr)
def test_alpha_must_be_a_number_above_0_and_up_to_1(alpha):
    with pytest.raises(ValueError, match="'alpha' must be .*> 0 and <= 1"):
        ewma(mx.zeros((5,)), alpha)


@pytest.mark.parametrize("alpha", [1, np.float32(0.25), np.float64(0.25), 5e-324])
def test_alpha_may_be_any_real_number(alpha):
    y, _ = ewma(mx.ones((1,)), alpha)
    assert y.item() == np.float32(alpha)


# ------------------------------------------------------------------------------------- samples that are not finite


@pytest.mark.parametrize("axis", [0, 1])
def test_cpu_leaves_a_bad_sample_out_of_the_average_whatever_the_cutting(axis):
    alpha, x = alpha_of(0.01), noise(700, 9)
    x[[0, 5, 6, 300, 699], [0, 1, 1, 2, 3]] = [math.nan, math.inf, -math.inf, math.nan, math.inf]
    expected = EWMA.without(x, alpha, np.zeros((1, 9)))
    if axis == 1:
        x, expected = x.T, expected.T
    zi = mx.zeros(EWMA.state_shape(x.shape, axis, pair=True))
    for lengths in ([], [1] * 20, [6, 0, 300]):
        y, _ = EWMA.in_pieces(mx.array(x), lengths, alpha, zi, "cpu", axis=axis)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


def test_plain_operations_count_a_bad_sample_as_one_at_the_average_before_its_chunk():
    alpha, x = alpha_of(0.01), noise(96, 2) + 3
    x[[40, 70, 71], [0, 1, 1]] = [math.nan, math.inf, -math.inf]
    run = partial(ewma, alpha=alpha, axis=0, chunk_sizes=(32,), path="plain")
    average, filled = [[2.0, 2.0]], x.copy()
    state = state_of(average, alpha)
    for start in (0, 32, 64):
        chunk = filled[start : start + 32]
        chunk[~np.isfinite(chunk)] = np.broadcast_to(average, chunk.shape)[~np.isfinite(chunk)]
        y, state = run(mx.array(chunk), zi=state)
        average = np.array(y)[-1:]
    y, _ = run(mx.array(x), zi=state_of([[2.0, 2.0]], alpha))
    expected, _ = run(mx.array(filled), zi=state_of([[2.0, 2.0]], alpha))
    finite = np.isfinite(x)
    check_close(np.array(y)[finite], np.array(expected)[finite], 1e-6)
    np.testing.assert_array_equal(np.array(y)[~finite], x[~finite])
