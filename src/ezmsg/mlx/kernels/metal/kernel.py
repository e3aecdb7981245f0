"""How the kernels for Metal are made of their sources, and launched.

A kernel is compiled once, whatever the message: it is told its shape at the launch. (Twice or more often where an
array has fewer than eight entries, which MLX passes in another address space.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TypeAlias

import mlx.core as mx

Launch: TypeAlias = Callable[[mx.array, mx.array, int, mx.array], tuple[mx.array, mx.array]]
"""What :func:`ezmsg.mlx.scan.chunked_scan` calls."""

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


def made_small(source: str) -> str:
    """*source* without comments, indentation and empty lines: MLX copies and hashes all of it at each launch."""
    lines = (line.strip() for line in re.sub(r"//.*", "", source).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def read_source(name: str) -> str:
    """The file *name* of the folder ``sources``."""
    return files(__package__).joinpath("sources", name).read_text(encoding="utf-8")


def metal_kernel(  # noqa: ANN201 - an opaque callable of MLX
    name: str, *, constants: Mapping[str, int], inputs: Sequence[str], outputs: Sequence[str]
):
    """``mx.fast.metal_kernel`` of the function in ``sources/<name>.metal``, which leaves *constants* open.

    MLX writes the signature itself; the one in the file is for readers and formatters. Division, square roots and the
    order of operations are as written: without ``"safe"`` a compiler may take a two-sum for a plain one.
    """
    own, _, function = made_small(read_source(f"{name}.metal")).partition("[[kernel]]")
    body = function[function.index(") {\n") + 4 : function.rindex("}")]
    values = "".join(f"constexpr uint {key} = {value};\n" for key, value in constants.items())
    return mx.fast.metal_kernel(
        name=f"ezmsg_mlx_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=made_small(read_source("strips.h")) + own,
        source=values + body,
        compile_options={"math_mode": "safe"},
    )


def threadgroups(n_samples: int, n_channels: int) -> dict[str, tuple[int, int, int]]:
    """The threads for a message, in the words of ``mlx.core.fast.metal_kernel``: lanes along x, strips along y."""
    lanes = min(8, 1 << (n_channels - 1).bit_length())
    while lanes < SIMDGROUP and n_channels > GROUPS * lanes:
        lanes *= 2
    strips = min(STRIPS, THREADS // lanes, -(-n_samples // SAMPLES))
    return {"grid": (-(-n_channels // lanes) * lanes, strips, 1), "threadgroup": (lanes, strips, 1)}


def launch_of(
    kernel: Callable[..., list[mx.array]],
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
