"""Kernels for Metal on an NVIDIA GPU: the very text that Metal would compile, compiled for CUDA and run there.

The second way beside :mod:`helpers.metal_emulation`, which has the text. ``metal_cuda.cuh`` stands for the Metal
Shading Language, nvcc compiles, and CuPy launches. 32 threads run at once there, and what compute-sanitizer says of
their accesses is of real ones.
"""

import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence

import numpy as np

from . import metal_emulation
from .metal_emulation import Launch

SHIM = pathlib.Path(__file__).with_suffix(".cuh")


def _nvcc() -> str | None:
    """That of this machine, or of the packages ``nvidia-cuda-nvcc``, ``-crt``, ``-runtime`` and ``nvidia-nvvm``."""
    folders = [sysconfig.get_path("purelib"), "nvidia", "cu13", "bin"]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(*folders))


COMPILER = _nvcc()

EXACT = "-fmad=false"
"""Nothing is contracted but what says so, as in the emulation: results are the same to the last bit."""

CONTRACTED = "-fmad=true"

POSITIONS = {
    "thread_position_in_threadgroup": "threadIdx",
    "threadgroup_position_in_grid": "blockIdx",
    "threads_per_threadgroup": "uint3{blockDim.x, blockDim.y, blockDim.z}",
    "threadgroups_per_grid": "uint3{gridDim.x, gridDim.y, gridDim.z}",
    "thread_position_in_grid": "uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, "
    "blockIdx.z * blockDim.z + threadIdx.z}",
    "threads_per_grid": "uint3{gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z}",
    "thread_index_in_threadgroup": "(threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x",
    "thread_index_in_simdgroup": "((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) % 32",
    "simdgroup_index_in_threadgroup": "((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) / 32",
}
"""What Metal tells a thread of its position, in CUDA."""

ENTRY = "launched_"
"""In front of a kernel's name: what CUDA launches."""

ROUNDED_OTHERWISE = re.compile(r"\b(exp|log|tanh|sin|cos|pow|rsqrt)\w*\(")
"""Functions that no two libraries round alike."""


def source_of(launch: Launch) -> str:
    """The text of *launch* in CUDA C++: but for its attributes, address spaces and template parameters, as it was."""
    text = launch.with_constants.replace("[[kernel]]", "__device__")
    text = re.sub(r" \[\[[^\]]*\]\]", "", text)
    # Not by macros: what CUDA's own words stand for has some of these in it.
    text = re.sub(r"\b(device|constant|thread)\s+(?=\w)", "", text)
    text = re.sub(r"\bthreadgroup\s+(?=\w)", "__shared__ ", text)
    arguments, given = [], []
    for index, parameter in enumerate(launch.parameters):
        if parameter.space:
            given.append(f"{'const ' * parameter.is_const}{parameter.type}* buffer{index}")
            arguments.append(f"{'*' * parameter.is_reference}buffer{index}")
        else:
            arguments.append(POSITIONS[parameter.name])
    return (
        f'#include "{SHIM}"\n{text}\n'
        f'extern "C" __global__ void {ENTRY}{launch.name}({", ".join(given)}) {{\n'
        f"{launch.name}({', '.join(arguments)});\n}}\n"
    )


@functools.cache
def _folder() -> pathlib.Path:
    # For all processes of a run, if it says where.
    named = os.environ.get("EZMSG_MLX_METAL_CUBINS")
    folder = pathlib.Path(named or tempfile.mkdtemp(prefix="metal_cuda_"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def compiled(source: str, flag: str = EXACT, architecture: str = "sm_90") -> pathlib.Path:
    """Machine code of *source*; AssertionError where that is not what nvcc takes."""
    digest = hashlib.sha256(repr((source, SHIM.read_text(), flag, architecture)).encode()).hexdigest()[:20]
    target = _folder() / f"{digest}.cubin"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        file, made = pathlib.Path(folder, "kernel.cu"), pathlib.Path(folder, "kernel.cubin")
        file.write_text(source)
        command = [COMPILER, "-cubin", "-w", "-std=c++17", "-lineinfo", flag, f"-arch={architecture}", "-o", made, file]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"does not compile: {(done.stdout + done.stderr)[:2000]}")
        made.rename(target)
    return target


@functools.cache
def _function(source: str, flag: str, name: str) -> object:
    import cupy

    # Each array in memory that is its alone, so that what lies outside is nobody's.
    cupy.cuda.set_allocator(None)
    architecture = f"sm_{cupy.cuda.Device().compute_capability}"
    return cupy.RawModule(path=str(compiled(source, flag, architecture))).get_function(ENTRY + name)


def run(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* on the GPU; AssertionError where CUDA reports a fault."""
    import cupy

    grid, group = launch.grid, launch.threadgroup
    assert all(n % m == 0 for n, m in zip(grid, group, strict=True)), f"{launch.name}: CUDA has no smaller last groups"
    assert 1 <= np.prod(group) <= 1024, f"{np.prod(group)} threads in a threadgroup"
    function = _function(source_of(launch), metal_emulation.options.cuda_flag, launch.name)
    try:
        given = [cupy.asarray(array) for array in launch.buffers(inputs)]
        on_device = [cupy.empty(result.shape, result.dtype) for result in results]
        blocks = tuple(n // m for n, m in zip(grid, group, strict=True))
        if os.environ.get("EZMSG_MLX_METAL_UNWRITTEN"):
            # For initcheck: results as they are allocated, of which nothing is copied.
            function(blocks, group, (*given, *(cupy.empty_like(result) for result in on_device)))
        for result in on_device:
            # What a kernel leaves unwritten is nothing to be read.
            result.data.memset(0xFF, result.nbytes)
        function(blocks, group, (*given, *on_device))
        for result, computed in zip(results, on_device, strict=True):
            result[...] = cupy.asnumpy(computed)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise AssertionError(f"{launch.name}: {error}") from error
    except cupy.cuda.driver.CUDADriverError as error:
        raise AssertionError(f"{launch.name}: {error}") from error


def run_both(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* in the emulation and on the GPU; AssertionError where they differ, in any bit if none may."""
    metal_emulation.run_emulated(launch, inputs, results)
    others = [np.empty_like(result) for result in results]
    run(launch, inputs, others)
    for emulated, on_gpu in zip(results, others, strict=True):
        if ROUNDED_OTHERWISE.search(launch.text):
            np.testing.assert_allclose(on_gpu, emulated, rtol=1e-5, atol=1e-6, err_msg=launch.name)
        else:
            np.testing.assert_array_equal(on_gpu, emulated, err_msg=launch.name)
            is_zero = emulated == 0
            assert (np.signbit(on_gpu) == np.signbit(emulated))[is_zero].all(), f"{launch.name}: signs of zeros differ"
