"""One file is one file, whatever lies beside it; each segment has what its own header says, where neo is wrong, too."""

import pathlib
import pickle

import numpy as np
import pytest
from helpers import recording_files
from helpers.nwb_files import write as write_nwb
from helpers.recording_files import DATA, RATE

from ezmsg.mlx import describe_recording, find_recordings, open_recording

pytest.importorskip("neo")


def first(source):
    return next(iter(source.read(0)))


def samples_of(source):
    return np.concatenate([message.data for message in source.read(0)])


def gains_of(source):
    return np.atleast_1d(first(source).attrs["nwb_scaling_gain"])


def labels_of(source):
    return first(source).axes["ch"].data.tolist()


# SpikeGLX.

NP2 = {"imDatPrb_type": 2013, "imAiRangeMax": 0.62, "imMaxInt": 2048}
FOUR_SHANKS = "(2013,384)" + "".join(f"({n} {n % 4} 0 {n % 2} {n})" for n in range(384))
PHASE_3A = "(641251510,3,384)" + "".join(f"({n} 0 0 {500 if n else 250} 125)" for n in range(384))

PROBES = {
    "first generation": ({}, 0.6 / 512 / 500),
    "of before there were others": ({"imDatPrb_type": None, "imProbeOpt": 3, "imroTbl": PHASE_3A}, 0.6 / 512 / 500),
    "by the header of the table": (
        {"imDatPrb_type": None, "imroTbl": FOUR_SHANKS} | NP2 | {"imDatPrb_type": None},
        0.62 / 2048 / 100,
    ),
    "four shanks": (NP2 | {"imroTbl": FOUR_SHANKS, "imChan0apGain": 100}, 0.62 / 2048 / 100),
    "second generation, prototype": (
        {"imDatPrb_type": 21, "imAiRangeMax": 0.5, "imMaxInt": 8192, "imroTbl": "(21,384)(0 1 0 0)(1 1 0 1)"},
        0.5 / 8192 / 80,
    ),
    "NP1110": ({"imDatPrb_type": 1110, "imroTbl": "(1110,2,0,1000,250,1)(0 5 5)(1 7 7)(2 4 4)"}, 0.6 / 512 / 1000),
    "a map that is not there": (
        {"snsChanMap": None, "snsSaveChanSubset": "1:3,768", "acqApLfSy": "384,384,1"},
        0.6 / 512 / 500,
    ),
    "a note in another encoding": ({"userNotes": "caf\xe9 = open"}, 0.6 / 512 / 500),
}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_has_the_gain_of_its_own_kind_with_and_without_its_synchronization_word(probe, tmp_path):
    meta, gain = PROBES[probe]
    meta = {"acqApLfSy": "384,0,1"} | meta
    path = recording_files.write_spikeglx_as(tmp_path / "a", labels=("AP1", "AP2", "AP3", "SY0"), **meta)
    np.testing.assert_allclose(gains_of(open_recording(path)), gain, rtol=1e-12)
    assert labels_of(open_recording(path)) == ["AP1", "AP2", "AP3"]
    np.testing.assert_array_equal(samples_of(open_recording(path)), np.resize(DATA, (500, 4))[:, :3])
    assert labels_of(open_recording(path, stream="imec0.ap-SYNC")) == ["SY0"]
    if meta.get("snsChanMap", "") is not None:
        path = recording_files.write_spikeglx_as(tmp_path / "b", labels=("AP1", "AP2", "AP3"), **meta)
        np.testing.assert_allclose(gains_of(open_recording(path)), gain, rtol=1e-12)
        assert first(open_recording(path)).data.shape[1] == 3


def test_gains_are_those_of_the_channels_that_were_saved(tmp_path):
    table = "(0,384)" + "".join(f"({number} 0 0 {500 + number} 250 1)" for number in range(384))
    labels = ("AP0", "AP5", "AP72", "SY0")
    path = recording_files.write_spikeglx_as(tmp_path, labels=labels, snsSaveChanSubset="0,5,72,768", imroTbl=table)
    np.testing.assert_allclose(gains_of(open_recording(path)), 0.6 / 512 / np.array([500, 505, 572]), rtol=1e-12)
    labels = ("LF0", "LF5", "SY0")
    path = recording_files.write_spikeglx_as(
        tmp_path, stream="imec0.lf", labels=labels, snsSaveChanSubset="384,389,768", acqApLfSy="384,384,1"
    )
    np.testing.assert_allclose(gains_of(open_recording(path)), 0.6 / 512 / 250, rtol=1e-12)


def test_four_synchronization_words_of_a_quad_base_are_one_stream(tmp_path):
    labels = ("AP0", "AP1", *(f"SY{number}" for number in range(4)))
    path = recording_files.write_spikeglx_as(
        tmp_path, labels=labels, **NP2 | {"imDatPrb_type": 2020, "imroTbl": "(NP2020,1536)"}
    )
    assert first(open_recording(path)).data.shape[1] == 2
    assert labels_of(open_recording(path, stream="imec0.ap-SYNC")) == ["SY0", "SY1", "SY2", "SY3"]
    np.testing.assert_allclose(gains_of(open_recording(path)), 0.62 / 2048 / 100)


def test_a_onebox_has_the_range_of_its_converter(tmp_path):
    labels = ("XA0", "XA1", "XD0", "SY0")
    entries = {"typeThis": "obx", "obAiRangeMax": 5, "obMaxInt": 32768, "obSampRate": 30303.0, "snsXaDwSy": "2,1,1"}
    without = dict.fromkeys(("imAiRangeMax", "imDatPrb_type", "imSampRate", "snsApLfSy", "imroTbl"))
    path = recording_files.write_spikeglx_as(tmp_path, stream="obx0.obx", labels=labels, **without, **entries)
    source = open_recording(path)
    assert labels_of(source) == ["XA0", "XA1"] and source.sampling_rate == 30303.0
    np.testing.assert_allclose(gains_of(source), 5 / 32768)
    names = [(stream.name, stream.kind) for stream in describe_recording(path).streams]
    assert names == [("obx0", "analog"), ("obx0-XD", "digital"), ("obx0-SYNC", "sync")]


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_meta_file_is_an_error_that_names_it_or_no_damage(seed, tmp_path):
    path = recording_files.write_spikeglx_as(tmp_path)
    meta, rng = path.with_suffix(".meta"), np.random.default_rng(seed)
    whole = meta.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            content[place] = rng.integers(0, 256)
        meta.write_bytes(bytes(content[: rng.integers(1, len(content))]) if rng.integers(2) else bytes(content))
        try:
            found = open_recording(path)
        except ValueError as error:
            assert str(path.with_suffix("")) in str(error)
        else:
            assert np.isfinite(gains_of(found)).all()


def test_nothing_of_the_neighbours_of_a_file_reaches_it(tmp_path):
    other = {"imroTbl": recording_files.NP1_TABLE.replace(" 500 250 ", " 1000 125 "), "imSampRate": 2001.5}
    recording_files.write_spikeglx_as(tmp_path, "a_g0_t0", **other)
    recording_files.write_spikeglx_as(tmp_path, "b_g1_t0", labels=("AP9", "AP8", "SY0"), **other)
    recording_files.write_spikeglx_as(tmp_path / "catgt_b_g0", "b_g0_tcat", **other)
    damaged = recording_files.write_spikeglx_as(tmp_path, "c_g0_t0", imAiRangeMax="none")
    recording_files.write_spikeglx_as(tmp_path, "a_g0_t0", stream="imec0.lf", labels=("LF0", "SY0"))
    path = recording_files.write_spikeglx_as(tmp_path, "b_g0_t0", firstSample=8000)
    source = open_recording(path)
    np.testing.assert_allclose(gains_of(source), 0.6 / 512 / 500)
    assert source.sampling_rate == RATE and labels_of(source) == ["AP0", "AP1", "AP2"]
    assert first(source).axes["time"].offset == 4.0
    assert [stream.name for stream in describe_recording(path).streams] == ["imec0.ap", "imec0.ap-SYNC"]
    with pytest.raises(ValueError, match=str(damaged.with_suffix(".meta"))):
        open_recording(damaged)
    # In a folder, files of a stream are its segments, each with its own header; of one that is damaged it is told.
    problems = {stream.name: stream.problem for stream in describe_recording(tmp_path).streams}
    assert problems["imec0.lf"] is None and "c_g0_t0.imec0.ap.meta" in problems["imec0.ap"]
    for file in (damaged, damaged.with_suffix(".meta")):
        file.unlink()
    (stream,) = [stream for stream in describe_recording(tmp_path).streams if stream.name == "imec0.ap"]
    assert [segment.differs for segment in stream.segments] == [(), ("rates", "gains"), (), ("labels",)]
    with pytest.raises(
        ValueError, match="has other rates and gains in segment b_g0_t0.*than in a_g0_t0.*one at a time"
    ):
        open_recording(tmp_path, stream="imec0.ap", segment="all")
    np.testing.assert_allclose(gains_of(open_recording(tmp_path, stream="imec0.ap", segment=1)), 0.6 / 512 / 500)


def test_words_and_voltages_of_other_kinds_are_streams_of_their_own(tmp_path):
    path = recording_files.write_spikeglx_nidq(tmp_path)
    streams = describe_recording(path).streams
    assert [(stream.name, stream.kind, stream.labels, stream.unit) for stream in streams] == [
        ("nidq", "analog", ("XA0", "XA1"), "volts"),
        ("nidq-XD", "digital", ("XD0",), ""),
    ]
    assert streams[0].gains == (5 / 32768,) and streams[0].offset == 0.0
    np.testing.assert_array_equal(samples_of(open_recording(path, stream="nidq-XD")), DATA[:, 2:])


@pytest.mark.parametrize("suffixes", [(".BIN", ".META"), (".bin", ".META")])
def test_suffixes_may_be_in_capitals(suffixes, tmp_path):
    path = recording_files.write_spikeglx_as(tmp_path, suffixes=suffixes)
    assert open_recording(path).n_samples == 500 and path in find_recordings(tmp_path)
    blackrock = recording_files.write_blackrock(tmp_path, name="recording.NS2")
    np.testing.assert_array_equal(samples_of(open_recording(blackrock)), DATA)
    intan = recording_files.write_intan_in_one_file(tmp_path).rename(tmp_path / "recording.RHD")
    np.testing.assert_array_equal(samples_of(open_recording(intan)), recording_files.intan_samples())


# Open Ephys.

ELECTRODES = [(f"CH{number + 1}", 0.195, "uV", "Headstage channel") for number in range(3)]


def test_an_experiment_has_the_channels_scale_and_rate_of_its_own_structure(tmp_path):
    recording_files.write_open_ephys_as(tmp_path, ELECTRODES)
    others = [("CH7", 0.39, "uV", ""), ("CH8", 0.39, "uV", ""), ("CH9", 0.39, "uV", "")]
    samples = recording_files.write_open_ephys_as(tmp_path, others, experiment=10, rate=1000.0, first=3000)
    recording_files.write_open_ephys_as(tmp_path, ELECTRODES, experiment=2)
    source = open_recording(tmp_path, segment=2)
    np.testing.assert_allclose(gains_of(source), 0.39e-6)
    assert labels_of(source) == ["CH7", "CH8", "CH9"] and source.sampling_rate == 1000.0
    assert first(source).axes["time"].offset == 3.0
    np.testing.assert_array_equal(samples_of(source), samples)
    with pytest.raises(ValueError, match="other labels and rates and gains in segment experiment10/recording1"):
        open_recording(tmp_path, segment="all")
    assert open_recording(tmp_path, segment="all", experiment_names=["experiment1", "experiment2"]).n_samples == 1000
    alone = open_recording(tmp_path / "Record Node 101" / "experiment10" / "recording1" / "structure.oebin")
    np.testing.assert_array_equal(samples_of(alone), samples)


@pytest.mark.parametrize(
    ("channel", "volts"),
    [
        (("AI0", 10 / 32767, "", "Analog Input channel from a NIDAQ device"), 10 / 32767),
        (("ADC1", 5 / 32768, "uV", "ADC data channel"), 5 / 32768),
        (("ADC1", 152.6, "uV", ""), 152.6e-6),
    ],
)
def test_analog_inputs_are_in_volts_and_beside_the_electrodes(channel, volts, tmp_path):
    aux = ("AUX1", 0.0000374, "mV", "Auxiliary")
    samples = recording_files.write_open_ephys_as(tmp_path, [*ELECTRODES, aux, channel])
    assert labels_of(open_recording(tmp_path)) == ["CH1", "CH2", "CH3"]
    kinds = {stream.name.partition("_Data")[2]: stream.kind for stream in describe_recording(tmp_path).streams}
    assert kinds == {"": "electrode", "_AUX": "auxiliary", "_ADC": "analog"}
    (name,) = [stream.name for stream in describe_recording(tmp_path).streams if stream.kind == "analog"]
    source = open_recording(tmp_path, stream=name)
    np.testing.assert_allclose(gains_of(source), volts, rtol=1e-12)
    # Intan's accelerometer inputs: 37.4 uV a count, of which the file says that it is in mV.
    (name,) = [stream.name for stream in describe_recording(tmp_path).streams if stream.kind == "auxiliary"]
    np.testing.assert_allclose(gains_of(open_recording(tmp_path, stream=name)), 37.4e-6)
    np.testing.assert_array_equal(samples_of(source), samples[:, 4:])


# Blackrock and Intan, which neo reads.


def test_the_last_sample_of_the_oldest_files_is_there(tmp_path):
    path = recording_files.write_blackrock_21(tmp_path / "a.ns2", DATA)
    np.testing.assert_array_equal(samples_of(open_recording(path)), DATA)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="a.ns2 has 5998 bytes of samples, which is 4 more than whole samples"):
        open_recording(path)


def test_a_file_of_blackrock_ends_its_labels_and_has_no_neighbours(tmp_path):
    folder = tmp_path / "session.ns2.copy"
    folder.mkdir()
    channels = [(b"RAM01", b"uV", 8191), (b"RAM02\0\x10\0\x02", b"uV\0rest", 8191)]
    path = recording_files.write_blackrock_as(folder / "a.ns2", DATA[:, :2], channels)
    for name in ("a.ns3", "a.ns5", "a.nev", "a.ccf"):
        (folder / name).write_bytes(b"NEURALCD, and nothing more")
    source = open_recording(path)
    assert labels_of(source) == ["RAM01", "RAM02"]
    np.testing.assert_array_equal(samples_of(source), DATA[:, :2])
    with pytest.raises(ValueError, match="a.ns3") as raised:
        open_recording(folder / "a.ns3")
    assert "ezmsg-mlx-" not in str(raised.value)


def mixed_blackrock(folder):
    channels = [(b"lfp 1", b"uV", 8191), (b"analog 1", b"mV", 4999), (b"lfp 2", b"uV", 8191)]
    return recording_files.write_blackrock_as(folder / "mixed.ns2", DATA, channels)


def test_analog_inputs_come_with_electrodes_only_where_they_are_asked_for(tmp_path):
    path = mixed_blackrock(tmp_path)
    source = open_recording(path)
    assert labels_of(source) == ["lfp 1", "lfp 2"]
    np.testing.assert_array_equal(samples_of(source), DATA[:, [0, 2]])
    np.testing.assert_allclose(gains_of(open_recording(path, stream="nsx2 analog")), 4.999 / 32764)
    both = open_recording(path, channels="electrode,analog 1")
    np.testing.assert_array_equal(samples_of(both), DATA[:, [0, 2, 1]])
    found = first(both).axes["ch"].data
    assert found["label"].tolist() == ["lfp 1", "lfp 2", "analog 1"]
    assert found["kind"].tolist() == ["electrode", "electrode", "analog"]
    np.testing.assert_allclose(gains_of(both)[[0, 2]], [8191e-6 / 32764, 4.999 / 32764])


def test_files_of_a_channel_belong_to_its_label_and_dc_amplifiers_have_their_sign(tmp_path):
    names = tuple(f"A-{number:03d}" for number in range(12))
    path = recording_files.write_intan_rhs(tmp_path / "r", names, (5, 2, 9, 0, 11, 3, 8, 1, 10, 4, 7, 6))
    below = tmp_path / "r" / "earlier"
    below.mkdir()
    np.zeros(600, np.int16).tofile(below / "amp-A-000.dat")
    for stream, value in (("RHS2000 amplifier channel", 100), ("DC Amplifier channel", 500), ("Stim channel", 1)):
        np.testing.assert_array_equal(first(open_recording(path, stream=stream)).data[0], value + np.arange(12))
    dc = first(open_recording(path, stream="DC Amplifier channel"))
    volts = dc.data[0] * dc.attrs["nwb_scaling_gain"] + dc.attrs["nwb_scaling_offset"]
    # By Intan's description: -19.23 mV for each count above 512.
    np.testing.assert_allclose(volts, -19.23e-3 * (500 + np.arange(12) - 512.0), atol=1e-12)
    (path / "stim-A-003.dat").rename(path / "stim-A-103.dat")
    problems = {stream.name: stream.problem for stream in describe_recording(path).streams}
    assert problems["RHS2000 amplifier channel"] is None and "files for" in problems["Stim channel"]


# Channels.


@pytest.mark.parametrize(
    ("asked", "columns"),
    [
        ("ch2,ch0", [2, 0]),
        (["ch1"], [1]),
        ("1", [1]),
        ([2, 0], [2, 0]),
        ("0:2", [0, 1]),
        (":2", [0, 1]),
        ("1:", [1, 2]),
    ],
)
def test_channels_are_chosen_by_label_and_by_index(asked, columns, tmp_path):
    path = recording_files.write_raw_binary(tmp_path)
    known = {"sampling_rate": RATE, "n_channels": 3, "gain": [1.0, 2.0, 3.0], "unit": "V"}
    source = pickle.loads(pickle.dumps(open_recording(path, channels=asked, **known)))
    np.testing.assert_array_equal(samples_of(source), DATA[:, columns])
    assert labels_of(source) == [f"ch{column}" for column in columns]
    np.testing.assert_array_equal(gains_of(source), np.array([1.0, 2.0, 3.0])[columns])
    assert source.identity != open_recording(path, **known).identity


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("ch7", r"'channels' must be labels .ch0, ch1, ch2. or indices below 3, got 'ch7'"),
        ("3", "got '3'"),
        ([-1], "got -1"),
        ("2:1", "got '2:1'"),
        ("", "got ''"),
        ([], "at least one"),
        ("ch1,1", "each channel once"),
        ("analog", "got 'analog'"),
    ],
)
def test_channels_that_are_not_there_are_refused(asked, error, tmp_path):
    path = recording_files.write_raw_binary(tmp_path)
    with pytest.raises(ValueError, match=error):
        open_recording(path, channels=asked, sampling_rate=RATE, n_channels=3)
    with pytest.raises(TypeError, match="'channels' must be .*, got 7"):
        open_recording(path, channels=7, sampling_rate=RATE, n_channels=3)


def test_channels_are_chosen_in_formats_that_do_not_know_of_it(tmp_path):
    path = write_nwb(tmp_path / "recording.nwb", {})
    whole, source = open_recording(path), open_recording(path, channels="e3,0")
    np.testing.assert_array_equal(samples_of(source), samples_of(whole)[:, [2, 0]])
    assert labels_of(source) == ["e3", "e2"] and source.gaps == whole.gaps
    assert source.identity != whole.identity
    with pytest.raises(ValueError, match="'channels' must be labels .e2, e0, e3. or .*, got 'e7'"):
        open_recording(path, channels="e7")


# Folders.


def test_links_that_go_round_give_each_recording_once(tmp_path):
    inside = tmp_path / "in" / "sub"
    inside.mkdir(parents=True)
    raw = recording_files.write_raw_binary(tmp_path / "in")
    (inside / "up").symlink_to("..")
    (inside / "self").symlink_to("self")
    (tmp_path / "in" / "other").symlink_to(inside)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "there").symlink_to(tmp_path / "in")
    assert find_recordings(tmp_path / "in", "rawbinary") == [raw]
    assert find_recordings(tmp_path / "other", "rawbinary") == [tmp_path / "other" / "there" / "recording.dat"]


def test_a_folder_that_may_not_be_read_is_left_out(tmp_path, monkeypatch, caplog):
    raw = recording_files.write_raw_binary(tmp_path)
    (tmp_path / "closed").mkdir()

    def iterdir(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return list_of(path)

    list_of = pathlib.Path.iterdir
    # Root may read every folder.
    monkeypatch.setattr(pathlib.Path, "iterdir", iterdir)
    assert find_recordings(tmp_path, "rawbinary") == [raw]
    assert "closed is left out" in caplog.text
