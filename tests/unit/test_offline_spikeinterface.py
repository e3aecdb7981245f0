"""Recordings of SpikeInterface as sources: what they know goes into messages and results."""

import functools
import pickle

import numpy as np
import pytest
from helpers.source_contract import SourceContract

from ezmsg.mlx import (
    AsArrayTransformer,
    CommonRereferenceTransformer,
    SpikeInterfaceSource,
    ZarrSink,
    process_recording,
    process_recordings,
)
from ezmsg.mlx.offline.spikeinterfacesource import as_source

RATE = 2000.0
TRACES = np.random.default_rng(0).integers(-500, 500, (1500, 4), np.int16)
PLACES = np.array([[0.0, 0.0], [0.0, 20.0], [32.0, 0.0], [32.0, 20.0]])


class Recording:
    """What of a recording of SpikeInterface is used, without SpikeInterface."""

    sampling_frequency = RATE
    channel_ids = np.array(["a", "b", "c", "d"])

    def __init__(self, *lengths: int, known: tuple[str, ...] = ("group", "location"), times: np.ndarray | None = None):
        self.lengths, self.known, self.times = lengths or (1500,), known, times

    def get_num_segments(self):
        return len(self.lengths)

    def get_num_samples(self, segment):
        return self.lengths[segment]

    def get_traces(self, segment, start, end, channel_ids):
        return TRACES[start : min(end, self.lengths[segment]), np.searchsorted(self.channel_ids, channel_ids)]

    def get_property_keys(self):
        return list(self.known)

    def get_property(self, name):
        return np.array([0, 0, 1, 1])

    def has_probe(self):
        return False

    def get_channel_locations(self):
        return PLACES

    def has_scaleable_traces(self):
        return True

    def get_channel_gains(self):
        return np.array([0.195, 0.195, 0.39, 0.39])

    def get_channel_offsets(self):
        return np.zeros(4)

    def has_time_vector(self, segment):
        return self.times is not None

    def get_times(self, segment):
        return self.times

    def get_start_time(self, segment):
        return 3.0 + 10 * segment

    def to_dict(self, include_annotations, include_properties):
        return {"class": "Recording", "kwargs": {"file": "/home/me/a.bin", "taps": np.arange(3), "how": self.known}}


class TestSource(SourceContract):
    @pytest.fixture
    def source(self):
        return SpikeInterfaceSource(Recording(), chunk_mb=0.002)


def test_ids_groups_places_scale_and_times_are_those_of_the_recording():
    message = next(iter(SpikeInterfaceSource(Recording()).read(0)))
    found = message.axes["ch"].data
    assert found["label"].tolist() == ["a", "b", "c", "d"] and found["group"].tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(np.stack([found["x"], found["y"]], axis=1), PLACES)
    np.testing.assert_allclose(message.attrs["nwb_scaling_gain"], [0.195e-6, 0.195e-6, 0.39e-6, 0.39e-6])
    assert message.attrs["nwb_scaling_unit"] == "volts" and message.axes["time"].offset == 3.0
    np.testing.assert_array_equal(message.data, TRACES)
    plain = next(iter(SpikeInterfaceSource(Recording(known=()), channels="c,0").read(0)))
    assert plain.axes["ch"].data.tolist() == ["c", "a"]
    np.testing.assert_array_equal(plain.data, TRACES[:, [2, 0]])


def test_segments_are_chosen_and_jumps_of_a_time_vector_are_gaps():
    with pytest.raises(ValueError, match="has 2 segments; allowed as segment are 0 to 1 and 'all'"):
        SpikeInterfaceSource(Recording(1000, 500))
    whole = SpikeInterfaceSource(Recording(1000, 500), segment="all")
    assert whole.n_samples == 1500 and [message.axes["time"].offset for message in whole.read(0)] == [3.0, 13.0]
    times = 5.0 + np.arange(1500) / RATE
    times[600:] += 0.25
    source = SpikeInterfaceSource(Recording(times=times))
    assert source.gaps == [600]
    assert [message.axes["time"].offset for message in source.read(0)] == pytest.approx([5.0, 5.55])


def test_a_recording_that_is_made_in_another_way_is_another():
    one, same = SpikeInterfaceSource(Recording()), pickle.loads(pickle.dumps(SpikeInterfaceSource(Recording())))
    assert one.identity == same.identity
    others = [Recording(known=("location",)), Recording(known=("group", "location", "more"))]
    assert len({one.identity, *(SpikeInterfaceSource(each).identity for each in others)}) == 3
    with pytest.raises(TypeError, match="'recording' must be a recording of SpikeInterface, got 3"):
        SpikeInterfaceSource(3)


def by_group():
    """A common reference for each group."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        CommonRereferenceTransformer(mode="mean", channel_groups="group"),
        AsArrayTransformer(backend="numpy"),
    ]


def referenced(traces):
    groups = [traces[:, :2], traces[:, 2:]]
    return np.concatenate([group - group.mean(axis=1, keepdims=True) for group in groups], axis=1)


def test_a_reference_by_group_and_results_know_groups_and_places(tmp_path):
    zarr = pytest.importorskip("zarr")
    process_recording(SpikeInterfaceSource(Recording()), by_group, ZarrSink(tmp_path / "r.zarr"), progress=False)
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    np.testing.assert_allclose(group["data"][:], referenced(TRACES.astype(float)), atol=1e-4)
    assert group["ch"][:].tolist() == ["a", "b", "c", "d"] and group["ch_group"][:].tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(group["ch_y"][:], PLACES[:, 1])


@pytest.fixture
def spikeinterface():
    return pytest.importorskip("spikeinterface.core", reason="needs spikeinterface, an extra of its own")


def test_recordings_of_spikeinterface_are_processed_as_they_are(spikeinterface, tmp_path):
    zarr = pytest.importorskip("zarr")
    recording = spikeinterface.generate_recording(num_channels=4, durations=[0.5], sampling_frequency=RATE)
    recording.set_channel_groups([0, 0, 1, 1])
    assert type(as_source(recording)) is SpikeInterfaceSource
    process_recording(recording, by_group, ZarrSink(tmp_path / "one.zarr"), progress=False)
    sinks = [ZarrSink(tmp_path / f"{name}.zarr") for name in "ab"]
    outcomes = process_recordings(zip([recording, recording.select_channels(["0", "1"])], sinks, strict=True), by_group)
    assert [type(outcome).__name__ for _, outcome in outcomes] == ["ProcessedRecording"] * 2
    expected = referenced(recording.get_traces(0).astype(float))
    for name, columns in (("one", slice(None)), ("a", slice(None)), ("b", slice(2))):
        group = zarr.open_group(str(tmp_path / f"{name}.zarr"), mode="r")
        np.testing.assert_allclose(group["data"][:], expected[:, columns], atol=1e-4)
        assert group["ch_x"].shape == group["ch"].shape


def test_preprocessing_of_spikeinterface_is_part_of_a_recording(spikeinterface):
    recording = spikeinterface.generate_recording(num_channels=2, durations=[0.5, 0.25], sampling_frequency=RATE)
    source = functools.partial(SpikeInterfaceSource, segment=1)
    copy = pickle.loads(pickle.dumps(source(recording)))
    assert copy.identity == source(recording).identity and copy.n_samples == 500
    np.testing.assert_array_equal(next(iter(copy.read(0))).data, recording.get_traces(1))
    preprocessing = pytest.importorskip("spikeinterface.preprocessing", reason="needs spikeinterface, and more")
    low, high = (preprocessing.bandpass_filter(recording, freq_min=low, freq_max=500.0) for low in (100.0, 101.0))
    assert source(low).identity != source(high).identity
