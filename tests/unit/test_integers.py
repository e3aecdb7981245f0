"""Conversion to integers that rounds to the nearest one and saturates."""

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import RecordedLog
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ezmsg.mlx import AsArraySettings, AsArrayTransformer, ReadLateSettings, ReadLateTransformer
from ezmsg.mlx.stream.convert import mlx_to_integers, numpy_to_integers

mx = pytest.importorskip("mlx.core")

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SOURCES = ["float16", "float32", "float64", "longdouble", "bool", *INTEGERS, ">f4", ">i8"]
ODD = [
    0.5,
    1.5,
    2.5,
    -0.5,
    -1.5,
    127.5,
    128.5,
    -128.5,
    32767.5,
    -32768.5,
    255.5,
    65535.5,
    2147483648.0,
    -3e9,
    9.3e18,
    2e19,
]


def expected(data: np.ndarray, dtype: str) -> np.ndarray:
    """By Python's integers, value by value."""
    info = np.iinfo(dtype)

    def one(value) -> int:
        if value != value:
            return 0
        if value in (np.inf, -np.inf):
            return info.max if value > 0 else info.min
        return min(max(int(np.rint(value)) if data.dtype.kind == "f" else int(value), info.min), info.max)

    return np.array([one(value) for value in data.ravel()], dtype).reshape(data.shape)


def odd_values(source: str) -> np.ndarray:
    """Values at the ends of all integers, between two of them, and such as are none."""
    dtype = np.dtype(source)
    if dtype.kind == "b":
        return np.array([[True, False]])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        ends = [
            edge + step for name in INTEGERS for edge in (np.iinfo(name).min, np.iinfo(name).max) for step in (-1, 0, 1)
        ]
        return np.array([[end for end in ends if info.min <= end <= info.max]], dtype)
    values = np.array([*ODD, np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, *map(float, range(-5, 6))], np.longdouble)
    exact = np.array([np.longdouble(np.iinfo(name).max) for name in INTEGERS])
    with np.errstate(over="ignore"):
        near = np.concatenate([values, exact, exact + 1, exact - 1]).astype(dtype.newbyteorder("="))
        near = np.concatenate(
            [near, np.nextafter(near, near.dtype.type(0)), np.nextafter(near, near.dtype.type(np.inf))]
        )
    return near.astype(dtype)[None]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("source", SOURCES)
def test_numpy_data_is_rounded_and_saturates(source, dtype):
    data = odd_values(source)
    with np.errstate(all="raise"):
        result = numpy_to_integers(data, dtype)
    assert result.dtype == dtype and result.flags.owndata
    np.testing.assert_array_equal(result, expected(data, dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64", "bool_", *INTEGERS])
def test_mlx_data_is_rounded_and_saturates_on_its_device(source, dtype):
    name = {"bfloat16": "float32", "bool_": "bool"}.get(source, source)
    with np.errstate(over="ignore"):
        data = mx.array(odd_values(name), getattr(mx, source))
    values = np.array(data.astype(mx.float32) if source == "bfloat16" else data)
    result = mlx_to_integers(data, dtype)
    assert result.dtype == getattr(mx, dtype)
    np.testing.assert_array_equal(np.array(result), expected(values, dtype))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(data=arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, min_side=0), elements=st.floats(width=32)))
def test_all_ways_give_the_same(data):
    results = [
        np.array(
            AsArrayTransformer(backend=to, dtype="int16", rounding="nearest")(AxisArray(given_data, dims(data))).data
        )
        for to in ("numpy", "mlx")
        for given_data in (data, mx.array(data))
    ]
    for result in results:
        assert result.dtype == np.int16
        np.testing.assert_array_equal(result, expected(data, "int16"))


def dims(data: np.ndarray) -> list[str]:
    return [f"dim{axis}" for axis in range(data.ndim)]


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed", "read-only", "0-d", "empty", "large"])
def test_any_memory_is_taken_and_left_alone(order):
    data = (np.random.default_rng(0).standard_normal((300, 120)) * 30000).astype(np.float32)
    data = {
        "C": data,
        "F": np.asfortranarray(data),
        "strided": data[::3, 1::2],
        "reversed": data[::-1, ::-1],
        "read-only": data.copy(),
        "0-d": data[0, 0, None].reshape(()),
        "empty": data[:0],
        "large": np.concatenate([data] * 3),
    }[order]
    data.flags.writeable = order != "read-only"
    before = data.copy()
    result = numpy_to_integers(data, "int16")
    assert result.flags.c_contiguous and result.shape == data.shape
    np.testing.assert_array_equal(result, np.clip(np.rint(before), -32768, 32767).astype(np.int16))
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize("to", ["numpy", "mlx"])
def test_nothing_is_warned_of(to):
    with RecordedLog() as log:
        for data in (np.array([1e6, np.nan], np.float32), mx.array([1e6, float("nan")])):
            AsArrayTransformer(backend=to, dtype="int16", rounding="nearest")(AxisArray(data, ["time"]))
    assert not log.warnings


@pytest.mark.parametrize("to", ["numpy", "mlx"])
def test_by_default_the_library_decides_as_before(to):
    data = np.array([1.7, -1.7, 2.5], np.float32)
    for given_data in (data, mx.array(data)):
        result = AsArrayTransformer(backend=to, dtype="int16")(AxisArray(given_data, ["time"])).data
        np.testing.assert_array_equal(np.array(result), [1, -1, 2])


def test_a_dtype_that_is_no_integer_is_not_rounded():
    data = np.array([1.7, -1.7], np.float32)
    for to, dtype in (("numpy", "float64"), ("mlx", "bfloat16"), ("numpy", None), ("mlx", None)):
        for given_data in (data, mx.array(data)):
            result = AsArrayTransformer(backend=to, dtype=dtype, rounding="nearest")(
                AxisArray(given_data, ["time"])
            ).data
            np.testing.assert_allclose(
                np.array(result.astype(mx.float32) if dtype == "bfloat16" else result), data, rtol=1e-2
            )


def test_what_is_an_integer_of_that_type_already_is_not_copied():
    data = np.ones((3, 2), np.int16)
    message = AxisArray(mx.array(data), ["time", "ch"])
    assert AsArrayTransformer(backend="mlx", dtype="int16", rounding="nearest")(message) is message


def test_complex_data_is_refused_as_ever():
    for given_data in (np.ones(3, np.complex64), mx.ones(3, mx.complex64)):
        with pytest.raises(TypeError, match="imaginary part"):
            AsArrayTransformer(backend="mlx", dtype="int16", rounding="nearest")(AxisArray(given_data, ["time"]))


def test_read_late_rounds_too():
    transformer = ReadLateTransformer(depth=0, dtype="int16", rounding="nearest")
    for data in (np.array([1.5, 1e9], np.float32), mx.array([1.5, 1e9])):
        (result,) = transformer(AxisArray(data, ["time"]))
        np.testing.assert_array_equal(result.data, np.array([2, 32767], np.int16))


@pytest.mark.parametrize("kind", [AsArraySettings, ReadLateSettings])
def test_rounding_is_checked(kind):
    with pytest.raises(ValueError, match="'rounding' must be one of 'truncate', 'nearest'.*, got 'up'"):
        kind(rounding="up")
