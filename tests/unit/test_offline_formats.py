"""Recordings of acquisition systems: what is read, what is told of them, and what is refused."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import recording_files
from helpers.nwb_files import write as write_nwb
from helpers.recording_files import DATA, RATE

from ezmsg.mlx import (
    NeoSource,
    NWBSource,
    RawBinarySource,
    RecordingFormat,
    describe_recording,
    find_recordings,
    open_recording,
    recording_formats,
    register_format,
)
from ezmsg.mlx.offline import neofiles

pytest.importorskip("neo")


def samples_of(source):
    return np.concatenate([message.data for message in source.read(0)])


WRITERS = {
    "spikeglx": (recording_files.write_spikeglx, 2.34375e-6, 2.0, ("AP0", "AP1", "AP2")),
    "openephysbinary": (recording_files.write_open_ephys_binary, 0.195e-6, 3.0, ("CH1", "CH2", "CH3")),
    "openephys": (recording_files.write_open_ephys, 0.195e-6, 3.0, ("CH1", "CH2", "CH3")),
    "blackrock": (recording_files.write_blackrock, 0.25e-6, 1.0, ("elec1", "elec2", "elec3")),
    "intan": (recording_files.write_intan, 0.195e-6, 0.25, ("site0", "site1", "site2")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_samples_labels_scaling_and_times_are_those_of_the_file(name, tmp_path):
    write, gain, start, labels = WRITERS[name]
    source = open_recording(write(tmp_path))
    assert type(source) is NeoSource and name in source.identity
    message = next(source.read(0))
    expected = recording_files.open_ephys_samples() if name == "openephys" else DATA
    np.testing.assert_array_equal(samples_of(source), expected)
    assert message.data.dtype == np.int16 and message.data.flags.writeable
    assert message.dims == ["time", "ch"] and message.axes["ch"].data.tolist() == list(labels)
    assert message.axes["time"].offset == start and 1 / message.axes["time"].gain == source.sampling_rate == RATE
    assert message.attrs["nwb_scaling_gain"] == pytest.approx(gain, rel=1e-12)
    assert message.attrs["nwb_scaling_offset"] == 0 and message.attrs["nwb_scaling_unit"] == "volts"


@pytest.mark.parametrize(
    ("write", "gain"),
    [(recording_files.write_spikeglx_nidq, 5 / 32768), (recording_files.write_intan_by_channel, 0.195e-6)],
    ids=["NI-DAQ", "a file a channel"],
)
def test_other_layouts_of_a_format_are_read_too(write, gain, tmp_path):
    source = open_recording(write(tmp_path))
    found = samples_of(source)
    np.testing.assert_array_equal(found, DATA[:, : found.shape[1]])
    attrs = next(source.read(0)).attrs
    assert attrs["nwb_scaling_gain"] == pytest.approx(gain) and attrs["nwb_scaling_unit"] == "volts"


def test_a_file_a_channel_must_all_have_one_length(tmp_path):
    recording_files.write_intan_by_channel(tmp_path)
    _shorten(tmp_path / "amp-A-001.dat", 2)
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_recording(tmp_path)


def test_files_of_other_channels_than_those_of_the_header_are_refused(tmp_path):
    recording_files.write_intan_by_channel(tmp_path)
    (tmp_path / "amp-A-001.dat").rename(tmp_path / "amp-A-003.dat")
    with pytest.raises(
        ValueError, match=r"has the channels .*'A-001', 'A-002'. in its header, and files for .*'A-003'"
    ):
        open_recording(tmp_path)


def test_counts_that_begin_at_zero_have_an_offset(tmp_path):
    message = next(open_recording(recording_files.write_intan_in_one_file(tmp_path)).read(0))
    np.testing.assert_array_equal(message.data, recording_files.intan_samples())
    assert message.data.dtype == np.uint16
    assert message.attrs["nwb_scaling_offset"] == pytest.approx(-32768 * 0.195e-6)


def test_the_scaling_makes_volts_in_a_chain(tmp_path):
    nwb = pytest.importorskip("ezmsg.nwb")
    message = next(open_recording(recording_files.write_blackrock(tmp_path)).read(0))
    volts = nwb.NWBScalingTransformer()(message)
    np.testing.assert_allclose(volts.data, DATA * 0.25e-6, rtol=1e-6)


def test_raw_binary_is_what_the_user_says(tmp_path):
    path = recording_files.write_raw_binary(tmp_path, DATA.astype(">i2"))
    path.write_bytes(b"header" + path.read_bytes())
    source = RawBinarySource(
        path,
        sampling_rate=RATE,
        n_channels=3,
        dtype=">i2",
        gain=[1, 2, 3],
        unit="mV",
        labels=["a", "b", "c"],
        header_bytes=6,
    )
    message = next(source.read(0))
    np.testing.assert_array_equal(message.data, DATA)
    assert message.axes["ch"].data.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(message.attrs["nwb_scaling_gain"], [1e-3, 2e-3, 3e-3])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "sampling_rate and n_channels"),
        ({"sampling_rate": 0}, "'sampling_rate' must be .*, got 0"),
        ({"n_channels": 0}, "'n_channels' must be .*, got 0"),
        ({"dtype": "U3"}, "'dtype' must be .*, got 'U3'"),
        ({"gain": [1, 2]}, "3 numbers, one for each channel"),
        ({"gain": np.nan}, "allowed are finite numbers"),
        ({"offset": np.inf}, "'offset' must be .*, got inf"),
        ({"labels": ["a"]}, "3 names, one for each channel"),
        (
            {"n_channels": 7},
            "recording.dat has 6000 bytes of samples, which is 8 more than whole samples of 7 channels",
        ),
        ({"header_bytes": 6000}, "has no samples"),
    ],
)
def test_raw_binary_refuses_what_cannot_be(options, error, tmp_path):
    path = recording_files.write_raw_binary(tmp_path)
    known = {"sampling_rate": RATE, "n_channels": 3} if options else {}
    with pytest.raises(TypeError if "dtype" in options else ValueError, match=error):
        open_recording(path, **known | options)


def test_spikeglx_takes_one_file_of_a_folder(tmp_path):
    files = [recording_files.write_spikeglx(tmp_path, f"run_g0_t{number}.imec0.ap", 4000 * number) for number in (0, 1)]
    recording_files.write_spikeglx(tmp_path, "run_g0_t0.imec1.ap")
    recording_files.write_spikeglx(tmp_path, "run_g0_t1.imec1.ap")
    for number, file in enumerate(files):
        assert next(open_recording(file).read(0)).axes["time"].offset == 2.0 * number
        assert next(open_recording(file.with_suffix(".meta")).read(0)).axes["time"].offset == 2.0 * number
    assert next(open_recording(files[0], stream="imec0.ap-SYNC").read(0)).data.shape == (1000, 1)
    with pytest.raises(ValueError, match=f"{tmp_path} has several streams; allowed as stream are .*imec0.ap, .*imec1"):
        open_recording(tmp_path)
    with pytest.raises(ValueError, match="has no stream 'imec7.ap'; allowed as stream are"):
        open_recording(tmp_path, stream="imec7.ap")
    with pytest.raises(ValueError, match="has 2 segments; allowed as segment are 0 to 1 and 'all'"):
        open_recording(tmp_path, stream="imec1.ap")
    with pytest.raises(ValueError, match="has no segment 2"):
        open_recording(tmp_path, stream="imec1.ap", segment=2)
    assert open_recording(tmp_path, stream="imec0.ap", segment=1).n_samples == 1000


@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({"fileSizeBytes": 8008}, "bin has 8000 bytes, but .*meta says fileSizeBytes=8008"),
        ({"nSavedChans": 3, "snsApLfSy": "2,0,1"}, "meta says nSavedChans=3, but names 4 channels"),
        ({"nSavedChans": 2, "snsApLfSy": "1,0,1"}, "meta says nSavedChans=2, but names 4 channels"),
        ({"snsApLfSy": "2,0,1"}, "meta says nSavedChans=4 and names 4 channels, but snsApLfSy=2,0,1"),
        (
            {"imDatPrb_type": 7000},
            "is of a probe whose gain is not known .NP1010 of type 7000., and has no imChan0apGain",
        ),
        ({"imSampRate": 0}, r"cannot be read|rate of 0.0 Hz"),
        (
            {
                "snsSaveChanSubset": "0,2,4,384",
                "~imroTbl": "(0,384)(0 0 0 500 250 1)(1 0 0 250 250 1)(2 0 0 500 250 1)",
            },
            "snsSaveChanSubset=0,2,4,384, but names AP1 where that has channel 2",
        ),
    ],
)
def test_spikeglx_refuses_a_meta_file_that_cannot_be_right(meta, error, tmp_path):
    path = recording_files.write_spikeglx(tmp_path, meta=meta)
    with pytest.raises(ValueError, match=error):
        open_recording(path)


def _shorten(file, by):
    content = file.read_bytes()
    file.write_bytes(content[:-by])


@pytest.mark.parametrize(
    ("name", "file", "by", "error"),
    [
        ("spikeglx", "*.bin", 8, "but .*meta says fileSizeBytes=8000"),
        ("openephysbinary", "**/continuous.dat", 4, "which is 2 more than whole samples"),
        ("openephysbinary", "**/continuous.dat", 6, "sample_numbers.npy has shape .1000,.*each of the 999 samples"),
        ("openephysbinary", "**/structure.oebin", 50, "cannot be read .JSONDecodeError"),
        ("openephys", "100_CH2.continuous", 1, "100_CH2.continuous is truncated"),
        ("openephys", "100_CH2.continuous", 2070, "has 5120 samples where the recording is .4096. long"),
        ("blackrock", "*.ns2", 2, "cannot be read"),
        ("blackrock", "*.ns2", 6000, "cannot be read"),
        ("intan", "amplifier.dat", 6, "999 samples at 2000.0 Hz, and 1000 time stamps"),
        ("intan", "amplifier.dat", 2, "999 samples at 2000.0 Hz, and 1000 time stamps"),
        ("intan", "time.dat", 4, "1000 samples at 2000.0 Hz, and 999 time stamps"),
        ("intan", "info.rhd", 40, "cannot be read"),
    ],
)
def test_truncated_files_are_refused(name, file, by, error, tmp_path):
    path = WRITERS[name][0](tmp_path)
    (found,) = tmp_path.glob(file)
    _shorten(found, by)
    with pytest.raises(ValueError, match=error) as raised:
        open_recording(path, name)
    assert str(tmp_path) in str(raised.value)


def test_gaps_end_messages_and_are_told(tmp_path):
    numbers = np.arange(len(DATA))
    numbers[300:] += 500
    source = open_recording(recording_files.write_open_ephys_binary(tmp_path, numbers))
    messages = list(source.read(0))
    assert [len(message.data) for message in messages] == [300, 700]
    assert [message.axes["time"].offset for message in messages] == [0.0, 800 / RATE]
    assert source.gaps == [300] and describe_recording(tmp_path).streams[0].segments[0].gaps == (300,)


@pytest.mark.parametrize("numbers", [2 * np.arange(1000), np.repeat(np.arange(0, 1000, 2), 2), np.arange(1000)[::-1]])
def test_sample_numbers_that_cannot_be_followed_are_refused(numbers, tmp_path):
    with pytest.raises(ValueError, match=r"sample_numbers.npy has sample numbers that follow no rate, or another one"):
        open_recording(recording_files.write_open_ephys_binary(tmp_path, numbers))


def test_a_single_number_that_does_not_fit_is_not_a_gap(tmp_path, caplog):
    numbers = np.arange(len(DATA))
    numbers[[100, 998]] = [2**40, 0]
    source = open_recording(recording_files.write_open_ephys_binary(tmp_path, numbers))
    assert source.gaps == [] and len(list(source.read(0))) == 1
    assert "2 sample numbers do not fit those around them, that of sample 100 first" in caplog.text


def test_numbers_that_step_back_are_followed_with_a_warning(tmp_path, caplog):
    numbers = np.arange(len(DATA))
    numbers[600:] -= 300
    source = open_recording(recording_files.write_open_ephys_binary(tmp_path, numbers))
    assert source.gaps == [600] and [message.axes["time"].offset for message in source.read(0)] == [0.0, 300 / RATE]
    assert "step back at sample 600" in caplog.text


def test_gaps_that_neo_would_fill_with_zeros_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has 5120 samples where the recording is .5220. long"):
        open_recording(recording_files.write_open_ephys(tmp_path, gap=100))


def test_gaps_in_time_stamps_of_intan_and_blackrock_are_followed(tmp_path):
    numbers = np.arange(500, 500 + len(DATA), dtype=np.int64)
    numbers[600:] += 1
    jitter = np.random.default_rng(2).integers(-10_000, 10_000, len(DATA))
    stamps = 1_700_000_000 * 10**9 + numbers * 500_000 + jitter
    paths = recording_files.write_intan(tmp_path / "a"), recording_files.write_blackrock_ptp(tmp_path, stamps)
    numbers.astype(np.int32).tofile(paths[0] / "time.dat")
    for path, start in zip(paths, (0.25, 1_700_000_000.25), strict=True):
        source = open_recording(path)
        messages = list(source.read(0))
        assert [len(message.data) for message in messages] == [600, 400] and source.gaps == [600]
        np.testing.assert_array_equal(samples_of(source), DATA)
        found = [message.axes["time"].offset - start for message in messages]
        assert found == pytest.approx([0.0, 601 / RATE], abs=2e-5)
    _shorten(paths[1], 3)
    with pytest.raises(ValueError, match=r"recording.ns2 is truncated: it ends in the middle of a packet"):
        open_recording(paths[1])


def test_pauses_are_segments_of_which_one_or_all_are_read(tmp_path):
    path = recording_files.write_blackrock(tmp_path, (200, 650))
    with pytest.raises(ValueError, match="has 3 segments; allowed as segment are 0 to 2 and 'all'"):
        open_recording(path)
    np.testing.assert_array_equal(samples_of(open_recording(path, segment=1)), DATA[200:650])
    source = open_recording(path, segment="all")
    np.testing.assert_array_equal(samples_of(source), DATA)
    starts = [1.0, 1.0 + 200 / RATE + 0.5, 1.0 + 650 / RATE + 1.0]
    assert [message.axes["time"].offset for message in source.read(0)] == pytest.approx(starts)
    assert source.gaps == [200, 650]
    assert [segment.n_samples for segment in describe_recording(path).streams[0].segments] == [200, 450, 350]


def test_recordings_of_one_name_have_identities_of_their_own(tmp_path):
    sources = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        data = DATA.copy()
        data[-1, -1] += number
        sources.append(
            open_recording(
                recording_files.write_raw_binary(tmp_path / str(number), data), sampling_rate=RATE, n_channels=3
            )
        )
    assert sources[0].identity != sources[1].identity
    others = [{"gain": 2.0}, {"labels": ["a", "b", "c"]}, {"sampling_rate": 1000.0}, {"chunk_mb": 0.001}]
    for other in others:
        known = {"sampling_rate": RATE, "n_channels": 3} | other
        assert open_recording(sources[0].path, **known).identity != sources[0].identity


def test_a_source_goes_to_another_process(tmp_path):
    source = open_recording(recording_files.write_spikeglx(tmp_path))
    list(source.read(0))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.identity == source.identity
    np.testing.assert_array_equal(samples_of(copy), DATA)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = recording_files.write_raw_binary(tmp_path)
    source = RawBinarySource(path, sampling_rate=RATE, n_channels=3)
    _shorten(path, 600)
    with pytest.raises(ValueError, match="recording.dat: Signals has 900 samples now, not 1000"):
        next(source.read(0))


@pytest.mark.parametrize("name", [*WRITERS, "nwb"])
def test_a_description_says_what_messages_hold(name, tmp_path):
    write, _, start, labels = WRITERS[name] if name != "nwb" else (None, 0.0, 5.0, ("e2", "e0", "e3"))
    path = write(tmp_path) if write else write_nwb(tmp_path / "recording.nwb", {})
    info = describe_recording(path)
    assert info.format == name and info.path == path
    stream = info.streams[0]
    source = open_recording(path, stream=stream.name)
    assert (stream.labels, stream.sampling_rate, stream.dtype, stream.unit) == (labels, RATE, "int16", "volts")
    assert stream.segments == ((source.n_samples, start, source.n_samples / RATE, (), ()),)
    assert stream.problem is None


def test_a_description_says_which_stream_is_damaged(tmp_path):
    recording_files.write_spikeglx(tmp_path)
    damaged = recording_files.write_spikeglx(tmp_path, "run_g0_t0.imec1.ap", meta={"fileSizeBytes": 1})
    problems = {stream.name: stream.problem for stream in describe_recording(tmp_path).streams}
    assert problems["imec0.ap"] is None and str(damaged) in problems["imec1.ap"]


def test_all_recordings_in_a_folder_are_found(tmp_path):
    expected = []
    for name, (write, *_) in WRITERS.items():
        folder = tmp_path / name / "session"
        folder.mkdir(parents=True)
        expected.append(write(folder))
    expected.append(write_nwb(tmp_path / "b.nwb", {}))
    (tmp_path / "results.zarr").mkdir()
    recording_files.write_spikeglx(tmp_path / "results.zarr")
    raw = recording_files.write_raw_binary(tmp_path)
    assert find_recordings(tmp_path) == sorted(expected)
    assert find_recordings(tmp_path, "blackrock") == [tmp_path / "blackrock" / "session" / "recording.ns2"]
    assert raw in find_recordings(tmp_path, "rawbinary")
    for path in expected:
        assert find_recordings(path) == [path]


def test_what_is_not_known_is_refused(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("nothing")
    with pytest.raises(
        ValueError, match=r"notes.txt is of no format that is known; 'format' may be one of 'nwb', 'spikeglx'"
    ):
        open_recording(other)
    with pytest.raises(
        ValueError, match="'format' must be one of 'auto', 'nwb', .* or the name of a reader of neo, got 'nbw'"
    ):
        open_recording(other, "nbw")
    with pytest.raises(FileNotFoundError, match=r"missing.nwb"):
        open_recording(tmp_path / "missing.nwb")
    with pytest.raises(TypeError, match="'format' must be .*, got 7"):
        open_recording(other, 7)
    with pytest.raises(TypeError, match="cannot be read as spikeglx with {'colour': 1}"):
        open_recording(recording_files.write_spikeglx(tmp_path), colour=1)
    with pytest.raises(ValueError, match="'segment' must be 0, .*, got 3"):
        open_recording(write_nwb(tmp_path / "a.nwb", {}), segment=3)


def test_the_other_readers_of_neo_go_by_their_names(tmp_path):
    path = tmp_path / "recording.plx"
    path.write_bytes(b"not a Plexon file")
    with pytest.raises(ValueError, match=r"recording.plx cannot be read") as raised:
        open_recording(path, "plexon")
    with pytest.raises(ValueError, match=r"recording.plx cannot be read"):
        open_recording(path)
    assert "\n" not in str(raised.value)


def test_a_format_of_another_package_is_asked_first(tmp_path, monkeypatch):
    formats = sys.modules["ezmsg.mlx.offline.formats"]
    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    path = write_nwb(tmp_path / "recording.nwb", {})
    mine = RecordingFormat("mine", "mine", lambda path: path if path.suffix == ".nwb" else None, NWBSource)
    register_format(mine)
    assert next(iter(recording_formats())) == "mine"
    info = describe_recording(path)
    assert info.format == "mine" and info.streams[0].segments[0].n_samples == 1000
    assert type(open_recording(path)) is NWBSource
    with pytest.raises(TypeError, match="'format' must be .*, got 3"):
        register_format(3)


def test_without_neo_the_error_names_the_extra(tmp_path, monkeypatch):
    path = recording_files.write_blackrock(tmp_path)
    monkeypatch.setitem(sys.modules, "neo.rawio", None)
    with pytest.raises(ImportError, match=r'This needs neo: pip install "ezmsg-mlx\[offline\]"'):
        open_recording(path)


def test_a_recording_of_intan_may_be_named_by_its_header(tmp_path):
    folder = recording_files.write_intan(tmp_path / "recording")
    np.testing.assert_array_equal(next(open_recording(folder / "info.rhd").read(0)).data, DATA)


@pytest.mark.parametrize("time_axis", [0, 1])
def test_bytes_behind_the_last_sample_of_a_buffer_that_neo_maps_are_an_error(time_axis, tmp_path):
    file = tmp_path / "samples.dat"
    file.write_bytes(bytes(16 + 1000 * 3 * 2 + 4))
    shape = (1000, 3) if time_axis == 0 else (3, 1000)
    buffer = {"type": "raw", "file_path": str(file), "file_offset": 16, "shape": shape, "dtype": "int16"}
    reader = SimpleNamespace(
        has_buffer_description_api=lambda: True,
        header={"signal_streams": {"buffer_id": ["0"]}},
        get_analogsignal_buffer_description=lambda *where: buffer | ({"time_axis": 1} if time_axis else {}),
    )
    segment = SimpleNamespace(opened=SimpleNamespace(reader=reader), stream=0, piece=(0, 0))
    with pytest.raises(ValueError, match="has 6004 bytes of samples, which is 4 more than whole samples of 3 channels"):
        neofiles.NeoSegment._check_buffer(segment)
    file.write_bytes(bytes(16 + 1000 * 3 * 2))
    neofiles.NeoSegment._check_buffer(segment)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), OSError("cannot map /links/a.dat")])
def test_errors_of_the_system_keep_their_number_and_others_name_the_file(error):
    with pytest.raises((OSError, ValueError)) as raised:
        with neofiles._without_links(Path("/data/a.dat"), SimpleNamespace(name="/links")):
            raise error
    if error.errno is not None:
        assert raised.value is error
    else:
        assert str(raised.value) == "cannot map /data/a.dat"
