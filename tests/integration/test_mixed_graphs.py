"""One stream on several branches at once: NumPy and MLX, ezmsg-sigproc's AsArray and ours, several limits."""

import itertools
import multiprocessing
from collections.abc import AsyncGenerator

import ezmsg.core as ez
import ezmsg.sigproc.asarray as sigproc_asarray
import ezmsg.sigproc.ewma as sigproc_ewma
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.processes import RecordedLog, in_fresh_process, run_graph
from helpers.reference import ewma

from ezmsg.mlx import AsArray, AsArraySettings, EWMASettings, EWMAUnit, Rechunk, RechunkSettings, cache_limit

RATE = 30000.0
N_CHANNELS = 32
LENGTHS = tuple(n for stall in range(40) for n in (300, 0, 1, 1000 + 53 * stall))
"""Forty lengths that come once each."""

TIME_CONSTANT = 0.01
SMALL, LARGE = 4.0, 64.0
"""Limits on MLX's cache that two nodes ask for, in MiB."""


def samples() -> np.ndarray:
    return np.random.default_rng(0).integers(-500, 500, (sum(LENGTHS), N_CHANNELS)).astype(np.int16) + np.int16(200)


@pytest.fixture
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


class Source(ez.Unit):
    # Few slots, so that they are used again soon, with room for the longest message.
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray, num_buffers=2, buf_size=(max(LENGTHS) + 1) * N_CHANNELS * 2 + 2**16)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        x, start = samples(), 0
        for n in LENGTHS:
            axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=start / RATE)}
            message = AxisArray(x[start : start + n], ["time", "ch"], axes, key="amp", stream_dim="time")
            start += n
            yield self.OUTPUT_SIGNAL, message


class CollectSettings(ez.Settings):
    branch: str = ""


class Collect(ez.Unit):
    """Keeps every message as it came, in the process of the chain, and hands all on when the last has come.

    MLX arrays and NumPy arrays that own their memory may be kept; views into shared memory may not.
    """

    SETTINGS = CollectSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_RESULT = ez.OutputStream(AxisArray, num_buffers=1, buf_size=sum(LENGTHS) * N_CHANNELS * 8 + 2**16)

    async def initialize(self) -> None:
        self.kept: list[AxisArray] = []
        self.log = RecordedLog()
        self.log.__enter__()

    async def shutdown(self) -> None:
        self.log.__exit__()

    @ez.subscriber(INPUT_SIGNAL)
    @ez.publisher(OUTPUT_RESULT)
    async def on_signal(self, message: AxisArray) -> AsyncGenerator:
        import mlx.core as mx

        self.kept.append(message)
        if sum(len(kept.data) for kept in self.kept) < sum(LENGTHS):
            return
        result = replace(
            message,
            data=np.concatenate([np.array(kept.data) for kept in self.kept]),
            attrs={
                "branch": self.SETTINGS.branch,
                "type": type(message.data).__module__,
                "offsets": [kept.axes["time"].offset for kept in self.kept],
                "cache": mx.get_cache_memory() / 2**20,
                "limit": cache_limit().limit_mb,
                "warnings": list(self.log.warnings),
                "errors": list(self.log.errors),
            },
        )
        yield self.OUTPUT_RESULT, result


AVERAGE = EWMASettings(time_constant=TIME_CONSTANT)


class Branches(ez.Collection):
    """From one stream: on MLX by three nodes that ask for different limits, and on NumPy."""

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_RESULT = ez.OutputTopic(AxisArray)

    OURS = AsArray(AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=SMALL))
    OURS_AVERAGE = EWMAUnit(AVERAGE)
    OURS_BACK = AsArray(AsArraySettings(backend="numpy"))
    KEEP_CONVERTED = Collect(CollectSettings("converted"))
    KEEP_AVERAGE = Collect(CollectSettings("average"))

    OTHER = AsArray(AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=LARGE))
    OTHER_CUT = Rechunk(RechunkSettings(sizes=(256,), remainder="emit"))
    OTHER_AVERAGE = EWMAUnit(AVERAGE)
    OTHER_BACK = AsArray(AsArraySettings(backend="numpy"))
    KEEP_OTHER = Collect(CollectSettings("other"))

    THEIRS = sigproc_asarray.AsArray(
        sigproc_asarray.AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=512.0)
    )
    THEIRS_AVERAGE = EWMAUnit(AVERAGE)
    THEIRS_BACK = sigproc_asarray.AsArray(sigproc_asarray.AsArraySettings(backend="numpy"))
    KEEP_THEIRS = Collect(CollectSettings("theirs"))

    NUMPY_AVERAGE = sigproc_ewma.EWMAUnit(sigproc_ewma.EWMASettings(time_constant=TIME_CONSTANT))
    KEEP_NUMPY = Collect(CollectSettings("numpy"))

    def network(self) -> ez.NetworkDefinition:
        branches = (
            (self.OURS, self.OURS_AVERAGE, self.OURS_BACK, self.KEEP_AVERAGE),
            # The same messages to two subscribers, of which this one keeps them.
            (self.OURS, self.KEEP_CONVERTED),
            (self.OTHER, self.OTHER_CUT, self.OTHER_AVERAGE, self.OTHER_BACK, self.KEEP_OTHER),
            (self.THEIRS, self.THEIRS_AVERAGE, self.THEIRS_BACK, self.KEEP_THEIRS),
            (self.NUMPY_AVERAGE, self.KEEP_NUMPY),
        )
        return (
            *((self.INPUT_SIGNAL, first.INPUT_SIGNAL) for first in {branch[0]: None for branch in branches}),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for branch in branches for a, b in itertools.pairwise(branch)),
            *((branch[-1].OUTPUT_RESULT, self.OUTPUT_RESULT) for branch in branches),
        )


class SinkSettings(ez.Settings):
    results: dict[str, AxisArray]


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT_RESULT = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_RESULT)
    async def on_result(self, message: AxisArray) -> None:
        self.SETTINGS.results[message.attrs["branch"]] = replace(message, data=message.data.copy())
        if len(self.SETTINGS.results) == 5:
            raise ez.NormalTermination


@in_fresh_process
def test_branches_of_one_stream_give_the_same_and_the_tightest_limit_holds(needs_mlx):
    multiprocessing.set_start_method("spawn", force=True)
    results: dict[str, AxisArray] = {}
    source, branches, sink = Source(), Branches(), Sink(SinkSettings(results))
    run_graph(
        {"SOURCE": source, "BRANCHES": branches, "SINK": sink},
        [(source.OUTPUT_SIGNAL, branches.INPUT_SIGNAL), (branches.OUTPUT_RESULT, sink.INPUT_RESULT)],
        process_components=[branches],
    )
    expected = ewma(samples(), RATE, TIME_CONSTANT)
    offsets = np.cumsum((0, *LENGTHS[:-1])) / RATE
    for name in ("average", "other", "theirs", "numpy"):
        assert results[name].attrs["type"] == "numpy", name
        difference = np.abs(results[name].data - expected).max()
        assert difference <= 1e-5 * np.abs(expected).max(), (name, difference)
        if name != "other":
            np.testing.assert_array_equal(results[name].attrs["offsets"], offsets, name)
    # Kept until the slots of shared memory had been used again many times.
    assert results["converted"].attrs["type"] == "mlx.core"
    np.testing.assert_array_equal(results["converted"].data, samples().astype(np.float32), strict=True)

    # The tightest limit holds, whatever ezmsg-sigproc's AsArray has set; and each disagreement is told once.
    told = max((result.attrs["warnings"] for result in results.values()), key=len)
    ours = [text for text in told if "MLX" in text]
    assert len(ours) == len(set(ours)) <= 3, ours
    assert sum("asks for an MLX cache limit" in text for text in ours) == 1
    one_buffer = max(LENGTHS) * N_CHANNELS * 4 / 2**20
    for result in results.values():
        assert result.attrs["limit"] == SMALL
        assert result.attrs["cache"] <= SMALL + one_buffer
        assert not result.attrs["errors"]
