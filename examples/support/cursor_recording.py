"""A recording of neurons that fire as a cursor moves: int16 counts at 30 kHz, simulated as it is asked for."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx.simulate import MICROVOLTS_PER_COUNT

RATE = 30000.0
BLOCK = 1500
"""Samples that are made at a time: 50 ms, in which the rates of neurons are constant."""

MEAN_RATE = 20.0
"""Spikes a second of each neuron while the cursor is in the middle."""

NOISE = 8.0
COMMON = 15.0
"""Standard deviations in microvolts: of each channel, and of what all have alike."""


@dataclasses.dataclass(frozen=True)
class CursorRecording:
    """One neuron a channel, whose rate is ``20 * exp(1.2 * cursor . preferred direction)`` spikes a second."""

    n_channels: int = 256
    seed: int = 0

    def cursor(self, times: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Where the cursor is at *times* in seconds, (time, 2), within -1 and 1."""
        phases = np.random.default_rng([self.seed, 1]).uniform(0, 2 * np.pi, (3, 2))
        frequencies = np.array([[0.11, 0.13], [0.31, 0.29], [0.53, 0.61]])
        angles = 2 * np.pi * frequencies * np.asarray(times, float)[..., None, None] + phases
        return np.einsum("...ij,i->...j", np.sin(angles), [0.5, 0.3, 0.2])

    def messages(self, start: float, stop: float, n_samples: int) -> Iterator[AxisArray]:
        """Messages of *n_samples* each, (time, ch), from *start* to *stop* in seconds."""
        labels = np.array([f"ch{number}" for number in range(self.n_channels)])
        channels = AxisArray.CoordinateAxis(data=labels, dims=["ch"])
        first, end = round(start * RATE), round(stop * RATE)
        left = np.empty((0, self.n_channels), np.int16)
        for block in self._blocks(first, end):
            left = np.concatenate([left, block])
            while len(left) >= n_samples:
                data, left = left[:n_samples].copy(), left[n_samples:]
                axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=first / RATE), "ch": channels}
                yield AxisArray(data, ["time", "ch"], axes=axes, key="simulated", stream_dim="time")
                first += n_samples

    def _blocks(self, first: int, end: int) -> Iterator[npt.NDArray[np.int16]]:
        neurons = np.random.default_rng([self.seed, 2])
        angles = np.sort(neurons.uniform(0, 2 * np.pi, self.n_channels))
        preferred = np.stack([np.cos(angles), np.sin(angles)])
        peaks = neurons.uniform(60, 120, self.n_channels)
        shape = _spike()
        rng = np.random.default_rng([self.seed, 3, first])
        # What noise there is comes again and again, from other channels each time.
        pool = rng.standard_normal((8 * BLOCK, self.n_channels), np.float32) * np.float32(NOISE)
        carried = np.zeros((len(shape), self.n_channels), np.float32)
        while first < end:
            at = rng.integers(len(pool) - BLOCK + 1)
            block = np.roll(pool[at : at + BLOCK], rng.integers(self.n_channels), axis=1)
            block += rng.standard_normal((BLOCK, 1), np.float32) * np.float32(COMMON)
            spikes = np.zeros((BLOCK + len(shape), self.n_channels), np.float32)
            spikes[: len(shape)] = carried
            where = self.cursor((first + BLOCK / 2) / RATE)
            counts = rng.poisson(MEAN_RATE * np.exp(1.2 * where @ preferred) * BLOCK / RATE)
            channels = np.repeat(np.arange(self.n_channels), counts)
            starts = rng.integers(0, BLOCK, len(channels))
            np.add.at(
                spikes, (starts[:, None] + np.arange(len(shape)), channels[:, None]), shape * peaks[channels, None]
            )
            block += spikes[:BLOCK]
            carried = spikes[BLOCK:]
            yield np.rint(block[: end - first] / MICROVOLTS_PER_COUNT).astype(np.int16)
            first += BLOCK


def _spike() -> npt.NDArray[np.float32]:
    """A trough of 1 and a slower hump, over 1.2 ms."""
    times = np.arange(36) / RATE
    trough = -np.exp(-0.5 * ((times - 0.0003) / 0.0001) ** 2)
    return (trough + 0.35 * np.exp(-0.5 * ((times - 0.0007) / 0.0002) ** 2)).astype(np.float32)
