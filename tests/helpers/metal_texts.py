"""The texts that MLX writes of the kernels for Metal, one for each way in which it passes their arrays."""

import pathlib
import re
import shutil
import subprocess

import mlx.core as mx
import numpy as np

from ezmsg.mlx.kernels.crossings import Crossings
from ezmsg.mlx.kernels.metal import crossings, ewma, sosfilt, zscore

from .metal_emulation import Launch, recorded

MODULES = {"crossings": crossings, "ewma": ewma, "sosfilt": sosfilt, "zscore": zscore}

SECTION = np.array([[1.0, 0.5, 0.25, 1.0, -0.5, 0.25]])

_CROSSINGS = [Crossings(np.zeros(n, np.float32), scale="rms", window=3, gives_values=n > 8) for n in (1, 8, 9)]

CALLS = {
    "crossings": [
        ((n, len(of.thresholds)), of, (of.n_rows, len(of.thresholds))) for of in _CROSSINGS for n in (1, 300)
    ],
    # Arrays of fewer than eight entries are "constant", others "device".
    "ewma": [(shape, 0.1, (n_states, shape[1])) for n_states in (2, 4) for shape in [(1, 1), (300, 1), (1, 8), (9, 9)]],
    "sosfilt": [(shape, SECTION, (1, 4, shape[1])) for shape in [(1, 1), (300, 1), (1, 8), (9, 9)]],
    "zscore": [(shape, 0.1, (6, shape[1])) for shape in [(1, 1), (300, 1), (1, 8), (9, 9)]],
}


def launches_of(recurrence: str) -> list[Launch]:
    """One for each text; the emulation must be installed."""
    with recorded() as launches:
        for shape, coefficients, state_shape in CALLS[recurrence]:
            MODULES[recurrence].run(mx.zeros(shape), coefficients, mx.zeros(state_shape), 0, ())
        return list({launch.text: launch for launch in launches}.values())


CLANG = shutil.which("clang")

_OPENCL = """
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
namespace mem_flags { constexpr int mem_device = 1, mem_threadgroup = 2; }
void threadgroup_barrier(int);
template <typename To, typename From> To as_type(From);
uint min(uint, uint);
float fma(float, float, float);
namespace metal { float fabs(float); float sqrt(float); }
"""


def opencl_of(launch: Launch) -> str:
    """*launch* in C++ for OpenCL, a language whose compilers know address spaces: those of Metal by other names."""
    text = launch.text.replace("[[kernel]] void", "__kernel void")
    # A kernel of OpenCL gives no truth values.
    text = text.replace("device bool* y", "device uchar* y")
    return _OPENCL + re.sub(r"\[\[.*?\]\]", "", text)


def errors_of_clang(opencl: str, folder: pathlib.Path) -> str:
    """What clang has against a source; empty where nothing."""
    file = folder / "kernel.clcpp"
    file.write_text(opencl)
    command = [CLANG, "-cl-std=clc++2021", "-x", "cl", "-target", "spir64", "-fsyntax-only", "-Wno-everything", file]
    return subprocess.run([*map(str, command)], capture_output=True, text=True).stderr
