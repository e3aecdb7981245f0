"""The power of MLX data is that of NumPy, and a square is computed as one."""

import math
from unittest import mock

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import PowTransformer

mx = pytest.importorskip("mlx.core")


def power(data: np.ndarray, exponent: float):
    return PowTransformer(exponent=exponent)(AxisArray(data, ["time", "ch"])).data


@pytest.mark.parametrize("exponent", [2, 2.0, 0.5, 3.0, 1.0, -1.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16"])
def test_same_as_numpy(exponent, dtype):
    data = np.arange(1, 13).reshape(6, 2).astype(dtype)
    result, expected = power(mx.array(data), exponent), power(data, exponent)
    np.testing.assert_allclose(np.array(result), expected, rtol=2e-3 if dtype == "float16" else 1e-6)


def test_a_square_is_not_a_general_power():
    data = mx.ones((3, 2))
    with mock.patch.object(mx, "square", wraps=mx.square) as square:
        power(data, 2.0)
        power(data, 3.0)
    assert square.call_count == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("2", TypeError),
        (True, TypeError),
        (None, TypeError),
        (2j, TypeError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
)
def test_exponent_must_be_a_finite_number(value, error):
    with pytest.raises(error, match="^exponent is .*; allowed is a finite number"):
        PowTransformer(exponent=value)
