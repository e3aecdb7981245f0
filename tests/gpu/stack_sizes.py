"""How many hidden units a block of the kernel of a stack takes: ``python tests/gpu/stack_sizes.py``.

The kernel as MLX would be given it, compiled by CuPy, launched again and again, and timed by the device. The stack is
that of ``network_speed.py``.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ezmsg.mlx.kernels.cells import Cell
from ezmsg.mlx.kernels.cuda import recurrentcell
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.kernels.plain.recurrentcell import random_stack

SIZES = (7168, 768, 5, 41)
N_LAUNCHES = 300

C_TYPES = {mx.float32: "float", mx.uint8: "unsigned char", mx.uint32: "unsigned", mx.bfloat16: "unsigned short"}


class Recorded:
    """Takes the place of ``mlx.core.fast.cuda_kernel``."""

    def __init__(self, **made: Any) -> None:
        self.made = made

    def __call__(self, **launch: Any) -> list[mx.array]:
        self.launch = launch
        Recorded.last = self
        return [mx.zeros(shape) for shape in launch["output_shapes"]]

    last: Recorded

    def source(self) -> str:
        made, arguments = self.made, []
        for name, array in zip(made["input_names"], self.launch["inputs"], strict=True):
            arguments.append(f"const {C_TYPES[array.dtype]}* {name}")
        arguments += [f"float* {name}" for name in made["output_names"]]
        return (
            f'{made["header"]}\nextern "C" __global__ void {made["name"]}'
            f"({', '.join(arguments)}) {{\n{made['source']}\n}}\n"
        )


# Made once, since random weights take longer than anything else here.
_random_stack = functools.cache(random_stack)


def recorded(cell: Cell, bits: int, sizes: Sequence[int] = SIZES) -> Recorded:
    """The launch of a step that writes its results to the host."""
    n_input, n_hidden, n_layers, n_out = sizes
    kernel, mx.fast.cuda_kernel = mx.fast.cuda_kernel, Recorded
    cuda_kernel.cache_clear()
    try:
        stack = recurrentcell.Stack(_random_stack(cell, bits, n_input, n_hidden, n_layers, n_out), 1)
        state = mx.zeros((n_layers, 2 if cell == "LSTM" else 1, 1, n_hidden))
        x = np.random.default_rng(0).standard_normal((1, n_input)).astype(np.float32)
        stack(mx.array(x), state, mx.zeros(16384, mx.uint8))
    finally:
        mx.fast.cuda_kernel = kernel
        cuda_kernel.cache_clear()
    return Recorded.last


_on_device: dict[int, tuple[mx.array, Any]] = {}


def on_device(array: mx.array) -> Any:
    """*array* for CuPy, which weights are copied to once."""
    import cupy

    if id(array) not in _on_device:
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        _on_device[id(array)] = array, cupy.asarray(np.array(bits))
    return _on_device[id(array)][1]


def microseconds(launch: Recorded, source: str, expected: list[np.ndarray]) -> float:
    """What the device takes for a launch among many; the first one's results have to be *expected*, if any are."""
    import cupy

    module = cupy.RawModule(code=source, backend="nvrtc", options=("-std=c++17",))
    function = module.get_function(launch.made["name"])
    inputs = [on_device(array) for array in launch.launch["inputs"]]
    state, kept = ([cupy.zeros(shape, np.float32) for _ in range(2)] for shape in launch.launch["output_shapes"][:2])
    kept[1] = cupy.zeros_like(kept[0])
    grid, block = launch.launch["grid"], launch.launch["threadgroup"]
    blocks = (grid[0] // block[0], 1, 1)
    weights = inputs[4:]

    def run(number: int) -> None:
        now, after = number % 2, (number + 1) % 2
        function(blocks, block, (inputs[0], kept[now], inputs[2], state[now], *weights, state[after], kept[after]))

    run(0)
    found = cupy.asnumpy(state[1]), cupy.asnumpy(inputs[2])[: 4 * SIZES[3]].view(np.float32)
    if not expected:
        expected.extend(found)
    difference = max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))
    if not difference < 1e-5:
        return float("inf")
    times = []
    for _ in range(3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for number in range(N_LAUNCHES):
            run(number + 1)
        end.record()
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / N_LAUNCHES)
    return min(times)


UNROLL, PREFETCH = "#pragma unroll 2", "MOST = 6144"

Choice = tuple[int, int, int, int]
"""Units of a block, the same of the first layer, rounds of a loop taken together, bytes of a row brought near."""


def measured(bits: int = 32, cell: Cell = "GRU", quick: bool = False) -> dict[Choice, float]:
    """Microseconds of each choice, the best first."""
    found: dict[Choice, float] = {}
    expected: list[np.ndarray] = []
    before = recurrentcell.UNITS, recurrentcell.LONG_UNITS
    try:
        for units, first in itertools.product((8,) if quick else (8, 4, 2), (2,) if quick else (4, 2)):
            recurrentcell.UNITS, recurrentcell.LONG_UNITS = units, first
            launch = recorded(cell, bits)
            source = launch.source()
            assert UNROLL in source and PREFETCH in source
            for rounds, most in ((2, 6144),) if quick else ((2, 6144), (4, 6144), (2, 0)):
                text = source.replace(UNROLL, f"#pragma unroll {rounds}").replace(PREFETCH, f"MOST = {most}")
                found[units, first, rounds, most] = microseconds(launch, text, expected)
    finally:
        recurrentcell.UNITS, recurrentcell.LONG_UNITS = before
    return dict(sorted(found.items(), key=lambda item: item[1]))


def say(bits: int, times: dict[Choice, float]) -> None:
    for (units, first, rounds, most), time in times.items():
        print(f"{bits} bits: {time:6.1f} µs, units {units}, first {first}, rounds {rounds}, near {most}", flush=True)


if __name__ == "__main__":
    for bits in (32, 16, 8):
        say(bits, measured(bits, quick="--quick" in sys.argv))
