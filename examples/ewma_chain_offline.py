"""Band power features from a simulated recording, with bare transformers.

    source -> AsArray(mlx) -> common reference -> x - EWMA(x) -> square
           -> EWMA -> bin 10 ms -> log -> AsArray(numpy) -> features

The stages run as one function, or with --stage-by-stage one by one, for the
same features. Stalls make messages of ever new lengths, which fill MLX's cache; the first
stage keeps it below its limit. The same chain as an ezmsg graph, with the same
features, is in ewma_chain_graph.py.

    pip install "ezmsg-mlx[cpu,examples]"
    python ewma_chain_offline.py --limit 64 --save features.npy
"""

import sys

from support import ewma_chain as shared

import numpy as np
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer

from ezmsg.mlx import (
    AsArraySettings,
    AsArrayTransformer,
    ChainTransformer,
    DetrendTransformer,
    EWMATransformer,
    PowTransformer,
    simulated_acquisition,
)


def make_chain(to_mlx: AsArraySettings) -> list[BaseTransformer]:
    """The stages, from int16 counts (time, ch) to float32 log power (bin, ch)."""
    return [
        AsArrayTransformer(to_mlx),
        CommonRereferenceTransformer(shared.REFERENCE),
        DetrendTransformer(shared.BASELINE),
        PowTransformer(shared.SQUARE),
        EWMATransformer(shared.POWER),
        BinnedAggregateTransformer(shared.BIN),
        LogTransformer(shared.LOG),
        AsArrayTransformer(shared.TO_NUMPY),
    ]


def main() -> int:
    options = shared.parse_options(__doc__)
    chain = ChainTransformer(make_chain=lambda: make_chain(options.to_mlx), fuse=not options.stage_by_stage)
    meter = shared.Meter()
    features = []

    with shared.ProgressLine(options.stream.duration) as progress:
        for message in simulated_acquisition(options.stream):
            meter.count(message)
            message = chain(message)
            features.append(message.data)
            meter.measure()
            progress.update(shared.end_of(message), meter)

    progress.print_summary(meter)
    if progress.interrupted:
        return 130
    if options.save:
        np.save(options.save, np.concatenate(features))
    return 0


if __name__ == "__main__":
    sys.exit(main())
