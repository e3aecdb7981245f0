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
from collections.abc import Sequence

from support import ewma_chain as shared
from support.ewma_chain_metered import Metered, MeteredChain

import ezmsg.core as ez
from ewma_chain_graph import main
from ezmsg.sigproc.binned_aggregate import BinnedAggregate
from ezmsg.sigproc.math.log import Log
from spike_band_power import BAND, POWER, SCORE, make_chain

from ezmsg.mlx import AsArray, EWMAUnit, Pow
from ezmsg.mlx.butterworthfilter import ButterworthFilter
from ezmsg.mlx.scaler import AdaptiveStandardScaler


class Chain(MeteredChain):
    """From int16 counts (time, ch) to float32 z-scores (bin, ch), in one unit."""

    make_chain = staticmethod(make_chain)


class UnitByUnit(Metered):
    """The same with a unit for each stage."""

    TO_MLX = AsArray()
    BAND = ButterworthFilter(BAND)
    SQUARE = Pow(shared.SQUARE)
    POWER = EWMAUnit(POWER)
    BIN = BinnedAggregate(shared.BIN)
    LOG = Log(shared.LOG)
    SCORE = AdaptiveStandardScaler(SCORE)
    TO_NUMPY = AsArray(shared.TO_NUMPY)

    def configure(self) -> None:
        super().configure()
        self.TO_MLX.apply_settings(self.SETTINGS)

    @property
    def stages(self) -> Sequence[ez.Unit]:
        before_bins = (self.TO_MLX, self.BAND, self.SQUARE, self.POWER)
        return (*before_bins, self.BIN, self.LOG, self.SCORE, self.TO_NUMPY)


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    sys.exit(main(Chain, UnitByUnit, __doc__))
