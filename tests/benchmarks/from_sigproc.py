"""The chain of the guide "from ezmsg-sigproc to MLX": on NumPy, unit by unit on MLX, and as one chain, in turns.

python tests/benchmarks/from_sigproc.py --json docs/results/data/from_sigproc_cpu.json
"""

import argparse
import sys
import time

import ezmsg.sigproc.affinetransform
import ezmsg.sigproc.butterworthfilter
import ezmsg.sigproc.ewma
import ezmsg.sigproc.math.pow
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

import ezmsg.mlx as mlx
from ezmsg.mlx import simulated_acquisition

sys.path.insert(0, __file__.rpartition("/")[0])

from results_file import LIVE, write_results

BAND = {"order": 4, "cuton": 300.0, "cutoff": 6000.0, "coef_type": "sos"}


def on_numpy() -> list:
    sigproc = ezmsg.sigproc
    return [
        sigproc.affinetransform.CommonRereferenceTransformer(),
        sigproc.butterworthfilter.ButterworthFilterTransformer(**BAND),
        sigproc.math.pow.PowTransformer(exponent=2.0),
        sigproc.ewma.EWMATransformer(time_constant=0.1),
    ]


def unit_by_unit() -> list:
    return [
        mlx.AsArrayTransformer(backend="mlx", dtype="float32"),
        mlx.CommonRereferenceTransformer(),
        mlx.ButterworthFilterTransformer(**BAND),
        mlx.PowTransformer(exponent=2.0),
        mlx.EWMATransformer(time_constant=0.1),
        mlx.AsArrayTransformer(backend="numpy"),
    ]


def one_chain() -> list:
    return [mlx.ChainTransformer(make_chain=unit_by_unit)]


WAYS = {
    "ezmsg-sigproc on NumPy": on_numpy,
    "this package, unit by unit": unit_by_unit,
    "this package, `Chain`": one_chain,
}


def seconds_for(stages: list, messages: list[AxisArray]) -> float:
    begin = time.perf_counter()
    for message in messages:
        for stage in stages:
            message = stage(message)
        np.asarray(message.data)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=2.0, help="length of the stream [2]")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for n_channels in options.channels:
        settings = mlx.SimulatedAcquisitionSettings(n_channels=n_channels, duration=options.seconds)
        messages = list(simulated_acquisition(settings))
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for number in range(options.rounds + 1):
            for name, make in WAYS.items():
                seconds = seconds_for(make(), messages)
                # The first round loads and compiles.
                if number:
                    times[name].append(seconds)
        for name, found in times.items():
            rows.append({"channels": n_channels, "way": name, "seconds": round(float(np.median(found)), 3)})
            print(f"{n_channels:5} channels  {name:30} {np.median(found):.3f} s ({min(found):.3f} to {max(found):.3f})")
    if options.json:
        write_results(
            options.json,
            title=f"{options.seconds:g} seconds of 30 kHz through the chain of the guide, from the first message",
            command="python tests/benchmarks/from_sigproc.py",
            spread=f"Median of {options.rounds} rounds, in turns",
            columns=[("channels", "channels", None), ("way", "way", None), ("seconds", "seconds", 2)],
            rows=rows,
            notes=["A stall every 300 messages, whose length has not been seen before."],
            packages=LIVE,
            form="bare chain",
        )


if __name__ == "__main__":
    main()
