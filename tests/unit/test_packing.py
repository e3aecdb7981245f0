"""What states consist of comes back from bytes bit for bit, and bytes cannot run code."""

import collections
import dataclasses
import enum
import io
import json
import os
import pickle
import sys
import tempfile
import typing
import zipfile

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import EWMATransformer, RechunkSettings
from ezmsg.mlx.offline import checkpoint
from ezmsg.mlx.offline.checkpoint import CannotPack, CannotSave, pack, save, unpack
from ezmsg.mlx.stream.segments import Segment

OWN = ("ezmsg", __name__.partition(".")[0])


class Colour(enum.Enum):
    RED = "red"


class Pair(typing.NamedTuple):
    one: object
    other: object


@dataclasses.dataclass
class Plain:
    value: object = None


@dataclasses.dataclass(slots=True)
class Slotted:
    value: object = None


class Reduced:
    def __reduce__(self):
        return os.system, ("true",)


class WithDel:
    def __del__(self):
        pass


def back(value):
    return unpack(pack(value, OWN), OWN)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**70), 0.1, -0.0, float("inf"), "µ\n\ud800", "", b"", b"\0x", bytearray(b"x"), 1 + 2j),
        *(
            [],
            [1, [2]],
            (),
            (1,),
            {"a": {1: (2, 3)}, (1, 2): None},
            {1, 2},
            frozenset({3}),
            slice(1, None, 2),
            range(3),
        ),
        collections.deque([1, 2], maxlen=3),
        *(Colour.RED, Pair(1, [2]), Plain([1]), Slotted("x"), np.dtype("<f4"), np.dtype([("a", "U3")]), np.float32, np),
        *(
            np.float32(0.1),
            np.int64(3),
            np.bool_(True),
            np.str_("x"),
            np.datetime64("2026-01-01"),
            np.longdouble("0.1"),
        ),
        RechunkSettings(sizes=(3,)),
        AxisArray.LinearAxis(unit="s", gain=0.1, offset=3.0),
    ],
    ids=repr,
)
def test_a_value_comes_back(value):
    again = back(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value) and again == value
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(10)[::-2],
        np.float16([np.nan, -0.0]),
        np.array([], ">i2"),
        np.array(3),
        np.array(["a", "µµ"]),
        np.array([("x", 1)], [("label", "U2"), ("x", "i4")]),
        np.array(["a", None, 3.5, (1, 2)], object),
        np.zeros((0, 3)),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_an_array_comes_back_bit_for_bit(array):
    again = back(array)
    assert again.dtype == array.dtype and again.shape == array.shape and again.flags.writeable
    if array.dtype.hasobject:
        assert again.tolist() == array.tolist()
    else:
        assert again.tobytes() == array.tobytes()


def test_texts_of_numpys_own_type_come_back():
    array = np.array([["a"], ["µµ" * 40]], np.dtypes.StringDType())
    assert back(array).dtype == array.dtype and back(array).tolist() == array.tolist()


def test_masks_come_back():
    array = np.ma.MaskedArray([1.0, 2.0], [False, True], fill_value=-1.0)
    again = back(array)
    assert again.mask.tolist() == [False, True] and again.data.tolist() == [1.0, 2.0] and again.fill_value == -1.0


def test_mlx_arrays_dtypes_and_the_library_come_back():
    mx = pytest.importorskip("mlx.core")
    for dtype in (mx.float32, mx.bfloat16, mx.bool_, mx.int64, mx.complex64, mx.uint8):
        array = mx.array([[0, 1, 3]]).astype(dtype)
        again, found = back([array, dtype])
        assert again.dtype == dtype == found and again.shape == array.shape
        assert mx.array_equal(again, array)
    assert back(mx) is mx


def test_messages_come_back_with_their_axes():
    axes = {
        "time": AxisArray.TimeAxis(fs=10.0, offset=3.0),
        "ch": AxisArray.CoordinateAxis(data=np.array(["a", "b"]), dims=["ch"]),
    }
    data = np.arange(8.0).reshape(4, 2)[::2]
    message = AxisArray(data=data, dims=["time", "ch"], axes=axes, attrs={"x": 1}, key="k", stream_dim="time")
    (again,) = back((Segment(message, 3),))
    assert type(again) is Segment and again.first == 3 and again.message == message
    assert again.message.attrs == {"x": 1} and again.message.axes == axes


def test_what_is_one_object_stays_one():
    array = np.zeros(3)
    one, other, plain = back([array, [array], Plain(array)])
    assert one is other[0] is plain.value


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        os.system,
        (number for number in ()),
        io.StringIO(),
        sys,
        os,
        Reduced(),
        WithDel(),
        collections.OrderedDict(),
        collections.Counter(),
        ValueError("x"),
        tempfile.TemporaryDirectory,
        [EWMATransformer(time_constant=1.0)],
        np.zeros(1, [("a", object)]),
        np.random.default_rng(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_do_something_is_not_packed(value):
    with pytest.raises(CannotPack, match="it holds a"):
        pack([value], OWN)


def test_devices_and_streams_of_mlx_are_not_packed():
    import mlx.core as mx

    # They come from the same module as dtypes, which are, and mean nothing in another process.
    for value in (mx.Device(mx.cpu), mx.default_stream(mx.cpu), mx.cpu):
        with pytest.raises(CannotPack, match=f"it holds a .*{type(value).__name__}"):
            pack([value], OWN)
    step = EWMATransformer(time_constant=1.0)
    step.state.zi = mx.default_stream(mx.cpu)
    with pytest.raises(CannotSave, match="the state of EWMATransformer cannot be saved .*Stream"):
        save(step)


def test_classes_of_other_packages_are_neither_packed_nor_built():
    packed = pack(Plain(), OWN)
    with pytest.raises(CannotPack, match="it holds a .*Plain"):
        pack(Plain())
    with pytest.raises(ValueError, match="class .*Plain"):
        unpack(packed)


def test_what_contains_itself_is_not_packed():
    value = []
    value.append(value)
    with pytest.raises(CannotPack, match="a list contains itself"):
        pack(value)


# ----------------------------------------------------------------------------------------------------- hostile bytes


def made(*nodes, value=None, **arrays):
    tree = {"format": checkpoint.FORMAT, "nodes": nodes, "value": [len(nodes) - 1] if value is None else value}
    file = io.BytesIO()
    np.savez(file, tree=np.frombuffer(json.dumps(tree).encode(), np.uint8), **arrays)
    return file.getvalue()


def test_bytes_made_by_hand_are_read():
    assert unpack(made(["list", 1, 2])) == [1, 2]


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {Evil.marker}",)


@pytest.fixture
def marker(tmp_path):
    Evil.marker = tmp_path / "ran"
    return Evil.marker


def hostile():
    """Bytes that would run code if they were read as a pickle, in whole or in part."""
    yield pickle.dumps(Evil())
    yield made(["array", "a"], a=np.array([Evil()], object))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tree.npy", pickle.dumps(Evil()))
    yield file.getvalue()
    file = io.BytesIO()
    np.save(file, np.array([Evil()], object))
    yield file.getvalue()


@pytest.mark.parametrize("number", range(4))
def test_a_pickle_in_any_place_does_not_run(number, marker):
    data = list(hostile())[number]
    with pytest.raises(ValueError, match="not values of this version of ezmsg-mlx"):
        unpack(data)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil()))
    assert marker.exists()  # it does run as a pickle


@pytest.mark.parametrize(
    "nodes",
    [
        [["dict"], ["object", "subprocess", "Popen", [0], [0]]],
        [["dict"], ["object", "ezmsg.mlx.offline.checkpoint", "os.system", [0], [0]]],
        [["dict"], ["object", "ezmsg.mlx.offline.zarrsink", "fcntl.flock", [0], [0]]],
        [["dict"], ["object", "ezmsg.mlx.offline.zarrsink", "Path", [0], [0]]],
        [["dict"], ["object", "ezmsg.mlx.ewma", "EWMATransformer", [0], [0]]],
        [["dict"], ["object", "ezmsg.core", "Unit", [0], [0]]],
        [["dict"], ["object", "ezmsg.not_imported", "X", [0], [0]]],
        [["dict", 3, 4], ["object", "ezmsg.mlx.rechunk", "RechunkState", [0], [0]]],
        [["named", "ezmsg.mlx.rechunk", "RechunkState"]],
        [["enum", "ezmsg.mlx.stream.segments", "Segment", "_make"]],
        [["__init__", "subprocess"]],
        [["dict"], ["array", [0]]],
        [["module", "os"]],
        [["mlx dtype", "load"]],
        [["array", "../../etc/passwd"]],
        [["list", [0]]],
        [["list", [-1]]],
        [["list", [0, 1]]],
        [["no such kind"]],
        ["list", "dict"],
        [["dict"], ["object", "ezmsg.mlx.rechunk", "RechunkState", [0], "text"]],
        [["dict"], ["bytes", [0]]],
        [["list", 1], ["masked", [0], [0], 0]],
        [["dict"], ["range", [0]]],
    ],
    ids=str,
)
def test_nothing_else_is_built(nodes):
    with pytest.raises(ValueError, match="not values of this version of ezmsg-mlx"):
        unpack(made(*nodes))


def test_damage_anywhere_is_a_value_error():
    packed = pack({"a": np.arange(50), "b": [Plain(1)]}, OWN)
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(packed)
        damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
        try:
            again = unpack(bytes(damaged), OWN)
        except ValueError:
            continue
        # In bytes of the archive that say nothing.
        assert again["a"].tolist() == list(range(50)) and again["b"] == [Plain(1)]
    for length in range(0, len(packed), 37):
        with pytest.raises(ValueError, match="not values"):
            unpack(packed[:length], OWN)
