"""Copies between NumPy and MLX: every dtype, byte order and stride, with right values or a clear refusal."""

import mmap
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ezmsg.mlx.stream import convert
from ezmsg.mlx.stream.convert import (
    MLX_DTYPES,
    as_float32,
    import_mlx,
    is_mlx_array,
    mlx_to_mlx,
    mlx_to_numpy,
    numpy_to_mlx,
)

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

needs_float64 = pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="MLX has float64 on its CPU device only")

EXACT = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
EXACT += ["float16", "float32", "complex64"]
"""NumPy's dtypes that MLX has too."""

NARROWED = {"float64": "float32", "complex128": "complex64"}
EXTENDED = ["longdouble", "clongdouble"]


def samples(dtype: str) -> np.ndarray:
    """The extremes of a dtype and what is in between, shape (4, 3)."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.arange(12).reshape(4, 3) % 3 == 0
    if kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([low, high, 0, 1, 2, 3, 5, 7, 100, high - 1, low + 1, high // 2], dtype).reshape(4, 3)
    real = np.array([0.0, -0.0, 1.0, -1.5, 1 / 3, 1e-3, 65504.0, 2.0**-14, 100.25, -7.0, np.inf, np.nan], dtype)
    if kind == "c":
        real.imag = real.real[::-1]
    return real.reshape(4, 3)


def assert_same(result: object, expected: np.ndarray) -> None:
    """Same dtype, shape and values, NaN included."""
    assert is_mlx_array(result)
    assert str(result.dtype) == f"mlx.core.{expected.dtype}"
    np.testing.assert_array_equal(np.array(result), expected, strict=True)


# NumPy to MLX


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", EXACT)
def test_every_dtype_that_mlx_has_is_kept_in_any_byte_order(dtype, order):
    data = samples(dtype)
    result, narrowed = numpy_to_mlx(data.astype(data.dtype.newbyteorder(order)))
    assert_same(result, data)
    assert narrowed == ""


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", NARROWED)
def test_double_precision_becomes_single_and_says_so(dtype, order):
    data = samples(dtype)
    result, narrowed = numpy_to_mlx(data.astype(data.dtype.newbyteorder(order)))
    assert_same(result, data.astype(NARROWED[dtype]))
    assert narrowed == f"{dtype} to {NARROWED[dtype]}"


@pytest.mark.parametrize("target", [name for name in MLX_DTYPES if name not in ("bfloat16", "float64", "complex64")])
@pytest.mark.parametrize("source", [*EXACT[:-1], "float64", "longdouble"])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")
def test_every_real_dtype_becomes_every_other(source, target):
    data = samples(source)
    expected = data.astype(target)
    if data.dtype.kind == "f" and expected.dtype.kind in "iu":
        # What C leaves undefined, NumPy and MLX may do differently.
        defined = np.isfinite(data) & (np.trunc(data) == expected)
        data, expected = data[defined], expected[defined]
        assert data.size > 2
    for order in "<>":
        result, narrowed = numpy_to_mlx(data.astype(data.dtype.newbyteorder(order)), target)
        assert_same(result, expected)
        fits = expected.dtype.kind not in "iu" or np.can_cast(data.dtype, expected.dtype)
        assert (narrowed == "") == fits


@needs_float64
@pytest.mark.parametrize("source", ["int16", "int64", "float32", "float64", ">f8", "longdouble"])
def test_float64_that_is_asked_for_is_kept_where_the_device_has_it(source):
    data = (np.arange(6).reshape(2, 3) / 3).astype(source)
    result, narrowed = numpy_to_mlx(data, "float64")
    assert_same(result, data.astype("float64"))
    assert narrowed == ""


@pytest.mark.parametrize("source", [*EXACT[:-1], "float64", "longdouble"])
def test_bfloat16_is_rounded_to_the_nearest(source):
    data = np.array([0, 1, 3, 7, 100, 127]).astype(source)
    result, narrowed = numpy_to_mlx(data, "bfloat16")
    assert result.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(result.astype(mx.float32)), data.astype("float32"))
    assert narrowed == ""


@pytest.mark.parametrize("source", [*EXACT, *NARROWED, *EXTENDED])
def test_every_dtype_becomes_complex64(source):
    data = samples(source)
    result, narrowed = numpy_to_mlx(data, "complex64")
    assert_same(result, data.astype("complex64"))
    assert narrowed == ""


def layouts() -> dict[str, np.ndarray]:
    x = np.arange(24.0, dtype="float32").reshape(4, 6)
    packed = np.zeros(5, [("flag", "u1"), ("counts", "i2", (3,)), ("volts", "f4")])
    packed["counts"] = np.arange(15).reshape(5, 3)
    packed["volts"] = np.arange(5)
    read_only = x.copy()
    read_only.flags.writeable = False
    arrays = {
        "time reversed": x[::-1],
        "channels reversed": x[:, ::-1],
        "both reversed": x[::-1, ::-1],
        "every second, reversed": x[::-2, 1::2],
        "reversed and transposed": x[::-1].T,
        "one sample, reversed": x[:1][::-1],
        "no samples, reversed": x[:0][::-1],
        "constant over time": np.broadcast_to(x[0], (5, 6)),
        "constant over channels": np.broadcast_to(x[:, :1], (4, 5)),
        "constant": np.broadcast_to(np.float32(3), (2, 3)),
        "constant and reversed": np.broadcast_to(x[::-1, :1], (4, 5)),
        "every second": x[::2, 1::3],
        "transposed": x.T,
        "Fortran": np.asfortranarray(x),
        "windows": np.lib.stride_tricks.sliding_window_view(x, 3, axis=0),
        "permuted": np.moveaxis(x.reshape(2, 3, 4), 0, 2),
        "read-only": read_only,
        "imaginary part": (x + 1j * x).astype("complex64").imag,
        "field of a packed record": packed["volts"],
        "field of arrays of a packed record": packed["counts"],
        "field of a packed record, reversed": packed["volts"][::-1],
        "not aligned": np.frombuffer(b"\0" + x.tobytes(), "u1")[1:].view("float32"),
        "no samples": x[:0],
        "no channels": x[:, :0],
        "no samples, no channels": x[:0, :0],
        "no samples of a packed record": packed["volts"][:0],
        "0-d": np.array(2.5, "float32"),
        "5-d": np.arange(32, dtype="int16").reshape(2, 2, 2, 2, 2)[..., ::-1],
        "subclass": x[::-1].view(np.recarray),
        "unmasked": np.ma.masked_array(x, mask=False),
    }
    return arrays | {
        f"big-endian, {name}": data.astype(data.dtype.newbyteorder(">"), "K") for name, data in arrays.items()
    }


@pytest.mark.parametrize("dtype", EXACT)
def test_reversed_arrays_of_every_dtype_arrive_in_their_order(dtype):
    # Of one byte an element, they would pass as contiguous where only sizes are looked at.
    data = samples(dtype)
    for view in (data[::-1], data[:, ::-1], data[::-1, ::-1], data.ravel()[::-1], data[::-2], data[:, :1][::-1]):
        result, narrowed = numpy_to_mlx(view)
        assert_same(result, view.copy())
        assert narrowed == ""
        np.testing.assert_array_equal(mlx_to_numpy(result), view, strict=True)


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_arrives_with_its_shape_and_values(layout):
    data = layouts()[layout]
    before = data.copy()
    for dtype in (None, "float32", "int64"):
        result, _ = numpy_to_mlx(data, dtype)
        native = np.dtype(dtype or data.dtype.newbyteorder("="))
        assert_same(result, np.asarray(data).astype(native))
        assert result.shape == data.shape
        np.testing.assert_array_equal(data, before, strict=True)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("source", ["float32", "int16", ">f4"])
def test_mlx_array_does_not_see_what_becomes_of_the_buffer(source, dtype):
    # Page-aligned, as a slot of shared memory is: such a buffer could be adopted instead of copied.
    with mmap.mmap(-1, 1 << 16) as buffer:
        slot = np.frombuffer(buffer, source)
        slot[:] = np.arange(slot.size) % 100
        expected = slot.astype(np.dtype(dtype or slot.dtype.newbyteorder("=")))
        received = slot.view()
        received.flags.writeable = False
        result, _ = numpy_to_mlx(received, dtype)
        slot[:] = 0
        assert_same(result, expected)
        del slot, received


def test_numpy_to_mlx_copies_by_mx_array_and_not_by_mx_asarray(monkeypatch):
    # On Metal mx.asarray adopts buffers; elsewhere the test above would not tell.
    def adopt(*_: object, **__: object) -> None:
        raise AssertionError("mx.asarray may adopt the buffer")

    monkeypatch.setattr(mx, "asarray", adopt)
    for dtype in (None, *MLX_DTYPES):
        numpy_to_mlx(np.ones((3, 2), "int16"), dtype)


UNSUPPORTED = {
    "object": np.array([[1, None]], object),
    "<U1": np.array([["a", "b"]]),
    "|S1": np.array([[b"a", b"b"]]),
    "datetime64[s]": np.array([[1, 2]], "M8[s]"),
    "timedelta64[ms]": np.array([[1, 2]], "m8[ms]"),
    "('volts', '<f4')": np.zeros((3, 2), [("volts", "f4"), ("bad", "?")]),
    "|V3": np.zeros((3, 2), "V3"),
}


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_mlx_cannot_hold_is_refused_by_its_dtype(name, dtype):
    for data in (UNSUPPORTED[name], UNSUPPORTED[name][:0]):
        with pytest.raises(TypeError) as error:
            numpy_to_mlx(data, dtype)
        assert str(error.value).startswith("Data of dtype ")
        assert name in str(error.value)
        assert "cannot be converted to MLX" in str(error.value)
        assert "Allowed are bool, integer, float and complex" in str(error.value)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("source", EXTENDED)
def test_extended_precision_needs_an_explicit_dtype(source, order):
    data = np.ones((2, 2), np.dtype(source).newbyteorder(order))
    with pytest.raises(TypeError, match="give an explicit dtype to round it"):
        numpy_to_mlx(data)
    result, narrowed = numpy_to_mlx(data, "complex64")
    assert_same(result, np.ones((2, 2), "complex64"))
    assert narrowed == ""


@pytest.mark.parametrize("target", [name for name in MLX_DTYPES if name != "complex64"])
@pytest.mark.parametrize("source", ["complex64", ">c8", "complex128", "clongdouble"])
def test_complex_data_do_not_become_real(source, target):
    with pytest.raises(
        TypeError, match=f"Data of dtype {np.dtype(source)} .* '{target}': it would lose the imaginary part"
    ):
        numpy_to_mlx(np.ones((2, 2), source), target)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_masked_entries_are_refused(dtype):
    data = np.ma.masked_array(np.ones((3, 2), "float32"), mask=np.eye(3, 2))
    with pytest.raises(TypeError, match="masked array .* fill it first"):
        numpy_to_mlx(data, dtype)
    result, _ = numpy_to_mlx(data.filled(7), dtype)
    assert np.array(result)[0].tolist() == [7, 1]


def test_data_in_the_byte_order_of_the_machine_are_not_copied_twice():
    data = np.ones((1000, 100), np.int32)
    tracemalloc.start()
    try:
        numpy_to_mlx(data, "float32")
        assert tracemalloc.get_traced_memory()[1] < data.nbytes
    finally:
        tracemalloc.stop()


# On a GPU, where narrow data is uploaded and widened


class Uploads:
    """Stands for ``mx.array``: the dtype of what is uploaded, and the one asked for in the same step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.array = mx.array

    def __call__(self, data: np.ndarray, dtype: mx.Dtype | None = None) -> mx.array:
        self.seen.append((data.dtype.name, dtype and str(dtype).removeprefix("mlx.core.")))
        return self.array(data, dtype=dtype)


@pytest.fixture
def uploads(monkeypatch) -> Uploads:
    uploads = Uploads()
    monkeypatch.setattr(mx, "array", uploads)
    return uploads


WIDENED = [("int16", "float32"), (">i2", "float32"), ("uint8", "float16"), ("bool", "float32"), ("float16", "float32")]


@pytest.mark.parametrize(("source", "target"), WIDENED)
def test_narrow_data_go_to_a_gpu_as_they_are_and_are_widened_there(monkeypatch, uploads, source, target):
    monkeypatch.setattr(convert, "uses_gpu", lambda: True)
    data = np.array([[0, 1, 1], [1, 0, 1]], source)
    result, narrowed = numpy_to_mlx(data, target)
    assert uploads.seen == [(data.dtype.name, None)]
    assert str(result.dtype) == f"mlx.core.{target}"
    assert np.array(result).tolist() == data.tolist()
    assert narrowed == ""


@pytest.mark.parametrize(("source", "target"), WIDENED)
def test_narrow_data_are_cast_while_copying_on_the_cpu(monkeypatch, uploads, source, target):
    monkeypatch.setattr(convert, "uses_gpu", lambda: False)
    numpy_to_mlx(np.ones((2, 3), source), target)
    assert uploads.seen == [(np.dtype(source).name, target)]


@pytest.mark.parametrize(("source", "target"), [("float32", "int16"), ("int32", "float32"), ("float64", "float32")])
def test_data_that_are_not_narrower_are_cast_before_they_go_to_a_gpu(monkeypatch, uploads, source, target):
    monkeypatch.setattr(convert, "uses_gpu", lambda: True)
    numpy_to_mlx(np.ones((2, 3), source), target)
    assert uploads.seen == [(source, target)]


def test_gpu_has_no_float64_and_the_narrowing_is_told(monkeypatch):
    monkeypatch.setattr(convert, "uses_gpu", lambda: True)
    for source in ("float64", "float32", "int16", "longdouble"):
        result, narrowed = numpy_to_mlx(np.ones((2, 3), source), "float64")
        assert result.dtype == mx.float32
        assert narrowed == "float64 to float32"
    assert mlx_to_mlx(mx.ones((2, 3)), "float64")[1] == "float64 to float32"


# MLX to NumPy


@pytest.mark.parametrize("dtype", EXACT)
def test_every_dtype_comes_back(dtype):
    data = samples(dtype)
    np.testing.assert_array_equal(mlx_to_numpy(mx.array(data)), data, strict=True)


@needs_float64
def test_float64_comes_back():
    data = np.arange(6.0).reshape(2, 3) / 3
    np.testing.assert_array_equal(mlx_to_numpy(mx.array(data, dtype=mx.float64)), data, strict=True)


@pytest.mark.parametrize("dtype", [None, "float32", "float64", "int16", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (2, 3)])
def test_bfloat16_comes_out_exactly_as_float32_or_as_asked_for(shape, dtype):
    data = np.full(shape, -3.0 if dtype == "int16" else 1.5, "float32")
    result = mlx_to_numpy(mx.array(data, dtype=mx.bfloat16), dtype)
    np.testing.assert_array_equal(result, data.astype(dtype or "float32"), strict=True)


@pytest.mark.parametrize("dtype", [None, "float32", "int64"])
@pytest.mark.parametrize("source", ["float32", "int16", "bfloat16"])
def test_numpy_array_owns_its_memory(source, dtype):
    data = mx.ones((4, 3)).astype(getattr(mx, source))
    mx.eval(data)
    result = mlx_to_numpy(data, dtype)
    assert result.flags.owndata and result.flags.writeable and result.base is None
    result[:] = 5
    assert mx.all(data == 1).item()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int16", "float32"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float32", "int32"),
        pytest.param("float64", "float32", marks=needs_float64),
    ],
)
def test_a_cast_made_in_one_thread_can_be_used_in_others(source, target):
    data = np.arange(6000).reshape(300, 20) % 100
    given = mx.array(data.astype(source), getattr(mx, source))
    mx.eval(given)
    with ThreadPoolExecutor(1) as maker, ThreadPoolExecutor(1) as user:
        result, _ = maker.submit(mlx_to_mlx, given, target).result()
        # As it is, and as the input of what that thread computes.
        np.testing.assert_array_equal(user.submit(mlx_to_numpy, result, "float64").result(), data)
        assert user.submit(lambda: float(result.astype(mx.float32).sum())).result() == data.sum()


def test_data_widened_on_a_gpu_can_be_used_in_other_threads(monkeypatch):
    monkeypatch.setattr(convert, "uses_gpu", lambda: True)
    data = np.arange(6000, dtype=np.int16).reshape(300, 20)
    with ThreadPoolExecutor(1) as maker, ThreadPoolExecutor(1) as user:
        result, _ = maker.submit(numpy_to_mlx, data, "float32").result()
        np.testing.assert_array_equal(user.submit(mlx_to_numpy, result).result(), data)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_lazy_views_are_evaluated_in_their_order(bfloat16):
    x = mx.arange(24).reshape(4, 6).astype(mx.bfloat16 if bfloat16 else mx.int32)
    for view in (x[::-1], x[:, ::-1], x.T, x[::2, 1::3], mx.broadcast_to(x[0], (3, 6)), x[:0], x[1, 2], x * 2):
        assert mlx_to_numpy(view).tolist() == view.tolist()


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "half", "longdouble"])
def test_complex_mlx_data_do_not_become_real(dtype):
    data = mx.array([1 + 2j])
    with pytest.raises(TypeError, match=f"complex64 .* '{dtype}': it would lose the imaginary part"):
        mlx_to_numpy(data, dtype)


@pytest.mark.parametrize("dtype", [None, "complex64", "csingle", "complex128", "cdouble", "clongdouble"])
def test_complex_mlx_data_become_complex(dtype):
    result = mlx_to_numpy(mx.array([1 + 2j]), dtype)
    assert result.dtype == np.dtype(dtype or "complex64")
    assert result.tolist() == [1 + 2j]


# MLX to MLX


@pytest.mark.parametrize("source", [name for name in MLX_DTYPES if name not in ("float64", "complex64")])
def test_mlx_data_are_cast(source):
    data = mx.array([[0, 1, 1]]).astype(getattr(mx, source))
    for target in MLX_DTYPES:
        if target != "float64":
            result, narrowed = mlx_to_mlx(data, target)
            assert result.dtype == getattr(mx, target)
            assert result.astype(mx.int32).tolist() == [[0, 1, 1]]
            fits = "int" not in target or ("float" not in source and np.can_cast(source.rstrip("_"), target))
            assert (narrowed == "") == fits


class Casts:
    """Stands for an MLX array: the streams that it is cast on."""

    def __init__(self, dtype: str) -> None:
        self.dtype = getattr(mx, dtype)
        self.streams: list[object] = []

    def astype(self, dtype: mx.Dtype, stream: object = None) -> mx.array:
        self.streams.append(stream)
        return mx.zeros(1, dtype)


@pytest.mark.parametrize(("dtype", "stream"), [("float64", mx.cpu), ("int16", None), ("bfloat16", None)])
def test_only_float64_is_cast_on_the_cpu(dtype, stream):
    data = Casts(dtype)
    as_float32(data, "adding")
    mlx_to_mlx(data, "float32")
    assert data.streams == [stream, stream]


def test_complex_mlx_data_are_not_cast_to_real():
    with pytest.raises(TypeError, match="it would lose the imaginary part"):
        mlx_to_mlx(mx.array([1 + 2j]), "float32")
    assert mlx_to_mlx(mx.array([1 + 2j]), "complex64")[0].tolist() == [1 + 2j]


# What there is


def test_dtype_names_are_those_of_mlx():
    names = {name for name in dir(mx) if isinstance(getattr(mx, name), mx.Dtype)}
    assert set(MLX_DTYPES) == names
    assert len(MLX_DTYPES) == len(names)


def test_only_mlx_arrays_are_mlx_arrays():
    assert is_mlx_array(mx.ones(3))
    assert is_mlx_array(mx.array(1, dtype=mx.bfloat16))
    for other in (np.ones(3), [1.0], mx.float32, mx, None):
        assert not is_mlx_array(other)


def test_import_gives_mlx():
    assert import_mlx() is mx
