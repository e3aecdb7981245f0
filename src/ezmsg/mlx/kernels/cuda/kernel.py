"""How the kernels for CUDA are made of their sources, and launched."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

Launch: TypeAlias = Callable[[mx.array, mx.array, int, mx.array], tuple[mx.array, mx.array]]
"""What :func:`ezmsg.mlx.scan.chunked_scan` calls."""


def made_small(source: str) -> str:
    """*source* without comments, indentation and empty lines: MLX copies and hashes all of it at each launch."""
    lines = (line.strip() for line in re.sub(r"//.*", "", source).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def cuda_kernel(  # noqa: ANN201 - an opaque callable of MLX
    name: str,
    source: str,
    header: str = "",
    *,
    constants: Mapping[str, int],
    inputs: Sequence[str],
    outputs: Sequence[str],
):
    """``mx.fast.cuda_kernel`` of a *source* that leaves *constants* open; their values become part of the name.

    In the source and not as template arguments, which MLX takes apart at each call.
    """
    values = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
    return mx.fast.cuda_kernel(
        name="_".join(["ezmsg_mlx", name, *map(str, constants.values())]),
        input_names=list(inputs),
        output_names=list(outputs),
        header=made_small(header),
        source=values + made_small(source),
    )


def launch_of(
    kernel: Callable[..., list[mx.array]],
    table: mx.array,
    shapes: Sequence[tuple[int, ...]],
    blocks: Mapping[str, tuple[int, int, int]],
    told: Callable[[], mx.array] | None = None,
) -> Launch:
    """Launches *kernel* for chunks of one size, with results of *shapes* in float32.

    To be kept for the next message of that size: to work it out anew took 2 of 9 us of Python a call.
    """
    arguments = {"output_shapes": list(shapes), "output_dtypes": [mx.float32] * len(shapes), **blocks}

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        inputs = [chunk, state, table] if told is None else [chunk, state, table, told()]
        y, state = kernel(inputs=inputs, **arguments)
        return y, state

    return launch
