"""Second-order sections on CUDA, through ``mx.fast.cuda_kernel``: data time first, state and arithmetic in float64.

A short message is one launch: a thread keeps 16 consecutive samples of one channel in registers, runs a section over
them from a zero state, learns from the threads before it what the true state was, runs it again, and goes on to
the next section. A longer one takes three: each thread runs all sections over a tile of its own from a zero state,
then one thread a channel links the tiles, and each thread runs over its tile again from the true state. So the data
crosses memory 1.5 times as often as in a copy, for up to four sections; more of them take more passes.

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
from .cuda_sosfilt_source import HEADER, LINK, LONE, RESULT, TILES
from .layout import time_back, time_first

LONE_SAMPLES = 16
"""Samples that one thread keeps in registers in a message that takes one launch."""

LONE_TILE = 32 * LONE_SAMPLES
"""Samples of the largest such message."""

LONE_LANES = 8
"""Channels of a block for such a message; few, so that 256 channels are spread over 32 multiprocessors."""

SAMPLES = 8
"""Samples that one thread keeps in registers in a longer message, at a time."""

THREADS = 128
"""Threads of a block for a longer message: with the registers that a thread takes, five blocks fit in an SM."""

MAX_SECTIONS = 4
"""Sections of a pass over a longer message: their transition over a tile fits in the registers of a thread."""

LINK_BATCH = 24
"""Tiles, times sections, whose states the thread that links them loads at once, since it waits for memory each time;
with 32 and four sections they no longer fit in registers."""


@functools.cache
def _kernel(name: str, **constants: int):  # noqa: ANN202 - an opaque callable of MLX
    inputs, outputs, source = {
        "lone": (["x", "zi", "table"], ["y", "zf"], LONE),
        "tiles": (["x", "table"], ["tile_state", "tile_taken"], TILES),
        "link": (["tile_state", "tile_taken", "zi", "table"], ["tile_start"], LINK),
        "result": (["x", "tile_start", "table"], ["y", "zf"], RESULT),
    }[name]
    return mx.fast.cuda_kernel(
        name=f"ezmsg_mlx_sosfilt_{name}_" + "_".join(map(str, constants.values())),
        input_names=inputs,
        output_names=outputs,
        header=HEADER,
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


def table(sos: npt.NDArray[np.float64], tile: int) -> npt.NDArray[np.float64]:
    """What the kernels need of *sos*: rows, each with the transition over :data:`LONE_SAMPLES`; then that over *tile*.

    In extended precision where the machine has it: the transition of a double pole next to 1 over 256 samples has
    entries of 256, and its powers amplify what rounding does to them.
    """
    rows, transition = _recurrence(sos)
    sections = [
        np.concatenate([row, np.linalg.matrix_power(_recurrence(section[None])[1], LONE_SAMPLES).ravel()])
        for row, section in zip(rows, sos, strict=True)
    ]
    over_tile = np.linalg.matrix_power(transition, tile).ravel() if tile else []
    return np.concatenate([*sections, over_tile]).astype(np.float64)


@functools.lru_cache(maxsize=64)
def _device_table(sos: bytes, tile: int) -> mx.array:
    return mx.array(table(np.frombuffer(sos).reshape(-1, 6), tile).view(np.int64))


def tile_size(n_samples: int) -> int:
    """Samples that one thread takes of a message of *n_samples*; few where there are few, or it all waits for one."""
    return 64 if n_samples <= 4096 else 256


def _launch_lone(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_channels = chunk.shape[1]
    lanes = min(LONE_LANES, 1 << (n_channels - 1).bit_length())
    threads = LONE_TILE // LONE_SAMPLES
    y, zf = _kernel("lone", SECTIONS=len(sos), LANES=lanes, THREADS=threads, SAMPLES=LONE_SAMPLES)(
        inputs=[chunk, state, _device_table(sos.tobytes(), 0)],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        grid=(lanes * -(-n_channels // lanes), threads, 1),
        threadgroup=(lanes, threads, 1),
    )
    return y, zf


def _launch_tiles(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_samples, n_channels = chunk.shape
    tile = tile_size(n_samples)
    n_tiles = -(-n_samples // tile)
    lanes = min(32, 1 << (n_channels - 1).bit_length())
    threads = THREADS // lanes
    groups = -(-n_channels // lanes)
    constants = {"SECTIONS": len(sos), "LANES": lanes, "TILE": tile, "SAMPLES": SAMPLES}
    coefficients = _device_table(sos.tobytes(), tile)
    states = (n_tiles, 2 * len(sos), n_channels)
    blocks = {
        "grid": (lanes * -(-n_tiles // threads), threads * groups, 1),
        "threadgroup": (lanes, threads, 1),
    }
    tile_state, tile_taken = _kernel("tiles", **constants, THREADS=threads, LAST_FIRST=0)(
        inputs=[chunk, coefficients],
        output_shapes=[states, (n_tiles, n_channels)],
        output_dtypes=[mx.int64, mx.int32],
        **blocks,
    )
    (tile_start,) = _kernel("link", **constants, BATCH=LINK_BATCH // len(sos))(
        inputs=[tile_state, tile_taken, state, coefficients],
        output_shapes=[states],
        output_dtypes=[mx.int64],
        grid=(lanes * groups, 1, 1),
        threadgroup=(lanes, 1, 1),
    )
    # The last samples that the first launch read are those that may still be in the second-level cache.
    y, zf = _kernel("result", **constants, THREADS=threads, LAST_FIRST=1)(
        inputs=[chunk, tile_start, coefficients],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        **blocks,
    )
    return y, zf


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
        launch = functools.partial(_launch_lone if lone else _launch_tiles, sos[sections])
        start = flat_zi if step >= len(sos) else flat_zi[sections]
        y, state = chunked_scan(y, n_samples, (grid_size(n_samples),), start, launch, axis=0, pad=False)
        states.append(state)
    zf = states[0] if len(states) == 1 else mx.concatenate(states)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis + 1, lead=1)
