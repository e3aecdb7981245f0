"""What compare_cache_limits.py and transformer_shapes.py share: measurements that do not touch each other."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 1 << 30
HUGE = 1 << 62


def in_fresh_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call *function* in a new process: MLX's limit, its cache and its kernels belong to the process."""
    # Spawned, for a forked child of a process that has used MLX hangs.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *args, **kwargs).result()


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
