"""MLX's caches of plans on CUDA, which count message lengths, whatever the limit on its buffer cache.

An FFT or a convolution of a new length needs a plan of its own. MLX keeps a fixed number of them and, by default, takes
many misses for an error: ``RuntimeError: Cache thrashing is happening``, from then on at every length that is not
kept, the steady one included (seen at the 257th FFT length on an H200 with MLX 0.32.4). Without that check the plan is
made again, which takes time and loses nothing.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"

# What MLX reads, and what it takes where that is not set.
_CAPACITIES = {
    "FFT plans": ("MLX_CUDA_FFT_CACHE_SIZE", 128),
    "convolution plans": ("MLX_CUDA_CONV_CACHE_SIZE", 128),
    "graphs": ("MLX_CUDA_GRAPH_CACHE_SIZE", 400),
}


@dataclass(frozen=True)
class PlanCaches:
    """How many plans MLX keeps on CUDA, and whether it takes many misses for an error."""

    capacities: dict[str, int]
    """Entries of each cache, by what it holds. Each length of an FFT or a convolution takes one at least."""

    refuses: bool
    """Whether MLX raises once twice as many lengths have missed a cache as it has entries."""


def tolerate_misses(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX go on after many misses, unless the user has decided. MLX reads it when a cache is first used."""
    environ.setdefault(THRASHING_CHECK, "0")


def plan_caches(environ: Mapping[str, str] = os.environ) -> PlanCaches:
    """The plan caches that MLX has on CUDA with these environment variables."""
    capacities = {}
    for name, (variable, default) in _CAPACITIES.items():
        text = environ.get(variable, "")
        capacities[name] = int(text) if text.isdigit() else default
    return PlanCaches(capacities, environ.get(THRASHING_CHECK, "1") != "0")
