"""The cases of the moving average alone, on the kernels of the GPU; and sizes that only a GPU is tried with."""

import numpy as np
import pytest
from helpers.ewma_cases import OWN_CASES, alpha_of, reference, zero_state
from helpers.recurrences import EWMA, check_close, noise

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.ewma import ewma


@pytest.mark.parametrize("path", ["cuda", "plain"])
@pytest.mark.parametrize("case", OWN_CASES)
def test_case(case, path):
    OWN_CASES[case](path)


@pytest.mark.parametrize("n_channels", [1, 2, 3, 31, 32, 33, 100, 257, 70000])
@pytest.mark.parametrize("n_samples", [1, 31, 32, 33, 511, 512, 513, 1025])
def test_any_size(n_samples, n_channels):
    x, alpha = noise(n_samples, n_channels) + 5, alpha_of(0.01)
    y, zf = ewma(mx.array(x), alpha, zero_state(x.shape), axis=0)
    expected = reference(x, alpha)
    check_close(y, expected)
    check_close(np.array(zf).astype(np.float64).sum(0).astype(np.float32), (1 - alpha) * expected[-1])


@pytest.mark.parametrize("time_constant", [0.01, 1.0, 60.0, 300.0])
def test_long_messages_follow_float64(time_constant):
    x, alpha = noise(300000, 4) + 5, alpha_of(time_constant)
    y, _ = EWMA.in_pieces(mx.array(x), [299990], alpha, zero_state(x.shape), "cuda")
    check_close(y, reference(x, alpha))


def test_long_messages_in_one_compiled_function_tell_apart():
    # Of the same shape and made alike, so that what each launch writes to must not become one array.
    x, alphas = noise(30000, 40) + 5, (alpha_of(0.01), alpha_of(1.0))
    averages = mx.compile(lambda data: [ewma(data, alpha, zero_state(x.shape), axis=0)[0] for alpha in alphas])
    for y, alpha in zip(averages(mx.array(x)), alphas, strict=True):
        check_close(y, reference(x, alpha))
