"""A fused chain as a unit of a graph, in a spawned process.

The graph is this file run as a script in a process of its own, since processes are spawned and MLX's state is global
to each.
"""

import functools
import multiprocessing
import pickle
import sys
import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

import ezmsg.mlx as mlx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import chains, warm

# More messages than the 32 after which shared memory is used again; bins of 60 samples.
LENGTHS = [60, 60, 30, 30, 7, 53, 0, 600, 60, 60] * 6
REFUSED = 25
"""Number of the message before which one comes that the chain refuses."""
STAGES = ("reference", "detrend", "square", "bins", "log")
SETTINGS = mlx.ChainSettings(make_chain=functools.partial(chains.make, STAGES))


class Source(ez.Unit):
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> typing.AsyncGenerator:
        for number, message in enumerate(chains.stream(LENGTHS)):
            if number == REFUSED:
                yield self.OUTPUT_SIGNAL, replace(message, data=message.data.astype(np.complex64))
            yield self.OUTPUT_SIGNAL, message


class SinkSettings(ez.Settings):
    output: str


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.pieces: list[np.ndarray] = []
        self.offsets: list[float] = []

    @ez.subscriber(INPUT_SIGNAL)
    async def receive(self, message: AxisArray) -> None:
        # A copy: the buffer belongs to the message and is used again.
        self.pieces.append(np.array(message.data))
        self.offsets.append(message.axes["time"].offset)
        if message.attrs["n"] == sum(LENGTHS[:-1]):
            np.savez(self.SETTINGS.output, *self.pieces, offsets=self.offsets)
            raise ez.NormalTermination


def run_graph(processes: str, output: str) -> None:
    multiprocessing.set_start_method("spawn", force=True)
    source, chain, sink = Source(), mlx.Chain(SETTINGS), Sink(SinkSettings(output=output))
    # Room for the longest message: while ezmsg makes its ring of shared memory anew, a channel may die.
    for stream in (source.OUTPUT_SIGNAL, chain.OUTPUT_SIGNAL):
        stream.buf_size = 1 << 20
    ez.run(
        SOURCE=source,
        CHAIN=chain,
        SINK=sink,
        connections=((source.OUTPUT_SIGNAL, chain.INPUT_SIGNAL), (chain.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)),
        process_components=(chain,) if processes == "two" else (),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )


@pytest.mark.parametrize("processes", ["one", "two"])
def test_a_chain_in_a_graph_gives_what_its_stages_give(processes, tmp_path):
    pytest.importorskip("mlx.core")
    output = tmp_path / "received.npz"
    done = warm.run([__file__, processes, str(output)])
    assert output.exists(), done.stdout + done.stderr
    received = np.load(output)
    offsets = received["offsets"]
    pieces = [received[f"arr_{number}"] for number in range(len(offsets))]
    reference = chains.make(STAGES)
    results = [
        result
        for message in chains.stream(LENGTHS)
        for result in chains.one_by_one(reference, message)
        # As ezmsg-sigproc's unit of bins does, where a message closes none; one that was empty goes through.
        if len(result.data) or not len(message.data)
    ]
    np.testing.assert_array_equal(offsets, [result.axes["time"].offset for result in results])
    for piece, result in zip(pieces, results, strict=True):
        np.testing.assert_array_equal(piece, result.data)
    assert "complex64" in done.stdout + done.stderr


def test_the_settings_of_a_chain_travel_to_another_process():
    settings = pickle.loads(pickle.dumps(SETTINGS))
    assert list(mlx.ChainTransformer(settings).stages)[1:3] == ["CommonRereference", "Detrend"]


if __name__ == "__main__":
    run_graph(*sys.argv[1:])
