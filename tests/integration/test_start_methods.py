"""The three start methods of multiprocessing, in a process that has used MLX and in one that has not.

It works, or the first message says what to change; nothing hangs.
"""

import faulthandler
import itertools
import multiprocessing
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers import spawned
from helpers.processes import RecordedLog, in_fresh_process, run_graph

from ezmsg.mlx import AsArray, AsArraySettings, AsArrayTransformer, Pow, PowSettings, PowTransformer

TO_MLX = AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=48.0)
TO_NUMPY = AsArraySettings(backend="numpy")
SQUARE = PowSettings(exponent=2.0)

N_MESSAGES = 5
TIME_LIMIT = 240.0
"""Seconds after which a process shows the stacks of its threads and ends. Only a hang takes that long."""

CURE = 'multiprocessing.set_start_method("spawn")'


@pytest.fixture
def cpu_only() -> None:
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    if mx.metal.is_available() or mx.cuda.is_available():
        pytest.skip("what a forked process may do with a GPU is up to the GPU's driver")


def message(number: int) -> AxisArray:
    data = np.full((300, 4), number, "int16")
    return AxisArray(data, ["time", "ch"], {"time": AxisArray.TimeAxis(fs=30000.0, offset=number / 100.0)}, key="amp")


def squares(numbers: range, limit_mb: float | None = 48.0) -> list[float]:
    """A sample of each message, squared on MLX in this thread."""
    to_mlx = AsArrayTransformer(replace(TO_MLX, mlx_cache_limit_mb=limit_mb))
    chain = (to_mlx, PowTransformer(SQUARE), AsArrayTransformer(TO_NUMPY))
    results = []
    for number in numbers:
        result = message(number)
        for stage in chain:
            result = stage(result)
        results.append(float(result.data[-1, 0]))
    return results


EXPECTED = [float(number**2) for number in range(N_MESSAGES)]


# A process with a function of the user's


def answer(pipe: Connection, limit_mb: float | None) -> None:
    # Only here: what the parent starts of it, a forked child waits for.
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    try:
        pipe.send(squares(range(N_MESSAGES), limit_mb))
    except RuntimeError as error:
        pipe.send(str(error))
    faulthandler.cancel_dump_traceback_later()


def squares_in_child(limit_mb: float | None = 48.0) -> list[float] | str:
    """The squares, or the error that the child met."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=answer, args=(sender, limit_mb))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


# A graph with a process for what runs on MLX


class Source(ez.Unit):
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        for number in range(N_MESSAGES):
            yield self.OUTPUT_SIGNAL, message(number)


class Tell(ez.Unit):
    """Adds the warnings of its process to each message."""

    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
        self.log = RecordedLog()
        self.log.__enter__()

    async def shutdown(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    @ez.subscriber(INPUT_SIGNAL)
    @ez.publisher(OUTPUT_SIGNAL)
    async def on_signal(self, arrived: AxisArray) -> AsyncGenerator:
        yield self.OUTPUT_SIGNAL, replace(arrived, attrs={"warnings": list(self.log.warnings)})


class Worker(ez.Collection):
    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)
    TO_MLX = AsArray(TO_MLX)
    SQUARE = Pow(SQUARE)
    TO_NUMPY = AsArray(TO_NUMPY)
    TELL = Tell()

    def network(self) -> ez.NetworkDefinition:
        stages = (self.TO_MLX, self.SQUARE, self.TO_NUMPY, self.TELL)
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in itertools.pairwise(stages)),
            (self.TELL.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


class SinkSettings(ez.Settings):
    results: list[float]
    warnings: list[list[str]]


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, arrived: AxisArray) -> None:
        self.SETTINGS.results.append(float(arrived.data[-1, 0]))
        self.SETTINGS.warnings.append(arrived.attrs["warnings"])
        if len(self.SETTINGS.results) == N_MESSAGES:
            raise ez.NormalTermination


def squares_in_graph() -> tuple[list[float], list[str]]:
    """The squares, and the warnings of the process that computed them."""
    results: list[float] = []
    warnings: list[list[str]] = []
    source, worker, sink = Source(), Worker(), Sink(SinkSettings(results, warnings))
    run_graph(
        {"SOURCE": source, "WORKER": worker, "SINK": sink},
        [(source.OUTPUT_SIGNAL, worker.INPUT_SIGNAL), (worker.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)],
        process_components=[worker],
    )
    return results, warnings[-1]


@pytest.mark.parametrize("method", [m for m in ("spawn", "forkserver") if m in multiprocessing.get_all_start_methods()])
@in_fresh_process
def test_a_new_process_works_whether_this_one_has_used_mlx_or_not(method, cpu_only):
    spawned.spawn_anew()
    multiprocessing.set_start_method(method, force=True)
    assert squares_in_child() == EXPECTED
    assert squares(range(1)) == [0.0]
    assert squares_in_child() == EXPECTED
    results, warnings = squares_in_graph()
    assert results == EXPECTED
    assert not warnings


needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork a process"
)


@needs_fork
@in_fresh_process
def test_a_process_forked_from_one_that_has_not_used_mlx_works(cpu_only):
    # Nor has importing it that effect.

    multiprocessing.set_start_method("fork", force=True)
    assert squares_in_child() == EXPECTED
    results, warnings = squares_in_graph()
    assert results == EXPECTED
    assert not warnings


@needs_fork
@in_fresh_process
def test_a_process_forked_from_one_that_has_used_mlx_says_what_to_change(cpu_only):
    multiprocessing.set_start_method("fork", force=True)
    assert squares(range(1)) == [0.0]

    # In the thread that forked MLX would hang, so that it is refused, also where no limit is asked for.
    for limit_mb in (48.0, None):
        error = squares_in_child(limit_mb)
        assert isinstance(error, str) and "was forked from one that had used MLX" in error and CURE in error

    # Units run in another thread, where only the limit cannot be set.
    results, warnings = squares_in_graph()
    assert results == EXPECTED
    (warning,) = warnings
    assert "was forked from one that had used MLX" in warning and CURE in warning
