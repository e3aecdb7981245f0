"""Second-order sections on CUDA, through ``mx.fast.cuda_kernel``: data time first, state and arithmetic in float64.

A short message is one block for a few channels: a thread keeps 16 consecutive samples of one channel in registers, runs
a section over them from a zero state, learns from the threads before it what the true state was, runs it again, and
goes on to the next section. In a longer one a block takes a tile of samples, all sections at once, and learns what the
state before it was as :mod:`ezmsg.mlx.kernels.cuda_lookback` says. Either way each sample is read and written once, up
to two sections; more of them in a longer message take more passes.

float64, since scipy's state needs it where a pole is next to 1. A data-centre GPU has half as many float64 units as
float32 ones, which keeps pace with memory for two sections; other GPUs have 1/64: one second of 1024 channels at
30 kHz and two sections are 1.2e9 operations, a millisecond of a large one.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..scan import chunked_scan
from .cuda import grid_size
from .cuda_lookback import LANES, LOOK_BACK, PLACE, blocks, nothing_told
from .cuda_sosfilt_source import HEADER, LONE, LONG
from .layout import time_back, time_first

LONE_SAMPLES = 16
"""Samples that one thread keeps in registers in a message that is one block along time."""

LONE_TILE = 32 * LONE_SAMPLES
"""Samples of the largest such message."""

LONE_LANES = 8
"""Channels of a block for such a message; few, so that 256 channels are spread over 32 multiprocessors."""

SAMPLES = 32
"""Samples of a thread in a longer message, in shared memory: five blocks of one section, three of two, fit in an SM."""

THREADS = 6
"""Threads of a block of a longer message along time."""

TILE = THREADS * SAMPLES
"""Samples of such a block."""

MAX_SECTIONS = 2
"""Sections of a pass over a longer message: with more, the registers of a thread leave room for one block. What one
pass hands to the next is float32: 8e-8 of the peak off for a band-pass of four sections, instead of 4e-8."""


@functools.cache
def _kernel(name: str, **constants: int):  # noqa: ANN202 - an opaque callable of MLX
    inputs, outputs, source = {
        "lone": (["x", "zi", "table"], ["y", "zf"], LONE),
        "long": (["x", "zi", "table", "told"], ["y", "zf"], PLACE + LONG),
    }[name]
    return mx.fast.cuda_kernel(
        name=f"ezmsg_mlx_sosfilt_{name}_" + "_".join(map(str, constants.values())),
        input_names=inputs,
        output_names=outputs,
        header=HEADER + LOOK_BACK,
        # Constants in the source and not as template arguments, which MLX takes apart at each call.
        source="".join(f"constexpr int {key} = {value};\n" for key, value in constants.items()) + source,
    )


def _recurrence(sos: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.longdouble], npt.NDArray[np.longdouble]]:
    """The rows (b0, g0, g1, a1, a2), and the transition of the states of all sections over one sample."""
    b0, b1, b2, _, a1, a2 = sos.astype(np.longdouble).T
    rows = np.stack([b0, b1 - a1 * b0, b2 - a2 * b0, a1, a2], axis=1)
    transition = np.zeros((2 * len(sos), 2 * len(sos)), np.longdouble)
    # What the sections before one make of their states is its input.
    value = np.zeros(2 * len(sos), np.longdouble)
    for i in range(len(sos)):
        z0, z1 = 2 * i, 2 * i + 1
        transition[z0], transition[z1] = rows[i, 1] * value, rows[i, 2] * value
        transition[z0, z0] -= a1[i]
        transition[z0, z1] += 1
        transition[z1, z0] -= a2[i]
        value = b0[i] * value
        value[z0] += 1
    return rows, transition


def table(sos: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the kernels need of *sos*: rows, each with the transition over :data:`LONE_SAMPLES`; then the transitions of
    all sections together over :data:`SAMPLES` and :data:`TILE`.

    In extended precision where the machine has it: the transition of a double pole next to 1 over 256 samples has
    entries of 256, and its powers amplify what rounding does to them.
    """
    rows, transition = _recurrence(sos)
    sections = [
        np.concatenate([row, np.linalg.matrix_power(_recurrence(section[None])[1], LONE_SAMPLES).ravel()])
        for row, section in zip(rows, sos, strict=True)
    ]
    together = [np.linalg.matrix_power(transition, n_samples).ravel() for n_samples in (SAMPLES, TILE)]
    return np.concatenate([*sections, *together]).astype(np.float64)


@functools.lru_cache(maxsize=64)
def _device_table(sos: bytes) -> mx.array:
    return mx.array(table(np.frombuffer(sos).reshape(-1, 6)).view(np.int64))


def _launch_lone(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_channels = chunk.shape[1]
    lanes = min(LONE_LANES, 1 << (n_channels - 1).bit_length())
    threads = LONE_TILE // LONE_SAMPLES
    y, zf = _kernel("lone", SECTIONS=len(sos), LANES=lanes, THREADS=threads, SAMPLES=LONE_SAMPLES)(
        inputs=[chunk, state, _device_table(sos.tobytes())],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        grid=(lanes * -(-n_channels // lanes), threads, 1),
        threadgroup=(lanes, threads, 1),
    )
    return y, zf


def _launch_long(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_samples, n_channels = chunk.shape
    y, zf = _kernel("long", SECTIONS=len(sos), LANES=LANES, THREADS=THREADS, SAMPLES=SAMPLES, TILE=TILE)(
        inputs=[
            chunk,
            state,
            _device_table(sos.tobytes()),
            nothing_told(-(-size // TILE), 2 * len(sos), n_channels),
        ],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        **blocks(-(-n_samples // TILE), THREADS, n_channels),
    )
    return y, zf


def compile_ahead(n_sections: int, n_channels: int) -> None:
    """See :func:`ezmsg.mlx.kernels.cuda.compile_ahead`."""
    _compile_ahead(n_sections, min(n_channels, LANES))


@functools.cache
def _compile_ahead(n_sections: int, n_channels: int) -> None:
    sos = np.tile([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], (n_sections, 1))
    for n_samples in (1, LONE_TILE + 1):
        mx.eval(sosfilt(mx.zeros((n_samples, n_channels)), sos, mx.zeros((n_sections, 4, n_channels)), 0, ()))


def sosfilt(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.sosfilt.sosfilt`. Lazy. Nothing is compiled for a size, so *chunk_sizes* do not matter."""
    n_samples = x.shape[axis]
    lone = n_samples <= LONE_TILE
    y, flat_zi = time_first(x, axis), time_first(zi, axis + 1, lead=1)
    states = []
    step = len(sos) if lone else MAX_SECTIONS
    for first in range(0, len(sos), step):
        sections = slice(first, first + step)
        launch = functools.partial(_launch_lone if lone else _launch_long, sos[sections])
        start = flat_zi if step >= len(sos) else flat_zi[sections]
        y, state = chunked_scan(y, n_samples, (grid_size(n_samples),), start, launch, axis=0, pad=False)
        states.append(state)
    zf = states[0] if len(states) == 1 else mx.concatenate(states)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis + 1, lead=1)
