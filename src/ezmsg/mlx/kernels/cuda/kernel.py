"""Make kernels for CUDA of their sources, and launch them.

Each block takes a tile of samples and 32 channels, computes what the tile makes of a state of zero, and publishes it at
once. Then it looks back for the nearest tile of which the state after it is known, goes forward from there over what
the tiles between have published, and publishes the state after its own. So each sample is read and written once. Blocks
start in the order of their index, so that the tiles that one waits for are running.

D. Merrill, M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

from ..sources import read_source

Launch: TypeAlias = Callable[[mx.array, mx.array, int, mx.array], tuple[mx.array, mx.array]]
"""The function that :func:`ezmsg.mlx.scan.chunked_scan` calls for each chunk."""

Compiled: TypeAlias = Callable[..., list[mx.array]]
"""The result of ``mx.fast.cuda_kernel``."""


@functools.cache
def cuda_kernel(
    name: str,
    inputs: tuple[str, ...] = ("x", "zi", "table"),
    outputs: tuple[str, ...] = ("y", "zf"),
    beginning: str = "",
    **constants: int,
) -> Compiled:
    """``mx.fast.cuda_kernel`` of the source *name* that leaves *constants* open; their values become part of the name.

    In the source and not as template arguments, which MLX takes apart at each call. The body begins with *beginning*.
    """
    header, body = read_source(__package__, f"{name}.cu")
    values = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
    made: Compiled = mx.fast.cuda_kernel(  # type: ignore[assignment]  # an opaque callable of MLX
        name="_".join(["ezmsg_mlx", name, *map(str, constants.values())]),
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=values + beginning + body,
    )
    return made


def launch_of(
    kernel: Compiled,
    table: mx.array,
    shapes: Sequence[tuple[int, ...]],
    blocks: Mapping[str, tuple[int, int, int]],
    published: Callable[[], mx.array] | None = None,
) -> Launch:
    """Launches *kernel* for chunks of one size, with results of *shapes* in float32.

    To be kept for the next message of that size, since Python takes a while to work it out.
    """
    arguments = {"output_shapes": list(shapes), "output_dtypes": [mx.float32] * len(shapes), **blocks}

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        inputs = [chunk, state, table] if published is None else [chunk, state, table, published()]
        y, state = kernel(inputs=inputs, **arguments)
        return y, state

    return launch


LONG_INPUTS = ("x", "zi", "table", "published")
"""Inputs of a kernel for long messages, the last being room for what tiles publish for each other."""

_WORDS_A_BLOCK = 256


def nothing_published(n_tiles: int, n_states: int, n_channels: int) -> Callable[[], mx.array]:
    """Gives room for what each tile publishes of its *n_states* states of each channel, with nothing published.

    Zeros, in memory of its own each time, since the kernel writes to it: `mx.compile` makes one array of two `mx.zeros`
    of the same shape, and none of what two calls of a kernel give.
    """
    zeros = cuda_kernel("nothing_published", (), ("published",), WORDS=_WORDS_A_BLOCK)
    n_words = -(-n_tiles * (n_states // 2 + 1) * n_channels // _WORDS_A_BLOCK) * _WORDS_A_BLOCK
    arguments = {
        "inputs": [],
        "output_shapes": [(n_words, 2)],
        "output_dtypes": [mx.int64],
        "grid": (n_words, 1, 1),
        "threadgroup": (_WORDS_A_BLOCK, 1, 1),
    }
    return lambda: zeros(**arguments)[0]


LANES = 32
"""Channels of a block for a long message: the threads of a warp."""

SAMPLES = 40
"""Samples of a thread for a long message: the fastest of 32, 36, 40, 44 and 48 (see the results, "How the sizes of the
kernels were chosen")."""

THREADS = 5
"""Threads of such a block along time; and the tiles before its own that it listens to."""

TILE = THREADS * SAMPLES
"""Samples of such a block."""


def blocks(n_samples: int, n_channels: int) -> dict[str, tuple[int, int, int]]:
    """The blocks for a long message, in the words of ``mlx.core.fast.cuda_kernel``.

    All along x, tile after tile, since that is the order in which they start.
    """
    n_blocks = -(-n_samples // TILE) * -(-n_channels // LANES)
    return {"grid": (n_blocks * LANES, THREADS, 1), "threadgroup": (LANES, THREADS, 1)}
