"""What the comparisons share: measurements that do not touch each other."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

from .interrupts import hidden_from_children

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 1 << 30
HUGE = 1 << 62


def in_fresh_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call *function* in a new process: MLX's limit, its cache and its kernels belong to the process."""
    # Spawned, for a forked child of a process that has used MLX hangs.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            with hidden_from_children():
                future = executor.submit(function, *args, **kwargs)
            return future.result()
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def lift_small_default() -> bool:
    """Lift MLX's default limit out of the way where it is so small that it hides what a cache does without one.

    Returns:
        Whether it did: on the CPU (32 MiB). On a GPU the default is about as large as its memory, and stays.
    """
    import mlx.core as mx

    default = mx.set_cache_limit(HUGE)
    if default >= SMALL:
        mx.set_cache_limit(default)
    return default < SMALL
