"""The axes, units and conversions of results in Zarr."""

import contextlib

import numpy as np
import pytest
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray
from helpers.nwb_files import write

from ezmsg.mlx import NWBSource, RechunkTransformer, ZarrSink, process_recording

zarr = pytest.importorskip("zarr")

TEXTS = ["a", "bb", "µ"]


def message(data, dims=("time", "ch"), attrs=None, **axes):
    axes = {"time": AxisArray.TimeAxis(fs=100.0, offset=3.0)} | axes
    return AxisArray(data=data, dims=list(dims), axes=axes, key="k", stream_dim="time", attrs=attrs or {})


def labels(values, dim="ch", unit=""):
    return AxisArray.CoordinateAxis(data=values, dims=[dim], unit=unit)


@contextlib.contextmanager
def opened(path, **options):
    sink = ZarrSink(path, **options)
    sink.open("recipe", "fingerprint")
    with contextlib.closing(sink):
        yield sink


def stored(path, *messages):
    with opened(path) as sink:
        for each in messages:
            sink.append(each)
        sink.commit()
    return zarr.open_group(str(path), mode="r")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array(TEXTS), TEXTS),
        (np.array(TEXTS, object), TEXTS),
        (np.array([text.encode() for text in TEXTS]), TEXTS),
        (np.array([text.encode() for text in TEXTS], object), TEXTS),
        (np.array(TEXTS, np.dtypes.StringDType()), TEXTS),
        (np.array(["", "", ""]), ["", "", ""]),
        (np.array([1, 2, 3], object), [1, 2, 3]),
        (np.array([True, False, True]), [True, False, True]),
        (np.array([1.5, 2.0, np.inf]), [1.5, 2.0, np.inf]),
    ],
    ids=["text", "objects", "bytes", "objects of bytes", "StringDType", "empty", "integers", "bool", "floats"],
)
def test_labels_of_all_kinds_reach_the_group(tmp_path, values, expected):
    group = stored(tmp_path / "r.zarr", message(np.zeros((2, 3)), ch=labels(values, unit="mm")))
    assert group["ch"][:].tolist() == expected
    assert group["ch"].attrs["unit"] == "mm" and list(group["ch"].attrs["_ARRAY_DIMENSIONS"]) == ["ch"]


def test_records_give_an_array_for_each_field(tmp_path):
    records = np.array([("x", 1, b"A"), ("y", 2, b"B")], [("label", "U4"), ("elec", "i4"), ("bank", "S1")])
    group = stored(tmp_path / "r.zarr", message(np.zeros((2, 2)), ch=labels(records)))
    assert group["ch"][:].tolist() == ["x", "y"]
    assert group["ch_elec"][:].tolist() == [1, 2] and group["ch_bank"][:].tolist() == ["A", "B"]
    assert list(group["ch_elec"].attrs["_ARRAY_DIMENSIONS"]) == ["ch"]
    no_label = records[["elec", "bank"]]
    group = stored(tmp_path / "s.zarr", message(np.zeros((2, 2)), ch=labels(no_label)))
    assert set(group) == {"data", "time", "ch_elec", "ch_bank"}


@pytest.mark.parametrize(
    "values",
    [np.array(["a", None, "c"], object), np.array([0, 1, 2], "M8[s]"), np.array([b"\xff"] * 3, object)],
    ids=["None", "dates", "no UTF-8"],
)
def test_labels_that_cannot_be_kept_are_refused(tmp_path, values):
    with opened(tmp_path / "r.zarr") as sink, pytest.raises((TypeError, ValueError), match="'ch' has values|codec"):
        sink.append(message(np.zeros((2, 3)), ch=labels(values)))


def test_labels_of_another_number_than_the_channels_are_refused(tmp_path):
    with opened(tmp_path / "r.zarr") as sink, pytest.raises(ValueError, match=r"'ch' has values of shape \(2,\)"):
        sink.append(message(np.zeros((2, 3)), ch=labels(np.array(["a", "b"]))))


def test_labels_that_change_are_refused(tmp_path):
    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(np.zeros((2, 3)), ch=labels(np.array(TEXTS))))
        sink.append(message(np.zeros((2, 3)), ch=labels(np.array(TEXTS))))
        with pytest.raises(ValueError, match="another axis 'ch' than those before"):
            sink.append(message(np.zeros((2, 3)), ch=labels(np.array(TEXTS[::-1]))))


@pytest.mark.parametrize("second", ["data", "ch_x"])
def test_names_that_the_group_has_already_are_refused(tmp_path, second):
    records = labels(np.array([(1,), (2,)], [("x", "i4")]))
    given = message(np.zeros((2, 2, 2)), ("time", "ch", second), ch=records)
    given.axes[second] = AxisArray.LinearAxis()
    with (
        opened(tmp_path / "r.zarr") as sink,
        pytest.raises(ValueError, match=f"{second}', which the group"),
    ):
        sink.append(given)


def test_no_channels_are_kept_as_none(tmp_path):
    group = stored(tmp_path / "r.zarr", message(np.zeros((2, 0)), ch=labels(np.array([], "U1"))))
    assert group["data"].shape == (2, 0) and group["ch"].shape == (0,)


def test_times_that_are_not_numbers_are_refused(tmp_path):
    dates = labels(np.array([0, 1], "M8[s]"), "time")
    with opened(tmp_path / "r.zarr") as sink, pytest.raises(TypeError, match="'time' has values of dtype datetime64"):
        sink.append(message(np.zeros((2, 3)), time=dates))


def test_windows_keep_the_times_of_the_windows_and_those_inside(tmp_path):
    step = WindowTransformer(newaxis="win", window_dur=0.04, window_shift=0.02, zero_pad_until="none")
    data = np.arange(60.0).reshape(20, 3)
    windows = step(message(data, ch=labels(np.array(TEXTS))))
    assert windows.dims == ["win", "time", "ch"]
    group = stored(tmp_path / "r.zarr", windows)
    np.testing.assert_array_equal(group["data"][:], windows.data)
    inner, outer = windows.axes["time"], windows.axes["win"]
    np.testing.assert_allclose(group["time"][:], inner.value(np.arange(4)))
    np.testing.assert_allclose(group["win"][:], outer.value(np.arange(len(windows.data))))
    assert np.diff(group["win"][:]) == pytest.approx(0.02)
    assert list(group["data"].attrs["_ARRAY_DIMENSIONS"]) == ["win", "time", "ch"]
    assert list(group["win"].attrs["_ARRAY_DIMENSIONS"]) == ["win"]


def test_a_checkpoint_of_windows_is_gone_on_with(tmp_path):
    windows = AxisArray(
        data=np.arange(24.0).reshape(4, 3, 2),
        dims=["win", "time", "ch"],
        axes={"win": AxisArray.TimeAxis(fs=10.0), "time": AxisArray.TimeAxis(fs=100.0)},
        stream_dim="win",
    )
    with opened(tmp_path / "r.zarr", chunk_samples=3) as sink:
        sink.append(windows)
        sink.checkpoint(b"state")
    sink = ZarrSink(tmp_path / "r.zarr")
    assert sink.open("recipe", "fingerprint") == (False, b"state")
    sink.commit()
    sink.close()
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:], windows.data)
    np.testing.assert_allclose(group["win"][:], [0, 0.1, 0.2, 0.3])


def test_attrs_that_json_holds_are_those_of_the_data(tmp_path):
    attrs = {"unit": "uV", "gain": np.float32(0.25), "gains": np.array([1.0, 2.0]), "flag": np.True_, "no": object()}
    group = stored(tmp_path / "r.zarr", message(np.zeros((2, 3)), attrs=attrs))
    found = dict(group["data"].attrs)
    found.pop("_ARRAY_DIMENSIONS")
    assert found == {"unit": "uV", "units": "uV", "gain": 0.25, "gains": [1.0, 2.0], "flag": True}


@pytest.mark.parametrize("in_volts", [False, True])
def test_results_of_an_nwb_recording_say_whether_they_are_counts(tmp_path, in_volts):
    nwb = pytest.importorskip("ezmsg.nwb")
    source = NWBSource(write(tmp_path / "recording.nwb", {}))
    chain = (lambda: [nwb.NWBScalingTransformer()]) if in_volts else (lambda: [RechunkTransformer()])
    process_recording(source, chain, ZarrSink(tmp_path / "r.zarr"))
    data = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")["data"]
    if in_volts:
        assert data.attrs["unit"] == "volts" and "nwb_scaling_gain" not in data.attrs
    else:
        assert data.dtype == np.int16 and data.attrs["nwb_scaling_applied"] is False
        assert (data.attrs["nwb_scaling_gain"], data.attrs["nwb_scaling_unit"]) == (0.25e-6, "volts")
