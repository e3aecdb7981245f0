"""The sources and sinks of this package, and those in memory of the tests, do what their protocols say."""

import numpy as np
import pytest
from helpers import recording_files
from helpers.nwb_files import DATA, RATE, write
from helpers.offline_memory import MemorySink, MemorySource
from helpers.sink_contract import Place, SinkContract
from helpers.source_contract import SourceContract

from ezmsg.mlx import NWBSource, ZarrSink, open_recording


class TestMemorySource(SourceContract):
    @pytest.fixture
    def source(self):
        return MemorySource()


class TestNWBSource(SourceContract):
    @pytest.fixture(params=["rate", "time stamps", "time stamps with gaps"])
    def source(self, request, tmp_path):
        pytest.importorskip("pynwb")
        stamps = np.arange(len(DATA)) / RATE
        if "gaps" in request.param:
            stamps[300:] += 1.0
            stamps[310:] += 1.0
        keywords = {} if request.param == "rate" else {"timestamps": stamps}
        return NWBSource(write(tmp_path / "recording.nwb", keywords), chunk_mb=100 * 6 / 2**20)


def _open_ephys_with_gaps(folder):
    numbers = np.arange(len(recording_files.DATA))
    numbers[300:] += 500
    numbers[310:] += 500
    return recording_files.write_open_ephys_binary(folder, numbers)


class TestNeoSource(SourceContract):
    @pytest.fixture(
        params=[
            (recording_files.write_raw_binary, {"sampling_rate": 2000, "n_channels": 3}),
            (recording_files.write_spikeglx, {}),
            (recording_files.write_open_ephys_binary, {}),
            (_open_ephys_with_gaps, {}),
            (recording_files.write_open_ephys, {}),
            (recording_files.write_blackrock, {}),
            (lambda folder: recording_files.write_blackrock(folder, (200, 650)), {"segment": "all"}),
            (recording_files.write_intan, {}),
            (recording_files.write_intan_in_one_file, {}),
        ],
        ids=[
            "raw binary",
            "SpikeGLX",
            "Open Ephys, binary",
            "Open Ephys, binary, with gaps",
            "Open Ephys, legacy",
            "Blackrock",
            "Blackrock with pauses",
            "Intan, a file a signal",
            "Intan, one file",
        ],
    )
    def source(self, request, tmp_path):
        pytest.importorskip("neo")
        write, options = request.param
        return open_recording(write(tmp_path), chunk_mb=100 * 6 / 2**20, **options)


class MemoryPlace(Place):
    def __init__(self):
        self._sink = MemorySink()

    def sink(self):
        return self._sink

    def results(self):
        return None if self._sink.results is None else (self._sink.results, self._sink.times)


class TestMemorySink(SinkContract):
    @pytest.fixture
    def place(self):
        return MemoryPlace()


class ZarrPlace(Place):
    def __init__(self, path):
        self._path = path

    def sink(self):
        return ZarrSink(self._path, chunk_mb=64 * 24 / 2**20)

    def results(self):
        import zarr

        if not self._path.exists():
            return None
        group = zarr.open_group(str(self._path), mode="r")
        return group["data"][:], group["time"][:]


class TestZarrSink(SinkContract):
    @pytest.fixture
    def place(self, tmp_path):
        pytest.importorskip("zarr")
        return ZarrPlace(tmp_path / "results.zarr")
