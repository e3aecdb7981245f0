"""The third process of the soak test: knows what has to come, and compares."""

import asyncio
from collections.abc import AsyncGenerator

from support import ewma_chain as shared

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArraySettings, EWMASettings
from soak.reference import Average, Bins, is_close
from soak.settings import LIMITS_MB, POWER_SECONDS, TAKEN, SoakSettings, span
from soak.stream import N_CHANNELS, Stream
from soak.watch import Watch, WatchSettings

TAKEN_WITHIN = 150
"""Messages with samples after which changed settings must show: more than can be under way."""

TOLERANCE = 2e-5
"""Of the largest value in a message. A sample of the power weighs 3e-4 or more."""


class SinkSettings(WatchSettings):
    soak: SoakSettings | None = None


class Sink(Watch):
    """Computes the chain in float64, compares every value, and ends the graph after the last.

    What was refused shows as a gap; new settings of the last average hold from one of the next messages on.
    """

    SETTINGS = SinkSettings

    INPUT_POWER = ez.InputStream(AxisArray)
    INPUT_FEATURES = ez.InputStream(AxisArray)
    OUTPUT_LIMIT = ez.OutputStream(AsArraySettings)
    OUTPUT_POWER = ez.OutputStream(EWMASettings)

    async def initialize(self) -> None:
        await super().initialize()
        self.soak = self.SETTINGS.soak
        self.stream = Stream(self.soak.seed)
        self.baseline = Average(shared.BASELINE.time_constant)
        self.power = Average(POWER_SECONDS[0])
        self.bins = Bins(shared.BIN.bin_duration)
        self.pending: float | None = None
        self.n_pending = 0
        self.next_sample = self.n_messages = self.n_samples = self.n_bins = self.n_changes = self.n_taken = 0
        self.gaps: list[tuple[int, int]] = []
        self.wrong: list[str] = []
        self.expected_bins = np.zeros((0, N_CHANNELS))
        self.received_bins = np.zeros((0, N_CHANNELS))
        self.at_end = False

    def report(self) -> dict[str, object]:
        names = ("n_messages", "n_samples", "n_bins", "n_changes", "n_taken", "gaps", "wrong", "at_end")
        return {name: getattr(self, name) for name in names}

    @ez.subscriber(INPUT_POWER)
    @ez.publisher(OUTPUT_LIMIT)
    @ez.publisher(OUTPUT_POWER)
    async def on_power(self, message: AxisArray) -> AsyncGenerator:
        self.n_messages += 1
        start, stop = span(message)
        self.n_samples += stop - start
        if stop > start:
            if start < self.next_sample:
                self._complain(f"samples {start} to {self.next_sample} came twice")
            elif start > self.next_sample:
                self.gaps.append((self.next_sample, start))
            self.next_sample = stop
            self._check_power(message.data, start, stop)
        if self.soak.fault == "hang" and self.n_messages == 300:
            await asyncio.Event().wait()
        slow, of = self.soak.slow
        if self.n_messages % of < slow:
            await asyncio.sleep(0.05)
        if self.n_messages % self.soak.change_every == 0 and self.pending is None:
            self.n_changes += 1
            self.pending = POWER_SECONDS[self.n_changes % 2]
            yield self.OUTPUT_LIMIT, shared.to_mlx(LIMITS_MB[self.n_changes % len(LIMITS_MB)])
            if self.soak.fault != "deaf":
                yield self.OUTPUT_POWER, EWMASettings(time_constant=self.pending)
        if message.attrs["n_samples"] == self.next_sample:
            self.at_end = True
        self._end_if_complete()

    def _check_power(self, y: np.ndarray, start: int, stop: int) -> None:
        x = self.stream.samples(start, stop).astype(np.float64)
        x -= x.mean(axis=1, keepdims=True)
        x = (x - self.baseline(x)) ** 2
        expected = self.power(x)
        if self.pending is not None and not is_close(y, expected, TOLERANCE):
            power = Average(self.pending)
            anew = power(x)
            if is_close(y, anew, TOLERANCE):
                self.power, expected, self.pending = power, anew, None
                self.n_taken += 1
                (self.folder / TAKEN).touch()
        self.n_pending = 0 if self.pending is None else self.n_pending + 1
        if self.n_pending == TAKEN_WITHIN:
            self._complain(f"changed settings had no effect by sample {stop}")
        if not is_close(y, expected, TOLERANCE):
            self._complain(f"samples {start} to {stop} are wrong")
        self._compare_bins(expected=self.bins(expected))

    @ez.subscriber(INPUT_FEATURES)
    async def on_features(self, message: AxisArray) -> None:
        self.n_bins += message.data.shape[0]
        self._compare_bins(received=message.data)
        self._end_if_complete()

    def _compare_bins(self, expected: np.ndarray | None = None, received: np.ndarray | None = None) -> None:
        if expected is not None:
            self.expected_bins = np.concatenate([self.expected_bins, expected])
        if received is not None:
            self.received_bins = np.concatenate([self.received_bins, received])
        n = min(len(self.expected_bins), len(self.received_bins))
        if not is_close(self.received_bins[:n], self.expected_bins[:n], TOLERANCE):
            self._complain(f"bins before number {self.n_bins} are wrong")
        self.expected_bins, self.received_bins = self.expected_bins[n:], self.received_bins[n:]

    def _complain(self, text: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(text)

    def _end_if_complete(self) -> None:
        if self.at_end and self.n_bins == self.bins.n_bins:
            raise ez.NormalTermination
