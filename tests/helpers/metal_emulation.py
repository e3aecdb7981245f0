"""Kernels for Metal without a Mac: the very text that Metal would compile, compiled for the CPU and run there.

MLX writes that text on any machine: where a call of a kernel is traced for export, it is recorded with the generated
source, the grid and the threadgroup. A shim for the Metal Shading Language (``metal_emulation.hpp``) makes C++ of the
source, and ``metal_emulation.cpp`` runs its threads in any order between barriers, watching each access to memory.

Tells whether results are right, barriers where they are needed, and all accesses inside; not how fast a kernel is.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from ezmsg.mlx.kernels.metal.kernel import metal_kernel

HERE = pathlib.Path(__file__)
SHIM, RUNTIME = HERE.with_suffix(".hpp"), HERE.with_suffix(".cpp")

COMPILER = shutil.which("g++") if sys.platform == "linux" else None
"""macOS has let go of what the emulation changes stacks with, and clang notes accesses in other words."""

ORDERS = {"ascending": 0, "descending": 1, "random": 2024}
"""Of the threads of a group between two barriers, and of the groups."""

DEFAULT_FLAGS = ("-O1", "-ffp-contract=off")

COUNTED = "-DCOUNTED"
"""Flag with which kernels count what they compute, and are not watched; see :data:`tally`."""

HAS_FMA = pathlib.Path("/proc/cpuinfo").is_file() and " fma " in pathlib.Path("/proc/cpuinfo").read_text()

FMA_FLAGS = ("-mfma",) if HAS_FMA else ()

DTYPES = {
    "bfloat16_t": np.uint16,
    "bool": np.bool_,
    "float": np.float32,
    "int": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
}


SAFE = 0
"""What MLX writes for ``compile_options={"math_mode": "safe"}``."""


@dataclasses.dataclass
class Options:
    order: str = "ascending"
    """One of :data:`ORDERS`."""

    flags: tuple[str, ...] = DEFAULT_FLAGS
    """For the compiler."""

    device: str = os.environ.get("EZMSG_MLX_METAL", "cpu")
    """``"cpu"``: the emulation; ``"cuda"``: :mod:`helpers.metal_cuda`; ``"vulkan"``: :mod:`helpers.metal_vulkan`."""

    cuda_flag: str = "-fmad=false"
    """For the compiler of CUDA: nothing is contracted but what says so."""


options = Options()
"""Of all that runs from now on; see :func:`using`."""


def contracts() -> bool:
    """Whether a multiplication and an addition may be rounded once."""
    return "-fmad=true" == options.cuda_flag or "-ffp-contract=fast" in options.flags


launches: list["Launch"] = []
"""What has been run, most recent last, while :func:`recorded` is on."""


@dataclasses.dataclass
class Tally:
    """What kernels did, since it was set to zero."""

    launches: int = 0
    operations: int = 0
    """On floats, with :data:`COUNTED` among the flags."""

    moved: int = 0
    """Bytes of the arrays that kernels read and wrote, each counted once a launch."""

    copies: int = 0
    """Arrays that MLX had to copy before a launch, since they were not in row order."""

    copied: int = 0
    """Bytes read and written for that."""


tally = Tally()

_is_recording = False

_is_tracing = False


@contextlib.contextmanager
def using(**changes: object) -> Iterator[None]:
    """Run kernels with other options."""
    before = dataclasses.asdict(options)
    vars(options).update(changes)
    try:
        yield
    finally:
        vars(options).update(before)


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    space: str
    """``"device"``, ``"constant"``, or ``""`` for a built-in value."""

    type: str
    is_const: bool
    is_reference: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    """What MLX would hand to Metal."""

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    math_mode: int
    """:data:`SAFE`, or something else."""

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        signature = re.search(rf"\[\[kernel\]\] void {self.name}\((.*?)\) \{{", self.text, re.DOTALL)
        found = []
        for line in signature[1].split(",\n"):
            match = re.fullmatch(r"\s*(const )?(device|constant|)\s*(\w+)([*&]?)\s+(\w+) \[\[.*\]\]", line)
            found.append(Parameter(match[5], match[2], match[3], bool(match[1]), match[4] == "&"))
        return found

    @functools.cached_property
    def with_constants(self) -> str:
        """The text with constants in the place of template parameters."""
        text = self.text
        if template := re.search(r"template <([^>]*)>\n(?=\[\[kernel\]\])", text):
            instance = re.search(r"\ntemplate \[\[host_name.*", text)
            values = re.search(rf"decltype\({self.name}<(.*?)>\)", instance[0])[1].split(", ")
            kinds = [part.split() for part in template[1].split(", ")]
            constants = [
                f"using {name} = {value};\n" if kind == "typename" else f"constexpr {kind} {name} = {value};\n"
                for (kind, name), value in zip(kinds, values, strict=True)
            ]
            text = text[: instance.start()].replace(template[0], "".join(constants))
        return text

    @functools.cached_property
    def cpp(self) -> str:
        """The text as C++: but for its template parameters, it is as it was."""
        index, arguments = 0, []
        for parameter in self.parameters:
            if parameter.space:
                pointer = f"({'const ' * parameter.is_const}{parameter.type}*)call.buffers[{index}]"
                arguments.append("*" * parameter.is_reference + pointer)
                index += 1
            else:
                arguments.append(f"emulation::position().{parameter.name}")
        return (
            f"{self.with_constants}\n"
            "extern const char __start_threadgroup_memory[] __attribute__((weak));\n"
            "extern const char __stop_threadgroup_memory[] __attribute__((weak));\n"
            'extern "C" const char* group_memory() { return __start_threadgroup_memory; }\n'
            'extern "C" size_t group_memory_size() { return __stop_threadgroup_memory - __start_threadgroup_memory; }\n'
            'extern "C" __attribute__((no_sanitize("thread"))) void body(const emulation::Call& call) {\n'
            f"{self.name}({', '.join(arguments)});\n}}\n"
        )

    def buffers(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the kernel is given to read: *inputs*, and the shapes of those whose shape it asks for."""
        given, buffers = iter(inputs), []
        last = None
        for parameter in self.parameters:
            if not (parameter.space and parameter.is_const):
                continue
            if last is not None and parameter.name.endswith("_shape"):
                buffers.append(np.array(last.shape, np.int32))
            else:
                last = next(given)
                buffers.append(last)
            assert buffers[-1].dtype == DTYPES[parameter.type], parameter
        return buffers


def launch_of(exported: bytes) -> Launch:
    """The one kernel of a function that ``mx.export_function`` has written.

    Strings are written with their length in front, numbers as they are in memory.
    """

    def number(at: int, kind: str = "Q") -> int:
        return struct.unpack_from(f"<{kind}", exported, at)[0]

    def string(at: int) -> tuple[str, int]:
        end = at + 8 + number(at)
        return exported[at + 8 : end].decode(), end

    start = exported.index(b"\x0c\0\0\0\0\0\0\0CustomKernel")
    assert exported.count(b"CustomKernel", start) == 1, "one kernel a function"
    # Its name, with what follows it in the class.
    name, at = string(exported.index(b"custom_kernel_", start) - 8)
    text, at = string(at)
    grid, threadgroup = struct.unpack_from("<3i", exported, at), struct.unpack_from("<3i", exported, at + 12)
    at += 24
    n_shapes = number(at)
    # Which shapes are told; whether inputs are made contiguous; no value to fill results with; no scalars.
    at += 8 + 3 * n_shapes
    assert exported[at] == 1 and exported[at + 1] == 0 and number(at + 2) == 0
    at += 10
    # Not compiled before; no threadgroup memory that is asked for at the launch; then the options of the compiler.
    assert exported[at] == 0 and number(at + 1, "i") == 0
    return Launch(name, text, grid, threadgroup, number(at + 5, "i"))


def _compile(*arguments: object) -> None:
    done = subprocess.run(
        [COMPILER, "-std=c++17", "-fPIC", "-Wno-attributes", *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"does not compile: {done.stderr[:2000]}")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="metal_emulation_")


@functools.cache
def _runtime() -> pathlib.Path:
    target = pathlib.Path(_folder().name, "runtime.o")
    _compile("-O1", "-c", RUNTIME, "-o", target)
    return target


@functools.cache
def compiled(cpp: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """A library of *cpp*; AssertionError where that is not what a compiler takes."""
    digest = hashlib.sha256(repr((cpp, flags)).encode()).hexdigest()[:16]
    source = pathlib.Path(_folder().name, f"{digest}.cpp")
    target, library = source.with_suffix(".o"), source.with_suffix(".so")
    source.write_text(cpp)
    checks = ("-Werror=double-promotion", "-Werror=return-type")
    watched = () if COUNTED in flags else ("-fsanitize=thread",)
    _compile(*flags, *checks, *watched, "-c", "-include", SHIM, source, "-o", target)
    _compile("-shared", "-Wl,-Bsymbolic", target, _runtime(), "-o", library)
    return ctypes.CDLL(str(library))


class _Call(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("group", ctypes.c_uint * 3),
        ("order", ctypes.c_uint),
        ("body", ctypes.c_void_p),
        ("group_memory", ctypes.c_void_p),
        ("group_memory_size", ctypes.c_size_t),
    ]


def run(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* where the options say; AssertionError tells what it did that it must not."""
    if options.device == "cpu":
        return run_emulated(launch, inputs, results)
    from . import metal_cuda, metal_vulkan

    return {"cuda": metal_cuda.run, "vulkan": metal_vulkan.run}[options.device](launch, inputs, results)


def run_emulated(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* on the CPU; AssertionError tells what a thread did that it must not."""
    library = compiled(launch.cpp, options.flags)
    parameters = [parameter for parameter in launch.parameters if parameter.space]
    buffers = launch.buffers(inputs)
    n_inputs = len(buffers)
    buffers += results
    pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
    library.group_memory.restype, library.group_memory_size.restype = ctypes.c_void_p, ctypes.c_size_t
    call = _Call(
        ctypes.addressof(pointers),
        launch.grid,
        launch.threadgroup,
        ORDERS[options.order],
        ctypes.cast(library.body, ctypes.c_void_p),
        library.group_memory(),
        library.group_memory_size(),
    )
    message = ctypes.create_string_buffer(500)
    failed = library.emulation_run(
        ctypes.byref(call),
        (ctypes.c_size_t * len(buffers))(*(buffer.nbytes for buffer in buffers)),
        (ctypes.c_size_t * len(buffers))(*(buffer.itemsize for buffer in buffers)),
        len(buffers),
        bytes(i >= n_inputs for i in range(len(buffers))),
        (ctypes.c_char_p * len(buffers))(*(parameter.name.encode() for parameter in parameters)),
        message,
        ctypes.c_size_t(len(message)),
    )
    counter = ctypes.c_ulong.in_dll(library, "emulation_operations")
    tally.operations += counter.value
    counter.value = 0
    if failed:
        raise AssertionError(f"{launch.name}: {message.value.decode()}")


@functools.lru_cache(maxsize=4096)
def _exported(kernel: object, arguments: tuple, examples: tuple) -> Launch:
    file = pathlib.Path(_folder().name, "function.mlxfn")

    def function(*inputs: mx.array) -> list[mx.array]:
        return kernel(inputs=list(inputs), **{key: list(v) if type(v) is tuple else v for key, v in arguments})

    mx.export_function(str(file), function, *(mx.zeros(shape, dtype) for shape, dtype in examples))
    return launch_of(file.read_bytes())


class MetalKernel:
    """Takes the place of what ``mx.fast.metal_kernel`` makes, and evaluates at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._kernel = _metal_kernel(*args, **kwargs)

    def launch(self, inputs: Sequence[mx.array], **arguments: object) -> Launch:
        """What MLX makes of a call."""
        fixed = tuple((key, tuple(value) if type(value) is list else value) for key, value in arguments.items())
        return _exported(self._kernel, fixed, tuple((array.shape, array.dtype) for array in inputs))

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **arguments: object,
    ) -> list[mx.array]:
        if _is_tracing:
            return self._kernel(inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **arguments)
        launch = self.launch(inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **arguments)
        if _is_recording:
            launches.append(launch)
        assert set(output_dtypes) <= {mx.float32, mx.bool_}
        # The bits of what NumPy lacks.
        given = [np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array) for array in inputs]
        copied = [array.nbytes for array in given if not array.flags.c_contiguous]
        tally.launches += 1
        tally.copies += len(copied)
        tally.copied += 2 * sum(copied)
        tally.moved += sum(array.nbytes for array in given) + sum(
            math.prod(shape) * dtype.size for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        )
        # What a kernel leaves unwritten is nothing to be read.
        results = [
            np.full(shape, np.nan, np.float32) if dtype == mx.float32 else np.full(shape, 99, np.uint8).view(np.bool_)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        run(launch, [np.ascontiguousarray(array) for array in given], results)
        return [mx.array(result) for result in results]


_metal_kernel = mx.fast.metal_kernel


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Keep what is run from now on in the list that this gives."""
    global _is_recording
    launches.clear()
    _is_recording = True
    try:
        yield launches
    finally:
        _is_recording = False


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Record calls of kernels in a graph that is never evaluated, as MLX does under ``mx.export_function``."""
    global _is_tracing
    _is_tracing = True
    try:
        yield
    finally:
        _is_tracing = False


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[None]:
    """Emulate the kernels that *modules* make, which must keep none from before or for later."""

    def forget() -> None:
        metal_kernel.cache_clear()
        for module in modules:
            for name in ("_launch", "_compile_ahead"):
                if hasattr(module, name):
                    getattr(module, name).cache_clear()

    monkeypatch.setattr(mx.fast, "metal_kernel", MetalKernel)
    forget()
    yield
    forget()
