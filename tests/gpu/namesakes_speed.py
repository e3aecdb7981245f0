"""Units with a namesake and the decoders on a GPU: values beside NumPy's in float64, and microseconds a message.

PYTHONPATH=src:tests:examples python tests/gpu/namesakes_speed.py [--json FILE] [--device cpu]

Ends with a table, and with status 1 if a value is more than 1e-5 of the largest off.
"""

import argparse
import importlib.util
import json
import sys
import time
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

import ezmsg.mlx as package

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "test_namesakes_benchmark.py"
LENGTHS = (300, 1, 37, 0, 300, 3000, 30, 1200)
SHAPES = ((30, 256, 60), (300, 256, 60), (3000, 1024, 8))
TOLERANCE = 1e-5


def benchmark():
    spec = importlib.util.spec_from_file_location("namesakes_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def messages(n_channels: int, fs: float, dtype: type) -> list[AxisArray]:
    rng, first, found = np.random.default_rng(0), 0, []
    for n in LENGTHS:
        data = (rng.standard_normal((n, n_channels)) + 3.0).astype(np.float32).astype(dtype)
        axes = {"time": AxisArray.TimeAxis(fs=fs, offset=first / fs)}
        found.append(AxisArray(data, ["time", "ch"], axes=axes, key="amp", stream_dim="time"))
        first += n
    return found


def error_of(ours, theirs, fs: float, n_channels: int = 64) -> float:
    """The largest error of any message, as a share of the largest value of all."""
    error = scale = 0.0
    for message in messages(n_channels, fs, np.float64):
        if 0 in message.data.shape:
            # Some of ezmsg-sigproc's refuse it.
            continue
        expected = theirs(message)
        found = ours(replace(message, data=mx.array(message.data.astype(np.float32))))
        if expected is None:
            assert found is None
            continue
        y, z = np.array(found.data), np.asarray(expected.data)
        assert y.shape == z.shape, (y.shape, z.shape)
        if z.size:
            error, scale = max(error, float(np.abs(y - z).max())), max(scale, float(np.abs(z).max()))
    return error / scale


def microseconds(call, stream, n_rounds: int) -> float:
    times = []
    for number in range(n_rounds + 15):
        message = next(stream)
        began = time.perf_counter()
        result = call(message)
        if result is not None:
            mx.eval(result.data)
        if number >= 15:
            times.append(1e6 * (time.perf_counter() - began))
    return float(np.percentile(times, 50))


def decoders(n_features: int) -> dict:
    rng = np.random.default_rng(1)
    weights, h = rng.standard_normal((n_features, 4)), rng.standard_normal((n_features, 4))
    kalman = package.RefitKalmanFilterSettings(
        0.95 * np.eye(4), 0.01 * np.eye(4), h, np.eye(n_features), steady_state=True
    )
    linear = package.LinearRegressorSettings(weights)
    kinds = {
        "LinearRegressor": (package.LinearRegressorTransformer, linear),
        "RefitKalmanFilter": (package.RefitKalmanFilterTransformer, kalman),
    }
    return {name: lambda kind=kind, given=given: kind(given) for name, (kind, given) in kinds.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--units", nargs="*", help="only these")
    options = parser.parse_args()
    mx.set_default_device(mx.gpu if options.device == "gpu" else mx.cpu)
    warnings.simplefilter("ignore")
    bench, rows = benchmark(), []
    chosen = {unit: case for unit, case in bench.cases().items() if not options.units or unit in options.units}
    for unit, (name, settings) in chosen.items():
        try:
            error = error_of(bench.make("mlx", name, settings), bench.make("sigproc", name, settings), bench.FS)
            times = [
                microseconds(
                    bench.make("mlx", name, settings),
                    bench.Stream(mx.random.normal((n_samples, n_channels))),
                    n_rounds,
                )
                for n_samples, n_channels, n_rounds in SHAPES
            ]
        except Exception as failure:
            print(f"{unit}: {type(failure).__name__}: {failure}", flush=True)
            error, times = float("nan"), []
        rows.append({"unit": unit, "error": error, "us": times})
        print(rows[-1], flush=True)
    for unit, make in decoders(64).items():
        # NumPy data is computed in float64.
        error = error_of(make(), make(), bench.FS)
        times = [
            microseconds(decoders(n)[unit](), bench.Stream(mx.random.normal((n_samples, n))), 40)
            for n_samples, n in ((1, 256), (10, 1024))
        ]
        rows.append({"unit": unit, "error": error, "us": times})
    head = " ".join(f"{n_samples}x{n_channels}".rjust(11) for n_samples, n_channels, _ in SHAPES)
    print(f"\n{'unit':26} {'error':>8} {head}   (decoders: 1x256, 10x1024)")
    for row in rows:
        print(f"{row['unit']:26} {row['error']:8.1e} " + " ".join(f"{value:11.0f}" for value in row["us"]))
    wrong = [row["unit"] for row in rows if not row["error"] <= TOLERANCE]
    print("wrong:", ", ".join(wrong) or "none")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
