"""MLX's caches of plans on CUDA, which count message lengths, whatever the limit on its buffer cache.

An FFT or a convolution of a new length needs a plan of its own. MLX keeps a fixed number of them and, by default, takes
many misses for an error: ``RuntimeError: Cache thrashing is happening``, from then on at every length that is not
kept, the steady one included (seen at the 257th FFT length on an H200 with MLX 0.32.4). Without that check the plan is
made again, which takes time and loses nothing.

MLX reads the variable that turns the check off with ``getenv`` whenever it makes such a cache: those of FFTs and
convolutions when they are first used, that of graphs with each stream. So it has to be set before MLX is used, and what
is set in Python's ``os.environ`` counts.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import ezmsg.core as ez

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"

# What MLX reads, and what it takes where that is not set.
_CAPACITIES = {
    "FFT plans": ("MLX_CUDA_FFT_CACHE_SIZE", 128),
    "convolution plans": ("MLX_CUDA_CONV_CACHE_SIZE", 128),
    "graphs": ("MLX_CUDA_GRAPH_CACHE_SIZE", 400),
}


PER_LENGTH = ("FFT plans", "convolution plans")
"""What takes an entry for each length of a message."""


@dataclass(frozen=True)
class PlanCaches:
    """How many plans MLX keeps on CUDA, and whether it takes many misses for an error."""

    capacities: dict[str, int]
    """Entries of each cache, by what it holds. Each length of an FFT or a convolution takes one at least."""

    refuses: bool
    """Whether MLX raises once twice as many lengths have missed a cache as it has entries."""


def tolerate_misses(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX go on after many misses, in this process and those that it starts.

    Also where the user has turned the check on: MLX's answer to a slow stream would be the end of it. The log warns.
    """
    asked = environ.get(THRASHING_CHECK, "0")
    environ[THRASHING_CHECK] = "0"
    if _as_mlx_reads(asked):
        ez.logger.warning(
            f"{THRASHING_CHECK} is {asked!r}; it is set to '0' here and in the processes that start from here. With "
            f"{asked!r} MLX raises once many message lengths have gone through an FFT or a convolution on CUDA, and at "
            "nearly every message from then on. shape_report() tells the lengths, and the log warns of many."
        )


def plan_caches(environ: Mapping[str, str] = os.environ) -> PlanCaches:
    """The plan caches that MLX has on CUDA with these environment variables."""
    capacities = {}
    for name, (variable, default) in _CAPACITIES.items():
        text = environ.get(variable, "")
        capacities[name] = int(text) if text.isdigit() else default
    return PlanCaches(capacities, _as_mlx_reads(environ.get(THRASHING_CHECK, "1")) != 0)


def _as_mlx_reads(text: str) -> int:
    """The number that *text* begins with, 0 if there is none: MLX uses ``atoi``."""
    number = re.match(r"\s*[+-]?\d+", text)
    return int(number[0]) if number else 0
