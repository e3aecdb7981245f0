"""Speed of second-order sections on a GPU: `python tests/gpu/sosfilt_speed.py`, or ``measure()`` in another script.

Ratios are taken within one run, against ``x + 1`` of the same array: with evaluation and synchronisation of each call,
as for :mod:`speed`, and with calls that do not wait for each other, which leaves out what a host takes to wake up.
"""

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.signal import butter
from speed import enqueued, evaluated, microseconds

from ezmsg.mlx.kernels import default_path, kernel

SHAPES = ((300, 256), (3000, 1024), (30000, 1024))


def measure(console: Console) -> None:
    names = ("shape", "sections", "held to", "x + 1 and sosfilt, us", "ratio", "enqueued, us", "ratio")
    table = Table(*names, title="Second-order sections")
    for shape in SHAPES:
        x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32)) * 1.0
        mx.eval(x)
        for n_sections in (1, 2, 4):
            sos = butter(n_sections, (300.0, 5000.0), "bandpass", fs=30000.0, output="sos")
            zi = mx.zeros((n_sections, 4, shape[1]))
            mx.eval(zi)
            held = f"{1.5 * max(1.0, n_sections / 2):g}" if shape == SHAPES[-1] else "-"
            row = [f"{shape}", f"{n_sections}", held]
            for call in (evaluated, enqueued):
                plus, filtered = microseconds(
                    call(lambda: (x + 1,)),
                    call(lambda: kernel("sosfilt", default_path()).run(x, sos, zi, 0, (512,))),
                    n=200 if x.size < 1e7 else 20,
                )
                row += [f"{plus:.0f}, {filtered:.0f}", f"{filtered / plus:.2f}"]
            table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    measure(Console(width=110))
