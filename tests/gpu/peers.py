"""Beside other libraries on the same GPU, in one run: `python tests/gpu/peers.py`.

The same float32 arrays in each library, on the device when the clock starts; each call is waited for. What is not
installed is said and left out: torchaudio, CuPy, JAX. The table is written to ``peers.json``, too.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from scipy.signal import butter

from ezmsg.mlx.kernels import default_path, kernel

SHAPES = ((300, 256), (3000, 256), (30000, 1024))
ALPHA = 1e-3
SECTIONS = butter(2, (300.0, 5000.0), "bandpass", fs=30000.0, output="sos")
LIBRARIES = {"ezmsg-mlx": "mlx.core", "CuPy": "cupyx.scipy.signal", "torchaudio": "torchaudio", "JAX": "jax"}
WORK = ("x + 1", "EWMA", "two sections")

Calls = dict[str, Callable[[], object]]
"""By the name of the work."""


def of_mlx(x: npt.NDArray[np.float32], module: ModuleType) -> Calls:
    data, path = mx.array(x), default_path()
    zi, sections = mx.zeros((2, x.shape[1])), mx.zeros((len(SECTIONS), 4, x.shape[1]))
    mx.eval(data, zi, sections)

    def waited(call: Callable[[], tuple[mx.array, ...]]) -> Callable[[], None]:
        def run() -> None:
            mx.eval(*call())
            mx.synchronize()

        return run

    return {
        "x + 1": waited(lambda: (data + 1,)),
        "EWMA": waited(lambda: kernel("ewma", path).run(data, ALPHA, zi, 0, (512,))),
        "two sections": waited(lambda: kernel("sosfilt", path).run(data, SECTIONS, sections, 0, (512,))),
    }


def of_cupy(x: npt.NDArray[np.float32], module: ModuleType) -> Calls:
    import cupy

    data, sos = cupy.asarray(x), cupy.asarray(SECTIONS, dtype=cupy.float32)
    b, a = cupy.asarray([ALPHA], dtype=cupy.float32), cupy.asarray([1.0, ALPHA - 1.0], dtype=cupy.float32)

    def waited(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            cupy.cuda.Stream.null.synchronize()

        return run

    return {
        "x + 1": waited(lambda: data + 1),
        "EWMA": waited(lambda: module.lfilter(b, a, data, axis=0)),
        "two sections": waited(lambda: module.sosfilt(sos, data, axis=0)),
    }


def of_torchaudio(x: npt.NDArray[np.float32], module: ModuleType) -> Calls:
    import torch

    # Time last, as it wants it, and where it is fastest.
    data = torch.from_numpy(np.ascontiguousarray(x.T)).cuda()
    functional = importlib.import_module("torchaudio.functional")
    a, b = (torch.tensor(values, device="cuda") for values in ([1.0, ALPHA - 1.0], [ALPHA, 0.0]))
    sections = [[torch.tensor(half, device="cuda").float() for half in (row[3:], row[:3])] for row in SECTIONS]

    def cascade() -> object:
        y = data
        for of_a, of_b in sections:
            y = functional.lfilter(y, of_a, of_b, clamp=False)
        return y

    def waited(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    return {
        "x + 1": waited(lambda: data + 1),
        "EWMA": waited(lambda: functional.lfilter(data, a, b, clamp=False)),
        "two sections": waited(cascade),
    }


def of_jax(x: npt.NDArray[np.float32], module: ModuleType) -> Calls:
    import jax
    import jax.numpy as jnp

    data = jax.device_put(x)

    @jax.jit
    def average(samples):
        def link(earlier, later):
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        decays = jnp.full_like(samples, 1.0 - ALPHA)
        return jax.lax.associative_scan(link, (decays, ALPHA * samples), axis=0)[1]

    plus = jax.jit(lambda samples: samples + 1)
    return {
        "x + 1": lambda: plus(data).block_until_ready(),
        "EWMA": lambda: average(data).block_until_ready(),
    }


MADE_BY = {"ezmsg-mlx": of_mlx, "CuPy": of_cupy, "torchaudio": of_torchaudio, "JAX": of_jax}


def median_us(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median time of a call of each in microseconds, in turns, over *seconds* each or nine rounds."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times[0]) < 9:
        for call, collected in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            collected.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(collected) for collected in times]


def measure(found: dict[str, ModuleType], shapes: tuple[tuple[int, int], ...], seconds: float) -> list[dict]:
    rows = []
    for shape in shapes:
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        made: dict[str, Calls] = {}
        for library, module in found.items():
            try:
                made[library] = MADE_BY[library](x, module)
            except Exception as error:
                print(f"{library} does not run here: {type(error).__name__}: {error}", flush=True)
        for work in WORK:
            names = [library for library, calls in made.items() if work in calls]
            times = dict(zip(names, median_us([made[name][work] for name in names], seconds), strict=True))
            row = {"name": work, "shape": f"{shape[0]} × {shape[1]}"}
            row |= {library: round(times[library], 1) if library in times else None for library in LIBRARIES}
            rows.append(row)
            figures = "  ".join(f"{name} {us:9.1f}" for name, us in times.items())
            print(f"{row['shape']:>14}  {work:13} {figures}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the file [$OUT, or here]")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each library, work and shape [1]")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    found = {}
    for library, module in LIBRARIES.items():
        try:
            found[library] = importlib.import_module(module)
        except Exception as error:
            print(f"{library} is missing: {error}", flush=True)
    shapes = ((30, 8), (600, 40)) if options.tiny else SHAPES
    rows = measure(found, shapes, 0.01 if options.tiny else options.seconds)
    versions = {"NumPy": np.__version__, "Python": platform.python_version()}
    packages = {"ezmsg-mlx": "ezmsg-mlx", "MLX": "mlx", "ezmsg": "ezmsg", "ezmsg-sigproc": "ezmsg-sigproc"}
    for name, package in {**packages, "CuPy": "cupy-cuda12x", "torchaudio": "torchaudio", "JAX": "jax"}.items():
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            continue
    made = {
        "title": "Beside other libraries on one GPU",
        "machine": str(mx.device_info().get("device_name", platform.machine())),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": "python tests/gpu/peers.py",
        "form": "function",
        "state": "settled",
        "input": "device",
        "spread": "Medians of one run, all in turns",
        "columns": [
            {"head": "", "key": "name"},
            {"head": "samples × channels", "key": "shape"},
            *({"head": f"{library}, µs", "key": library, "digits": 0} for library in LIBRARIES),
        ],
        "rows": rows,
        "notes": ["torchaudio has its data with time last; the others have time first."],
    }
    path = Path(options.out) / "peers.json"
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
