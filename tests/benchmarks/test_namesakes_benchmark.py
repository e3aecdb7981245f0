"""Speed of the units with a namesake on the CPU: MLX data against ezmsg-sigproc's unit with NumPy data.

pytest tests/benchmarks/test_namesakes_benchmark.py -s

or, which writes the table of the results:

python tests/benchmarks/test_namesakes_benchmark.py docs/results/data/namesakes_cpu.json
"""

import gc
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

FS = 30000.0
SHAPES = ((30, 256, 150), (300, 256, 60), (3000, 256, 10))
"""Samples, channels and rounds."""

BAND = {"order": 4, "cuton": 300.0, "cutoff": 5000.0, "coef_type": "sos"}


def cases() -> dict[str, tuple[str, dict]]:
    from ezmsg.sigproc.butterworthfilter import ButterworthFilterSettings
    from ezmsg.sigproc.downsample import DownsampleSettings
    from scipy.signal import firwin

    taps = firwin(31, [300.0, 5000.0], fs=FS, pass_zero=False)
    band = ButterworthFilterSettings(**BAND)
    low = ButterworthFilterSettings(order=4, cutoff=100.0, coef_type="sos")
    hilbert = {"f_lo": 300.0, "f_hi": 5000.0, "trans_lo": 200.0, "trans_hi": 200.0}
    decimate = {"order": 8, "ripple_tol": 0.05, "Wn": 0.2, "wn_hz": False, "coef_type": "sos"}
    square = {"bandpass": band, "lowpass": low, "downsample": DownsampleSettings(factor=30)}
    return {
        "Activation": ("activation.ActivationTransformer", {"function": "sigmoid"}),
        "AdaptiveLNC": ("adaptive_lnc.AdaptiveLNCTransformer", {"num_harmonics": 3}),
        "ButterworthZeroPhase": ("butterworthzerophase.ButterworthZeroPhaseTransformer", BAND),
        "ChebyForDecimate": ("decimate.ChebyForDecimateTransformer", decimate),
        "CombFilterUnit": ("combfilter.CombFilterTransformer", {"coef_type": "sos"}),
        "CWT": ("wavelets.CWTTransformer", {"frequencies": [500.0, 1000.0, 2000.0], "wavelet": "cmor1.5-1.0"}),
        "Filterbank": ("filterbank.FilterbankTransformer", {"kernels": [taps, taps[::-1], taps[5:]]}),
        "FIRHilbertEnvelopeUnit": ("fir_hilbert.FIRHilbertEnvelopeTransformer", hilbert),
        "FIRHilbertFilterUnit": ("fir_hilbert.FIRHilbertFilterTransformer", hilbert),
        "ResampleConcat": ("resampleconcat", {}),
        "ResampleUnit": ("resample", {"resample_rate": 20000.0}),
        "RMSBandPower": ("singlebandpow.RMSBandPowerTransformer", {"bandpass": band, "bin_duration": 0.01}),
        "SquareLawBandPower": ("singlebandpow.SquareLawBandPowerTransformer", square),
    }


def make(package: str, name: str, settings: dict) -> Callable[[AxisArray], object]:
    """What takes a message and gives its result."""
    module = importlib.import_module(f"ezmsg.{package}.{name.partition('.')[0]}")
    if name == "resample":
        return module.ResampleProcessor(**settings).send
    if name == "resampleconcat":
        processor = module.ResampleConcatProcessor(module.ResampleConcatSettings(**settings))

        def both(message: AxisArray) -> object:
            processor.push_reference(message)
            return processor(message)

        return both
    return getattr(module, name.rpartition(".")[2])(**settings)


class Stream:
    """Messages of one kind of array, one after the other in time."""

    def __init__(self, data: object) -> None:
        self._data, self._first = data, 0
        self._channels = AxisArray.CoordinateAxis(data=np.arange(data.shape[1]).astype(str), dims=["ch"])

    def __next__(self) -> AxisArray:
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=self._first / FS), "ch": self._channels}
        self._first += self._data.shape[0]
        return AxisArray(self._data, ["time", "ch"], axes=axes, key="amp", stream_dim="time")


def times_of(name: str, settings: dict, n_samples: int, n_channels: int, n_rounds: int) -> dict[str, float]:
    """Microseconds a message of NumPy data in ezmsg-sigproc, and of MLX data here: the first decile of turns."""
    import mlx.core as mx

    data = np.random.default_rng(0).standard_normal((n_samples, n_channels), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = {
            "numpy": (make("sigproc", name, settings), Stream(data)),
            "mlx": (make("mlx", name, settings), Stream(mx.array(data))),
        }
        times: dict[str, list[float]] = {package: [] for package in runs}
        # What waits for later samples has to be full before it counts.
        n_before = 3 + -(-3000 // n_samples)
        for number in range(n_before + n_rounds):
            for package, (call, stream) in runs.items():
                message = next(stream)
                began = time.perf_counter()
                result = call(message)
                if package == "mlx" and result is not None:
                    mx.eval(result.data)
                if number >= n_before:
                    times[package].append(1e6 * (time.perf_counter() - began))
    gc.collect()
    # Whatever else the machine does can only add to the time.
    return {package: float(np.percentile(values, 10)) for package, values in times.items()}


@pytest.mark.parametrize(("n_samples", "n_channels", "n_rounds"), SHAPES)
@pytest.mark.parametrize("unit", cases())
def test_a_namesake_is_at_least_as_fast_on_mlx_as_on_numpy(unit, n_samples, n_channels, n_rounds):
    pytest.importorskip("mlx.core")
    name, settings = cases()[unit]
    found = times_of(name, settings, n_samples, n_channels, n_rounds)
    ratio = found["numpy"] / found["mlx"]
    print(
        f"\n{unit}, {n_samples} x {n_channels}: NumPy {found['numpy']:.0f} us, MLX {found['mlx']:.0f} us, {ratio:.2f}"
    )
    assert ratio >= 1.0


def main(path: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from results_file import LIVE, write_results

    rows = []
    for unit, (name, settings) in cases().items():
        for n_samples, n_channels, n_rounds in SHAPES:
            found = times_of(name, settings, n_samples, n_channels, n_rounds)
            ratio = found["numpy"] / found["mlx"]
            rows.append({"unit": unit, "samples": n_samples, "channels": n_channels, **found, "ratio": ratio})
            print(f"{unit:24} {n_samples:5} x {n_channels}  {found['numpy']:9.0f} {found['mlx']:9.0f}  {ratio:6.2f}")
    write_results(
        path,
        title="Units with a namesake in ezmsg-sigproc, on two cores",
        command="python tests/benchmarks/test_namesakes_benchmark.py docs/results/data/namesakes_cpu.json",
        spread="the first decile of turns",
        columns=[
            ("unit", "unit", None),
            ("samples", "samples", None),
            ("channels", "channels", None),
            ("ezmsg-sigproc, NumPy, µs", "numpy", 0),
            ("here, MLX, µs", "mlx", 0),
            ("times as fast", "ratio", 1),
        ],
        rows=rows,
        packages=LIVE,
        state="settled",
        form="function",
        input="device",
    )


if __name__ == "__main__":
    main(sys.argv[1])
