"""The moving average in a running graph: one process, and two with shared memory between them.

The graph is this file run as a script in a process of its own, since processes are spawned and MLX's state is
global to each.
"""

import multiprocessing
import socket
import sys
import typing

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import ArrayBackend, AsArray, AsArraySettings, EWMASettings, EWMAUnit

FS = 30000.0
TIME_CONSTANT = 0.01
# More messages than the 32 after which shared memory is used again.
LENGTHS = [300, 1, 0, 299, 5000, 7, 0, 300, 12000, 31, 300] * 4
REFUSED = 4
"""Number of the message before which one comes whose time axis has no step."""


def samples() -> np.ndarray:
    return np.random.default_rng(0).integers(-500, 500, (sum(LENGTHS), 16), dtype=np.int16) + np.int16(200)


class Source(ez.Unit):
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> typing.AsyncGenerator:
        x, start = samples(), 0
        for number, n in enumerate(LENGTHS):
            if number == REFUSED:
                yield (
                    self.OUTPUT_SIGNAL,
                    AxisArray(x[:99], dims=["time", "ch"], axes={"time": AxisArray.LinearAxis(gain=0.0)}, key="amp"),
                )
            axes = {"time": AxisArray.TimeAxis(fs=FS, offset=start / FS)}
            yield self.OUTPUT_SIGNAL, AxisArray(x[start : start + n], dims=["time", "ch"], axes=axes, key="amp")
            start += n


class SinkSettings(ez.Settings):
    output: str


class SinkState(ez.State):
    pieces: list
    offsets: list


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    STATE = SinkState
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.STATE.pieces, self.STATE.offsets = [], []

    @ez.subscriber(INPUT_SIGNAL)
    async def receive(self, message: AxisArray) -> None:
        # A copy: the buffer belongs to the message and is used again.
        self.STATE.pieces.append(np.array(message.data))
        self.STATE.offsets.append(message.axes["time"].offset)
        if sum(map(len, self.STATE.pieces)) == sum(LENGTHS):
            np.savez(self.SETTINGS.output, *self.STATE.pieces, offsets=self.STATE.offsets)
            raise ez.NormalTermination


class OnMLX(ez.Collection):
    """Conversion, average, conversion back: the part that shares a process."""

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    TO_MLX = AsArray(AsArraySettings(backend=ArrayBackend.mlx))
    EWMA = EWMAUnit(EWMASettings(time_constant=TIME_CONSTANT))
    TO_NUMPY = AsArray(AsArraySettings(backend=ArrayBackend.numpy))

    def network(self) -> ez.NetworkDefinition:
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            (self.TO_MLX.OUTPUT_SIGNAL, self.EWMA.INPUT_SIGNAL),
            (self.EWMA.OUTPUT_SIGNAL, self.TO_NUMPY.INPUT_SIGNAL),
            (self.TO_NUMPY.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


def free_port() -> int:
    """A port for a graph server of our own: topics of other graphs on this machine may have the same names."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_graph(processes: str, output: str) -> None:
    multiprocessing.set_start_method("spawn", force=True)
    source, on_mlx, sink = Source(), OnMLX(), Sink(SinkSettings(output=output))
    # Room for the longest message: while ezmsg makes its ring of shared memory anew, a channel may die.
    for stream in (source.OUTPUT_SIGNAL, on_mlx.TO_NUMPY.OUTPUT_SIGNAL):
        stream.buf_size = 1 << 20
    ez.run(
        SOURCE=source,
        ON_MLX=on_mlx,
        SINK=sink,
        connections=(
            (source.OUTPUT_SIGNAL, on_mlx.INPUT_SIGNAL),
            (on_mlx.OUTPUT_SIGNAL, sink.INPUT_SIGNAL),
        ),
        process_components=(on_mlx,) if processes == "two" else (),
        graph_address=("127.0.0.1", free_port()),
        auto_start=True,
    )


@pytest.mark.parametrize("processes", ["one", "two"])
def test_graph_gives_the_average_of_all_samples(processes, tmp_path):
    pytest.importorskip("mlx.core")
    from helpers import warm
    from helpers.ewma_cases import alpha_of, check_close, corrected

    output = tmp_path / "received.npz"
    done = warm.run([__file__, processes, str(output)])
    assert output.exists(), done.stdout + done.stderr
    received = np.load(output)
    offsets = received["offsets"]
    pieces = [received[f"arr_{number}"] for number in range(len(offsets))]
    assert [len(piece) for piece in pieces] == LENGTHS
    assert {piece.dtype for piece in pieces} == {np.dtype(np.float32)}
    np.testing.assert_allclose(offsets, np.cumsum([0, *LENGTHS[:-1]]) / FS)
    check_close(np.concatenate(pieces), corrected(samples(), alpha_of(TIME_CONSTANT)))
    assert "must have a gain > 0, got 0.0" in done.stdout + done.stderr


if __name__ == "__main__":
    run_graph(*sys.argv[1:])
