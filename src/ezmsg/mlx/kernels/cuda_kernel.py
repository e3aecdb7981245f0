"""How the kernels for CUDA are made of their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import mlx.core as mx


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
