"""Whether a kernel computes what it should on the machine that it runs on: looked at once, before its first use.

A kernel that is compiled by the driver of a GPU may fail there and nowhere else. So it is run on a little data, whose
results are known in float64.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Sequence
from typing import cast

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .cells import CellKernel
from .contract import Kernel, Path, PlainKernel, Proof, Recurrence

LIMIT = 10.0
"""Seconds after which a kernel counts as one that does not end. Compiling one takes less than a second."""

TOLERANCE = 1e-4
"""Largest difference from float64, relative to the largest value. Kernels are held to a tenth of that; a fault of a
compiler shows in the first digits."""

_Sizes = tuple[tuple[int, ...], int]

_SIZES: _Sizes = (350, 50), 9
"""Samples of messages, of more than one tile of a threadgroup and of less; channels, of more than one threadgroup."""

_OTHER_SIZES: dict[Path, _Sizes] = {"cuda": ((20, 600, 30), 33)}
"""The same where others are needed. On CUDA, messages of more than 512 samples have a kernel of their own, and each
kind has to go on from the state of the other; for more than 16 channels, kernels are those that most streams compile.
"""


def _messages(path: Path) -> list[npt.NDArray[np.float32]]:
    lengths, n_channels = _OTHER_SIZES.get(path, _SIZES)
    ends = np.cumsum(lengths)
    x = np.random.default_rng(0).standard_normal((ends[-1], n_channels)).astype(np.float32) + np.float32(5)
    x[[0, 7, ends[-2] - 1, ends[-2] + 1], 2] = np.nan
    # Far from all others on both sides of where a message ends.
    x[ends[-2] - 2 : ends[-2] + 3, 1] = 9
    return np.split(x, ends[:-1])


def proofs_of(recurrence: Recurrence) -> Sequence[Proof]:
    """The cases that kernels of *recurrence* are compared with, which stand beside its plain form."""
    plain = cast(PlainKernel, importlib.import_module(f".plain.{recurrence}", __package__))
    return plain.proofs()


def difference_of(recurrence: Recurrence, kernel: Kernel, path: Path) -> float:
    """Largest difference from float64, relative to the largest value; inf where other samples than before are finite.

    Of long and short messages of few channels, as *path* needs them, with samples that are not finite in one channel.
    """
    if recurrence == "recurrentcell":
        from .plain import recurrentcell

        return recurrentcell.difference_of(cast("CellKernel", kernel))
    messages, largest = _messages(path), 0.0
    x = np.concatenate(messages).astype(np.float64)
    for case in proofs_of(recurrence):
        expected, results = case.reference(x, case.coefficients), []
        state = mx.zeros((*case.state_shape, x.shape[1]))
        for message in messages:
            y, state = kernel.run(mx.array(message), case.coefficients, state, 0, (512,))
            results.append(np.array(y, np.float32))
        found = np.concatenate(results)
        if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
            return math.inf
        largest = max(largest, float(np.nanmax(np.abs(found - expected)) / np.nanmax(np.abs(expected))))
    return largest


def _trouble(recurrence: Recurrence, kernel: Kernel, path: Path) -> str | None:
    try:
        difference = difference_of(recurrence, kernel, path)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if difference <= TOLERANCE:
        return None
    return f"differs from float64 by {difference:.1e} of the largest value"


def trouble_of(recurrence: Recurrence, kernel: Kernel, path: Path) -> str | None:
    """Say what is wrong with *kernel*, as the end of a sentence; None if nothing is.

    On Metal in a thread of its own, which is left behind where a kernel does not end. On CUDA in the thread of the
    caller, whose streams MLX then uses from the start. A limit would not help there: nothing takes a kernel that does
    not end off the GPU, and the process could not end either.
    """
    if path != "metal":
        return _trouble(recurrence, kernel, path)
    found: list[str | None] = []
    name = f"ezmsg-mlx proof of {recurrence}"
    thread = threading.Thread(target=lambda: found.append(_trouble(recurrence, kernel, path)), name=name, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return found[0] if found else f"does not end within {LIMIT:g} s"


def holds(recurrence: Recurrence, path: Path, kernel: Kernel) -> bool:
    """Whether *kernel* computes what it should here. The log warns where it does not."""
    trouble = trouble_of(recurrence, kernel, path)
    if trouble is None:
        return True
    ez.logger.warning(
        f"The kernel {recurrence!r} for {path} {trouble}. Plain MLX operations take its place: results are right, and "
        "take longer. Please report this with what `python -m ezmsg.mlx.selftest` prints."
    )
    return False
