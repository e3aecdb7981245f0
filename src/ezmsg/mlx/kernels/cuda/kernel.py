"""How the kernels for CUDA are made of their sources, and launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

from ..sources import read_source

Launch: TypeAlias = Callable[[mx.array, mx.array, int, mx.array], tuple[mx.array, mx.array]]
"""What :func:`ezmsg.mlx.scan.chunked_scan` calls."""

Compiled: TypeAlias = Callable[..., list[mx.array]]
"""What ``mx.fast.cuda_kernel`` returns."""


@functools.cache
def cuda_kernel(
    name: str,
    inputs: tuple[str, ...] = ("x", "zi", "table"),
    outputs: tuple[str, ...] = ("y", "zf"),
    **constants: int,
) -> Compiled:
    """``mx.fast.cuda_kernel`` of the source *name* that leaves *constants* open; their values become part of the name.

    In the source and not as template arguments, which MLX takes apart at each call.
    """
    header, body = read_source(__package__, f"{name}.cu")
    values = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
    made: Compiled = mx.fast.cuda_kernel(  # type: ignore[assignment]  # an opaque callable of MLX
        name="_".join(["ezmsg_mlx", name, *map(str, constants.values())]),
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=values + body,
    )
    return made


def launch_of(
    kernel: Compiled,
    table: mx.array,
    shapes: Sequence[tuple[int, ...]],
    blocks: Mapping[str, tuple[int, int, int]],
    told: Callable[[], mx.array] | None = None,
) -> Launch:
    """Launches *kernel* for chunks of one size, with results of *shapes* in float32.

    To be kept for the next message of that size, since Python takes a while to work it out.
    """
    arguments = {"output_shapes": list(shapes), "output_dtypes": [mx.float32] * len(shapes), **blocks}

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        inputs = [chunk, state, table] if told is None else [chunk, state, table, told()]
        y, state = kernel(inputs=inputs, **arguments)
        return y, state

    return launch
