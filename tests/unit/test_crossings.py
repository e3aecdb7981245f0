"""The kernels of crossings find what the one for the CPU finds, which test_peak.py compares with ezmsg-event."""

import importlib

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation, metal_emulation
from helpers.crossing_cases import KINDS, check, check_all, found, signal
from helpers.metal_counts import graph_of
from helpers.metal_emulation import ORDERS

from ezmsg.mlx.kernels import proof
from ezmsg.mlx.kernels.cpu import crossings as cpu
from ezmsg.mlx.kernels.crossings import Crossings
from ezmsg.mlx.kernels.cuda import crossings as cuda
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.kernels.metal import crossings as metal
from ezmsg.mlx.kernels.plain import crossings as plain

KERNELS = {"cpu": cpu, "plain": plain, "metal": metal, "cuda": cuda}


@pytest.fixture
def emulated(monkeypatch):
    if metal_emulation.COMPILER is None:
        pytest.skip("needs Linux and g++")
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_emulation.CudaKernel)
    for cached in (cuda_kernel, cuda._launch, cuda._compile_ahead):
        cached.cache_clear()
    with metal_emulation.installed(monkeypatch, metal):
        yield
    for cached in (cuda_kernel, cuda._launch, cuda._compile_ahead):
        cached.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_plain_operations_find_the_same(kind):
    check(kind, "plain")


@pytest.mark.parametrize("path", ["metal", "cuda"])
def test_kernels_for_gpus_find_the_same(path, emulated):
    check_all(path)


@pytest.mark.parametrize("order", ORDERS)
def test_threads_for_metal_need_nothing_of_each_other(order, emulated):
    with metal_emulation.using(order=order):
        check("peaks", "metal")


@pytest.mark.parametrize("path", KERNELS)
def test_kernels_prove_themselves(path, emulated):
    assert proof.trouble_of("crossings", KERNELS[path], path) is None


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_how_the_stream_is_cut(kind):
    crossings = KINDS[kind]
    if crossings.is_sparse:
        return
    whole, state = found(crossings, "cpu", ())
    pieces, last = found(crossings, "cpu", tuple(range(1, 100)))
    np.testing.assert_array_equal(np.concatenate(pieces), whole[0])
    np.testing.assert_allclose(last, state, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_one_kernel_in_the_graph_for_metal(kind, emulated):
    crossings, x = KINDS[kind], signal()
    zi = mx.zeros((crossings.n_rows, x.shape[1]))
    nodes = graph_of(lambda x, zi: metal.run(x, crossings, zi, 0, ()), mx.array(x), zi)
    assert nodes == {"CustomKernel": 1}


@pytest.mark.parametrize("n", [1, 2, 30, 31, 61, 62])
def test_there_is_room_for_as_many_events_as_the_refractory_period_lets_happen(n):
    for refractory in (0, 1, 3, 30):
        crossings = Crossings(np.zeros(1, np.float32), refractory=refractory, is_sparse=True)
        # Over the threshold every other sample.
        x = np.where(np.arange(n + 1) % 2, 1.0, -1.0).astype(np.float32)[:, None]
        y, _ = cpu.find(x, crossings, np.zeros((crossings.n_rows, 1), np.float32))
        assert len(y) == crossings.slots(n + 1) and (y >= 0).sum() in (len(y), len(y) - 1)


def test_a_long_memory_is_kept_in_pairs(emulated):
    # At 30 kHz and 300 s, in the middle of a stream: a sample moves the scale by a ten-millionth.
    alpha, x = 1e-7, np.full((3000, 2), 3.0, np.float32)
    for scale, first in (("rms", (1 - alpha) * 1.0), ("mad", 1.0)):
        crossings = Crossings(np.full(2, 5.0, np.float32), scale=scale, alpha=alpha)
        zi = np.zeros((crossings.n_rows, 2), np.float32)
        zi[2], zi[4] = first, 1.0
        ends = {}
        for path, module in KERNELS.items():
            if path == "plain" and scale == "mad":
                continue
            state = np.array(module.run(mx.array(x), crossings, mx.array(zi), 0, ())[1]).astype(np.float64)
            ends[path] = (state[2] + state[3]) - np.float64(zi[2])
        for moved in ends.values():
            np.testing.assert_allclose(moved, ends["cpu"], rtol=1e-2)
        assert (ends["cpu"] > 1e-4).all()


@pytest.mark.parametrize("path", ["cpu", "plain", "cuda", "metal"])
def test_fewer_thresholds_than_channels_are_refused(path):
    few = Crossings(np.ones(3, np.float32), scale="mad", alpha=0.1)
    with pytest.raises(ValueError, match="'thresholds' must be one for each of 4 channels, got 3"):
        importlib.import_module(f"ezmsg.mlx.kernels.{path}.crossings").run(
            mx.zeros((5, 4)), few, mx.zeros((few.n_rows, 4)), 0, ()
        )
