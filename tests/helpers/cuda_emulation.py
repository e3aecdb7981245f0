"""Kernels for CUDA without a GPU: their very source, compiled for the CPU and run thread by thread.

Tells whether results are right and barriers where they are needed, not how fast a kernel is, nor what a GPU makes of
the order in which blocks see each other's writes.
"""

import ctypes
import dataclasses
import functools
import hashlib
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

HERE = pathlib.Path(__file__)
HEADER, RUNTIME = HERE.with_suffix(".hpp"), HERE.with_suffix(".cpp")

COMPILER = shutil.which("c++") or shutil.which("g++") if sys.platform == "linux" else None
"""macOS has let go of what the emulation changes stacks with."""

blocks_at_once = 4
"""How many blocks run at the same time. With more than one, tiles wait for the tiles before them."""

C_TYPES = {
    mx.bool_: "bool",
    mx.float32: "float",
    mx.uint8: "uint8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint32: "uint32_t",
    # Its bits, since neither C++ nor NumPy has it.
    mx.bfloat16: "uint16_t",
}


def _compile(*arguments: object) -> None:
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-fPIC", "-pthread", *map(str, arguments)], check=True)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cuda_emulation_")


@functools.cache
def _load_runtime() -> None:
    library = pathlib.Path(_folder().name, "runtime.so")
    _compile("-shared", RUNTIME, "-o", library)
    # Kernels find it there, and are linked with nothing.
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@functools.cache
def _compiled(source: str) -> ctypes.CDLL:
    _load_runtime()
    file = pathlib.Path(_folder().name, f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cpp")
    library = file.with_suffix(".so")
    file.write_text(source)
    _compile("-shared", "-nostdlib", "-include", HEADER, file, "-o", library)
    return ctypes.CDLL(str(library))


def _unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.bool_:
        return np.full(shape, 99, np.uint8).view(np.bool_)
    if dtype == mx.float32:
        return np.full(shape, math.nan, np.float32)
    return np.full(shape, -1, np.int64) if dtype == mx.int64 else np.full(shape, 0xFFFFFFFF, np.uint32)


@dataclasses.dataclass(frozen=True)
class CudaKernel:
    """Takes the place of ``mlx.core.fast.cuda_kernel``, as far as this package uses it; evaluates at once."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        (width, height, depth), n_blocks = threadgroup, -(-grid[0] // threadgroup[0])
        assert (height, depth) == grid[1:] and depth == 1, "blocks along x alone"
        assert width * height <= 1024 and n_blocks < 2**31, "the limits of CUDA"
        bits = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in inputs]
        # Copied: NumPy's memory begins at a multiple of 16 bytes, as CUDA's does, and that of MLX's CPU device not.
        arrays = [np.array(array, order="C") for array in bits]
        # What a kernel leaves unwritten is nothing to be read.
        results = [_unwritten(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        shapes = [np.array(array.shape, np.int32) for array in arrays]
        run = getattr(_compiled(self._cpp([array.dtype for array in inputs], output_dtypes)), self.name)
        run(
            *(ctypes.c_void_p(array.ctypes.data) for array in (*arrays, *results, *shapes)),
            *map(ctypes.c_uint, (n_blocks, width, height, blocks_at_once)),
        )
        for given, array in zip(inputs, arrays, strict=True):
            if given.dtype == mx.uint8:
                # Memory of the host, which a kernel may write to.
                np.asarray(given)[...] = array
        return [mx.array(result) for result in results]

    def _cpp(self, dtypes: Sequence[mx.Dtype], output_dtypes: Sequence[mx.Dtype]) -> str:
        arguments = [f"const {C_TYPES[dtype]}* {name}" for name, dtype in zip(self.input_names, dtypes, strict=True)]
        arguments += [f"{C_TYPES[dtype]}* {name}" for name, dtype in zip(self.output_names, output_dtypes, strict=True)]
        arguments += [f"const int* {name}_shape" for name in self.input_names]
        arguments += [f"unsigned {name}" for name in ("n_blocks", "block_width", "block_height", "n_at_once")]
        return (
            f'{self.header}\nextern "C" void {self.name}({", ".join(arguments)}) {{\n'
            f"emulation::run(n_blocks, {{block_width, block_height, 1}}, n_at_once, [&] {{\n{self.source}\n}});\n}}\n"
        )
