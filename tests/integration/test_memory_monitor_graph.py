"""MemoryMonitor in a graph: it tells of the process that it lives in, and of no other."""

import math
import multiprocessing
import os

import ezmsg.core as ez
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import in_fresh_process, run_graph

from ezmsg.mlx.asarray import ArrayBackend, AsArray, AsArraySettings
from ezmsg.mlx.memory import MEMORY_METRICS, MemoryMonitor, MemoryMonitorSettings
from ezmsg.mlx.simulate import SimulatedAcquisition, SimulatedAcquisitionSettings


@pytest.fixture
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


class WatchedChain(ez.Collection):
    """Converts to MLX under a limit of 64 MiB, with a monitor beside it."""

    SOURCE = SimulatedAcquisition(SimulatedAcquisitionSettings(n_channels=64, real_time=True))
    TO_MLX = AsArray(AsArraySettings(backend=ArrayBackend.mlx, dtype="float32", mlx_cache_limit_mb=64.0))
    MONITOR = MemoryMonitor(MemoryMonitorSettings(interval=0.02))
    OUTPUT_MEMORY = ez.OutputTopic(AxisArray)

    def network(self) -> ez.NetworkDefinition:
        return (
            (self.SOURCE.OUTPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            (self.MONITOR.OUTPUT_SIGNAL, self.OUTPUT_MEMORY),
        )


class RowsSettings(ez.Settings):
    received: list[dict[str, float]]
    """For each row: every metric by its name, and ``pid`` and ``offset``."""


class Rows(ez.Unit):
    """Receives rows until the watched process works under its limit and this one has told something, too."""

    SETTINGS = RowsSettings
    INPUT_ROWS = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_ROWS)
    async def on_row(self, message: AxisArray) -> None:
        row = dict(zip(message.axes["metric"].data.tolist(), message.data[0].tolist(), strict=True))
        row |= {"pid": message.attrs["pid"], "offset": message.axes["time"].offset}
        received = self.SETTINGS.received
        received.append(row)
        if len({row["pid"] for row in received}) == 2 and any(row["mlx_cache_limit"] == 64.0 for row in received):
            raise ez.NormalTermination


@pytest.mark.usefixtures("needs_mlx")
@in_fresh_process
def test_each_monitor_tells_of_its_own_process():
    multiprocessing.set_start_method("spawn")
    chain, received = WatchedChain(), []
    # An interval of an hour: the graph must not wait for its second row.
    here, rows = MemoryMonitor(MemoryMonitorSettings(interval=3600.0)), Rows(RowsSettings(received))
    run_graph(
        {"CHAIN": chain, "HERE": here, "ROWS": rows},
        [(chain.OUTPUT_MEMORY, rows.INPUT_ROWS), (here.OUTPUT_SIGNAL, rows.INPUT_ROWS)],
        process_components=[chain],
    )
    (own,) = [row for row in received if row["pid"] == os.getpid()]
    others = [row for row in received if row["pid"] != os.getpid()]
    assert own.keys() == {*MEMORY_METRICS, "pid", "offset"}

    # This process has not loaded MLX, and the monitor does not.
    assert (own["mlx_active"], own["mlx_cache"], own["mlx_peak"]) == (0.0, 0.0, 0.0)
    assert math.isnan(own["mlx_cache_limit"])

    assert others[-1]["mlx_peak"] > 0.0
    assert others[-1]["mlx_cache_limit"] == 64.0
    offsets = [row["offset"] for row in others]
    assert offsets == sorted(set(offsets))
