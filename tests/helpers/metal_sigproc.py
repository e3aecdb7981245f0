"""What ezmsg-sigproc's kernels for Metal are tested with here: every kernel that it has, of every kind of size."""

import importlib
import sys
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from scipy.signal import butter, lfilter, sosfilt

from . import metal_emulation
from .recurrences import Cases, check_close, noise

SIZES = [(1, (1, 32)), (30, (32, 512)), (300, (512,)), (300, (7, 33, 100)), (1500, (32, 512))]
"""Samples of a message, and what it may be cut into."""

N_CHANNELS = (1, 3, 130)
"""From 128 on, sections have a thread for each channel."""

BAND_PASS = butter(2, (1000.0, 5000.0), "bandpass", fs=30000.0, output="sos")

SLOW = butter(2, 30.0, "highpass", fs=30000.0, output="sos").astype(np.float32)
"""Poles so near to 1 that a thread for each channel computes it, whatever their number; as its kernel gets them."""


class Modules(NamedTuple):
    ewma: ModuleType
    sosfilt: ModuleType


NAMES = [f"ezmsg.sigproc.util.{name}" for name in ("ewma_mlx_metal", "sosfilt_mlx_metal")]


def imported() -> Modules:
    """The modules that make the kernels, of what ``mx.fast.metal_kernel`` is at the time."""
    for name in NAMES:
        sys.modules.pop(name, None)
    return Modules(*map(importlib.import_module, NAMES))


CASES = Cases()


@CASES.add(n_channels=N_CHANNELS)
def average(modules: Modules, n_channels: int) -> None:
    alpha = 0.01
    for n, sizes in SIZES:
        x, zi = noise(n_channels, n), np.full((n_channels, 1), 0.5)
        y, zf = modules.ewma.ewma_mlx_metal(mx.array(x), alpha, mx.array(zi), chunk_sizes=sizes)
        expected, last = lfilter([alpha], [1, alpha - 1], x.astype(np.float64), zi=zi)
        check_close(y, expected)
        check_close(zf, last)


@CASES.add(n_channels=N_CHANNELS)
def sections(modules: Modules, n_channels: int) -> None:
    for function in (modules.sosfilt.sosfilt_mlx_metal, modules.sosfilt._sosfilt_mlx_metal_unfused):
        for n, sizes in SIZES:
            x, zi = noise(n_channels, n), np.full((2, n_channels, 2), 0.1)
            y, zf = function(mx.array(BAND_PASS), mx.array(x), mx.array(zi), chunk_sizes=sizes)
            expected, last = sosfilt(BAND_PASS, x.astype(np.float64), zi=zi)
            check_close(y, expected, 1e-4)
            check_close(zf, last, 1e-4)


@CASES.add(n_channels=N_CHANNELS)
def serial_sections(modules: Modules, n_channels: int) -> None:
    for n, sizes in SIZES:
        x, zi = noise(n_channels, n), np.full((1, n_channels, 2), 0.1)
        y, zf = modules.sosfilt.sosfilt_mlx_metal(mx.array(SLOW), mx.array(x), mx.array(zi), chunk_sizes=sizes)
        # In float32, whose rounding is 1e-3 of the state of such a filter; where a multiplication and an addition are
        # rounded as one, which the kernel allows, it is another rounding.
        tolerance = 1e-3 if metal_emulation.contracts() else 1e-6
        expected, last = sosfilt(SLOW, x, zi=zi.astype(np.float32))
        check_close(y, expected, tolerance)
        check_close(zf, last, tolerance, peak=np.abs(expected).max())
