"""The kernels for Metal by another reader of the language, crosstl; and on Vulkan, where there is some."""

import os
import pkgutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("crosstl", reason="needs crosstl, which needs Python 3.11")

from helpers import metal_emulation, metal_vulkan
from helpers.metal_mutants import CELLS, CHECKS, MUTANTS
from helpers.metal_suite import SIGPROC, suite
from helpers.metal_texts import CALLS, MODULES, launches_of

from ezmsg.mlx.kernels import metal

ALL = bool(os.environ.get("EZMSG_MLX_ALL_METAL"))
"""Whether all texts and all cases are looked at, which takes minutes, or some."""

NEEDS_TOOLS = pytest.mark.skipif(
    not (metal_vulkan.ASSEMBLER and metal_vulkan.VALIDATOR), reason="needs SPIRV-Tools: apt-get install spirv-tools"
)

NEEDS_DEVICE = pytest.mark.skipif(
    metal_vulkan.device() is None, reason="needs Vulkan: apt-get install mesa-vulkan-drivers, pip install vulkan"
)

NOT_FUSED = {"sosfilt: follows_float64"}
"""Vulkan need not round fma once, and lavapipe rounds it twice: 1.03e-5 instead of 1e-5 for 1 of 12 000 samples."""

REFUSED = ("recurrentcell: check", *(f"recurrentcell: {cell}, {bits} bits" for cell, bits in CELLS if bits > 8))
"""crosstl takes no pointer to device memory for one of another type, and says so."""

CASES = {f"{kernel}: {name}": case for kernel, cases in suite().items() for name, case in cases.items()}

SOME = [case for case in CASES if case.endswith((": any_size[9]", "GRU, 8 bits", "GRU, 16 bits", ": scores"))]

pytestmark = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")


@pytest.fixture
def installed(monkeypatch):
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        yield


@NEEDS_TOOLS
@pytest.mark.parametrize("name", MODULES)
def test_texts_are_read_and_what_is_written_of_them_is_valid(name, installed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(metal_emulation, "run", lambda launch, inputs, results: None)
        launches = launches_of(name)
    # The last is of arrays of any size, and of weights in bytes.
    for launch in launches if ALL and name != "recurrentcell" else launches[-1:]:
        assembly = metal_vulkan.assembly_of(launch.with_constants, launch.threadgroup)
        assert metal_vulkan.spirv_of(assembly)
        # Memory that a threadgroup shares, and barriers for it, which a translation may lose in silence.
        assert assembly.count(" Workgroup\n") == launch.text.count("threadgroup float ") + launch.text.count(
            "threadgroup uint "
        )
        assert assembly.count("OpControlBarrier") == launch.text.count("threadgroup_barrier(")


@pytest.mark.parametrize(
    ("before", "after"), [("uint n_channels", "uint n_channels n"), ("if (", "if "), ("};", "}")], ids=str
)
def test_what_is_no_metal_is_refused(before, after, installed, monkeypatch):
    monkeypatch.setattr(metal_emulation, "run", lambda launch, inputs, results: None)
    launch = launches_of("ewma")[0]
    assert before in launch.text
    with pytest.raises(Exception, match=r"."):
        metal_vulkan.assembly_of(launch.text.replace(before, after, 1), launch.threadgroup)


@NEEDS_TOOLS
@NEEDS_DEVICE
@pytest.mark.parametrize("case", CASES if ALL else SOME)
def test_case_on_vulkan(case, installed):
    with metal_emulation.using(device="vulkan"):
        if case in REFUSED:
            with pytest.raises(ValueError, match="requires uint[*] storage buffer"):
                CASES[case]()
        elif case in NOT_FUSED:
            with pytest.raises(AssertionError, match="Mismatched elements: 1 "):
                CASES[case]()
        else:
            CASES[case]()


@NEEDS_TOOLS
@NEEDS_DEVICE
def test_a_barrier_holds_on_vulkan(installed):
    # Before a difference is believed: each thread reads what all others of its threadgroup wrote.
    kernel = metal_emulation.MetalKernel(
        name="tested",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_threadgroup.x; uint n = threads_per_threadgroup.x;\n"
        "uint at = threadgroup_position_in_grid.x * n + i; threadgroup float shared[256];\n"
        "float sum = x[at]; uint turn = 0;\n"
        "for (uint step = 1; step < n; step *= 2) { shared[i] = sum;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); sum += shared[(i + step) % n];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); }\n"
        "y[at] = sum;",
    )
    x = np.arange(1024, dtype=np.float32)
    with metal_emulation.using(device="vulkan"):
        (y,) = kernel(
            inputs=[mx.array(x)],
            grid=(1024, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(1024,)],
            output_dtypes=[mx.float32],
        )
    np.testing.assert_array_equal(np.array(y), np.repeat(x.reshape(4, 256).sum(axis=1), 256))


def test_all_kernels_are_in_every_proof():
    # CONTRIBUTING.md says where each is entered.
    kernels = {module.name for module in pkgutil.iter_modules(metal.__path__)} - {"kernel"}
    assert kernels == MODULES.keys() == CALLS.keys() == CHECKS.keys() == {mutant.recurrence for mutant in MUTANTS}
    assert {*kernels, SIGPROC} <= suite().keys()
