"""Second-order sections on CUDA, through ``mx.fast.cuda_kernel``: data time first, state and arithmetic in float64.

A short message is one block for a few channels: a thread keeps 16 consecutive samples of one channel in registers, runs
a section over them from a zero state, learns from the threads before it what the true state was, runs it again, and
goes on to the next section. In a longer one a block takes a tile of samples to shared memory, runs two sections at
once over it, learns what the state before it was as :mod:`ezmsg.mlx.kernels.cuda.kernel` says, and goes on to the
next two. Each sample is read and written once (twice where an odd section is left over).

float64, since scipy's state needs it where a pole is next to 1. A data-centre GPU has half as many float64 units as
float32 ones, which keeps pace with memory for two sections; other GPUs have 1/64: one second of 1024 channels at
30 kHz and two sections are 1.2e9 operations, a millisecond of a large one.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...scan import chunked_scan
from ..layout import buffer_length, time_back, time_first
from .kernel import (
    LANES,
    LONG_INPUTS,
    SAMPLES,
    THREADS,
    TILE,
    Launch,
    blocks,
    cuda_kernel,
    launch_of,
    nothing_published,
)

SHORT_SAMPLES = 16
"""Samples that one thread keeps in registers in a message that is one block along time."""

SHORT_THREADS = 32
"""Threads of a block along time for such a message."""

SHORT_TILE = SHORT_THREADS * SHORT_SAMPLES
"""Samples of the largest such message."""

SHORT_LANES = 8
"""Channels of a block for such a message; few, so that 256 channels are spread over 32 multiprocessors."""

SECTIONS = 2
"""Sections that a longer message goes through at a time: four at once need 128 registers a thread instead of 64. What
is handed to the next two is float32: 8e-8 of the peak off for a band-pass of four sections, instead of 4e-8."""


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
    """The table of *sos* for the kernels.

    Rows, each with the transition over :data:`SHORT_SAMPLES`; then the transitions of all sections together over
    :data:`SAMPLES` and :data:`TILE`.

    In extended precision where the machine has it: the transition of a double pole next to 1 over 256 samples has
    entries of 256, and its powers amplify what rounding does to them.
    """
    rows, transition = _recurrence(sos)
    sections = [
        np.concatenate([row, np.linalg.matrix_power(_recurrence(section[None])[1], SHORT_SAMPLES).ravel()])
        for row, section in zip(rows, sos, strict=True)
    ]
    together = [np.linalg.matrix_power(transition, n_samples).ravel() for n_samples in (SAMPLES, TILE)]
    return np.concatenate([*sections, *together]).astype(np.float64)


_BYTES_A_SECTION = 6 * np.dtype(np.float64).itemsize


@functools.lru_cache(maxsize=64)
def _device_table(sos: bytes, n_passes: int) -> mx.array:
    passes = np.frombuffer(sos).reshape(n_passes, -1, 6)
    return mx.array(np.concatenate([table(sections) for sections in passes]).view(np.int64))


@functools.lru_cache(maxsize=256)
def _launch(sos: bytes, n_samples: int, n_channels: int) -> Launch:
    n_all = len(sos) // _BYTES_A_SECTION
    size = buffer_length(n_samples)
    shapes = [(size, n_channels), (n_all, 4, n_channels)]
    if n_samples <= SHORT_TILE:
        lanes = min(SHORT_LANES, 1 << (n_channels - 1).bit_length())
        grid = (lanes * -(-n_channels // lanes), SHORT_THREADS, 1)
        of_message = {"grid": grid, "threadgroup": (lanes, SHORT_THREADS, 1)}
        kernel = cuda_kernel("sosfilt_short", SECTIONS=n_all, LANES=lanes, SAMPLES=SHORT_SAMPLES, THREADS=SHORT_THREADS)
        return launch_of(kernel, _device_table(sos, 1), shapes, of_message)
    n_sections = min(n_all, SECTIONS)
    n_passes = n_all // n_sections
    # For as many samples as the buffer has, of which there are fewer lengths.
    published = nothing_published(-(-size // TILE) * n_passes, 2 * n_sections, n_channels)
    of_block = {"LANES": LANES, "SAMPLES": SAMPLES, "THREADS": THREADS, "TILE": TILE}
    kernel = cuda_kernel("sosfilt_long", LONG_INPUTS, SECTIONS=n_sections, PASSES=n_passes, **of_block)
    return launch_of(kernel, _device_table(sos, n_passes), shapes, blocks(n_samples, n_channels), published)


def compile_ahead(coefficients: npt.NDArray[np.float64], n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Takes seconds in each process."""
    _compile_ahead(len(coefficients), min(n_channels, LANES))


@functools.cache
def _compile_ahead(n_sections: int, n_channels: int) -> None:
    sos = np.tile([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], (n_sections, 1))
    for n_samples in (1, SHORT_TILE + 1):
        mx.eval(run(mx.zeros((n_samples, n_channels)), sos, mx.zeros((n_sections, 4, n_channels)), 0, ()))


def run(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy, and compiled for all sizes at once."""
    n_samples, n_sections = x.shape[axis], len(sos)
    is_flat = axis == 0 and x.ndim == 2
    y, start = (x, zi) if is_flat else (time_first(x, axis), time_first(zi, axis + 1, lead=1))
    # In a longer message an odd section comes last, by itself.
    is_whole = n_samples <= SHORT_TILE or n_sections < SECTIONS or n_sections % SECTIONS == 0
    parts = [(sos, start)] if is_whole else [(sos[:-1], start[:-1]), (sos[-1:], start[-1:])]
    sizes, states = (buffer_length(n_samples),), []
    for sections, state in parts:
        launch = _launch(sections.tobytes(), n_samples, y.shape[1])
        y, state = chunked_scan(y, n_samples, sizes, state, launch, axis=0, pad=False)
        states.append(state)
    zf = states[0] if is_whole else mx.concatenate(states)
    return (y, zf) if is_flat else (time_back(y, x.shape, axis), time_back(zf, zi.shape, axis + 1, lead=1))
