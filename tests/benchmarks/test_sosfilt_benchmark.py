"""Speed of second-order sections on the CPU: MLX data against ezmsg-sigproc's filter of NumPy data.

pytest tests/benchmarks/test_sosfilt_benchmark.py -s
"""

import time

import numpy as np
import pytest
from ezmsg.sigproc.filter import FilterSettings, FilterTransformer
from ezmsg.util.messages.axisarray import AxisArray
from scipy.signal import butter

FS = 30000.0


@pytest.mark.parametrize("n_sections", [1, 2, 4])
@pytest.mark.parametrize(("n_samples", "n_channels", "n_rounds"), [(300, 256, 200), (3000, 1024, 10)])
def test_sosfilt_is_at_least_as_fast_on_mlx_as_on_numpy(n_samples, n_channels, n_rounds, n_sections):
    mx = pytest.importorskip("mlx.core")
    from ezmsg.mlx.sosfilt import sosfilt

    sos = butter(n_sections, (300.0, 5000.0), "bandpass", fs=FS, output="sos")
    data = np.random.default_rng(0).standard_normal((n_samples, n_channels), np.float32)
    x, zi = mx.array(data), mx.zeros((n_sections, 4, n_channels))
    message = AxisArray(data, dims=["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=FS)}, stream_dim="time")
    theirs = FilterTransformer(FilterSettings(coefs=sos, coef_type="sos"))
    runs = {"MLX": lambda: mx.eval(sosfilt(x, sos, zi, axis=0, path="cpu")), "NumPy": lambda: theirs(message)}
    times = {name: [] for name in runs}
    for name in runs:
        runs[name]()
    for _ in range(n_rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - began))
    # The first decile, since whatever else the machine does can only add to the time.
    decile = {name: np.percentile(values, 10) for name, values in times.items()}
    ratio = decile["NumPy"] / decile["MLX"]
    print(
        f"\n{n_samples} x {n_channels}, {n_sections} sections: MLX {decile['MLX']:.0f} us, "
        f"NumPy {decile['NumPy']:.0f} us, MLX is {ratio:.1f} times as fast"
    )
    assert ratio >= 1.0
