"""Reading late changes when results come, and nothing else."""

from unittest import mock

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArrayTransformer, ReadLateSettings, ReadLateTransformer

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import readlate
from ezmsg.mlx.stream.convert import Unread


def messages(n: int) -> list[AxisArray]:
    axis = AxisArray.TimeAxis(fs=1000.0)
    return [AxisArray(mx.full((4, 2), float(i)) * 2, ["time", "ch"], axes={"time": axis}) for i in range(n)]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_same_results_in_order_and_depth_messages_late(depth):
    reader = ReadLateTransformer(depth=depth)
    outputs = [reader(message) for message in messages(8)]
    assert [len(output) for output in outputs] == [0] * depth + [1] * (8 - depth)
    results = [message for output in outputs for message in output] + reader.flush()
    at_once = [AsArrayTransformer()(message) for message in messages(8)]
    assert [type(message.data) for message in results] == [np.ndarray] * 8
    np.testing.assert_array_equal([m.data for m in results], [m.data for m in at_once])
    assert reader.flush() == []


def test_a_changed_stream_loses_nothing():
    reader = ReadLateTransformer(depth=2)
    old, new = messages(2), AxisArray(mx.ones((1, 3)), ["time", "other"], key="new")
    outputs = [message for given in [*old, new] for message in reader(given)] + reader.flush()
    assert [message.data.shape for message in outputs] == [(4, 2), (4, 2), (1, 3)]


def test_a_smaller_depth_hands_out_what_is_due():
    reader = ReadLateTransformer(depth=3)
    given = messages(4)
    for message in given[:3]:
        assert reader(message) == []
    reader.update_settings(ReadLateSettings(depth=1))
    assert len(reader(given[3])) == 3


def test_dtype_and_numpy_messages():
    reader = ReadLateTransformer(depth=0, dtype="float64")
    (result,) = reader(messages(1)[0])
    assert result.data.dtype == np.float64
    message = AxisArray(np.ones((2, 2), np.int16), ["time", "ch"])
    (result,) = reader(message)
    assert result.data.dtype == np.float64
    assert reader(result)[0] is result


@pytest.mark.parametrize(("depth", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)])
def test_bad_depth_is_refused(depth, error):
    with pytest.raises(error, match="'depth' must be"):
        ReadLateSettings(depth=depth)


@pytest.mark.parametrize("dtype", ["zeros", "object", "bfloat16", 5, np.float32, np.dtype("float32")])
def test_bad_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="'dtype' must be"):
        ReadLateSettings(dtype=dtype)


@pytest.mark.parametrize("backend", [np, mx], ids=["numpy", "mlx"])
def test_what_waits_survives_the_reuse_of_the_buffers_it_came_from(backend):
    # Views, as everything is that arrives through shared memory.
    slot, times, labels, gains = np.ones((2, 2)), np.arange(2.0), np.array(["a", "b"]), np.ones(2)
    axes = {
        "time": AxisArray.CoordinateAxis(data=times[:], dims=["time"]),
        "ch": AxisArray.CoordinateAxis(data=labels[:], dims=["ch"]),
    }
    data = slot[:] if backend is np else mx.array(slot)
    reader = ReadLateTransformer(depth=1)
    assert reader(AxisArray(data, ["time", "ch"], axes=axes, attrs={"gain": gains[:], "unit": "uV"})) == []
    slot[:], times[:], labels[:], gains[:] = -1, -1, "z", -1

    (result,) = reader.flush()
    np.testing.assert_array_equal(result.data, np.ones((2, 2)))
    assert list(result.axes["time"].data) == [0, 1] and list(result.axes["ch"].data) == ["a", "b"]
    assert list(result.attrs["gain"]) == [1, 1] and result.attrs["unit"] == "uV"


def test_results_are_begun_when_they_come_and_read_when_they_are_due():
    events, begin = [], readlate.begin_reading

    class Noted(Unread):
        __slots__ = ()

        def read(self):
            events.append("read")
            return super().read()

    def noted(data, dtype, *, rounds):
        events.append("begun")
        unread = begin(data, dtype, rounds=rounds)
        unread.__class__ = Noted
        return unread

    with mock.patch.object(readlate, "begin_reading", noted):
        reader = ReadLateTransformer(depth=1, dtype="float64")
        results = [result for message in messages(3) for result in reader(message)] + reader.flush()
    assert events == ["begun", "begun", "read", "begun", "read", "read"]
    assert [result.data.dtype for result in results] == [np.float64] * 3


def test_settings_that_change_and_states_that_are_put_back_are_those_that_count():
    reader, given = ReadLateTransformer(depth=2), messages(4)
    for message in given[:2]:
        assert reader(message) == []
    before = reader.state
    waiting = before.waiting
    reader.update_settings(ReadLateSettings(depth=2, dtype="float64"))
    (first,) = reader(given[2])
    assert first.data.dtype == np.float64
    np.testing.assert_array_equal(first.data, np.array(given[0].data))
    # As after an error in a stage behind.
    reader.state.waiting = waiting
    assert [float(result.data[0, 0]) for result in reader.flush()] == [0.0, 2.0]
