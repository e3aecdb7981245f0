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
def place_of(source: str, flag: str) -> pathlib.Path:
    """Where the machine code of *source* lies, as soon as it has been compiled."""
    digest = hashlib.sha256(repr((source, SHIM.read_text(), flag, architecture())).encode()).hexdigest()[:20]
    return _folder() / f"{digest}.cubin"


def compiled(source: str, flag: str = EXACT) -> pathlib.Path:
    """Machine code of *source*; AssertionError where that is not what nvcc takes."""
    target = place_of(source, flag)
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        file, made = pathlib.Path(folder, "kernel.cu"), pathlib.Path(folder, "kernel.cubin")
        file.write_text(source)
        command = [
            COMPILER,
            "-cubin",
            "-w",
            "-std=c++17",
            "-lineinfo",
            flag,
            f"-arch={architecture()}",
            "-o",
            made,
            file,
        ]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"does not compile: {(done.stdout + done.stderr)[:2000]}")
        made.rename(target)
    return target


@functools.cache
def architecture() -> str:
    """That of the GPU, or of some other where there is none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        found = []
    return f"sm_{found[0].replace('.', '')}" if found else "sm_90"


def arguments_of(
    launch: Launch, inputs: Sequence[np.ndarray]
) -> tuple[pathlib.Path, str, tuple[int, ...], tuple[int, ...], list[np.ndarray]]:
    """What CUDA is given: where machine code lies, the name in it, blocks, threads of a block, and what is read."""
    grid, threads = launch.grid, launch.threadgroup
    assert all(n % m == 0 for n, m in zip(grid, threads, strict=True)), (
        f"{launch.name}: CUDA has no smaller last groups"
    )
    assert 1 <= np.prod(threads) <= 1024, f"{np.prod(threads)} threads in a threadgroup"
    blocks = tuple(n // m for n, m in zip(grid, threads, strict=True))
    cubin = place_of(source_of(launch), metal_emulation.options.cuda_flag)
    return cubin, ENTRY + launch.name, blocks, threads, launch.buffers(inputs)


def is_exact(launch: Launch) -> bool:
    """Whether all that *launch* computes is rounded alike everywhere."""
    return not ROUNDED_OTHERWISE.search(launch.text)


def run(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* on the GPU; AssertionError where CUDA reports a fault."""
    from . import cuda_launch

    cubin, entry, *rest = arguments_of(launch, inputs)
    compiled(source_of(launch), metal_emulation.options.cuda_flag)
    try:
        function = cuda_launch.function_of(str(cubin), entry)
        computed = cuda_launch.launched(function, *rest, results)
    except cuda_launch.ERRORS as error:
        raise AssertionError(f"{launch.name}: {error}") from error
    for result, found in zip(results, computed, strict=True):
        result[...] = found
