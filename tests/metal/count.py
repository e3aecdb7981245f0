"""What the kernels for Metal take, beside those of ezmsg-sigproc, as far as it can be counted on a CPU.

``PYTHONPATH=tests python tests/metal/count.py`` prints a table; ``--write`` also writes it where the documentation
finds it. Times are not measured: the kernels are traced, and emulated.
"""

import argparse
import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from helpers.metal_counts import Counts, counts_of
from helpers.metal_emulation import MetalKernel
from rich.console import Console
from rich.table import Table
from scipy.signal import butter

from ezmsg.mlx.kernels.metal import ewma, sosfilt, zscore

# Before the modules of ezmsg-sigproc make theirs.
mx.fast.metal_kernel = MetalKernel

from ezmsg.sigproc.util.ewma_mlx_metal import ewma_mlx_metal
from ezmsg.sigproc.util.sosfilt_mlx_metal import sosfilt_mlx_metal

SHAPES = ((30, 256), (300, 256), (3000, 256), (30000, 1024))

N_SECTIONS = (1, 2, 4)

FILE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "data" / "metal_counts.json"

ALPHA = 1e-3


def theirs_of_average(x: mx.array, zi: mx.array) -> list[mx.array]:
    """As ezmsg-sigproc's transformer calls its kernel for data with time first."""
    y, zf = ewma_mlx_metal(mx.moveaxis(x, 0, -1), ALPHA, mx.moveaxis(zi, 0, -1), chunk_sizes=(32, 1024))
    return [mx.moveaxis(y, -1, 0), mx.moveaxis(zf, -1, 0)]


def calls(shape: tuple[int, int]) -> Iterator[tuple[str, str, Counts]]:
    """What is computed, by whom, and what that takes."""
    n_channels = shape[1]
    x = mx.zeros(shape)
    average = "average"
    yield average, "ezmsg-mlx", counts_of(lambda x, zi: ewma.run(x, ALPHA, zi, 0, ()), x, mx.zeros((2, n_channels)))
    yield average, "ezmsg-sigproc", counts_of(theirs_of_average, x, mx.zeros((1, n_channels)))
    of_start = counts_of(lambda x, zi: ewma.run(x, ALPHA, zi, 0, ()), x, mx.zeros((4, n_channels)))
    yield "average, bias corrected", "ezmsg-mlx", of_start
    yield "z-score", "ezmsg-mlx", counts_of(lambda x, zi: zscore.run(x, ALPHA, zi, 0, ()), x, mx.zeros((6, n_channels)))
    for n in N_SECTIONS:
        sos = butter(n, (300.0, 5000.0), "bandpass", fs=30000.0, output="sos")
        sos32 = mx.array(sos.astype(np.float32))

        def ours(x: mx.array, zi: mx.array, sos: np.ndarray = sos) -> tuple[mx.array, mx.array]:
            return sosfilt.run(x, sos, zi, 0, ())

        def theirs(x: mx.array, zi: mx.array, sos: mx.array = sos32) -> list[mx.array]:
            y, zf = sosfilt_mlx_metal(sos, mx.moveaxis(x, 0, -1), mx.moveaxis(zi, 1, -1), chunk_sizes=(32, 512))
            return [mx.moveaxis(y, -1, 0), mx.moveaxis(zf, -1, 1)]

        name = f"{n} section{'s' * (n > 1)}"
        yield name, "ezmsg-mlx", counts_of(ours, x, mx.zeros((n, 4, n_channels)))
        yield name, "ezmsg-sigproc", counts_of(theirs, x, mx.zeros((n, 2, n_channels)))


def rows() -> Iterator[dict]:
    for shape in SHAPES:
        size = shape[0] * shape[1]
        for computed, package, counts in calls(shape):
            yield {
                "shape": f"{shape[0]} × {shape[1]}",
                "computed": computed,
                "package": package,
                "nodes": counts.nodes,
                "beyond_views": counts.beyond_views,
                "launches": counts.launches,
                "bytes": round(counts.bytes / size, 2),
                "operations": round(counts.operations / size, 1),
            }


COLUMNS = [
    {"head": "samples × channels", "key": "shape"},
    {"head": "computed", "key": "computed"},
    {"head": "by", "key": "package"},
    {"head": "nodes", "key": "nodes"},
    {"head": "beyond views", "key": "beyond_views"},
    {"head": "launches", "key": "launches"},
    {"head": "bytes a sample", "key": "bytes", "digits": 1},
    {"head": "operations a sample", "key": "operations", "digits": 0},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} for the documentation")
    arguments = parser.parse_args()
    table = Table(*(column["head"] for column in COLUMNS), title="A message on Metal, counted")
    counted = list(rows())
    for row in counted:
        table.add_row(*(str(row[column["key"]]) for column in COLUMNS))
    Console(width=140).print(table)
    if not arguments.write:
        return
    packages = {"MLX": "mlx", "ezmsg-sigproc": "ezmsg-sigproc", "NumPy": "numpy"}
    found = {
        "title": "A message on Metal: nodes of the graph, launches, bytes and operations, counted without one",
        "machine": "any (counted, not timed)",
        "versions": {
            "ezmsg-mlx": "0.1.0.dev",
            **{name: version(package) for name, package in packages.items()},
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": "PYTHONPATH=tests python tests/metal/count.py --write",
        "form": "function",
        "state": "settled",
        "input": "device",
        "spread": "Each number is exact",
        "columns": COLUMNS,
        "rows": counted,
        "notes": [
            "Data is time first, as sources emit it. Launches are the kernels, and the copies, paddings and "
            "concatenations that MLX makes around them. Bytes are those of the arrays that each launch reads and "
            "writes. Operations are those of the kernels on float32; a fused multiply-add is one.",
            "More operations buy accuracy: ezmsg-sigproc's sections have their coefficients in float32 "
            "({doc}`/explanation/kernels`). From 128 channels on they run one thread a channel.",
        ],
    }
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
