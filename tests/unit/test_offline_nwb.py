"""Recordings read from NWB files."""

import shutil

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import LinearAxis
from helpers.nwb_files import DATA, RATE, write
from helpers.processes import run_code

from ezmsg.mlx import NWBSource
from ezmsg.mlx.offline.reading import volts_of

h5py = pytest.importorskip("h5py")
pynwb = pytest.importorskip("pynwb")
nwb = pytest.importorskip("ezmsg.nwb")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("nwb") / "recording.nwb", {"chunks": (64, 3)})


def chunk_mb(n_samples):
    return (n_samples + 0.5) * 3 * 2 / 2**20


def test_samples_come_as_they_are_stored_under_the_times_of_the_file(file):
    source = NWBSource(file, chunk_mb=chunk_mb(200))
    assert (source.n_samples, source.sampling_rate) == (1000, RATE)
    messages = list(source.read(0))
    # 192 samples: three whole chunks of the file.
    assert [len(message.data) for message in messages] == [192] * 5 + [40]
    np.testing.assert_array_equal(np.concatenate([message.data for message in messages]), DATA)
    for number, message in enumerate(messages):
        assert message.data.dtype == np.int16
        assert message.dims == ["time", "ch"] and message.stream_dim == "time" and message.key == "Raw"
        assert message.axes["time"].offset == 5.0 + 192 * number / RATE
        assert message.axes["time"].gain == 1 / RATE
        assert list(message.axes["ch"].data) == ["e2", "e0", "e3"]
        assert message.axes["ch"] is messages[0].axes["ch"]


@pytest.mark.parametrize(("size", "expected"), [(15, 15), (16, 64), (64, 64), (1000, 960)])
def test_messages_are_whole_chunks_of_the_file_if_those_fit(file, size, expected):
    source = NWBSource(file, chunk_mb=chunk_mb(size))
    assert f"read {expected} samples at a time" in source.identity


def test_reading_goes_on_anywhere_with_the_same_messages(file):
    source = NWBSource(file, chunk_mb=chunk_mb(192))
    whole = list(source.read(0))
    rest = list(source.read(384))
    assert len(rest) == 4
    for one, other in zip(rest, whole[2:], strict=True):
        np.testing.assert_array_equal(one.data, other.data)
        assert one.axes["time"] == other.axes["time"]


def test_the_rate_needs_no_vector_of_time_stamps(file, monkeypatch):
    """ezmsg-nwb's reader makes one when it opens a file, so that memory grows with the length."""
    monkeypatch.setattr(nwb, "NWBSlicer", None)
    monkeypatch.setattr(nwb, "NWBAxisArrayIterator", None)
    assert sum(len(message.data) for message in NWBSource(file).read(0)) == 1000


def test_the_attrs_say_how_to_get_volts(file):
    message = next(NWBSource(file).read(0))
    scaled = nwb.NWBScalingTransformer()(message)
    np.testing.assert_allclose(scaled.data, DATA * 0.25e-6, rtol=1e-6)


def test_what_is_read_equals_what_ezmsg_nwb_reads(file):
    slicer = nwb.NWBSlicer(file, reference_clock=nwb.ReferenceClockType.UNKNOWN)
    expected = slicer.read_by_index("Raw", 192, 384)
    slicer.close()
    found = next(iter(NWBSource(file, chunk_mb=chunk_mb(192)).read(192)))
    np.testing.assert_array_equal(found.data, expected.data)
    assert found.axes["time"].offset == pytest.approx(expected.axes["time"].offset, abs=1e-12)
    assert (found.dims, found.key, found.attrs) == (expected.dims, expected.key, expected.attrs)
    assert found.axes["ch"] == expected.axes["ch"]


def test_channels_without_labels_are_named_by_their_ids(tmp_path):
    file = write(tmp_path / "recording.nwb", {}, labels=False)
    assert list(next(NWBSource(file).read(0)).axes["ch"].data) == ["ch_2", "ch_0", "ch_3"]


def test_each_recording_has_an_identity_of_its_own(file, tmp_path):
    other = write(tmp_path / "recording.nwb", {"chunks": (64, 3)})
    assert NWBSource(file).identity == NWBSource(file).identity
    assert NWBSource(file).identity != NWBSource(other).identity
    assert NWBSource(file).identity != NWBSource(file, chunk_mb=chunk_mb(64)).identity


# --------------------------------------------------------------------------------------------------- time stamps


def test_time_stamps_are_followed_through_their_gaps(tmp_path):
    timestamps = 5.0 + np.arange(1000) / RATE
    timestamps[600:] += 1.0
    file = write(tmp_path / "recording.nwb", {"timestamps": timestamps})
    source = NWBSource(file, chunk_mb=chunk_mb(256))
    assert source.n_samples == 1000
    assert source.sampling_rate == pytest.approx(RATE, rel=1e-6)
    messages = list(source.read(0))
    np.testing.assert_array_equal(np.concatenate([message.data for message in messages]), DATA)
    times = np.concatenate([message.axes["time"].value(np.arange(len(message.data))) for message in messages])
    np.testing.assert_allclose(times, timestamps, rtol=0, atol=1e-5)
    assert all(isinstance(message.axes["time"], LinearAxis) and len(message.data) for message in messages)

    n_first_two = sum(len(message.data) for message in messages[:2])
    rest = list(source.read(n_first_two))
    np.testing.assert_array_equal(rest[0].data, messages[2].data)
    assert len(rest) == len(messages) - 2


def test_the_rate_is_that_of_time_stamps_which_go_in_coarse_steps(tmp_path):
    # Three and four milliseconds in turns: neither is the time from sample to sample.
    timestamps = np.round(5.0 + np.arange(1000) / 300.0, 3)
    # A single one is late, which is no gap.
    timestamps[500] += 0.003
    source = NWBSource(write(tmp_path / "recording.nwb", {"timestamps": timestamps}))
    assert source.sampling_rate == pytest.approx(300.0, rel=1e-4)
    assert [len(message.data) for message in source.read(0)] == [1000]


def test_time_stamps_that_follow_no_rate_are_refused(tmp_path):
    timestamps = np.cumsum(np.random.default_rng(0).exponential(5.0, 1000))
    file = write(tmp_path / "recording.nwb", {"timestamps": timestamps})
    with pytest.raises(ValueError, match="Raw has time stamps that follow no rate"):
        NWBSource(file)


# -------------------------------------------------------------------------------------------------------- errors


def test_a_file_without_electrical_series_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"recording\.nwb has no electrical series\."):
        NWBSource(write(tmp_path / "recording.nwb"))


def test_of_several_series_one_must_be_named(tmp_path):
    file = write(tmp_path / "recording.nwb", {"name": "Raw"}, {"name": "Lfp", "data": DATA[:10]})
    both = "allowed as series are /acquisition/Lfp, /acquisition/Raw"
    with pytest.raises(ValueError, match=f"several electrical series; {both}"):
        NWBSource(file)
    with pytest.raises(ValueError, match=f"no electrical series 'Eeg'; {both}"):
        NWBSource(file, "Eeg")
    assert NWBSource(file, "Lfp").n_samples == 10
    assert NWBSource(file, "/acquisition/Raw").n_samples == 1000


@pytest.mark.filterwarnings("ignore:.*[rR]ate:UserWarning:pynwb")
@pytest.mark.parametrize("rate", [0.0, -30000.0, np.nan, np.inf])
def test_a_rate_that_is_not_above_0_is_refused(tmp_path, rate):
    file = write(tmp_path / "recording.nwb", {})
    with h5py.File(file, "r+") as raw:
        raw["acquisition/Raw/starting_time"].attrs["rate"] = rate
    with pytest.raises(ValueError, match=f"Raw has a rate of {rate} Hz; allowed is a finite number above 0"):
        NWBSource(file)


def test_a_series_without_samples_is_refused(tmp_path):
    file = write(tmp_path / "recording.nwb", {"data": np.empty((0, 3), np.int16)})
    with pytest.raises(ValueError, match=r"Raw has no samples \(shape \(0, 3\)\)"):
        NWBSource(file)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (0.0, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
def test_the_size_of_a_chunk_is_checked(file, value, error):
    with pytest.raises(error, match=f"^'chunk_mb' must be a finite number > 0, got {value!r}"):
        NWBSource(file, chunk_mb=value)


def test_path_and_series_are_checked(file):
    with pytest.raises(TypeError, match="^'path' must be a path, got 3"):
        NWBSource(3)
    with pytest.raises(TypeError, match="^'series' must be a name or None, got 0"):
        NWBSource(file, 0)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*nowhere\.nwb"):
        NWBSource(tmp_path / "nowhere.nwb")


def test_a_file_that_is_not_an_nwb_file_is_named(tmp_path):
    file = tmp_path / "text.nwb"
    file.write_text("not a recording")
    with pytest.raises(ValueError, match="text.nwb is not an NWB file"):
        NWBSource(file)
    with pytest.raises(FileNotFoundError, match="absent.nwb"):
        NWBSource(tmp_path / "absent.nwb")


# ------------------------------------------------------------------------------------------------------ ezmsg-nwb


@pytest.mark.parametrize("per_channel", [None, (2.0, 2.0, 2.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("unit", ["volts", b"microvolts", ""])
def test_the_scaling_is_that_of_ezmsg_nwb(file, tmp_path, per_channel, unit):
    path = shutil.copy(file, tmp_path)
    with h5py.File(path, "r+") as raw:
        group = raw["acquisition/Raw"]
        group["data"].attrs.update({"conversion": 0.25e-6, "offset": 1e-3, "unit": unit})
        if per_channel is not None:
            group["channel_conversion"] = per_channel
        factors = None if per_channel is None else group["channel_conversion"]
        expected = nwb.describe_stream_scaling(group["data"], factors, is_electrical=True).as_attrs()
    attrs = next(NWBSource(path).read(0)).attrs
    assert attrs.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(attrs[name], value, strict=isinstance(value, np.ndarray))


def test_units_of_voltage_are_those_of_ezmsg_nwb():
    names = [*nwb.scaling.VOLTAGE_UNIT_SPELLINGS, " UV ", "", "s", "mvs", "voltss", "kv", "uvolt", "microv", "a"]
    for name in names:
        known = nwb.parse_voltage_unit(name)
        assert volts_of(name) == (None if known is None else nwb.VOLTS_PER_UNIT[known]), name


def test_to_read_a_recording_pynwb_is_not_loaded(file):
    # It takes longer to load than everything else that a worker, or a run in one process, needs.
    out = run_code(
        f"""
        import sys
        from ezmsg.mlx.offline import executors, open_recording
        next(open_recording({str(file)!r}).read(0))
        open_recording({str(file)!r}, "rawbinary", sampling_rate=1000.0, n_channels=1, dtype="int8")
        print(sorted({{"pynwb", "hdmf", "ezmsg.nwb", "scipy.signal", "numba"}} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"
