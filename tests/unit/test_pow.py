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


@pytest.mark.parametrize("in_mlx", [False, True], ids=["numpy", "mlx"])
@pytest.mark.parametrize("exponent", [2, 3, -1, -2, 0, np.int64(2), np.float64(2.0)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"])
def test_integers_do_not_wrap(dtype, exponent, in_mlx):
    # Powers of two, which float32 holds; their cubes as well.
    largest = 1 if dtype == "bool" else min(np.iinfo(dtype).max // 2 + 1, 2**40)
    lowest = -largest if dtype.startswith("int") else 1
    data = np.array([[1, largest], [lowest, 1]]).astype(dtype)
    result = np.array(power(mx.array(data) if in_mlx else data, exponent))
    assert result.dtype == (np.float32 if in_mlx else np.float64)
    np.testing.assert_allclose(result, np.power(data.astype(np.float64), float(exponent)), rtol=1e-6)


@pytest.mark.parametrize("in_mlx", [False, True], ids=["numpy", "mlx"])
@pytest.mark.parametrize("exponent", [np.float64(2.0), np.float64(3.0), 2, 3])
def test_float32_stays_float32(exponent, in_mlx):
    data = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    assert np.array(power(mx.array(data) if in_mlx else data, exponent)).dtype == np.float32


def test_squares_of_complex_data():
    data = np.array([[1 + 2j, -1j]], np.complex64)
    np.testing.assert_allclose(np.array(power(mx.array(data), 2)), data**2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.int16])
def test_a_square_is_not_a_general_power(dtype):
    data = mx.ones((3, 2), dtype)
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
    with pytest.raises(error, match="^'exponent' must be a finite number, got .*"):
        PowTransformer(exponent=value)
