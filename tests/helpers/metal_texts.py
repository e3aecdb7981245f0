"""The texts that MLX writes of the kernels for Metal, one for each way in which it passes their arrays.

A kernel that is added gets an entry in :data:`MODULES` and in :data:`CALLS`, and one in ``CHECKS`` and some in
``MUTANTS`` of :mod:`helpers.metal_mutants`. The rest follows: :mod:`helpers.metal_suite` runs it in the emulation, on
CUDA and on Vulkan.
"""

import functools
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ezmsg.mlx.kernels.crossings import Crossings
from ezmsg.mlx.kernels.metal import crossings, ewma, recurrentcell, sosfilt, zscore
from ezmsg.mlx.kernels.plain.recurrentcell import random_cell

from .metal_emulation import Launch, recorded

MODULES = {
    "crossings": crossings,
    "ewma": ewma,
    "recurrentcell": recurrentcell,
    "sosfilt": sosfilt,
    "zscore": zscore,
}
"""The module that launches each kernel."""

SECTION = np.array([[1.0, 0.5, 0.25, 1.0, -0.5, 0.25]])

SHAPES = [(1, 1), (300, 1), (1, 8), (9, 9)]
"""Arrays of fewer than eight entries are "constant", others "device"."""


_CROSSINGS = [Crossings(np.zeros(n, np.float32), scale="rms", window=3, gives_values=n > 8) for n in (1, 8, 9)]


def _run(name: str, coefficients: object, shape: tuple[int, int], state_shape: tuple[int, ...]) -> None:
    MODULES[name].run(mx.zeros(shape), coefficients, mx.zeros((*state_shape, shape[1])), 0, ())


def _step(cell: str, bits: int) -> None:
    state = (mx.zeros((1, 64)),) * (2 if cell == "LSTM" else 1)
    recurrentcell.run(mx.zeros((1, 64)), random_cell(cell, bits, 64, 64), state)


CALLS: dict[str, list[Callable[[], None]]] = {
    "crossings": [
        functools.partial(_run, "crossings", of, (n, len(of.thresholds)), (of.n_rows,))
        for of in _CROSSINGS
        for n in (1, 300)
    ],
    "ewma": [functools.partial(_run, "ewma", 0.1, shape, (n,)) for n in (2, 4) for shape in SHAPES],
    "recurrentcell": [functools.partial(_step, cell, bits) for cell in ("GRU", "LSTM") for bits in (32, 16, 8)],
    "sosfilt": [functools.partial(_run, "sosfilt", SECTION, shape, (1, 4)) for shape in SHAPES],
    "zscore": [functools.partial(_run, "zscore", 0.1, shape, (6,)) for shape in SHAPES],
}
"""Calls of each kernel, of which MLX writes all texts that it has for it."""


def launches_of(name: str) -> list[Launch]:
    """One for each text; the emulation must be installed."""
    with recorded() as launches:
        for call in CALLS[name]:
            call()
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
float exp(float);
typedef ushort bfloat16_t;
typedef uint uint32_t;
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
