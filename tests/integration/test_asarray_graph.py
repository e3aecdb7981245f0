"""AsArray as a unit: settings at run time, messages that cannot be converted, and several processes."""

import multiprocessing
import sys
from collections.abc import AsyncGenerator

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.processes import RecordedLog, in_fresh_process, run_graph

from ezmsg.mlx import AsArray, AsArraySettings, apply_cache_limit, cache_limit

pytestmark = pytest.mark.usefixtures("needs_mlx")


@pytest.fixture
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


def message(data: np.ndarray) -> AxisArray:
    return AxisArray(data, dims=["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)}, key="amp")


def limit_in_force() -> float:
    """In MiB, of MLX itself: it has no getter, and a huge limit changes nothing."""
    import mlx.core as mx

    old = mx.set_cache_limit(1 << 50)
    mx.set_cache_limit(old)
    return old / 2**20


# One process


class LoopSettings(ez.Settings):
    seen: list[tuple[type, int, float]]
    """For each result: its type, number of samples, and the limit in force in MiB when it came."""


class Loop(ez.Unit):
    """Sends one message after the other, each when the one before has come back converted.

    First one that cannot be converted, then one without samples; after that another limit, and messages until it
    is in force.
    """

    SETTINGS = LoopSettings
    INPUT_RESULT = ez.InputStream(AxisArray)
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)
    OUTPUT_SETTINGS = ez.OutputStream(AsArraySettings)

    @ez.publisher(OUTPUT_SIGNAL)
    async def start(self) -> AsyncGenerator:
        yield self.OUTPUT_SIGNAL, message(np.array([[object(), None]]))
        yield self.OUTPUT_SIGNAL, message(np.ones((0, 2)))

    @ez.subscriber(INPUT_RESULT)
    @ez.publisher(OUTPUT_SETTINGS)
    @ez.publisher(OUTPUT_SIGNAL)
    async def on_result(self, result: AxisArray) -> AsyncGenerator:
        self.SETTINGS.seen.append((type(result.data), result.data.shape[0], cache_limit().limit_mb))
        if cache_limit().limit_mb == 128.0:
            raise ez.NormalTermination
        if len(self.SETTINGS.seen) == 1:
            yield self.OUTPUT_SETTINGS, AsArraySettings("mlx", "float32", 128.0)
        yield self.OUTPUT_SIGNAL, message(np.ones((30, 2)))


@in_fresh_process
def test_graph_goes_on_after_a_message_that_cannot_be_converted_and_takes_new_settings():
    import mlx.core as mx

    seen: list[tuple[type, int, float]] = []
    components = {"LOOP": Loop(LoopSettings(seen)), "TO_MLX": AsArray(AsArraySettings("mlx", "float32", 64.0))}
    with RecordedLog() as log:
        run_graph(
            components,
            [
                (components["LOOP"].OUTPUT_SIGNAL, components["TO_MLX"].INPUT_SIGNAL),
                (components["LOOP"].OUTPUT_SETTINGS, components["TO_MLX"].INPUT_SETTINGS),
                (components["TO_MLX"].OUTPUT_SIGNAL, components["LOOP"].INPUT_RESULT),
            ],
        )
    # Only the message that cannot be converted is lost.
    assert seen[0] == (mx.array, 0, 64.0)
    assert seen[-1] == (mx.array, 30, 128.0)
    assert any("Data of dtype object cannot be converted to MLX" in error for error in log.errors)
    # The log names the unit by its address.
    changes = [info for info in log.infos if info.startswith("MLX cache limit")]
    assert [change.rpartition(": ")[2] for change in changes][1:] == ["64 MiB -> 128 MiB, asked for by TO_MLX."]
    assert changes[0].endswith(" -> 64 MiB, asked for by TO_MLX.")
    assert limit_in_force() == 128

    # The unit is still there, but not its graph: it asks for nothing any more.
    class Node:
        pass

    node = Node()
    apply_cache_limit(node, 256.0)
    assert limit_in_force() == 256
    assert not [warning for warning in log.warnings if "asks for an MLX cache limit" in warning]


# Several processes

N_MESSAGES = 40
N_SAMPLES = 300


class Source(ez.Unit):
    """Counting int16 samples, through shared memory with a single slot: each message overwrites the last."""

    OUTPUT_SIGNAL = ez.OutputStream(AxisArray, num_buffers=1)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        for i in range(N_MESSAGES):
            start = i * N_SAMPLES
            data = np.arange(start, start + N_SAMPLES, dtype="int16")[:, None] + np.zeros(4, "int16")
            yield self.OUTPUT_SIGNAL, message(data)


class HoldState(ez.State):
    held: list[AxisArray]


class Hold(ez.Unit):
    """Keeps what it receives until all has come, then sends it at once, with the limit of this process."""

    STATE = HoldState
    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        self.STATE.held = []

    @ez.subscriber(INPUT_SIGNAL)
    @ez.publisher(OUTPUT_SIGNAL)
    async def on_signal(self, arrived: AxisArray) -> AsyncGenerator:
        import mlx.core as mx

        self.STATE.held.append(arrived)
        if len(self.STATE.held) == N_MESSAGES:
            together = mx.concatenate([held.data for held in self.STATE.held])
            limit = cache_limit()
            attrs = {"limit": limit_in_force(), "node": limit.node, "source": limit.source}
            yield self.OUTPUT_SIGNAL, replace(arrived, data=together, attrs=attrs)


class Worker(ez.Collection):
    """What runs in one process: to MLX, hold, and back to NumPy."""

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)
    TO_MLX = AsArray(AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=48.0))
    HOLD = Hold()
    TO_NUMPY = AsArray(AsArraySettings(backend="numpy"))

    def network(self) -> ez.NetworkDefinition:
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            (self.TO_MLX.OUTPUT_SIGNAL, self.HOLD.INPUT_SIGNAL),
            (self.HOLD.OUTPUT_SIGNAL, self.TO_NUMPY.INPUT_SIGNAL),
            (self.TO_NUMPY.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


class SinkSettings(ez.Settings):
    received: list[AxisArray]


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, arrived: AxisArray) -> None:
        self.SETTINGS.received.append(replace(arrived, data=arrived.data.copy()))
        raise ez.NormalTermination


@in_fresh_process
def test_spawned_process_that_converts_has_the_limit_and_keeps_every_sample():
    multiprocessing.set_start_method("spawn", force=True)
    received: list[AxisArray] = []
    source, worker, sink = Source(), Worker(), Sink(SinkSettings(received))
    run_graph(
        {"SOURCE": source, "WORKER": worker, "SINK": sink},
        [(source.OUTPUT_SIGNAL, worker.INPUT_SIGNAL), (worker.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)],
        process_components=[source, worker],
    )
    (result,) = received
    expected = np.arange(N_MESSAGES * N_SAMPLES)[:, None] + np.zeros(4)
    np.testing.assert_array_equal(result.data, expected.astype("float32"), strict=True)
    assert result.attrs == {"limit": 48.0, "node": "WORKER/TO_MLX", "source": "node"}
    # This process, which has built the unit, has nothing of it.
    assert "mlx.core" not in sys.modules
    assert cache_limit().source == "default"
