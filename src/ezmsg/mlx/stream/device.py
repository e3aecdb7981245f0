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
import os
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

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


CUDA_GRAPHS = "MLX_USE_CUDA_GRAPHS"
"""MLX's environment variable."""


def start_kernels_one_by_one(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX start kernels one by one in this process and those that it starts, unless the user has said otherwise.

    Else MLX makes a CUDA graph for each evaluation. A message of a fused chain or a step of a decoder is one evaluation
    of a few kernels, for which the graph takes longer than the kernels do. MLX reads the variable once in a process,
    when it first computes on the GPU, so whoever has used it there before keeps the graphs.
    """
    environ.setdefault(CUDA_GRAPHS, "0")


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
        driver = ctypes.CDLL("libcuda.so.1")
        function = driver.cuMemAdvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int

    def advise(address: int, size: int, advice: int, device: int) -> int:
        context = ctypes.c_void_p()
        # A thread in which MLX has not computed has no context.
        if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value:
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), _FIRST_DEVICE) == 0:
                driver.cuCtxSetCurrent(context)
        result: int = function(address, size, advice, device)
        return result

    return advise


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

_COPIES = """
template <typename T>
__device__ bool is_wide(const T* x, size_t n_items, size_t thread) {
  return (thread + 1) * (16 / sizeof(T)) <= n_items && reinterpret_cast<size_t>(x) % 16 == 0;
}

template <typename T>
__device__ void copy_to_host(const T* x, const unsigned char* memory, size_t n_items, size_t thread) {
  T* y = reinterpret_cast<T*>(const_cast<unsigned char*>(memory));
  constexpr size_t n = 16 / sizeof(T);
  if (is_wide(x, n_items, thread)) {
    reinterpret_cast<ulonglong2*>(y)[thread] = reinterpret_cast<const ulonglong2*>(x)[thread];
  } else {
    for (size_t i = thread * n; i < (thread + 1) * n && i < n_items; ++i) y[i] = x[i];
  }
}

template <typename T, typename U>
__device__ void copy_from_host(const T* x, U* y, size_t n_items, size_t thread) {
  constexpr size_t n = 16 / sizeof(T), n_stores = n * sizeof(U) / 16;
  if (is_wide(x, n_items, thread)) {
    alignas(16) T items[n];
    alignas(16) U wide[n];
    *reinterpret_cast<ulonglong2*>(items) = reinterpret_cast<const ulonglong2*>(x)[thread];
    for (size_t i = 0; i < n; ++i) wide[i] = static_cast<U>(items[i]);
    for (size_t i = 0; i < n_stores; ++i)
      reinterpret_cast<ulonglong2*>(y)[thread * n_stores + i] = reinterpret_cast<ulonglong2*>(wide)[i];
  } else {
    for (size_t i = thread * n; i < (thread + 1) * n && i < n_items; ++i) y[i] = static_cast<U>(x[i]);
  }
}
"""

# MLX lets a kernel write to arrays of its own making only. The memory is its input, and nobody else reads it meanwhile.
_TO_HOST = f"""
size_t thread = blockIdx.x * size_t({_THREADS}) + threadIdx.x;
copy_to_host(x, memory, size_t(x_shape[0]), thread);
if (thread == 0) done[0] = 1;
"""
_FROM_HOST = f"""
size_t thread = blockIdx.x * size_t({_THREADS}) + threadIdx.x;
copy_from_host(x, y, size_t(x_shape[0]), thread);
if (thread == 0) done[0] = 1;
"""


class Bus(NamedTuple):
    """Has the device copy between its memory and that of the host."""

    write: Callable[[mx.array, mx.array], mx.array]
    """Writes an array, row by row, to bytes on the host; gives an array that is there when it has."""

    read: Callable[[mx.array, mx.Dtype], tuple[mx.array, mx.array]]
    """Reads an array that lies on the host, as one of the same dtype or as float32; gives that, and an array that is
    there when it has."""


def bus() -> Bus | None:
    """The kernels that copy over the bus; None where MLX computes in memory that the host reads."""
    return _bus() if _has_cuda() and uses_gpu() else None


@functools.cache
def _has_cuda() -> bool:
    # Asked for each message.
    return gpu_backend() == "cuda"


@functools.cache
def _bus() -> Bus | None:
    import mlx.core as mx

    write_kernel = _copy_kernel("to_host", ["x", "memory"], ["done"], _TO_HOST)
    read_kernel = _copy_kernel("from_host", ["x"], ["y", "done"], _FROM_HOST)

    def write(x: mx.array, memory: mx.array) -> mx.array:
        (done,) = write_kernel(
            inputs=[x.reshape(-1), memory], output_shapes=[(1,)], output_dtypes=[mx.int32], **_threads_for(x.nbytes)
        )
        return done

    def read(x: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        y, done = read_kernel(
            inputs=[x.reshape(-1)],
            output_shapes=[x.shape, (1,)],
            output_dtypes=[dtype, mx.int32],
            **_threads_for(x.nbytes),
        )
        return y, done

    made = Bus(write, read)
    # Once in a process: a kernel that does not compile or is wrong must cost no result.
    try:
        is_right = _is_right(made)
    except Exception:
        ez.logger.exception("MLX copies messages and results, since the kernels that do it over the bus failed.")
        return None
    if not is_right:
        ez.logger.warning("MLX copies messages and results, since the kernels that do it over the bus are wrong.")
    return made if is_right else None


def _copy_kernel(name: str, inputs: list[str], outputs: list[str], source: str) -> Callable[..., list[mx.array]]:
    import mlx.core as mx

    return mx.fast.cuda_kernel(  # type: ignore[return-value]  # an opaque callable of MLX
        name=f"ezmsg_mlx_{name}", input_names=inputs, output_names=outputs, header=_COPIES, source=source
    )


def _threads_for(n_bytes: int) -> dict[str, tuple[int, int, int]]:
    n_blocks = -(-n_bytes // (_BYTES_A_THREAD * _THREADS))
    return {"grid": (n_blocks * _THREADS, 1, 1), "threadgroup": (_THREADS, 1, 1)}


def _is_right(bus: Bus) -> bool:
    import mlx.core as mx

    counts = np.arange(1003, dtype=np.int16)
    memory = mx.zeros(8192, mx.uint8)
    y, done = bus.read(mx.array(counts), mx.float32)
    mx.eval(y, memory)
    window = np.asarray(memory)[: y.nbytes].view(np.float32)
    mx.eval(bus.write(y, memory), done)
    return bool((window == counts).all())
