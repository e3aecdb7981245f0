"""The source's process of ewma_chain_graph.py, and how much of the stream leaves it."""

import math

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import Rechunk, RechunkSettings, SimulatedAcquisition, SimulatedAcquisitionSettings

from . import ewma_chain as shared


class RunSettings(ez.Settings):
    """What the source's process and the sink agree on."""

    stream: SimulatedAcquisitionSettings
    rechunk: bool = False
    monitor: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths that Rechunk cuts to, in samples: larger ones, too, so that a stall is few messages."""
        return tuple(factor * self.stream.samples_per_message for factor in (1, 4, 16))

    @property
    def longest_message(self) -> int:
        """Length of the longest message that leaves the source's process, in samples."""
        return max(self.sizes if self.rechunk else (self.stream.samples_per_message, *self.stream.stall_lengths))

    @property
    def most_ordinary_bins(self) -> int:
        """How many bins an ordinary message can complete; one after a stall completes more."""
        return math.ceil(self.stream.samples_per_message / (shared.BIN.bin_duration * self.stream.sampling_rate))

    def fills(self, n_bins: int) -> bool:
        """Whether the samples that leave the source's process fill as many bins."""
        n_samples = self.stream.n_samples
        if self.rechunk:
            # Rechunk keeps the rest, and all sizes are multiples of the smallest.
            n_samples -= n_samples % min(self.sizes)
        return int(n_bins * (shared.BIN.bin_duration * self.stream.sampling_rate)) <= n_samples


class Acquisition(ez.Collection):
    """The source and, if asked for, Rechunk."""

    SETTINGS = RunSettings

    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    SOURCE = SimulatedAcquisition()
    RECHUNK = Rechunk()

    def configure(self) -> None:
        stream = self.SETTINGS.stream
        self.SOURCE.apply_settings(stream)
        self.RECHUNK.apply_settings(RechunkSettings(sizes=self.SETTINGS.sizes, remainder="carry"))
        # Room for the longest message. ezmsg's ring of shared memory starts at 32 x 64 KiB; a message that does not
        # fit makes it anew for 32 of twice that size: by default a second's pause and half a GB.
        ring = self._last.OUTPUT_SIGNAL
        ring.num_buffers = 4
        ring.buf_size = self.SETTINGS.longest_message * stream.n_channels * np.dtype(np.int16).itemsize + 2**16

    @property
    def _last(self) -> ez.Unit:
        return self.RECHUNK if self.SETTINGS.rechunk else self.SOURCE

    def network(self) -> ez.NetworkDefinition:
        within = ((self.SOURCE.OUTPUT_SIGNAL, self.RECHUNK.INPUT_SIGNAL),) if self.SETTINGS.rechunk else ()
        return (*within, (self._last.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL))
