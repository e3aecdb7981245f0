"""A network in a running graph, in a process of its own, with new weights from another process.

The graph is this file run as a script in a process of its own, since processes are spawned.
"""

import multiprocessing
import sys
import typing

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import Network, NetworkSettings

FS = 50.0
# A message of many lengths, more than the 32 after which shared memory is used again.
FIRST_HALF = [4, 1, 0, 30, 4, 7, 90, 3] * 5
WINDOW, HOP = 10, 4
N_SAMPLES = sum(FIRST_HALF) + 100 * HOP


def samples() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N_SAMPLES, 8)).astype(np.float32)


def n_windows(n_samples: int) -> int:
    return (n_samples - WINDOW) // HOP + 1


class Source(ez.Unit):
    """Half of the messages; then weights, and one message after the other as results come back."""

    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)
    OUTPUT_WEIGHTS = ez.OutputStream(dict)
    INPUT_SEEN = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.x, self.n_sent, self.n_seen = samples(), 0, 0

    def message(self, n: int) -> AxisArray:
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=self.n_sent / FS)}
        self.n_sent += n
        return AxisArray(self.x[self.n_sent - n : self.n_sent], dims=["time", "ch"], axes=axes, key="spikes")

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> typing.AsyncGenerator:
        for n in FIRST_HALF:
            yield self.OUTPUT_SIGNAL, self.message(n)

    @ez.subscriber(INPUT_SEEN)
    @ez.publisher(OUTPUT_SIGNAL)
    @ez.publisher(OUTPUT_WEIGHTS)
    async def on_seen(self, message: AxisArray) -> typing.AsyncGenerator:
        self.n_seen += len(message.data)
        if self.n_sent < sum(FIRST_HALF) or self.n_seen < n_windows(self.n_sent):
            return
        if self.n_sent == sum(FIRST_HALF):
            yield self.OUTPUT_WEIGHTS, {"layer": {"weight": 2.0 * np.eye(8, dtype=np.float32)}}
        if self.n_sent < N_SAMPLES:
            yield self.OUTPUT_SIGNAL, self.message(HOP)


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
        self.pieces.append(np.array(message.data))
        self.offsets.append(message.axes["time"].offset)
        if sum(map(len, self.pieces)) == n_windows(N_SAMPLES):
            np.savez(self.SETTINGS.output, *self.pieces, offsets=self.offsets)
            raise ez.NormalTermination


def run_graph(output: str) -> None:
    multiprocessing.set_start_method("spawn", force=True)
    settings = NetworkSettings(model_class="helpers.networks.Mean", window=WINDOW, hop=HOP)
    source, network, sink = Source(), Network(settings), Sink(SinkSettings(output=output))
    for stream in (source.OUTPUT_SIGNAL, source.OUTPUT_WEIGHTS, network.OUTPUT_SIGNAL):
        stream.buf_size = 1 << 20
    ez.run(
        SOURCE=source,
        NETWORK=network,
        SINK=sink,
        connections=(
            (source.OUTPUT_SIGNAL, network.INPUT_SIGNAL),
            (source.OUTPUT_WEIGHTS, network.INPUT_WEIGHTS),
            (network.OUTPUT_SIGNAL, sink.INPUT_SIGNAL),
            (network.OUTPUT_SIGNAL, source.INPUT_SEEN),
        ),
        process_components=(network,),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )


def test_each_window_has_its_result_and_new_weights_take_over_in_between(tmp_path):
    pytest.importorskip("mlx.core")
    from helpers import warm

    output = tmp_path / "received.npz"
    done = warm.run([__file__, str(output)])
    assert output.exists(), done.stdout + done.stderr
    received = np.load(output)
    offsets = received["offsets"]
    pieces = [received[f"arr_{number}"] for number in range(len(offsets))]
    counts = np.cumsum([0, *map(len, pieces[:-1])])
    np.testing.assert_allclose(offsets, (WINDOW - 1 + HOP * counts) / FS)
    found = np.concatenate(pieces)
    x = samples()
    means = np.stack([x[HOP * n : HOP * n + WINDOW].mean(axis=0) for n in range(n_windows(N_SAMPLES))])
    factors = found[:, 0] / means[:, 0]
    # One until the weights are there, and two from then on.
    n_before = int(np.argmax(factors > 1.5))
    assert n_windows(sum(FIRST_HALF)) <= n_before < len(found)
    expected = means * np.where(np.arange(len(found)) < n_before, 1.0, 2.0)[:, None]
    np.testing.assert_allclose(found, expected, atol=1e-5)


if __name__ == "__main__":
    run_graph(*sys.argv[1:])
