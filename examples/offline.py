"""Band power of a whole recording, from an NWB file into Zarr, in bounded memory.

pip install "ezmsg-mlx[cpu,offline]"
python offline.py RECORDING.nwb [RESULTS.zarr]
"""

import argparse
import sys
import tempfile
from pathlib import Path

from ezmsg.mlx import (
    AsArrayTransformer,
    DetrendTransformer,
    EWMATransformer,
    NWBSource,
    PowTransformer,
    ZarrSink,
    process_recording,
)


def make_chain() -> list:
    return [
        AsArrayTransformer(backend="mlx", dtype="float32", mlx_cache_limit_mb=128),
        DetrendTransformer(time_constant=1.0),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.1),
        AsArrayTransformer(backend="numpy"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, nargs="?", help="a file in the NWB format")
    parser.add_argument("results", type=Path, nargs="?", help="where to write [a temporary folder]")
    options = parser.parse_args()
    if options.recording is None:
        parser.error("give a recording; python offline_recordings.py writes simulated ones")
    results = options.results or Path(tempfile.mkdtemp()) / f"{options.recording.stem}.zarr"
    try:
        done = process_recording(NWBSource(options.recording), make_chain, ZarrSink(results))
    except (ImportError, OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{done.n_samples} samples of {options.recording.name} are done")
    print(f'zarr.open_group("{results}")["data"] is the power, (time, channel)')


if __name__ == "__main__":
    main()
