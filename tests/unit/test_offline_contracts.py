"""The sources and sinks of this package, and those in memory of the tests, do what their protocols say."""

import numpy as np
import pytest
from helpers.nwb_files import DATA, RATE, write
from helpers.offline_memory import MemorySink, MemorySource
from helpers.sink_contract import Place, SinkContract
from helpers.source_contract import SourceContract

from ezmsg.mlx import NWBSource, ZarrSink


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
