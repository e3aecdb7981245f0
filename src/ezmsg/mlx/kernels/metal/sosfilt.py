"""Second-order sections on Metal, all of them in one launch a message: see ``sources/sosfilt.metal``."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...scan import chunked_scan
from ..layout import buffer_length, time_back, time_first
from ..sections import DifferenceForm
from .kernel import SAMPLES, THREADS, Launch, launch_of, metal_kernel, threadgroups

POWERS = 6
"""Where a row of the table has what 0 to :data:`SAMPLES` samples of zero make of a state, 2 x 2 each."""

ROW = POWERS + 4 * (SAMPLES + 1)
"""Numbers in the table for a section."""


def _row(section: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    form = DifferenceForm.of(section)
    powers = [np.linalg.matrix_power(form.transition, k).ravel() for k in range(SAMPLES + 1)]
    front = [form.b0, *form.inputs, *form.change[:, 0], float(form.mirrored)]
    return np.concatenate([front, *powers])


@functools.lru_cache(maxsize=64)
def _table(sos: bytes) -> mx.array:
    """The table of the sections for the kernel, rounded to float32 from float64; uploaded once."""
    rows = [_row(section) for section in np.frombuffer(sos).reshape(-1, 6)]
    return mx.array(np.concatenate(rows).astype(np.float32))


@functools.lru_cache(maxsize=256)
def _launch(sos: bytes, n_samples: int, n_channels: int, n_sections: int) -> Launch:
    shapes = [(buffer_length(n_samples), n_channels), (n_sections, 4, n_channels)]
    kernel = metal_kernel("sosfilt", SAMPLES=SAMPLES, THREADS=THREADS, POWERS=POWERS, ROW=ROW)
    return launch_of(kernel, _table(sos), shapes, threadgroups(n_samples, n_channels))


def compile_ahead(coefficients: npt.NDArray[np.float64], n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. Metal compiles one kernel for all messages and filters."""
    _compile_ahead(len(coefficients), n_channels)


@functools.lru_cache(maxsize=64)
def _compile_ahead(n_sections: int, n_channels: int) -> None:
    sos = np.tile([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], (n_sections, 1))
    mx.eval(run(mx.zeros((8, n_channels)), sos, mx.zeros((n_sections, 4, n_channels)), 0, ()))


def run(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy. Nothing is compiled for a size."""
    n_samples, sizes = x.shape[axis], (buffer_length(x.shape[axis]),)
    flat, state = time_first(x, axis), time_first(zi, axis + 1, lead=1)
    launch = _launch(sos.tobytes(), n_samples, flat.shape[1], len(sos))
    y, zf = chunked_scan(flat, n_samples, sizes, state, launch, axis=0, pad=False)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis + 1, lead=1)
