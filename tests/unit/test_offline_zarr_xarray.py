"""Results in Zarr as xarray shows them."""

import warnings

import numpy as np
import pytest
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray
from helpers import recording_files

from ezmsg.mlx import RechunkTransformer, ZarrSink, open_recording, process_recording

pytest.importorskip("zarr")
xarray = pytest.importorskip("xarray")


def opened(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return xarray.open_dataset(path, engine="zarr", **options)


def written(path, message):
    sink = ZarrSink(path)
    sink.open("recipe", "fingerprint")
    sink.append(message)
    sink.commit()
    sink.close()
    return opened(path)


def test_results_of_a_recording_open_with_their_coordinates(tmp_path):
    source = open_recording(recording_files.write_blackrock(tmp_path, (400,)), segment="all")
    path = tmp_path / "results.zarr"
    process_recording(source, lambda: RechunkTransformer(sizes=(100,)), ZarrSink(path), progress=False)
    found = opened(path)
    data = found["data"]
    assert data.dims == ("time", "ch") and set(found.coords) == {"time", "ch"}
    np.testing.assert_array_equal(data, recording_files.DATA)
    assert found["ch"].values.tolist() == ["elec1", "elec2", "elec3"]
    assert found["time"].attrs == {"unit": "s", "units": "s", "sampling_rate": 2000.0}
    np.testing.assert_array_equal(data.sel(ch="elec2"), recording_files.DATA[:, 1])
    # The pause of half a second is in the times.
    np.testing.assert_array_equal(data.sel(time=slice(1.7, None)), recording_files.DATA[400:])
    assert data.attrs["nwb_scaling_unit"] == "volts" and "recording.ns2" in found.attrs["recipe"]


def test_it_opens_with_dask_and_without_the_file_that_says_all_at_once(tmp_path):
    path = tmp_path / "results.zarr"
    message = AxisArray(np.zeros((4, 2)), ["time", "ch"], {"time": AxisArray.TimeAxis(fs=10.0)}, stream_dim="time")
    written(path, message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert xarray.open_zarr(path)["data"].chunks == ((4,), (2,))
    # As groups of before have none.
    (path / ".zmetadata").unlink()
    assert opened(path, consolidated=False)["data"].dims == ("time", "ch")


def test_fields_of_labels_are_coordinates(tmp_path):
    records = np.array([("x", 1, "A"), ("y", 2, "B")], [("label", "U4"), ("elec", "i4"), ("bank", "U1")])
    axes = {"time": AxisArray.TimeAxis(fs=10.0), "ch": AxisArray.CoordinateAxis(data=records, dims=["ch"], unit="")}
    message = AxisArray(np.zeros((4, 2)), ["time", "ch"], axes, attrs={"unit": "volts"}, stream_dim="time")
    found = written(tmp_path / "results.zarr", message)
    assert set(found.coords) == {"time", "ch", "ch_elec", "ch_bank"} and set(found.data_vars) == {"data"}
    assert found["data"].attrs["units"] == "volts"
    assert found["ch_elec"].dims == ("ch",) and found["ch_elec"].values.tolist() == [1, 2]


def test_windows_have_both_times(tmp_path):
    step = WindowTransformer(newaxis="win", window_dur=0.4, window_shift=0.2, zero_pad_until="none")
    axes = {"time": AxisArray.TimeAxis(fs=10.0)}
    windows = step(AxisArray(np.arange(40.0).reshape(20, 2), ["time", "ch"], axes, stream_dim="time"))
    found = written(tmp_path / "results.zarr", windows)
    assert found["data"].dims == ("win", "time", "ch") and set(found.coords) == {"win", "time"}
    assert found["time"].attrs["sampling_rate"] == 10.0 and found["win"].attrs["sampling_rate"] == pytest.approx(5.0)
