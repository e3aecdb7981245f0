"""Band power from a simulated recording, without a graph: transformers are called message by message.

pip install "ezmsg-mlx[cpu]"
python bare.py
"""

import argparse
import sys

from ezmsg.mlx import (
    AsArrayTransformer,
    DetrendTransformer,
    EWMATransformer,
    PowTransformer,
    SimulatedAcquisitionSettings,
    cache_limit,
    memory_snapshot,
    run_chain,
    simulated_acquisition,
)

CHAIN = [
    AsArrayTransformer(backend="mlx", dtype="float32", mlx_cache_limit_mb=128),
    DetrendTransformer(time_constant=1.0),
    PowTransformer(exponent=2.0),
    EWMATransformer(time_constant=0.1),
    AsArrayTransformer(backend="numpy"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the recording [3]")
    seconds = parser.parse_args().seconds
    # 64 channels of int16 counts at 30 kHz; every 50th message comes after a stall and is longer than the others.
    stream = SimulatedAcquisitionSettings(n_channels=64, stall_every=50, duration=seconds)
    n_samples = 0
    try:
        for message in run_chain(CHAIN, simulated_acquisition(stream)):
            n_samples += len(message.data)
    except ImportError as error:  # MLX is not installed; the error names the extras that bring it.
        sys.exit(str(error))
    print(f"{n_samples} samples x {stream.n_channels} channels, {message.data.dtype}")
    print(f"power of channel 0 at the end: {message.data[-1, 0]:.1f} counts squared")
    print(f"MLX's cache: {memory_snapshot().mlx_cache:.0f} MiB, {cache_limit().limit_mb:.0f} MiB at most")


if __name__ == "__main__":
    main()
