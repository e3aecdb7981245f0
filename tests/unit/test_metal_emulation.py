"""The emulation of Metal itself: what it must notice, and that it runs kernels which others test on a Mac."""

import sys

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import metal_emulation, metal_sigproc
from helpers.recurrences import noise

pytestmark = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")

GOOD = """
  uint i = thread_position_in_threadgroup.x;
  uint n = threads_per_threadgroup.x;
  uint at = threadgroup_position_in_grid.x * n + i;
  threadgroup float shared[32];
  shared[i] = x[at];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[at] = shared[n - 1 - i];
"""

FAULTS = {
    "a read past the end": (("x[at]", "x[at + 33]"), "out of bounds"),
    "a read before the beginning": (("x[at]", "x[at - 64]"), "out of bounds"),
    "a write past the end": (("y[at]", "y[at + 64]"), "out of bounds"),
    "threadgroup memory past the end": (("shared[i] = x", "shared[i + 1] = x"), "out of bounds"),
    "no barrier": (("threadgroup_barrier(mem_flags::mem_threadgroup);", ""), "race|uninitialised"),
    "a barrier for other memory": (("mem_flags::mem_threadgroup", "mem_flags::mem_device"), "race"),
    "two threads that write the same": (("shared[i] =", "shared[0] ="), "race"),
    "two groups that write the same": (("y[at]", "y[i]"), "race"),
    "a write while others read": (("y[at] =", "shared[i] = 0.0f; y[at] ="), "race"),
    "a read of what nobody wrote": (("shared[i] = x[at]", "if (i != 3) shared[i] = x[at]"), "uninitialised"),
    "a result that is read": (("= x[at]", "= y[at]"), "uninitialised"),
    "a barrier that not all come to": (("threadgroup_b", "if (i != 3) threadgroup_b"), "barrier|uninitialised"),
    "an end before the barrier": (("threadgroup_b", "if (i == 3) return; threadgroup_b"), "barrier"),
    "two barriers at once": (
        (
            "threadgroup_barrier",
            "if (i & 1)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nelse threadgroup_barrier",
        ),
        "barrier",
    ),
    "too much threadgroup memory": (("shared[32]", "shared[8193]"), "threadgroup memory"),
    "a double": (("= x[at]", "= float(double(x[at]))"), "does not compile"),
    "a literal that is a double": (("= x[at]", "= x[at] * 2.5"), "does not compile"),
    "dynamic memory": (("= x[at]", "= *new float(x[at])"), "does not compile"),
    "an input that is written": (("shared[i] =", "((device float*)x)[at] = 0.0f; shared[i] ="), "is written"),
}


def run(source, x, groups=2, size=32, **options):
    kernel = metal_emulation.MetalKernel(name="tested", input_names=["x"], output_names=["y"], source=source)
    with metal_emulation.using(**options):
        (y,) = kernel(
            inputs=[mx.array(x)],
            grid=(groups * size, 1, 1),
            threadgroup=(size, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[mx.float32],
        )
    return np.array(y)


@pytest.mark.parametrize("order", metal_emulation.ORDERS)
def test_a_good_kernel_runs(order):
    x = noise(64)
    np.testing.assert_array_equal(run(GOOD, x, order=order), np.concatenate([x[31::-1], x[:31:-1]]))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed_in_whatever_order_threads_run(fault):
    (before, after), expected = FAULTS[fault]
    assert before in GOOD
    for order in metal_emulation.ORDERS:
        with pytest.raises(AssertionError, match=expected):
            run(GOOD.replace(before, after), noise(64), order=order)


def test_more_threads_than_metal_allows_are_refused():
    with pytest.raises(AssertionError, match="1025 threads"):
        run("y[thread_position_in_grid.x] = x[thread_position_in_grid.x];", noise(1025), groups=1, size=1025)


def test_the_last_group_may_be_smaller():
    kernel = metal_emulation.MetalKernel(
        name="tested",
        input_names=["x"],
        output_names=["y"],
        source="y[thread_position_in_grid.x] = float(threads_per_threadgroup.x);",
    )
    (y,) = kernel(
        inputs=[mx.zeros((10,))],
        grid=(10, 1, 1),
        threadgroup=(4, 1, 1),
        output_shapes=[(10,)],
        output_dtypes=[mx.float32],
    )
    np.testing.assert_array_equal(np.array(y), [4] * 8 + [2] * 2)


# ----------------------------------------------------------------------------------- kernels that are known to be right


@pytest.fixture
def sigproc(monkeypatch):
    """The kernels of ezmsg-sigproc, with this emulation in the place of Metal."""
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulation.MetalKernel)
    for name in metal_sigproc.NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield metal_sigproc.imported()
    for name in metal_sigproc.NAMES:
        del sys.modules[name]


@pytest.mark.parametrize("case", metal_sigproc.CASES)
def test_case_of_sigproc(sigproc, case):
    with metal_emulation.using(order="random"):
        metal_sigproc.CASES[case](sigproc)
