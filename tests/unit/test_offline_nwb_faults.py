"""NWB files that are not what they seem: right data, or one error with the file, the series and the reason."""

import errno
import fcntl
import os
import pickle
import shutil
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from helpers.nwb_files import DATA, RATE, write
from helpers.processes import RecordedLog, in_fresh_process

from ezmsg.mlx import NWBSource

h5py = pytest.importorskip("h5py")
pytest.importorskip("pynwb")
pytest.importorskip("ezmsg.nwb")

SERIES = "acquisition/Raw"
N_DAMAGED = int(os.environ.get("DAMAGED_COPIES", "20"))
"""Damaged copies of a file that are read; 240 take half a minute."""


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "recording.nwb", {})


def read(source):
    """All samples and times of a source."""
    messages = list(source.read(0))
    times = [message.axes["time"].value(np.arange(len(message.data))) for message in messages]
    return np.concatenate([message.data for message in messages]), np.concatenate(times)


def edit(path):
    return h5py.File(path, "r+")


def refused(path, match, error=ValueError, series="Raw"):
    with pytest.raises(error, match=match) as raised:
        list(NWBSource(path).read(0))
    assert str(path) in str(raised.value) and (series is None or series in str(raised.value))
    # As a cluster sends it.
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


# --------------------------------------------------------------------------------------------------- shapes, labels


def test_data_stored_channel_by_time_are_refused(tmp_path):
    path = write(tmp_path / "recording.nwb", {"data": np.ascontiguousarray(DATA[:, :3].T)}, quiet=True)
    refused(path, r"data of shape \(3, 1000\) and 3 electrodes.*may be stored as \(channel, time\)")


def test_electrodes_of_another_number_than_the_channels_are_refused(file):
    with edit(file) as raw:
        replace(raw[SERIES], "electrodes", np.array([0, 1]))
    refused(file, r"data of shape \(1000, 3\) and 2 electrodes; allowed is")


def replace(group, name, values):
    attrs = dict(group[name].attrs)
    del group[name]
    group.create_dataset(name, data=values).attrs.update(attrs)


@pytest.mark.parametrize("rows", [[0, 1, 4], [0, -1, 2]])
def test_electrodes_that_the_table_does_not_have_are_refused(file, rows):
    with edit(file) as raw:
        replace(raw[SERIES], "electrodes", np.array(rows))
    refused(file, "has electrodes .* of a table of 4")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([b"a", "µ".encode(), b"c", b"dd"]), ["c", "a", "dd"]),
        (np.array(["a", "b", "µ", "dd"], object), ["µ", "a", "dd"]),
        (np.array([10.0, 11.0, 12.0, 13.0]), ["12.0", "10.0", "13.0"]),
    ],
    ids=["bytes", "text", "numbers"],
)
def test_labels_come_as_text_however_they_are_stored(file, values, expected):
    with edit(file) as raw:
        replace(raw["general/extracellular_ephys/electrodes"], "label", values)
    assert list(next(NWBSource(file).read(0)).axes["ch"].data) == expected


def test_data_that_are_not_numbers_are_refused(file):
    with edit(file) as raw:
        replace(raw[SERIES], "data", np.array([b"x"] * 10))
    refused(file, r"has data of dtype \|S1; allowed are integers and floats")


@pytest.mark.parametrize(("name", "value"), [("conversion", np.nan), ("offset", np.inf)])
def test_a_conversion_that_is_not_finite_is_refused(file, name, value):
    with edit(file) as raw:
        raw[f"{SERIES}/data"].attrs[name] = value
    refused(file, "has conversion .*; allowed are finite numbers")


@pytest.mark.parametrize(("values", "match"), [([1.0, 2.0], "of shape .2,. for 3"), ([1.0, 2.0, np.nan], "finite")])
def test_conversions_of_the_channels_are_checked(file, values, match):
    with edit(file) as raw:
        raw[SERIES].create_dataset("channel_conversion", data=values)
    refused(file, match)


# ------------------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("start", [np.nan, -np.inf])
def test_a_starting_time_that_is_not_finite_is_refused(file, start):
    with edit(file) as raw:
        raw[f"{SERIES}/starting_time"][()] = start
    refused(file, f"has a starting time of {start} s; allowed is a finite number")


def test_neither_a_rate_nor_time_stamps_are_refused(file):
    with edit(file) as raw:
        del raw[f"{SERIES}/starting_time"]
    refused(file, "neither a rate nor time stamps")


def stamped(path, stamps, data=None):
    data = np.arange(3 * len(stamps), dtype=np.int32).reshape(-1, 3) if data is None else data
    return write(path, {"timestamps": stamps, "data": data}), data


def assert_read(path, stamps, data, rate=RATE, tolerance=0.01):
    source = NWBSource(path, chunk_mb=0.05)
    found, times = read(source)
    np.testing.assert_array_equal(found, data)
    np.testing.assert_allclose(times, stamps, rtol=0, atol=tolerance / rate)
    assert source.sampling_rate == pytest.approx(rate, rel=1e-4)
    return source


@pytest.mark.parametrize("start", [0.0, 1.7e9])
@pytest.mark.parametrize("pauses", [{15000: 60.0}, {1: 0.01, 5000: 1e4, 5003: 0.001, 29999: 3.0}, {15000: -0.5}])
def test_pauses_and_steps_of_the_clock_are_followed(tmp_path, start, pauses):
    stamps = start + np.arange(30000) / RATE
    for place, seconds in pauses.items():
        stamps[place:] += seconds
    path, data = stamped(tmp_path / "recording.nwb", stamps)
    with RecordedLog() as log:
        source = assert_read(path, stamps, data)
    assert [("step back at sample 15000" in warning) for warning in log.warnings] == [True] * (min(pauses.values()) < 0)
    # From any place where a message has ended.
    messages = list(source.read(0))
    ends = np.cumsum([len(message.data) for message in messages])
    for number in range(0, len(messages) - 1, 3):
        rest = list(source.read(int(ends[number])))
        assert len(rest) == len(messages) - number - 1
        assert rest[0].axes["time"] == messages[number + 1].axes["time"]
        np.testing.assert_array_equal(rest[0].data, messages[number + 1].data)


def test_a_gap_at_the_seam_of_two_blocks_is_found(tmp_path, monkeypatch):
    from ezmsg.mlx.offline import nwbsource as nwbtimes

    monkeypatch.setattr(nwbtimes, "BLOCK", 100)
    stamps = np.arange(1000) / RATE
    for place in (99, 100, 101, 500, 799):
        stamps[place:] += 1.0
    path, data = stamped(tmp_path / "recording.nwb", stamps)
    assert_read(path, stamps, data)


def test_time_stamps_that_jitter_are_smoothed_and_not_cut(tmp_path):
    exact = np.arange(20000) / RATE
    exact[7000:] += 2.0
    stamps = exact + np.random.default_rng(0).uniform(-0.3, 0.3, len(exact)) / RATE
    stamps[3000] += 5 / RATE  # one that is late among others
    path, data = stamped(tmp_path / "recording.nwb", stamps)
    source = assert_read(path, exact, data, tolerance=0.15)
    assert len(list(source.read(0))) == -(-20000 // source._chunk) + 1


def test_time_stamps_in_float32_are_right_or_refused(tmp_path):
    exact = 10.0 + np.arange(20000) / RATE
    path, data = stamped(tmp_path / "near.nwb", exact)
    with edit(path) as raw:
        replace(raw[SERIES], "timestamps", exact.astype(np.float32))
    assert_read(path, exact, data, tolerance=0.1)
    with edit(path) as raw:
        replace(raw[SERIES], "timestamps", (exact + 20000.0).astype(np.float32))
    refused(
        path, "has time stamps in float32, which go in steps of 0.002 s there: too coarse for samples 0.0005 s apart"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_time_stamps_that_are_not_finite_are_refused(tmp_path, value):
    stamps = np.arange(1000) / RATE
    path, _ = stamped(tmp_path / "recording.nwb", stamps)
    stamps[700] = value
    with edit(path) as raw:
        replace(raw[SERIES], "timestamps", stamps)
    refused(path, f"has a time stamp of {value} s at sample 700")


@pytest.mark.parametrize(
    "stamps",
    [np.zeros(1000), -np.arange(1000) / RATE, np.repeat(np.arange(100), 10) / RATE, np.array([1.0])],
    ids=["all the same", "backwards", "one for each packet", "a single one"],
)
def test_time_stamps_without_a_rate_are_refused(tmp_path, stamps):
    refused(stamped(tmp_path / "recording.nwb", stamps)[0], "has time stamps that follow no rate")


def test_another_number_of_time_stamps_than_samples_is_refused(tmp_path):
    path, _ = stamped(tmp_path / "recording.nwb", np.arange(1000) / RATE)
    with edit(path) as raw:
        replace(raw[SERIES], "timestamps", np.arange(999) / RATE)
    refused(path, r"has 1000 samples and time stamps of shape \(999,\)")


def test_a_rate_in_float32_keeps_times_exact(file):
    with edit(file) as raw:
        raw[f"{SERIES}/starting_time"].attrs["rate"] = np.float32(RATE)
        raw[f"{SERIES}/starting_time"][()] = 1.7e9
    _, times = read(NWBSource(file, chunk_mb=0.001))
    np.testing.assert_allclose((times - 1.7e9) * RATE, np.arange(1000), rtol=0, atol=0.01)


# -------------------------------------------------------------------------------------------- other series and files


def test_spike_events_beside_one_series_are_no_ambiguity(tmp_path):
    path = write(tmp_path / "recording.nwb", {}, spikes=True)
    assert read(NWBSource(path))[0].shape == DATA.shape
    with pytest.raises(ValueError, match="recording.nwb: Spikes is a SpikeEventSeries; allowed is"):
        NWBSource(path, "Spikes")


def test_a_series_of_an_extension_counts(file):
    import json

    with edit(file) as raw:
        raw[SERIES].attrs.update({"neurodata_type": "ProbeSeries", "namespace": "ndx-probe"})
        spec = {"groups": [{"neurodata_type_def": "ProbeSeries", "neurodata_type_inc": "ElectricalSeries", "doc": "d"}]}
        schema = {"namespace": "core", "neurodata_types": ["ElectricalSeries"]}
        namespace = {"name": "ndx-probe", "version": "1", "doc": "d", "schema": [schema, {"source": "probe"}]}
        group = raw.create_group("specifications/ndx-probe/1")
        group["probe"], group["namespace"] = json.dumps(spec), json.dumps({"namespaces": [namespace]})
    np.testing.assert_array_equal(read(NWBSource(file))[0], DATA)


def test_a_dead_link_in_another_series_does_no_harm(tmp_path):
    path = write(tmp_path / "recording.nwb", {}, {"name": "Other"})
    with edit(path) as raw:
        del raw["acquisition/Other/data"]
        raw["acquisition/Other/data"] = h5py.ExternalLink("nowhere.nwb", "/data")
        raw["acquisition/Third"] = h5py.ExternalLink("nowhere.nwb", "/acquisition/Third")
    np.testing.assert_array_equal(read(NWBSource(path, "Raw"))[0], DATA)
    with pytest.raises(ValueError, match="recording.nwb: Other has its data in 'nowhere.nwb', which is not there"):
        NWBSource(path, "Other")


def test_a_link_that_may_be_another_series_is_told(file):
    with edit(file) as raw:
        raw["acquisition/Other"] = h5py.SoftLink("/processing/gone")
    with RecordedLog() as log:
        np.testing.assert_array_equal(read(NWBSource(file))[0], DATA)
    assert [f"{file} has links that lead nowhere: /acquisition/Other." in warning for warning in log.warnings] == [True]


def test_data_and_series_linked_from_other_files_are_read(tmp_path, file):
    linked = write(tmp_path / "linked.nwb", {})
    with edit(linked) as raw:
        del raw[f"{SERIES}/data"]
        raw[f"{SERIES}/data"] = h5py.ExternalLink("recording.nwb", f"/{SERIES}/data")
        raw["acquisition/Alias"] = h5py.SoftLink(f"/{SERIES}")
        raw["acquisition/circle"] = h5py.SoftLink("/acquisition")
    np.testing.assert_array_equal(read(NWBSource(linked))[0], DATA)
    np.testing.assert_array_equal(read(NWBSource(linked, "Alias"))[0], DATA)
    file.unlink()
    refused(linked, "Raw has its data in 'recording.nwb', which is not there")


def test_an_hdf5_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.h5"
    h5py.File(path, "w").close()
    refused(path, "is an HDF5 file, but not an NWB file of version 2", series=None)


# ------------------------------------------------------------------------------------------------- the file system


def test_a_locked_file_is_an_error_of_the_system(file):
    with open(file) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(file, "locked, another process has it open for writing", BlockingIOError, series=None)
    assert len(read(NWBSource(file))[0]) == 1000


def test_a_folder_is_an_error_of_the_system(tmp_path):
    refused(tmp_path, "Is a directory", IsADirectoryError, series=None)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("when", ["opened", "read"])
def test_errors_of_the_system_keep_their_type(file, monkeypatch, number, when):
    def fail(*_, **__):
        raise OSError(number, "h5py says much more")

    source = NWBSource(file)
    if when == "read":
        monkeypatch.setattr(h5py.Dataset, "__getitem__", fail)
        with pytest.raises(OSError, match=f"Raw: {os.strerror(number)}") as raised:
            next(source.read(0))
    else:
        monkeypatch.setattr(h5py, "File", fail)
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            NWBSource(file)
    assert type(raised.value) is type(OSError(number, ""))
    assert (raised.value.errno, raised.value.filename) == (number, str(file))


def test_a_file_that_became_shorter_is_told(file):
    source = NWBSource(file, chunk_mb=0.001)
    with edit(file) as raw:
        replace(raw[SERIES], "data", DATA[:500])
    with pytest.raises(ValueError, match="Raw has fewer than its 1000 samples now"):
        list(source.read(0))


@pytest.mark.parametrize("times", ["rate", "time stamps"])
@in_fresh_process
def test_damage_anywhere_is_one_error_or_does_no_harm(tmp_path, times):
    """In a process of its own, since HDF5 could crash."""
    whole = write(tmp_path / "whole.nwb", {} if times == "rate" else {"timestamps": np.arange(1000) / RATE})
    content = whole.read_bytes()
    rng = np.random.default_rng(7)
    n_refused = 0
    for number in range(N_DAMAGED):
        damaged = bytearray(content)
        if number % 4 == 0:
            del damaged[rng.integers(1, len(damaged)) :]
        else:
            for place in rng.integers(len(damaged), size=[8, 40, 200][number % 4 - 1]):
                damaged[place] ^= 1 << int(rng.integers(8))
        path = tmp_path / f"damaged-{number}.nwb"
        path.write_bytes(damaged)
        try:
            list(NWBSource(path).read(0))
        except (ValueError, OSError) as error:
            n_refused += 1
            assert str(path) in str(error), (number, error)
        path.unlink()
    assert n_refused > N_DAMAGED / 4


# ---------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("what", ["starting time", "rate", "conversion", "channel conversion", "labels", "electrodes"])
def test_a_file_that_was_corrected_is_another_recording(file, what):
    before = NWBSource(file).identity
    assert NWBSource(file).identity == before
    with edit(file) as raw:
        series = raw[SERIES]
        if what == "starting time":
            series["starting_time"][()] = 5.25
        elif what == "rate":
            series["starting_time"].attrs["rate"] = RATE * 1.001
        elif what == "conversion":
            series["data"].attrs["conversion"] = 0.5e-6
        elif what == "channel conversion":
            series.create_dataset("channel_conversion", data=[1.0, 1.0, 1.0 + 1e-9])
        elif what == "labels":
            raw["general/extracellular_ephys/electrodes/label"][2] = "e2'"
        else:
            series["electrodes"][0] = 1
    assert NWBSource(file).identity != before


def test_corrected_time_stamps_are_another_recording(tmp_path):
    stamps = np.arange(1000) / RATE
    path, _ = stamped(tmp_path / "recording.nwb", stamps)
    before = NWBSource(path).identity
    with edit(path) as raw:
        raw[f"{SERIES}/timestamps"][500] += 1e-9
    assert NWBSource(path).identity != before
    copied = tmp_path / "elsewhere" / "recording.nwb"
    copied.parent.mkdir()
    shutil.copy(path, copied)
    assert NWBSource(copied).identity == NWBSource(path).identity


def test_no_more_of_the_file_is_built_than_the_series(file):
    """pynwb builds an object of everything, so that whatever is broken elsewhere would be in the way."""
    with mock.patch("pynwb.NWBHDF5IO", None), mock.patch("ezmsg.nwb.NWBSlicer", None):
        assert NWBSource(file).n_samples == 1000


def test_memory_does_not_grow_with_the_number_of_time_stamps(tmp_path, monkeypatch):
    from ezmsg.mlx.offline import nwbsource as nwbtimes

    monkeypatch.setattr(nwbtimes, "BLOCK", 2**14)
    peaks = []
    for n in (2**16, 2**19):
        path = tmp_path / f"{n}.nwb"
        path, _ = stamped(path, np.arange(10) / RATE)
        with edit(path) as raw:
            replace(raw[SERIES], "data", np.zeros((n, 3), np.int8))
            attrs = dict(raw[f"{SERIES}/timestamps"].attrs)
            del raw[f"{SERIES}/timestamps"]
            stamps = raw[SERIES].create_dataset("timestamps", data=np.arange(n) / RATE, chunks=(2**14,))
            stamps.attrs.update(attrs)
        tracemalloc.start()
        NWBSource(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 8 * 100_000
