"""Speed of z-scores and of averages from the first message on, on a GPU: `python tests/gpu/scaler_speed.py`.

Ratios are taken within one run, against ``x + 1`` of the same array, all in turns: with evaluation and synchronisation
of each call, and with calls that do not wait for each other. The table is written to ``scaler_speed.json``, too.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import mlx.core as mx
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from results_file import LIVE, write_results
from speed import enqueued, evaluated, microseconds

from ezmsg.mlx import AdaptiveStandardScalerTransformer, EWMATransformer
from ezmsg.mlx.kernels import default_path, kernel

SHAPES = ((30, 256), (300, 256), (300, 1024), (3000, 256), (3000, 1024), (30000, 1024))
HELD_TO = {
    ("z-score", (300, 256)): 1.8,
    ("z-score", (30000, 1024)): 2.0,
    ("EWMA from the first message", (300, 256)): 1.5,
    ("EWMA from the first message", (30000, 1024)): 1.5,
}
"""Of the ratio to ``x + 1``, evaluated."""

ALPHA = 1e-6
"""A time constant of 33 s at 30 kHz, so that no average settles while it is measured."""


def calls_of(x: mx.array) -> dict[str, Callable[[], tuple[mx.array, ...]]]:
    n_channels = x.shape[1]
    path = default_path()
    average, score = kernel("ewma", path).run, kernel("zscore", path).run
    states = {length: mx.zeros((length, n_channels)) for length in (2, 4, 6)}
    # As after some messages: what a state of zeros gives may be faster.
    _, states[4] = average(x, ALPHA, states[4], 0, (512,))
    _, states[6] = score(x, ALPHA, states[6], 0, (512,))
    mx.eval(states)
    message = AxisArray(x, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})
    scaler, averaged = (kind(time_constant=1e4) for kind in (AdaptiveStandardScalerTransformer, EWMATransformer))
    return {
        "x + 1": lambda: (x + 1,),
        "EWMA settled": lambda: average(x, ALPHA, states[2], 0, (512,)),
        "EWMA from the first message": lambda: average(x, ALPHA, states[4], 0, (512,)),
        "z-score": lambda: score(x, ALPHA, states[6], 0, (512,)),
        "EWMATransformer": lambda: (averaged(message).data,),
        "AdaptiveStandardScalerTransformer": lambda: (scaler(message).data,),
    }


def measure(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[dict]:
    rows = []
    for shape in shapes:
        x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32)) * 1.0
        mx.eval(x)
        calls = calls_of(x)
        n = 100 if x.size < 1e7 else 10
        times = {
            how.__name__: microseconds(*(how(call) for call in calls.values()), n=n) for how in (evaluated, enqueued)
        }
        for name, us, us_enqueued in zip(calls, times["evaluated"], times["enqueued"], strict=True):
            row = {
                "shape": f"{shape[0]} × {shape[1]}",
                "name": name,
                "us": round(us, 1),
                "ratio": round(us / times["evaluated"][0], 2),
                "held_to": HELD_TO.get((name, shape)),
                "us_enqueued": round(us_enqueued, 1),
                "ratio_enqueued": round(us_enqueued / times["enqueued"][0], 2),
            }
            rows.append(row)
            held = f"held to {row['held_to']}" if row["held_to"] else ""
            print(
                f"{row['shape']:>14}  {name:34} {us:8.1f} us {row['ratio']:6.2f}  "
                f"enqueued {us_enqueued:8.1f} us {row['ratio_enqueued']:6.2f}  {held}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the file [$OUT, or here]")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    rows = measure(((30, 8), (600, 40)) if options.tiny else SHAPES)
    path = Path(options.out) / "scaler_speed.json"
    write_results(
        path,
        title="z-scores, and averages from the first message on, against `x + 1` of the same array",
        machine=str(mx.device_info().get("device_name", platform.machine())),
        command="python tests/gpu/scaler_speed.py",
        packages=LIVE,
        form="function",
        input="device",
        spread="One run, all in turns",
        columns=[
            ("samples × channels", "shape", None),
            ("", "name", None),
            ("evaluated, µs", "us", 0),
            ("of `x + 1`", "ratio", 2),
            ("held to", "held_to", None),
            ("enqueued, µs", "us_enqueued", 0),
            ("of `x + 1`", "ratio_enqueued", 2),
        ],
        rows=rows,
    )
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
