"""The device that MLX uses, and memory that the device reads on the host.

MLX's CUDA backend uploads through managed memory: the host writes the buffer, the GPU's first access faults its
pages over to the device, and the host's next write to the recycled buffer faults them back. For short messages that
takes longer than the upload itself. With the pages pinned to the host by an advice to the driver, the GPU reads each of
them once over the bus. Small results that the host reads are the same the other way round. The advice changes where
pages live, never what they hold, and nothing depends on it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import ezmsg.core as ez
import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx

GPU: TypeAlias = Literal["cuda", "metal"]
"""The backends of MLX that compute on a GPU."""

Backend: TypeAlias = Literal["cpu", "cuda", "metal"]
"""All backends of MLX."""


def gpu_backend() -> GPU | None:
    """The GPU backend of the installed MLX that has a device on this machine; None without one."""
    import mlx.core as mx

    if mx.cuda.is_available():
        return "cuda"
    return "metal" if mx.metal.is_available() else None


def backend_in_use() -> Backend | Literal["gpu"]:
    """The backend of MLX's default device; ``"gpu"`` for a GPU of none that is known here.

    Everything that depends on the device asks for it through :func:`uses_gpu` or :func:`default_backend`, so that a
    test which stands in for a GPU replaces this function and nothing else.
    """
    import mlx.core as mx

    return (gpu_backend() or "gpu") if mx.default_device().type == mx.gpu else "cpu"


def default_backend() -> Backend | Literal["gpu"]:
    """The backend of MLX's default device, at the time of the call: a GPU build may run on its CPU device."""
    return backend_in_use()


def uses_gpu() -> bool:
    """Whether MLX's default device is a GPU, at the time of the call."""
    return backend_in_use() != "cpu"


def has_gpu_allocator() -> bool:
    """Whether MLX's buffer cache is that of a GPU's allocator, which lets one buffer through past the limit."""
    return gpu_backend() is not None


PAGE = 16 * 1024
"""Size in bytes that MLX's CUDA allocator rounds to. Below, it takes powers of two, so that all above half of it get as
much. Smaller buffers share a page with others."""

# From cuda.h: CUmem_advise and the device number of the host.
_SET_PREFERRED_LOCATION = 3
_UNSET_PREFERRED_LOCATION = 4
_SET_ACCESSED_BY = 5
_UNSET_ACCESSED_BY = 6
_HOST = -1
_FIRST_DEVICE = 0

_MOST_ADVISED = 1024
_advised: dict[int, int] = {}


@functools.cache
def _advise() -> Callable[[int, int, int, int], int] | None:
    """The driver's ``cuMemAdvise``; None where MLX runs without CUDA, or its driver is not to be found."""
    if gpu_backend() != "cuda":
        return None
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemAdvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def keep_on_host(array: mx.array, least: int = PAGE // 2 + 1) -> mx.array:
    """Advise the driver to leave the memory of *array* on the host, and let the GPU read and write it there.

    Args:
        array: One that MLX has just copied from host memory and the device has not used, or one that has been read on
            the host.
        least: Size in bytes from which on arrays are worth it. By default, those with pages of their own.

    Returns:
        *array*. Without CUDA, and for smaller ones, nothing is done.
    """
    advise = _advise()
    if advise is None or array.nbytes < max(least, 1):
        return array
    address, size = _range(array)
    # MLX recycles its buffers, so the same few addresses come again, and each keeps its advice.
    if _advised.get(address, 0) < size:
        if len(_advised) >= _MOST_ADVISED:
            _advised.clear()
        _advised[address] = size
        advise(address, size, _SET_PREFERRED_LOCATION, _HOST)
        advise(address, size, _SET_ACCESSED_BY, _FIRST_DEVICE)
    return array


def leave_host(array: mx.array) -> None:
    """Take back the advice for the memory of *array*, before MLX gives that to others. In any thread."""
    advise = _advise()
    if advise is None:
        return
    address, size = _range(array)
    if _advised.pop(address, 0):
        advise(address, size, _UNSET_PREFERRED_LOCATION, _HOST)
        advise(address, size, _UNSET_ACCESSED_BY, _FIRST_DEVICE)


def _range(array: mx.array) -> tuple[int, int]:
    """Address and size in bytes of the memory of *array*.

    As much as MLX has allocated: the driver refuses a range that goes on behind it.
    """
    n_bytes = array.nbytes
    size = -(-n_bytes // PAGE) * PAGE if n_bytes >= PAGE else 1 << (n_bytes - 1).bit_length()
    return np.asarray(array).__array_interface__["data"][0], size


_THREADS = 256
_BYTES_A_THREAD = 16

# MLX lets a kernel write to arrays of its own making only. The memory is its input, and nobody else reads it meanwhile.
_TO_HOST_HEADER = """
template <typename T>
__device__ void copy_to_host(const T* x, const unsigned char* memory, size_t n_items, size_t thread) {
  T* y = reinterpret_cast<T*>(const_cast<unsigned char*>(memory));
  constexpr size_t n = 16 / sizeof(T);
  if ((thread + 1) * n <= n_items && reinterpret_cast<size_t>(x) % 16 == 0) {
    reinterpret_cast<ulonglong2*>(y)[thread] = reinterpret_cast<const ulonglong2*>(x)[thread];
  } else {
    for (size_t i = thread * n; i < (thread + 1) * n && i < n_items; ++i) y[i] = x[i];
  }
}
"""
_TO_HOST = f"""
size_t thread = blockIdx.x * size_t({_THREADS}) + threadIdx.x;
copy_to_host(x, memory, size_t(x_shape[0]), thread);
if (thread == 0) done[0] = 1;
"""

ToHost: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"
"""Has the device write an array, row by row, to bytes on the host; gives an array that is there when it has."""


def to_host() -> ToHost | None:
    """What writes results to the host's memory; None where MLX computes in memory that the host reads."""
    return _to_host() if gpu_backend() == "cuda" and uses_gpu() else None


@functools.cache
def _to_host() -> ToHost | None:
    import mlx.core as mx

    kernel = mx.fast.cuda_kernel(
        name="ezmsg_mlx_to_host",
        input_names=["x", "memory"],
        output_names=["done"],
        header=_TO_HOST_HEADER,
        source=_TO_HOST,
    )

    def write(x: mx.array, memory: mx.array) -> mx.array:
        n_threads = -(-x.nbytes // _BYTES_A_THREAD)
        (done,) = kernel(  # type: ignore[operator]  # an opaque callable of MLX
            inputs=[x.reshape(-1), memory],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(-(-n_threads // _THREADS) * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
        )
        return done

    # Once in a process: a kernel that does not compile or is wrong must cost no result.
    try:
        x, memory = mx.arange(1003, dtype=mx.float32) + 1, mx.zeros(8192, mx.uint8)
        mx.eval(x, memory)
        window = np.asarray(memory)
        mx.eval(write(x, memory))
        is_right = bool((window[: x.nbytes].view(np.float32) == np.arange(1003) + 1).all())
    except Exception:
        ez.logger.exception("Results are read through MLX, since the kernel that writes them to the host failed.")
        return None
    if not is_right:
        ez.logger.warning("Results are read through MLX, since the kernel that writes them to the host is wrong.")
    return write if is_right else None
