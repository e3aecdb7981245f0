"""Launch machine code on an NVIDIA GPU, and import nothing else: compute-sanitizer looks at all that a process does."""

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

import cupy
import numpy as np

ERRORS = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)

UNWRITTEN = "EZMSG_MLX_METAL_UNWRITTEN"
"""Set for initcheck: a launch is repeated with results as they are allocated, of which nothing is copied."""

# Each array in memory that is its alone, so that what lies outside is nobody's.
cupy.cuda.set_allocator(None)


class Recorded(NamedTuple):
    """A launch, and what the emulation on the CPU made of it."""

    cubin: str
    entry: str
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]
    buffers: list[np.ndarray]
    """What is read, in the order of the kernel's arguments."""

    results: list[np.ndarray]
    is_exact: bool
    """Whether results must be the same to the last bit."""

    def difference(self, computed: Sequence[np.ndarray]) -> str:
        """What is wrong with results; empty where nothing is."""
        for number, (expected, found) in enumerate(zip(self.results, computed, strict=True)):
            if expected.dtype != np.float32:
                wrong = expected.view(np.uint8) != found.view(np.uint8)
            elif self.is_exact:
                bits, others = (np.where(np.isnan(array), np.float32(np.nan), array) for array in (expected, found))
                wrong = bits.view(np.uint32) != others.view(np.uint32)
            else:
                wrong = ~np.isclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            if wrong.any():
                at = tuple(int(index[0]) for index in np.nonzero(wrong))
                return (
                    f"{self.entry}: result {number} differs in {wrong.sum()} of {wrong.size} values, "
                    f"{found[at]!r} instead of {expected[at]!r} at {at}"
                )
        return ""


@functools.lru_cache(maxsize=4096)
def function_of(cubin: str, entry: str) -> cupy.RawKernel:
    return cupy.RawModule(path=cubin).get_function(entry)


def launched(
    function: cupy.RawKernel,
    blocks: tuple[int, int, int],
    threads: tuple[int, int, int],
    buffers: Sequence[np.ndarray],
    like: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """The results, of the shapes and dtypes of *like*; what a kernel leaves unwritten is NaN, or 255 of bool."""
    given = [cupy.asarray(array) for array in buffers]
    if os.environ.get(UNWRITTEN):
        function(blocks, threads, (*given, *(cupy.empty(one.shape, one.dtype) for one in like)))
        cupy.cuda.runtime.deviceSynchronize()
    results = [cupy.empty(one.shape, one.dtype) for one in like]
    for result in results:
        result.data.memset(0xFF, result.nbytes)
    function(blocks, threads, (*given, *results))
    return [cupy.asnumpy(result) for result in results]
