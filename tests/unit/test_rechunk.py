import asyncio
import dataclasses
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import typing
import weakref

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx.rechunk import Rechunk, RechunkSettings, RechunkTransformer

FS = 30000.0
N_CHANNELS = 4


def array(data: np.ndarray, backend: str):
    if backend == "numpy":
        return data
    mx = pytest.importorskip("mlx.core")
    return mx.array(data)


@pytest.fixture(params=["numpy", "mlx"])
def backend(request) -> str:
    if request.param == "mlx":
        pytest.importorskip("mlx.core")
    return request.param


def make(first: int, n: int, backend: str = "numpy", labels: str = "abcd", dtype: str = "int32", **fields) -> AxisArray:
    """Samples ``first`` to ``first + n`` of a counting stream: ten times the number of the sample, plus the channel."""
    data = (np.arange(first, first + n)[:, None] * 10 + np.arange(len(labels))).astype(dtype)
    axes = {
        "time": AxisArray.TimeAxis(fs=FS, offset=100.0 + first / FS),
        "ch": AxisArray.CoordinateAxis(data=np.array(list(labels)), dims=["ch"]),
    }
    fields = {"dims": ["time", "ch"], "axes": axes, "key": "amp", "stream_dim": "time"} | fields
    return AxisArray(array(data, backend), **fields)


def lengths(messages: list[AxisArray], dim: str = "time") -> list[int]:
    return [m.data.shape[m.get_axis_idx(dim)] for m in messages]


def joined(messages: list[AxisArray], axis: int = 0) -> np.ndarray:
    return np.concatenate([np.array(m.data) for m in messages], axis=axis)


def counting(first: int, stop: int) -> np.ndarray:
    return np.arange(first, stop)[:, None] * 10 + np.arange(N_CHANNELS)


# Settings


@pytest.mark.parametrize("sizes", [300, 300.0, "300", None, True, (300, 2.0), [True], ("300",), np.array([300]), {300}])
def test_sizes_of_a_wrong_type_are_refused(sizes):
    with pytest.raises(TypeError, match="sizes.* must be .*integer"):
        RechunkSettings(sizes=sizes)


@pytest.mark.parametrize("sizes", [(), [], (0,), (300, -1)])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes.* must be .*integer"):
        RechunkSettings(sizes=sizes)


@pytest.mark.parametrize("remainder", ["drop", "", None, 1, True])
def test_unknown_remainder_is_refused(remainder):
    with pytest.raises(ValueError, match="^'remainder' must be one of 'carry', 'emit', got .*"):
        RechunkSettings(remainder=remainder)


def test_settings_survive_json():
    settings = RechunkSettings(sizes=[np.int64(300), 1200], remainder="emit")
    assert settings.sizes == (300, 1200)
    assert RechunkSettings(**json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


def test_numpy_data_do_not_import_mlx():
    code = """
import sys
import numpy as np
from ezmsg.mlx.rechunk import RechunkTransformer
from ezmsg.util.messages.axisarray import AxisArray
rechunk = RechunkTransformer(sizes=(3,))
assert len(rechunk(AxisArray(np.zeros((5, 2)), dims=["time", "ch"]))) == 1
assert len(rechunk(AxisArray(np.zeros((5, 2)), dims=["time", "ch"]))) == 2
assert "mlx.core" not in sys.modules and "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Cutting


def test_fitting_message_passes_as_the_same_object(backend):
    rechunk = RechunkTransformer(sizes=(300, 1200))
    for first, n in ((0, 300), (300, 1200), (1500, 300)):
        message = make(first, n, backend)
        (out,) = rechunk(message)
        assert out is message


def test_largest_sizes_come_first(backend):
    rechunk = RechunkTransformer(sizes=(100, 1000, 300))
    message = make(0, 2700, backend)
    out = rechunk(message)
    assert lengths(out) == [1000, 1000, 300, 300, 100]
    np.testing.assert_array_equal(joined(out), counting(0, 2700))
    assert type(out[0].data) is type(message.data)


def test_pieces_are_views_into_the_message():
    message = make(0, 1000)
    out = RechunkTransformer()(message)
    assert lengths(out) == [300, 300, 300]
    assert all(np.shares_memory(piece.data, message.data) for piece in out)


def test_left_over_samples_go_in_front_of_the_next_message(backend):
    rechunk = RechunkTransformer()
    out = [rechunk(make(first, 500, backend)) for first in (0, 500, 1000)]
    assert [lengths(pieces) for pieces in out] == [[300], [300, 300], [300, 300]]
    np.testing.assert_array_equal(joined([piece for pieces in out for piece in pieces]), counting(0, 1500))


def test_messages_shorter_than_a_piece_are_collected(backend):
    rechunk = RechunkTransformer(sizes=(10,))
    out = [rechunk(make(first, 1, backend)) for first in range(25)]
    assert [len(pieces) for pieces in out] == [int(i % 10 == 9) for i in range(25)]
    np.testing.assert_array_equal(joined([piece for pieces in out for piece in pieces]), counting(0, 20))


def test_emit_sends_the_rest_in_descending_powers_of_two(backend):
    rechunk = RechunkTransformer(remainder="emit")
    out = rechunk(make(0, 300 + 187, backend))
    assert lengths(out) == [300, 128, 32, 16, 8, 2, 1]
    np.testing.assert_array_equal(joined(out), counting(0, 487))
    assert rechunk.flush() == []
    message = make(487, 256, backend)
    assert rechunk(message)[0] is message


def test_offsets_are_computed_from_the_message_that_the_first_sample_arrived_in():
    rechunk = RechunkTransformer()
    first, second = make(0, 500), make(500, 700)
    # A quarter of a sample late, which is no gap: accumulated offsets would differ.
    second.axes["time"].offset += 0.25 / FS
    out = rechunk(first) + rechunk(second)
    assert lengths(out) == [300, 300, 300, 300]
    arrived = [first.axes["time"].value(0), first.axes["time"].value(300)]
    arrived += [second.axes["time"].value(100), second.axes["time"].value(400)]
    assert [piece.axes["time"].offset for piece in out] == arrived
    assert {piece.axes["time"].gain for piece in out} == {1 / FS}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_stream_dimension_may_be_anywhere(backend, position):
    dims = ["ch", "band"]
    dims.insert(position, "time")
    samples = np.moveaxis(np.arange(50 * 6).reshape(50, 2, 3), 0, position)

    def part(start: int, stop: int) -> AxisArray:
        data = np.take(samples, np.arange(start, stop), axis=position)
        axes = {"time": AxisArray.TimeAxis(fs=10.0, offset=start / 10.0)}
        return AxisArray(array(data, backend), dims=dims, axes=axes)

    rechunk = RechunkTransformer(sizes=(8,))
    out = rechunk(part(0, 27)) + rechunk(part(27, 50)) + rechunk.flush()
    assert lengths(out) == [8] * 6 + [2]
    np.testing.assert_array_equal(joined(out, axis=position), samples)
    np.testing.assert_allclose([piece.axes["time"].offset for piece in out], np.arange(7) * 0.8)


def test_declared_stream_dimension_wins_over_time():
    data = np.arange(24).reshape(6, 4)
    axes = {"win": AxisArray.LinearAxis(gain=0.5), "time": AxisArray.TimeAxis(fs=10.0)}
    message = AxisArray(data, dims=["win", "time"], axes=axes, stream_dim="win")
    out = RechunkTransformer(sizes=(2,))(message)
    assert [piece.data.shape for piece in out] == [(2, 4)] * 3
    assert [piece.axes["win"].offset for piece in out] == [0.0, 1.0, 2.0]


def test_one_dimension_is_enough(backend):
    message = AxisArray(array(np.arange(7), backend), dims=["time"])
    rechunk = RechunkTransformer(sizes=(3,))
    assert lengths(rechunk(message) + rechunk.flush()) == [3, 3, 1]


def test_zero_channels_are_cut_like_any_others(backend):
    rechunk = RechunkTransformer()
    out = rechunk(make(0, 500, backend, labels="")) + rechunk(make(500, 100, backend, labels=""))
    assert [piece.data.shape for piece in out] == [(300, 0), (300, 0)]


def test_message_without_samples_passes_and_the_carry_stays(backend):
    rechunk = RechunkTransformer()
    rechunk(make(0, 500, backend))
    empty = make(0, 0, backend, key="other")
    (out,) = rechunk(empty)
    assert out is empty
    np.testing.assert_array_equal(joined(rechunk(make(500, 100, backend))), counting(300, 600))


def test_message_without_a_dimension_is_refused_and_the_carry_stays():
    rechunk = RechunkTransformer()
    rechunk(make(0, 500))
    with pytest.raises(ValueError, match=r"^The message has data of shape \(\), without a dimension"):
        rechunk(AxisArray(np.array(1.0), dims=[]))
    assert lengths(rechunk.flush()) == [128, 64, 8]


def test_async_call_is_the_same():
    rechunk = RechunkTransformer()
    assert lengths(asyncio.run(rechunk.__acall__(make(0, 700)))) == [300, 300]


# Axes and attrs


def test_coordinates_along_the_stream_are_cut_with_the_data(backend):
    def events(first: int, n: int) -> AxisArray:
        # Event times with gaps, which nobody can call gaps, and a second coordinate along the same dimension.
        times = AxisArray.CoordinateAxis(data=np.arange(first, first + n) ** 2.0, dims=["time"], unit="s")
        marks = AxisArray.CoordinateAxis(data=np.arange(first, first + n) % 3, dims=["time"])
        return make(first, n, backend, axes={"time": times, "mark": marks})

    rechunk = RechunkTransformer(sizes=(8,))
    out = rechunk(events(0, 19)) + rechunk(events(40, 21)) + rechunk.flush()
    assert lengths(out) == [8] * 5
    samples = np.r_[0:19, 40:61]
    np.testing.assert_array_equal(np.concatenate([piece.axes["time"].data for piece in out]), samples**2.0)
    np.testing.assert_array_equal(np.concatenate([piece.axes["mark"].data for piece in out]), samples % 3)
    np.testing.assert_array_equal(joined(out)[:, 0], samples * 10)
    assert out[2].axes["time"].unit == "s"


def test_stream_without_an_axis_is_cut_and_gets_none(backend):
    rechunk = RechunkTransformer()
    out = rechunk(make(0, 500, backend, axes={})) + rechunk(make(500, 100, backend, axes={}))
    assert lengths(out) == [300, 300]
    assert all(piece.axes == {} for piece in out)


def test_other_metadata_come_from_the_message_of_the_last_sample():
    rechunk = RechunkTransformer()
    rechunk(make(0, 500, attrs={"trial": 1}))
    second = make(500, 500, attrs={"trial": 2})
    straddling, within = rechunk(second)
    assert straddling.attrs == within.attrs == {"trial": 2}
    assert straddling.axes["ch"] is within.axes["ch"] is second.axes["ch"]
    assert (straddling.key, straddling.stream_dim, straddling.dims) == ("amp", "time", ["time", "ch"])


# Changes in the stream


def relabelled(message: AxisArray, dim: str, **fields) -> AxisArray:
    return replace(message, axes={**message.axes, dim: replace(message.axes[dim], **fields)})


NEXT = make(500, 500)
CHANGES = {
    "gap": make(501, 500),
    "overlap": make(499, 500),
    "gap of 0.6 samples": relabelled(NEXT, "time", offset=NEXT.axes["time"].offset + 0.6 / FS),
    "offset that is no number": relabelled(NEXT, "time", offset=float("nan")),
    "rate": relabelled(NEXT, "time", gain=(1 + 2e-6) / FS),
    "unit": relabelled(NEXT, "time", unit="ms"),
    "channel labels": make(500, 500, labels="abce"),
    "channel count": make(500, 500, labels="abc"),
    "channel axis gone": make(500, 500, axes={"time": NEXT.axes["time"]}),
    "another axis": replace(
        NEXT, axes={**NEXT.axes, "site": AxisArray.CoordinateAxis(data=np.array(["M1"]), dims=["site"])}
    ),
    "linear channel axis": replace(NEXT, axes={**NEXT.axes, "ch": AxisArray.LinearAxis()}),
    "coordinates for a linear stream axis": replace(
        NEXT, axes={**NEXT.axes, "time": AxisArray.CoordinateAxis(data=np.arange(500.0), dims=["time"], unit="s")}
    ),
    "dtype": make(500, 500, dtype="int16"),
    "byte order": make(500, 500, dtype=">i4"),
    "key": make(500, 500, key="other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_flushes_the_carry_with_its_old_metadata(change):
    rechunk = RechunkTransformer()
    rechunk(make(0, 500, attrs={"trial": 1}))
    message = CHANGES[change]
    before = pickle.dumps(message)
    out = rechunk(message) + rechunk.flush()

    flushed, new = out[:3], out[3:]
    assert lengths(flushed) == [128, 64, 8]
    np.testing.assert_array_equal(joined(flushed), counting(300, 500))
    source = make(0, 500)
    offsets = [piece.axes["time"].offset for piece in flushed]
    assert offsets == [source.axes["time"].value(i) for i in (300, 428, 492)]
    for piece in flushed:
        assert (piece.key, piece.dims, piece.stream_dim, piece.attrs) == ("amp", ["time", "ch"], "time", {"trial": 1})
        assert piece.data.dtype == source.data.dtype
        assert piece.axes["ch"] == source.axes["ch"]
        assert piece.axes["time"].gain == source.axes["time"].gain

    np.testing.assert_array_equal(joined(new), message.data)
    assert new[0].key == message.key and new[0].axes.keys() == message.axes.keys()
    assert pickle.dumps(message) == before


@pytest.mark.parametrize(
    "change",
    [
        make(304, 304, axes={}, dims=["time", "feature"]),
        make(304, 304, axes={}, labels="abc"),
        replace(make(304, 304, axes={}), data=np.ones((4, 304), "int32"), stream_dim="ch"),
        replace(make(304, 304, axes={}), data=np.ones((4, 304), "int32"), dims=["ch", "time"]),
    ],
    ids=["dims", "channel count", "stream dimension", "transposed"],
)
def test_a_change_shows_without_any_axis(change):
    rechunk = RechunkTransformer()
    rechunk(make(0, 304, axes={}))
    flushed, new = rechunk(change)
    np.testing.assert_array_equal(flushed.data, counting(300, 304))
    assert flushed.dims == ["time", "ch"] and flushed.stream_dim == "time"
    assert (new.dims, new.stream_dim) == (change.dims, change.stream_dim)
    assert np.shares_memory(new.data, change.data)


@pytest.mark.parametrize(
    "axis",
    [
        AxisArray.CoordinateAxis(data=np.arange(304), dims=["time"], unit="s"),
        AxisArray.CoordinateAxis(data=np.arange(304.0), dims=["event"], unit="s"),
        AxisArray.CoordinateAxis(data=np.arange(304.0), dims=["time"], unit="ms"),
        AxisArray.LinearAxis(unit="s"),
    ],
    ids=["dtype", "dims", "unit", "linear"],
)
def test_other_coordinates_along_the_stream_flush_the_carry(axis):
    times = AxisArray.CoordinateAxis(data=np.arange(304.0), dims=["time"], unit="s")
    rechunk = RechunkTransformer()
    rechunk(make(0, 304, axes={"time": times}))
    flushed, new = rechunk(make(304, 304, axes={"time": axis}))
    assert list(flushed.axes["time"].data) == [300.0, 301.0, 302.0, 303.0]
    np.testing.assert_array_equal(new.data, counting(304, 604))


def test_a_change_of_the_array_library_flushes_the_carry():
    pytest.importorskip("mlx.core")
    rechunk = RechunkTransformer()
    rechunk(make(0, 500, "numpy"))
    out = rechunk(make(500, 500, "mlx"))
    assert lengths(out) == [128, 64, 8, 300]
    assert [type(piece.data).__module__ for piece in out] == ["numpy"] * 3 + ["mlx.core"]
    np.testing.assert_array_equal(joined(out), counting(300, 800))


def test_a_linear_axis_of_another_dimension_is_told_apart_by_its_offset():
    def band(first: int, low: float) -> AxisArray:
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=first / FS), "ch": AxisArray.LinearAxis(gain=1.0, offset=low)}
        return make(first, 500, axes=axes)

    rechunk = RechunkTransformer()
    rechunk(band(0, low=5.0))
    assert lengths(rechunk(band(500, low=70.0))) == [128, 64, 8, 300]


def test_fitting_message_behind_a_flush_passes_as_the_same_object():
    rechunk = RechunkTransformer()
    rechunk(make(0, 500))
    message = make(1000, 300)
    out = rechunk(message)
    assert lengths(out) == [128, 64, 8, 300]
    assert out[-1] is message


NO_CHANGES = {
    "rate wobble": relabelled(NEXT, "time", gain=(1 + 1e-7) / FS),
    "offset jitter": relabelled(NEXT, "time", offset=NEXT.axes["time"].offset - 0.4 / FS),
    "attrs": make(500, 500, attrs={"trial": 2}),
    "order of the axes": replace(NEXT, axes={name: NEXT.axes[name] for name in ("ch", "time")}),
    "subclass of ndarray": replace(NEXT, data=NEXT.data.view(np.memmap)),
}


@pytest.mark.parametrize("no_change", NO_CHANGES)
def test_what_is_no_change_does_not_flush(no_change):
    rechunk = RechunkTransformer()
    rechunk(make(0, 500))
    out = rechunk(NO_CHANGES[no_change])
    assert lengths(out) == [300, 300]
    np.testing.assert_array_equal(joined(out), counting(300, 900))


# Settings, state and end


def test_new_settings_cut_the_carry_with_the_next_message(backend):
    rechunk = RechunkTransformer()
    first, second = make(0, 500, backend), make(500, 70, backend)
    assert lengths(rechunk(first)) == [300]
    rechunk.update_settings(RechunkSettings(sizes=(64,)))
    out = rechunk(second)
    assert lengths(out) == [64] * 4
    np.testing.assert_array_equal(joined(out), counting(300, 556))
    assert [piece.axes["time"].offset for piece in out] == [first.axes["time"].value(300 + 64 * i) for i in range(4)]
    rechunk.update_settings(RechunkSettings(sizes=(64,), remainder="emit"))
    out = rechunk(make(570, 5, backend))
    assert lengths(out) == [16, 2, 1]
    np.testing.assert_array_equal(joined(out), counting(556, 575))


def test_offsets_stay_exact_when_a_carry_is_carried_again():
    rechunk = RechunkTransformer()
    source = make(0, 500)
    rechunk(source)
    rechunk.update_settings(RechunkSettings(sizes=(150,)))
    out = rechunk(make(500, 5)) + rechunk.flush()
    assert lengths(out) == [150, 32, 16, 4, 2, 1]
    np.testing.assert_array_equal(joined(out), counting(300, 505))
    assert [piece.axes["time"].offset for piece in out[:4]] == [
        source.axes["time"].value(i) for i in (300, 450, 482, 498)
    ]


def test_larger_sizes_take_the_carry_of_smaller_ones():
    rechunk = RechunkTransformer(sizes=(64,))
    out = rechunk(make(0, 100))
    rechunk.update_settings(RechunkSettings(sizes=(300,)))
    out += rechunk(make(100, 200)) + rechunk(make(300, 70))
    assert lengths(out) == [64, 300]
    np.testing.assert_array_equal(joined(out), counting(0, 364))


def test_new_settings_may_cut_into_the_carry_of_several_messages():
    rechunk = RechunkTransformer(sizes=(100,))
    sources = [make(0, 40), make(40, 40)]
    assert [rechunk(source) for source in sources] == [[], []]
    rechunk.update_settings(RechunkSettings(sizes=(90, 30)))
    out = rechunk(make(80, 5)) + rechunk.flush()
    assert lengths(out) == [30, 30, 16, 8, 1]
    np.testing.assert_array_equal(joined(out), counting(0, 85))
    assert [piece.axes["time"].offset for piece in out[:3]] == [
        sources[0].axes["time"].value(0),
        sources[0].axes["time"].value(30),
        sources[1].axes["time"].value(20),
    ]


def test_flush_returns_the_carry_once_and_the_stream_may_go_on(backend):
    rechunk = RechunkTransformer()
    assert rechunk.flush() == []
    rechunk(make(0, 500, backend))
    out = rechunk.flush()
    assert lengths(out) == [128, 64, 8]
    np.testing.assert_array_equal(joined(out), counting(300, 500))
    assert rechunk.flush() == []
    message = make(500, 300, backend)
    assert rechunk(message)[0] is message


def test_state_can_be_pickled_and_restored(backend):
    rechunk = RechunkTransformer()
    rechunk(make(0, 500, backend))
    restored = RechunkTransformer()
    restored.state = pickle.dumps(rechunk.state)
    for transformer in (restored, rechunk):
        out = transformer(make(500, 100, backend))
        assert lengths(out) == [300]
        np.testing.assert_array_equal(joined(out), counting(300, 600))


def test_stateful_op_carries_the_state():
    state, out = RechunkTransformer().stateful_op(None, make(0, 500))
    state, more = RechunkTransformer().stateful_op(state, make(500, 100))
    np.testing.assert_array_equal(joined(out + more), counting(0, 600))


# Memory


def test_carry_survives_the_reuse_of_the_buffers_it_came_from():
    message = make(0, 500, attrs={"gain": np.arange(4.0), "unit": "uV"})
    times = AxisArray.CoordinateAxis(data=np.arange(500.0), dims=["time"])
    # A view, as everything is that arrives through shared memory.
    labels = AxisArray.CoordinateAxis(data=np.array(list("abcd"))[:], dims=["ch"])
    message = replace(message, axes={**message.axes, "time": times, "ch": labels})
    rechunk = RechunkTransformer()
    rechunk(message)
    message.data[:] = -1
    message.axes["ch"].data[:] = "z"
    message.axes["time"].data[:] = -1
    message.attrs["gain"][:] = -1

    out = rechunk.flush()
    np.testing.assert_array_equal(joined(out), counting(300, 500))
    np.testing.assert_array_equal(np.concatenate([piece.axes["time"].data for piece in out]), np.arange(300.0, 500.0))
    for piece in out:
        assert list(piece.axes["ch"].data) == list("abcd")
        assert list(piece.attrs["gain"]) == [0, 1, 2, 3] and piece.attrs["unit"] == "uV"


def test_masks_are_kept_in_carried_and_joined_samples():
    rechunk = RechunkTransformer(sizes=(4,))
    masks = np.arange(12).reshape(3, 4) % 5 == 0
    masked = [
        replace(message, data=np.ma.masked_array(message.data, np.repeat(masks[i, :3, None], N_CHANNELS, axis=1)))
        for i, message in enumerate(make(3 * i, 3) for i in range(2))
    ]
    out = [piece for message in masked for piece in rechunk(message)] + rechunk.flush()
    assert lengths(out) == [4, 2]
    np.testing.assert_array_equal(joined(out), counting(0, 6))
    found = np.concatenate([np.ma.getmaskarray(piece.data) for piece in out])
    np.testing.assert_array_equal(found, np.concatenate([np.ma.getmaskarray(message.data) for message in masked]))
    assert found.any()


def test_carry_keeps_no_buffer_of_its_message_alive():
    message = make(0, 15_001)
    labels = np.array(list("abcd"))
    views = AxisArray.CoordinateAxis(data=labels[:], dims=["ch"])
    message = replace(message, axes={**message.axes, "ch": views})
    buffers = [weakref.ref(message.data), weakref.ref(labels)]
    rechunk = RechunkTransformer()
    assert len(rechunk(message)) == 50
    del message, labels, views
    gc.collect()
    assert [buffer() for buffer in buffers] == [None, None]
    assert lengths(rechunk.flush()) == [1]


def test_mlx_carry_holds_neither_its_message_nor_a_lazy_graph():
    mx = pytest.importorskip("mlx.core")
    rechunk = RechunkTransformer()
    gc.collect()
    before = mx.get_active_memory()
    for i in range(20):
        counts = mx.zeros((15_000 + 10 * i + 1, 64))
        mx.eval(counts)
        lazy = (counts + 1.0) * 2.0
        offset = 100.0 + i * 20_000 / FS
        rechunk(AxisArray(lazy, dims=["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=FS, offset=offset)}))
    del counts, lazy
    gc.collect()
    # 191 samples of 64 channels are 48 KiB; one message would be 3.7 MiB.
    assert mx.get_active_memory() - before < 100 * 1024
    (carried,) = rechunk.state.carry
    assert carried.message.data.shape == (191, 64) and mx.all(carried.message.data == 2.0).item()


@pytest.mark.parametrize("n", [200, 500])
def test_mlx_carry_is_a_copy_even_where_it_is_the_whole_message(n):
    # A window into the MLX array stands for a buffer that MLX shares with its source, as mx.asarray may on Metal.
    message = make(0, n, "mlx")
    window = np.asarray(message.data)
    rechunk = RechunkTransformer()
    rechunk(message)
    window[:] = -1
    np.testing.assert_array_equal(joined(rechunk.flush()), counting(n // 300 * 300, n))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "bool_", "uint8", "int64"])
def test_mlx_dtypes_keep_their_bits(dtype):
    mx = pytest.importorskip("mlx.core")
    data = mx.array(np.arange(40).reshape(20, 2)).astype(getattr(mx, dtype))
    rechunk = RechunkTransformer(sizes=(8,))
    messages = [AxisArray(part, dims=["time", "ch"]) for part in (data[:10], data[10:])]
    out = [piece.data for message in messages for piece in rechunk(message)]
    out += [piece.data for piece in rechunk.flush()]
    assert {piece.dtype for piece in out} == {data.dtype}
    assert mx.array_equal(mx.concatenate(out), data).item()


def test_input_is_never_written_to():
    rechunk = RechunkTransformer()
    for first in (0, 500, 1000):
        message = make(first, 500, attrs={"trial": 1})
        message.data.flags.writeable = False
        message.axes["ch"].data.flags.writeable = False
        before = pickle.dumps(message)
        rechunk(message)
        assert pickle.dumps(message) == before


# The unit in a graph


class CountingSource(ez.Unit):
    """300-sample messages and stalls, after which everything unread comes as one message."""

    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)
    LENGTHS = (300, 300, 1234, 300, 1, 2500, 300, 0, 465)

    @ez.publisher(OUTPUT_SIGNAL)
    async def run(self) -> typing.AsyncGenerator:
        first = 0
        for n in self.LENGTHS:
            yield self.OUTPUT_SIGNAL, make(first, n)
            first += n


class Sink(ez.Unit):
    """Keep what arrives; end the graph with the last sample."""

    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.received: list[AxisArray] = []

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.received.append(message)
        if sum(lengths(self.received)) >= sum(CountingSource.LENGTHS):
            raise ez.NormalTermination


def test_unit_publishes_every_piece_in_order():
    source, rechunk, sink = CountingSource(), Rechunk(RechunkSettings(sizes=(300, 1200))), Sink()
    watchdog = threading.Timer(30.0, os._exit, args=(1,))
    watchdog.start()
    try:
        ez.run(
            SOURCE=source,
            RECHUNK=rechunk,
            SINK=sink,
            connections=(
                (source.OUTPUT_SIGNAL, rechunk.INPUT_SIGNAL),
                (rechunk.OUTPUT_SIGNAL, sink.INPUT_SIGNAL),
            ),
            force_single_process=True,
        )
    finally:
        watchdog.cancel()
    np.testing.assert_array_equal(joined(sink.received), counting(0, sum(CountingSource.LENGTHS)))
    assert set(lengths(sink.received)) == {0, 300, 1200}
