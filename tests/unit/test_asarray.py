"""AsArray: its settings, what it leaves alone, what it converts, and where it is a drop-in for ezmsg-sigproc's."""

import copy
import dataclasses
import json
import math
import pickle

import ezmsg.sigproc.asarray as sigproc
import numpy as np
import pytest
from ezmsg.core.messagemarshal import MessageMarshal
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import RecordedLog, run_code

from ezmsg.mlx.asarray import ArrayBackend, AsArray, AsArraySettings, AsArrayTransformer
from ezmsg.mlx.stream.convert import MLX_DTYPES

mx = pytest.importorskip("mlx.core", exc_type=ImportError)


def message(data, **fields) -> AxisArray:
    axes = {
        "time": AxisArray.TimeAxis(fs=30000.0, offset=1.5),
        "ch": AxisArray.CoordinateAxis(data=np.array(["a", "b"]), dims=["ch"]),
    }
    fields = {"axes": axes, "attrs": {"gain": [0.25]}, "key": "amp", "stream_dim": "time"} | fields
    return AxisArray(data, dims=["time", "ch", "x"][: data.ndim], **fields)


def to_mlx(dtype: str | None = None) -> AsArrayTransformer:
    # Without a limit: that of this process is left alone.
    return AsArrayTransformer(AsArraySettings(backend="mlx", dtype=dtype, mlx_cache_limit_mb=None))


def to_numpy(dtype: str | None = None) -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend="numpy", dtype=dtype))


# Settings


def test_defaults():
    settings = AsArraySettings()
    assert settings.backend is ArrayBackend.numpy
    assert settings.dtype is None
    assert settings.mlx_cache_limit_mb == 512.0
    assert type(settings.mlx_cache_limit_mb) is float
    assert json.loads(json.dumps(dataclasses.asdict(settings))) == {
        "backend": "numpy",
        "dtype": None,
        "mlx_cache_limit_mb": 512.0,
        "rounding": "truncate",
    }


def test_fields_and_enum_are_those_of_sigproc():
    def fields(settings: type) -> list[tuple[str, object]]:
        return [(field.name, field.default) for field in dataclasses.fields(settings)]

    # In their order, with those of this package behind them.
    assert fields(AsArraySettings) == [*fields(sigproc.AsArraySettings), ("rounding", "truncate")]
    assert issubclass(AsArraySettings, sigproc.AsArraySettings)
    assert issubclass(AsArrayTransformer, sigproc.AsArrayTransformer)
    assert ArrayBackend is sigproc.ArrayBackend
    assert AsArrayTransformer.get_settings_type() is AsArray.SETTINGS is AsArraySettings


def test_settings_may_be_given_field_by_field():
    transformer = AsArrayTransformer(backend="mlx", dtype="float16", mlx_cache_limit_mb=None)
    assert transformer(message(np.ones((3, 2)))).data.dtype == mx.float16


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf, 1e30, 2**43, "512", b"1", True, np.True_, [1.0]])
def test_nonsense_limits_are_refused_when_the_settings_are_built(backend, limit):
    with pytest.raises(
        (TypeError, ValueError), match='^.mlx_cache_limit_mb. must be None, "auto" or a finite number of MiB'
    ):
        AsArraySettings(backend=backend, mlx_cache_limit_mb=limit)
    with pytest.raises((TypeError, ValueError), match="^'mlx_cache_limit_mb' must be "):
        dataclasses.replace(AsArraySettings(backend=backend), mlx_cache_limit_mb=limit)


@pytest.mark.parametrize("limit", [None, 0, 0.5, 512, np.float32(64), np.int64(64), 1e6, "auto"])
def test_limits_that_mlx_can_hold_are_taken(limit):
    assert AsArraySettings(mlx_cache_limit_mb=limit).mlx_cache_limit_mb == limit


@pytest.mark.parametrize("backend", ["MLX", "", "tensorflow", None, 3, np])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match="^'backend' must be one of 'numpy', 'mlx', got "):
        AsArraySettings(backend=backend)


@pytest.mark.parametrize(
    "dtype", ["zeros", "array", "Dtype", "float", "bool", "core", "", "FLOAT32", "f4", "longdouble"]
)
def test_what_is_no_dtype_of_mlx_is_refused_and_those_that_are_listed(dtype):
    with pytest.raises(TypeError) as error:
        AsArraySettings(backend="mlx", dtype=dtype)
    assert f"'dtype' must be None or one of {', '.join(map(repr, MLX_DTYPES))} with backend mlx, got {dtype!r}" == str(
        error.value
    )


@pytest.mark.parametrize(
    "dtype",
    ["zeros", "array", "e", "float", "object_", "str_", "datetime64", "timedelta64", "void", "", "bfloat16", "f4"],
)
def test_what_is_no_number_dtype_of_numpy_is_refused_and_those_that_are_listed(dtype):
    with pytest.raises(
        TypeError, match=f"^'dtype' must be None or one of .*float32.* with backend numpy, got '{dtype}'"
    ):
        AsArraySettings(backend="numpy", dtype=dtype)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), b"float32", 4, ["float32"]])
def test_dtype_must_be_a_name(backend, dtype):
    with pytest.raises(TypeError, match="^'dtype' must be .* with backend"):
        AsArraySettings(backend=backend, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bool", "bool_", "int16", "float16", "single", "double", "longdouble", "complex128"])
def test_dtypes_of_numpy_are_taken_by_any_of_their_names(dtype):
    for data in (np.ones((3, 2), "int8"), mx.ones((3, 2))):
        result = to_numpy(dtype)(message(data)).data
        np.testing.assert_array_equal(result, np.ones((3, 2), dtype), strict=True)


@pytest.mark.parametrize("dtype", MLX_DTYPES)
def test_dtypes_of_mlx_are_taken(dtype):
    if dtype == "float64" and mx.default_device().type == mx.gpu:
        pytest.skip("MLX has float64 on its CPU device only")
    for data in (np.ones((3, 2), "int8"), mx.ones((3, 2))):
        result = to_mlx(dtype)(message(data)).data
        assert result.dtype == getattr(mx, dtype)
        assert result.astype(mx.int8).tolist() == [[1, 1]] * 3


def test_settings_travel_between_processes():
    settings = AsArraySettings(ArrayBackend.mlx, "float16", 64.0)
    assert pickle.loads(pickle.dumps(settings)) == settings


# What is left alone


@pytest.mark.parametrize("backend", ["mlx", ArrayBackend.mlx])
def test_enum_members_and_plain_strings_are_the_same_backend(backend):
    transformer = AsArrayTransformer(AsArraySettings(backend=backend, mlx_cache_limit_mb=None))
    assert isinstance(transformer(message(np.ones((3, 2)))).data, mx.array)


def test_message_that_is_what_was_asked_for_comes_back_as_the_same_object():
    in_numpy, in_mlx = message(np.ones((3, 2), "float32")), message(mx.ones((3, 2)))
    assert to_numpy()(in_numpy) is in_numpy
    assert to_mlx()(in_mlx) is in_mlx
    assert to_mlx("float32")(in_mlx) is in_mlx


@pytest.mark.parametrize("dtype", [name for name in MLX_DTYPES if name != "float64"])
def test_mlx_message_of_the_dtype_asked_for_comes_back_as_the_same_object(dtype):
    in_mlx = message(mx.ones((3, 2)).astype(getattr(mx, dtype)))
    assert to_mlx(dtype)(in_mlx) is in_mlx
    assert to_mlx()(in_mlx) is in_mlx


@pytest.mark.parametrize("transform", [to_mlx("float16"), to_mlx(), to_numpy("float64"), to_numpy("int8"), to_numpy()])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_everything_but_the_data_is_untouched_and_so_is_the_input(transform, backend):
    data = np.arange(6.0, dtype="float32").reshape(3, 2)
    data.flags.writeable = False
    sent = message(data if backend == "numpy" else mx.array(data))
    before = copy.deepcopy({name: value for name, value in vars(sent).items() if name != "data"})
    received = transform(sent)
    for name in ("dims", "axes", "attrs", "key", "stream_dim"):
        assert getattr(received, name) is getattr(sent, name)
        assert getattr(sent, name) == before[name]
    assert received.data.shape == (3, 2)
    assert np.array(sent.data).tolist() == np.array(received.data).tolist() == data.tolist()
    assert sent.data.dtype == (np.float32 if backend == "numpy" else mx.float32)


# What is converted


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 0), (0, 0), (1, 2), (3, 2), (3, 2, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64"])
def test_messages_of_any_shape_go_there_and_back(shape, dtype):
    data = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    there = to_mlx()(message(data, axes={}, stream_dim=None))
    assert isinstance(there.data, mx.array)
    back = to_numpy()(there)
    np.testing.assert_array_equal(back.data, data, strict=True)


def test_scalar_of_numpy_counts_as_0_d():
    result = to_mlx()(message(np.float32(2.5), axes={}, stream_dim=None)).data
    assert result.shape == () and result.item() == 2.5 and result.dtype == mx.float32


def test_byte_order_and_strides_do_not_matter():
    data = np.arange(12).reshape(6, 2)
    for sent in (
        data.astype(">i2"),
        data.astype("float32")[::-1, ::-1],
        np.broadcast_to(data[:1].astype(">f8"), (6, 2)),
    ):
        assert np.array(to_mlx("float32")(message(sent)).data).tolist() == sent.tolist()


@pytest.mark.parametrize("dtype", [None, "float32", "int16", "float16"])
@pytest.mark.parametrize("source", ["numpy", "mlx"])
@pytest.mark.parametrize("target", ["numpy", "mlx"])
def test_results_are_those_of_sigproc(source, target, dtype):
    data = np.arange(6.0, dtype="float32").reshape(3, 2)
    sent = message(data if source == "numpy" else mx.array(data))
    ours = AsArrayTransformer(AsArraySettings(target, dtype, None))(sent)
    theirs = sigproc.AsArrayTransformer(sigproc.AsArraySettings(ArrayBackend[target], dtype, None))(sent)
    assert type(ours.data) is type(theirs.data)
    assert ours.data.dtype == theirs.data.dtype
    assert ours.data.tolist() == theirs.data.tolist()


async def test_awaited_and_called_are_the_same():
    result = await to_mlx("float16").__acall__(message(np.ones((3, 2))))
    assert result.data.dtype == mx.float16


def test_settings_may_change_at_run_time():
    transformer = to_mlx()
    sent = message(np.ones((3, 2), "int16"))
    assert transformer(sent).data.dtype == mx.int16
    transformer.update_settings(AsArraySettings("mlx", "float32", None))
    assert transformer(sent).data.dtype == mx.float32
    transformer.update_settings(AsArraySettings("numpy"))
    assert transformer(sent) is sent


def test_bfloat16_comes_out_of_mlx_as_float32():
    sent = message(mx.array([[1.5, -2.0]], dtype=mx.bfloat16))
    for dtype in (None, "float32"):
        received = to_numpy(dtype)(sent).data
        np.testing.assert_array_equal(received, np.array([[1.5, -2.0]], "float32"), strict=True)


def test_numpy_data_do_not_look_into_the_mlx_array():
    sent = message(mx.ones((3, 2)))
    for dtype in (None, "float32", "float64"):
        to_numpy(dtype)(sent).data[:] = 5
        assert mx.all(sent.data == 1).item()


def test_mlx_data_survive_the_buffer_that_their_message_arrived_in():
    # The ring of shared memory between two ezmsg processes, with a single slot.
    slot = memoryview(bytearray(1 << 16))
    transformers = [to_mlx(), to_mlx("float32")]
    kept = []
    for i in range(20):
        MessageMarshal.to_mem(i, message(np.full((300, 2), i, "int16")), slot)
        with MessageMarshal.obj_from_mem(slot.toreadonly()) as arrived:
            kept.append([transformer(arrived).data for transformer in transformers])
            del arrived
    for i, pair in enumerate(kept):
        for data in pair:
            assert mx.all(data == i).item()


# What is refused, and what is told


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (np.array([[1, None]], object), "object"),
        (np.array([["a", "b"]]), "<U1"),
        (np.array([[1, 2]], "M8[s]"), "datetime64"),
        (np.zeros((3, 2), [("volts", "f4"), ("bad", "?")]), "volts"),
        (np.ones((3, 2), "longdouble"), str(np.dtype("longdouble"))),
        (np.ma.masked_array(np.ones((1, 2)), mask=[[True, False]]), "masked array"),
    ],
)
def test_refused_data_are_named_and_the_next_message_is_converted(data, named):
    transformer = to_mlx()
    with pytest.raises(TypeError, match="cannot be converted to MLX") as error:
        transformer(message(data))
    assert named in str(error.value)
    assert transformer(message(np.ones((3, 2)))).data.shape == (3, 2)


@pytest.mark.parametrize("data", [np.ones((3, 2), "complex64"), np.ones((3, 2), "complex128"), mx.ones((3, 2)) * 1j])
def test_complex_data_are_not_made_real(data):
    with pytest.raises(TypeError, match="complex.*'float32': it would lose the imaginary part"):
        to_mlx("float32")(message(data))
    if isinstance(data, mx.array):
        with pytest.raises(TypeError, match="complex.*'float32': it would lose the imaginary part"):
            to_numpy("float32")(message(data))


@pytest.mark.parametrize(("source", "target"), [("float64", "float32"), ("complex128", "complex64")])
def test_narrowing_is_told_once_a_node(source, target):
    with RecordedLog() as log:
        nodes = [to_mlx(), to_mlx()]
        nodes[0].node_name = "GRAPH/TO_MLX"
        for _ in range(10):
            for node in nodes:
                assert node(message(np.ones((3, 2), source))).data.dtype == getattr(mx, target)
    assert log.warnings == [
        f"GRAPH/TO_MLX narrows {source} to {target} on the way to MLX.",
        f"AsArrayTransformer narrows {source} to {target} on the way to MLX.",
    ]


def test_each_narrowing_is_told_when_the_dtype_changes():
    node = to_mlx("int16")
    with RecordedLog() as log:
        for dtype in ("int16", "uint8", "int16"):
            node.update_settings(dataclasses.replace(node.settings, dtype=dtype))
            for _ in range(2):
                node(message(np.ones((3, 2), "float32")))
    what = "(what does not fit comes out as another number) on the way to MLX."
    assert log.warnings == [f"AsArrayTransformer narrows float32 to {dtype} {what}" for dtype in ("int16", "uint8")]


def warnings_on_all_ways(source: str, target: str) -> list[str]:
    data = np.ones((3, 2), source)
    with RecordedLog() as log:
        for node, given in (
            (to_mlx(target), data),
            (to_mlx(target), mx.array(data)),
            (to_numpy(target), mx.array(data)),
        ):
            for _ in range(3):
                assert str(node(message(given)).data.dtype).rpartition(".")[2] in (target, target.rstrip("_"))
    return log.warnings


@pytest.mark.parametrize(
    ("source", "target"), [("float64", "int16"), ("float32", "int32"), ("int32", "int16"), ("int16", "uint16")]
)
def test_integers_that_do_not_hold_all_values_are_told_once_a_node(source, target):
    warnings = warnings_on_all_ways(source, target)
    kept = "float32" if source == "float64" else source
    what = "(what does not fit comes out as another number) on the way to"
    assert warnings == [
        f"AsArrayTransformer narrows {source} to {target} {what} MLX.",
        f"AsArrayTransformer narrows {kept} to {target} {what} MLX.",
        f"AsArrayTransformer narrows {kept} to {target} {what} NumPy.",
    ]


@pytest.mark.parametrize(
    ("source", "target"),
    [("uint8", "int16"), ("bool", "int32"), ("int16", "int16"), ("int16", "float32"), ("int8", "bool_")],
)
def test_integers_that_hold_all_values_are_not_told(source, target):
    assert not warnings_on_all_ways(source, target)


def test_narrowing_that_is_asked_for_is_not_told():
    with RecordedLog() as log:
        to_mlx("float32")(message(np.ones((3, 2))))
        to_mlx("float16")(message(np.ones((3, 2), "float32")))
        to_mlx("float16")(message(mx.ones((3, 2))))
        to_mlx()(message(np.ones((3, 2), "float32")))
    assert not log.records


# Other backends, and none


def test_other_backends_are_left_to_sigproc(tmp_path):
    # Small packages in place of the three, since installing them is not worth it.
    source = """
        import numpy as np

        class Tensor:
            def __init__(self, array):
                self.array, self.ndim, self.shape = array, array.ndim, array.shape
            def __array__(self, dtype=None, copy=None):
                return np.array(self.array, dtype=dtype)

        float32 = np.float32

        def asarray(data, dtype=None):
            return Tensor(np.asarray(data, dtype=dtype))
    """
    for package in ("torch", "cupy", "jax/numpy"):
        folder = tmp_path / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("\n".join(line[8:] for line in source.splitlines()))
    (tmp_path / "jax" / "__init__.py").write_text("")
    run_code(
        """
        import importlib
        import sys

        sys.path.insert(0, sys.argv[1])
        import mlx.core as mx
        import numpy as np
        from ezmsg.util.messages.axisarray import AxisArray
        from ezmsg.mlx.asarray import ArrayBackend, AsArraySettings, AsArrayTransformer

        def convert(data, *settings):
            return AsArrayTransformer(AsArraySettings(*settings))(AxisArray(data, dims=["time", "ch"])).data

        x = np.arange(6, dtype="int16").reshape(3, 2)
        sources = [x, mx.array(x), mx.array(x).astype(mx.bfloat16)]
        for name in ("torch", "cupy", "jax"):
            there = importlib.import_module("jax.numpy" if name == "jax" else name)
            for backend in (name, ArrayBackend[name]):
                for data in sources:
                    result = convert(data, backend)
                    assert type(result) is there.Tensor, (name, result)
                    assert np.array_equal(result.array, x)
                    assert convert(data, backend, "float32").array.dtype == "float32"
            message = AxisArray(there.asarray(x), dims=["time", "ch"])
            assert AsArrayTransformer(AsArraySettings(name))(message) is message
            assert np.array_equal(convert(there.asarray(x), "numpy"), x)
            to_mlx = convert(there.asarray(x), "mlx", "float32", None)
            assert to_mlx.dtype == mx.float32 and np.array_equal(np.array(to_mlx), x)
            for nonsense in (3, np.float32):
                try:
                    AsArraySettings(name, nonsense)
                except TypeError as error:
                    assert f"must be None or the name of a dtype with backend {name}" in str(error)
                else:
                    raise AssertionError
        """,
        tmp_path,
    )


@pytest.mark.parametrize("missing", ["mlx", "mlx.core"])
def test_without_mlx_everything_but_the_conversion_works(missing):
    # Without the package at all, or (pip install mlx on Linux) with a package that cannot be imported.
    run_code(
        """
        import importlib.util
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == sys.argv[1]:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == sys.argv[1] else find_spec(name, package)

        import numpy as np
        from ezmsg.util.messages.axisarray import AxisArray
        from ezmsg.mlx import AsArray, AsArraySettings, AsArrayTransformer, cache_limit

        message = AxisArray(np.ones((3, 2)), dims=["time", "ch"])
        for limit in (512.0, None):
            settings = AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=limit)
            AsArray(settings)
            transformer = AsArrayTransformer(settings)
            for _ in range(2):
                try:
                    transformer(message)
                except ImportError as error:
                    for extra in ("ezmsg-mlx[cpu]", "ezmsg-mlx[cuda12]", "ezmsg-mlx[cuda13]"):
                        assert extra in str(error), error
                else:
                    raise AssertionError
        assert AsArrayTransformer(AsArraySettings())(message) is message
        assert cache_limit().source == "default"
        """,
        missing,
    )
