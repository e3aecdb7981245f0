"""How the kernels for Metal are made of their sources, and launched.

A kernel is compiled once, whatever the message: it receives its shape at the launch. (Twice or more often where an
array has fewer than eight entries, which MLX passes in another address space.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import mlx.core as mx

from ..sources import read_source

Launch: TypeAlias = Callable[[mx.array, mx.array, int, mx.array], tuple[mx.array, mx.array]]
"""The function that :func:`ezmsg.mlx.scan.chunked_scan` calls for each chunk."""

Compiled: TypeAlias = Callable[..., list[mx.array]]
"""The result of ``mx.fast.metal_kernel``."""

SAMPLES = 10
"""Samples of one thread. With :data:`STRIPS`, a tile holds the 300 samples of a usual message."""

STRIPS = 32
"""Most threads of a threadgroup along time. Each adds up what those before it tell, one by one."""

THREADS = 256
"""Most threads of a threadgroup, a quarter of what Metal allows: that many may have as many registers as these take."""

TILE = STRIPS * SAMPLES
"""Most samples that a threadgroup goes through at a time."""

GROUPS = 128
"""Threadgroups from which on they get more channels each, up to a full simdgroup."""

SIMDGROUP = 32


@functools.cache
def metal_kernel(
    name: str,
    inputs: tuple[str, ...] = ("x", "zi", "table"),
    outputs: tuple[str, ...] = ("y", "zf"),
    **constants: int,
) -> Compiled:
    """``mx.fast.metal_kernel`` of the source *name* that leaves *constants* open; their values become part of the name.

    Division, square roots and the order of operations are as written: without ``"safe"`` a compiler may take the second
    half of a pair for zero.
    """
    header, body = read_source(__package__, f"{name}.metal")
    values = "".join(f"constexpr uint {key} = {value};\n" for key, value in constants.items())
    made = mx.fast.metal_kernel(
        name="_".join(["ezmsg_mlx", name, *map(str, constants.values())]),
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=values + body,
        compile_options={"math_mode": "safe"},
    )
    # Typed as an object.
    return cast("Compiled", made)


def threadgroups(n_samples: int, n_channels: int) -> dict[str, tuple[int, int, int]]:
    """The threads for a message, in the words of ``mlx.core.fast.metal_kernel``: lanes along x, strips along y."""
    lanes = min(8, 1 << (n_channels - 1).bit_length())
    while lanes < SIMDGROUP and n_channels > GROUPS * lanes:
        lanes *= 2
    strips = min(STRIPS, THREADS // lanes, -(-n_samples // SAMPLES))
    return {"grid": (-(-n_channels // lanes) * lanes, strips, 1), "threadgroup": (lanes, strips, 1)}


def launch_of(
    kernel: Compiled,
    table: mx.array,
    shapes: Sequence[tuple[int, ...]],
    threads: Mapping[str, tuple[int, int, int]],
) -> Launch:
    """Launches *kernel* for messages of one size, with results of *shapes* in float32."""
    arguments = {"output_shapes": list(shapes), "output_dtypes": [mx.float32] * len(shapes), **threads}

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        y, after = kernel(inputs=[chunk, state, table], **arguments)
        return y, after

    return launch
