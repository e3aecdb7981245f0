"""Spike-band power, as z-scores, from a simulated recording, with bare transformers.

    source -> AsArray(mlx) -> band-pass 300 to 5000 Hz -> square -> EWMA
           -> bin 10 ms -> log -> z-score -> AsArray(numpy) -> features

The power in the band of the spikes follows the firing around an electrode
without sorting spikes. The stages run as one function, or with
--stage-by-stage one by one, for the same features. --plot draws some channels
as recorded, in the band of the spikes, and as z-scores. The same chain as an
ezmsg graph is in spike_band_power_graph.py.

    pip install "ezmsg-mlx[cpu,examples]"
    python spike_band_power.py --duration 10 --plot spikes.png
"""

import sys

from support import ewma_chain as shared
from support.spike_band_view import Recent, save_plot

import numpy as np
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer

from ezmsg.mlx import (
    AsArraySettings,
    AsArrayTransformer,
    ChainTransformer,
    EWMASettings,
    EWMATransformer,
    PowTransformer,
    simulated_acquisition,
)
from ezmsg.mlx.butterworthfilter import ButterworthFilterSettings, ButterworthFilterTransformer
from ezmsg.mlx.scaler import AdaptiveStandardScalerSettings, AdaptiveStandardScalerTransformer

BAND = ButterworthFilterSettings(order=2, cuton=300.0, cutoff=5000.0, coef_type="sos")
POWER = EWMASettings(time_constant=0.02)
SCORE = AdaptiveStandardScalerSettings(time_constant=5.0)


def make_chain(to_mlx: AsArraySettings) -> list[BaseTransformer]:
    """The stages, from int16 counts (time, ch) to float32 z-scores (bin, ch)."""
    return [
        AsArrayTransformer(to_mlx),
        ButterworthFilterTransformer(BAND),
        PowTransformer(shared.SQUARE),
        EWMATransformer(POWER),
        BinnedAggregateTransformer(shared.BIN),
        LogTransformer(shared.LOG),
        AdaptiveStandardScalerTransformer(SCORE),
        AsArrayTransformer(shared.TO_NUMPY),
    ]


def main() -> int:
    options = shared.parse_options(__doc__, plot="where to draw channels on their way through the chain")
    chain = ChainTransformer(make_chain=lambda: make_chain(options.to_mlx), fuse=not options.stage_by_stage)
    # For the picture alone: a fused chain gives its results, and nothing of what is between its stages.
    band_of_spikes = ButterworthFilterTransformer(BAND)
    meter = shared.Meter()
    features = []
    recent = Recent(seconds=1.0) if options.plot else None

    with shared.ProgressLine(options.stream.duration) as progress:
        for message in simulated_acquisition(options.stream):
            meter.count(message)
            if recent:
                recent.raw.add(message)
                recent.filtered.add(band_of_spikes(message))
            message = chain(message)
            if recent:
                recent.scores.add(message)
            features.append(message.data)
            meter.measure()
            progress.update(shared.end_of(message), meter)

    progress.print_summary(meter)
    if recent and any(map(len, features)):
        save_plot(recent, options.plot)
    if progress.interrupted:
        return 130
    if options.save:
        np.save(options.save, np.concatenate(features))
    return 0


if __name__ == "__main__":
    sys.exit(main())
