"""Conversions, the guard and the recommendation on a device with its own memory."""

import numpy as np
import pytest
from helpers.processes import RecordedLog, in_fresh_process

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import (
    AsArrayTransformer,
    EWMATransformer,
    SimulatedAcquisitionSettings,
    cache_limit,
    simulated_acquisition,
)
from ezmsg.mlx.stream.convert import numpy_to_mlx

MIB = 1 << 20


@pytest.mark.parametrize("source", ["int8", "uint8", "int16", "uint16", "int32", "float16", "bool"])
@pytest.mark.parametrize("n_samples", [1, 300, 15000])
def test_narrow_types_are_widened_on_the_device(source, n_samples):
    data = np.random.default_rng(0).integers(0, 100, (n_samples, 64)).astype(source)
    for _ in range(3):
        converted, narrowed = numpy_to_mlx(data, "float32")
        assert converted.dtype == mx.float32 and not narrowed
        np.testing.assert_array_equal(np.array(converted), data.astype(np.float32))


def test_recycled_uploads_keep_their_values():
    """Many uploads alive at once and then recycled: the driver's advice moves pages, never values."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        sources = [rng.integers(-9, 9, (300, 256), np.int16) for _ in range(20)]
        uploaded = [numpy_to_mlx(source, "float32")[0] for source in sources]
        for source, array in zip(sources, uploaded, strict=True):
            np.testing.assert_array_equal(np.array(array * 2), source * 2.0)


def test_float64_becomes_float32_and_says_so_once():
    transformer = AsArrayTransformer(backend="mlx", dtype="float64")
    message = next(simulated_acquisition(SimulatedAcquisitionSettings(n_channels=4, duration=0.1)))
    with RecordedLog() as log:
        for _ in range(3):
            assert transformer(message).data.dtype == mx.float32
    assert len([text for text in log.warnings if "narrows" in text]) == 1


@in_fresh_process
def test_long_run_sets_the_limit_once_and_overshoots_by_one_buffer():
    calls = []
    original = mx.set_cache_limit
    mx.set_cache_limit = lambda limit: (calls.append(limit), original(limit))[1]
    to_mlx = AsArrayTransformer(backend="mlx", dtype="float32", mlx_cache_limit_mb=64.0)
    average = EWMATransformer(time_constant=0.1)
    settings = SimulatedAcquisitionSettings(n_channels=256, duration=60.0, stall_every=20)
    largest = 0
    for message in simulated_acquisition(settings):
        mx.eval(average(to_mlx(message)).data)
        largest = max(largest, mx.get_cache_memory())
    assert calls == [64 * MIB]
    assert cache_limit().source == "node"
    one_buffer = max(settings.stall_lengths) * 256 * 4 * 9 // 8 + MIB
    assert 48 * MIB < largest <= 64 * MIB + one_buffer


@in_fresh_process
def test_an_outside_raise_is_put_back():
    to_mlx = AsArrayTransformer(backend="mlx", mlx_cache_limit_mb=8.0)
    message = next(simulated_acquisition(SimulatedAcquisitionSettings(n_channels=256, duration=0.1)))
    to_mlx(message)
    mx.reset_peak_memory()
    mx.set_cache_limit(1 << 40)
    for n in range(1, 60):
        mx.eval(mx.ones((n * 64, 1024)) * 2)
    assert mx.get_cache_memory() > 64 * MIB
    with RecordedLog() as log:
        for _ in range(3):
            to_mlx(message)
    assert len([text for text in log.warnings if "raised" in text]) == 1
    mx.eval(mx.ones((64, 1024)) * 2)
    assert mx.get_cache_memory() < 64 * MIB


@in_fresh_process
def test_outputs_that_nobody_reads_do_not_grow_memory():
    average = EWMATransformer(time_constant=0.1)
    to_mlx = AsArrayTransformer(backend="mlx", dtype="float32")
    used = []
    for message in simulated_acquisition(SimulatedAcquisitionSettings(duration=20.0, stall_every=0)):
        average(to_mlx(message))
        used.append(mx.get_active_memory())
    assert max(used[1000:]) <= 2 * max(used[100:500])
