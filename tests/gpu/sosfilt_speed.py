"""Speed of second-order sections on a GPU: `python tests/gpu/sosfilt_speed.py`, or ``measure()`` in another script.

Ratios are taken within one run, against ``x + 1`` of the same array, evaluation and synchronisation included.
"""

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.signal import butter
from speed import evaluated, microseconds

from ezmsg.mlx.sosfilt import run_kernel

SHAPES = ((300, 256), (3000, 1024), (30000, 1024))


def measure(console: Console) -> None:
    table = Table("shape", "sections", "x + 1, us", "sosfilt, us", "ratio", "held to", title="Second-order sections")
    for shape in SHAPES:
        x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32)) * 1.0
        mx.eval(x)
        for n_sections in (1, 2, 4):
            sos = butter(n_sections, (300.0, 5000.0), "bandpass", fs=30000.0, output="sos")
            zi = mx.zeros((n_sections, 4, shape[1]))
            mx.eval(zi)
            plus, filtered = microseconds(
                evaluated(lambda: (x + 1,)),
                evaluated(lambda: run_kernel(x, sos, zi, 0, (512,))),
                n=200 if x.size < 1e7 else 20,
            )
            held = f"{1.5 * max(1.0, n_sections / 2):g}" if shape == SHAPES[-1] else "-"
            table.add_row(f"{shape}", f"{n_sections}", f"{plus:.0f}", f"{filtered:.0f}", f"{filtered / plus:.2f}", held)
    console.print(table)


if __name__ == "__main__":
    measure(Console(width=110))
