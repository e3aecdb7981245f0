"""Spike-band power, as z-scores, from a simulated recording, as an ezmsg graph.

    source | AsArray(mlx) -> band-pass 300 to 5000 Hz -> square -> EWMA
           -> bin 10 ms -> log -> z-score -> AsArray(numpy) | sink

Each | is a process boundary. Processes, options and progress are those of
ewma_chain_graph.py; the same chain without a graph, with the same features and
a picture of the channels, is in spike_band_power.py.

    pip install "ezmsg-mlx[cpu,examples]"
    python spike_band_power_graph.py --real-time
"""

import multiprocessing
import sys

from support import ewma_chain as shared

import ezmsg.core as ez
from ewma_chain_graph import MeterUnit, main
from ezmsg.sigproc.binned_aggregate import BinnedAggregate
from ezmsg.sigproc.math.log import Log
from ezmsg.util.messages.axisarray import AxisArray
from spike_band_power import BAND, POWER, SCORE

from ezmsg.mlx import AsArray, AsArraySettings, EWMAUnit, MemoryMonitor, MemoryMonitorSettings, Pow
from ezmsg.mlx.butterworthfilter import ButterworthFilter
from ezmsg.mlx.scaler import AdaptiveStandardScaler


class Chain(ez.Collection):
    """From int16 counts (time, ch) to float32 z-scores (bin, ch)."""

    SETTINGS = AsArraySettings

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_FEATURES = ez.OutputTopic(AxisArray)
    OUTPUT_MEMORY = ez.OutputTopic(AxisArray)

    TO_MLX = AsArray()
    BAND = ButterworthFilter(BAND)
    SQUARE = Pow(shared.SQUARE)
    POWER = EWMAUnit(POWER)
    BIN = BinnedAggregate(shared.BIN)
    LOG = Log(shared.LOG)
    SCORE = AdaptiveStandardScaler(SCORE)
    TO_NUMPY = AsArray(shared.TO_NUMPY)
    METER = MeterUnit()
    MONITOR = MemoryMonitor(MemoryMonitorSettings(interval=0.1))

    def configure(self) -> None:
        self.TO_MLX.apply_settings(self.SETTINGS)

    def network(self) -> ez.NetworkDefinition:
        stages = (self.TO_MLX, self.BAND, self.SQUARE, self.POWER, self.BIN, self.LOG, self.SCORE, self.TO_NUMPY)
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in zip(stages, stages[1:])),
            (self.INPUT_SIGNAL, self.METER.INPUT_SIGNAL),
            (self.TO_NUMPY.OUTPUT_SIGNAL, self.METER.INPUT_FEATURES),
            (self.METER.OUTPUT_FEATURES, self.OUTPUT_FEATURES),
            (self.MONITOR.OUTPUT_SIGNAL, self.OUTPUT_MEMORY),
        )


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    sys.exit(main(Chain, __doc__))
