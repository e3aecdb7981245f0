"""From raw samples to a decoded cursor, as an ezmsg graph in real time.

    source | AsArray(mlx) -> band-pass -> common reference -> counts, power
           -> z-score -> linear decoder -> AsArray(numpy) | cursor

Each | is a process boundary. 256 simulated neurons, recorded at 30 kHz, fire as
a cursor moves. The decoder is fitted before, offline, to the first --train
seconds; then messages of 1 ms come at the pace of an amplifier. What is printed
and drawn: the cursor, true and decoded, and how long after the last sample of a
bin it was there. The stages are those of raw_to_decoder.py, where the chain is
called message by message.

    pip install "ezmsg-mlx[cpu,examples]"
    python raw_to_decoder_graph.py --plot cursor.png
"""

import asyncio
import functools
import multiprocessing
import sys
import time
from collections.abc import AsyncGenerator

from support.cursor_recording import CursorRecording
from support.decoder_view import save_plot

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from raw_to_decoder import WARM_UP, fitted, make_chain, parse_options, report, spikes_of

from ezmsg.mlx import Chain, ChainSettings

N_WARM = round(WARM_UP / 0.001)
"""Messages before the stream begins, as fast as they go: the first ones load and compile what the others need."""

N_BUFFERS = 16
"""Messages that may be under way between two processes."""


class AmplifierSettings(ez.Settings):
    recording: CursorRecording
    start: float
    stop: float


class Amplifier(ez.Unit):
    """Sends the recording in messages of 1 ms, each when its last sample is there."""

    SETTINGS = AmplifierSettings

    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        settings = self.SETTINGS
        begin = settings.start - WARM_UP
        # Made before, so that the source has nothing to do but to send.
        self.messages = list(settings.recording.messages(begin, settings.stop, n_samples=30))

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> AsyncGenerator:
        for message in self.messages[:N_WARM]:
            yield self.OUTPUT_SIGNAL, stamped(message, 0.0)
        # By now the buffers have been read, but for the last ones.
        began = time.monotonic() + 1.0
        for number, message in enumerate(self.messages[N_WARM:], 1):
            due = began + 0.001 * number
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            yield self.OUTPUT_SIGNAL, stamped(message, due)


def stamped(message: AxisArray, due: float) -> AxisArray:
    message.attrs["due"] = due
    return message


class CursorSettings(ez.Settings):
    n_results: int
    """How many come, those of the first messages included."""


class Cursor(ez.Unit):
    """Takes the decoded positions, in the main process, and ends the graph after the last."""

    SETTINGS = CursorSettings

    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.n_results = 0
        self.positions: list[AxisArray] = []
        self.latencies: list[float] = []

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        now = time.monotonic()
        self.n_results += 1
        if message.attrs["due"] > 0.0:
            self.latencies.append(now - message.attrs["due"])
            # Its memory is used again for later messages.
            axes = {"time": message.axes["time"]}
            self.positions.append(AxisArray(message.data.copy(), message.dims, axes=axes))
        if self.n_results >= self.SETTINGS.n_results:
            raise ez.NormalTermination


def main() -> int:
    options = parse_options(__doc__)
    recording = CursorRecording(options.channels, options.seed)
    decoder = fitted(recording, options.train)
    start, stop = max(options.train, WARM_UP), max(options.train, WARM_UP) + round(options.seconds / 0.02) * 0.02
    source = Amplifier(AmplifierSettings(recording, start, stop))
    source.OUTPUT_SIGNAL.num_buffers = N_BUFFERS
    chain = Chain(ChainSettings(make_chain=functools.partial(make_chain, decoder), lengths=(30,)))
    cursor = Cursor(CursorSettings(round((stop - start) / 0.02) + N_WARM // 20))
    ez.run(
        AMPLIFIER=source,
        CHAIN=chain,
        CURSOR=cursor,
        connections=((source.OUTPUT_SIGNAL, chain.INPUT_SIGNAL), (chain.OUTPUT_SIGNAL, cursor.INPUT_SIGNAL)),
        process_components=(source, chain),
    )
    if not cursor.positions:
        return 130
    what = "time from the last sample to the cursor"
    drawn = report(recording, cursor.positions, cursor.latencies, what)
    if options.plot:
        spikes = spikes_of(recording, start, stop)
        save_plot(options.plot, *drawn, spikes, 1e3 * np.array(cursor.latencies), what)
    return 0


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    sys.exit(main())
