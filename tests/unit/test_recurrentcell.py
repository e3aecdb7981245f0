"""Steps of recurrent cells: each kernel against float64, whatever the weights and the batch."""

import importlib

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation, metal_emulation

from ezmsg.mlx.kernels.cells import GROUP
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.kernels.metal.kernel import metal_kernel
from ezmsg.mlx.kernels.plain.recurrentcell import difference_after_steps, random_cell, random_stack, stack_difference
from ezmsg.mlx.kernels.proof import TOLERANCE, difference_of

BITS = (32, 16, 8)


def kernel_of(path):
    return importlib.import_module(f"ezmsg.mlx.kernels.{path}.recurrentcell")


@pytest.fixture(params=["cpu", "plain", "cuda", "metal"])
def kernel(request, monkeypatch):
    """A kernel; for a GPU the source of it, compiled for the CPU and run thread by thread."""
    found = kernel_of(request.param)
    if request.param in ("cuda", "metal"):
        emulation, make = {"cuda": (cuda_emulation, cuda_kernel), "metal": (metal_emulation, metal_kernel)}[
            request.param
        ]
        if emulation.COMPILER is None:
            pytest.skip("needs Linux and a C++ compiler")
        emulated = getattr(emulation, f"{request.param.capitalize()}Kernel")
        monkeypatch.setattr(mx.fast, f"{request.param}_kernel", emulated)
        caches = (make.cache_clear, getattr(found, "_launch", make).cache_clear)
        [clear() for clear in caches]
        yield found
        [clear() for clear in caches]
    else:
        yield found


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("bits", BITS)
def test_a_step_is_that_of_float64(kernel, cell, bits):
    # Of more columns than a block has threads in words of bytes, and a batch.
    weights = random_cell(cell, bits, (5 if bits == 8 else 20) * GROUP, GROUP)
    assert difference_after_steps(kernel, weights, 2) < 2e-6


def test_sizes_may_be_odd(kernel):
    for bits in (32, 16):
        for n_input, n_hidden in ((13, 9), (3, 5)):
            assert difference_after_steps(kernel, random_cell("GRU", bits, n_input, n_hidden), 1) < 2e-6


def test_kernels_pass_their_proof(kernel):
    assert difference_of("recurrentcell", kernel, "plain") < TOLERANCE / 10


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("kernel", ["cuda"], indirect=True)
def test_a_stack_is_one_launch(kernel, cell):
    for bits, n_rows, sizes in ((32, 1, (13, 9, 2, 3)), (16, 3, (18, 10, 3, 30)), (8, 2, (5 * GROUP, GROUP, 1, 5))):
        weights = random_stack(cell, bits, *sizes)
        assert len(weights.layers) == sizes[2]
        assert stack_difference(kernel.stack(weights, n_rows), weights, n_rows) < 2e-6
    assert kernel.stack(random_stack("GRU", 16, 13, 10, 2, 3), 1) is None
    assert kernel.stack(random_stack("GRU", 32, 16, 16, 2, 3), 5) is None


def test_a_row_does_not_depend_on_the_others():
    cpu = kernel_of("cpu")
    for bits in BITS:
        weights = random_cell("GRU", bits, 2 * GROUP, GROUP)
        x, h = (mx.random.normal((16, n)) for n in (2 * GROUP, GROUP))
        together = np.array(cpu.run(x, weights, (h,))[0])
        for row in (0, 7, 15):
            alone = np.array(cpu.run(x[row : row + 1], weights, (h[row : row + 1],))[0])
            np.testing.assert_array_equal(together[row : row + 1], alone)


def test_a_helper_that_comes_late_changes_nothing(monkeypatch):
    """Chunks that another thread has taken and not finished are computed by the caller, too."""
    cpu = kernel_of("cpu")
    monkeypatch.setattr(cpu, "CHUNK", 1 << 12)
    weights = random_cell("GRU", 32, 4 * GROUP, GROUP)
    x, state = mx.random.normal((1, 4 * GROUP)), (mx.random.normal((1, GROUP)),)
    expected = np.array(cpu.run(x, weights, state)[0])

    class Stopped:
        def call(self, function, first, counts, *rest):
            counts[0] += 3  # taken, and never finished

    monkeypatch.setattr(cpu, "HELPERS", 1)
    monkeypatch.setattr(cpu, "_helpers_of", lambda process: Stopped())
    np.testing.assert_array_equal(np.array(cpu.run(x, weights, state)[0]), expected)


def test_one_launch_a_layer(monkeypatch):
    if metal_emulation.COMPILER is None:
        pytest.skip("needs Linux and a C++ compiler")
    metal = kernel_of("metal")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulation.MetalKernel)
    metal_kernel.cache_clear(), metal._launch.cache_clear()
    with metal_emulation.recorded() as launches:
        metal.run(mx.zeros((1, 64)), random_cell("GRU", 32, 64, 16), (mx.zeros((1, 16)),))
        assert len(launches) == 1
    metal_kernel.cache_clear(), metal._launch.cache_clear()
