"""Detrending: what it adds to the average, which has tests of its own."""

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import DetrendTransformer, EWMATransformer


def message(data) -> AxisArray:
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=1000.0)})


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int16", "bool_"])
@pytest.mark.parametrize("n_samples", [0, 5])
def test_float32_comes_out_whatever_goes_in(dtype, n_samples):
    with mx.stream(mx.cpu):
        data = (mx.arange(2 * n_samples).reshape(n_samples, 2) % 2).astype(getattr(mx, dtype))
    assert DetrendTransformer(time_constant=0.1)(message(data)).data.dtype == mx.float32


def test_is_the_data_less_its_average():
    data = np.random.default_rng(0).standard_normal((50, 3)).astype("float32")
    detrended, average = (
        kind(time_constant=0.01)(message(mx.array(data))).data
        for kind in (
            DetrendTransformer,
            EWMATransformer,
        )
    )
    np.testing.assert_allclose(np.array(detrended), data - np.array(average), atol=1e-6)
