"""The kernels of the CPU, each compiled by one of the processes that run tests while the others compile another one.

Where numba's cache has none of them, each process would compile all, and so would each process that a test starts.
"""

import fcntl
import pathlib
import sys

import numpy as np

from . import warm
from .processes import environment

KERNELS = ("zscore", "ewma", "sosfilt", "chain")


def compile_all(folder: pathlib.Path) -> None:
    """Return when all are compiled; *folder* is one that all of these processes know."""
    taken_by_others = [name for name in KERNELS if not _compiled_here(folder / name)]
    for name in taken_by_others:
        with open(folder / name, "a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)


def _compiled_here(lock: pathlib.Path) -> bool:
    with open(lock, "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # What goes wrong there is told by the tests.
        warm.run(["-m", "helpers.kernels_once", lock.name], environment=environment())
        return True


def _compile(name: str) -> None:
    if name == "chain":
        from ezmsg.mlx.kernels.cpu import loops, median

        loops.compile_ahead()
        median.compile_ahead()
        return
    from ezmsg.mlx.kernels import kernel

    coefficients = np.array([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]) if name == "sosfilt" else 0.5
    kernel(name, "cpu").compile_ahead(coefficients, 1)


if __name__ == "__main__":
    _compile(sys.argv[1])
