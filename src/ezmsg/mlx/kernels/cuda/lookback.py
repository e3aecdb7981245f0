"""How the kernels for CUDA link the tiles of a long message in one launch: decoupled look-back.

Each block takes a tile of samples and 32 channels, computes what the tile makes of a state of zero, and tells it at
once. Then it looks back for the nearest tile of which the state after it is known, goes forward from there over what
the tiles between have told, and tells the state after its own. So each sample is read and written once. Blocks start
in the order of their index, so that the tiles that one waits for are running.

D. Merrill, M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .kernel import cuda_kernel

LONG_INPUTS = ("x", "zi", "table", "told")
"""Inputs of a kernel for long messages, the last being room for what tiles tell each other."""

_WORDS_A_BLOCK = 256


def nothing_told(n_tiles: int, n_states: int, n_channels: int) -> Callable[[], mx.array]:
    """Gives room for what each tile publishes of its *n_states* states of each channel, with nothing published.

    Zeros, in memory of its own each time, since the kernel writes to it: `mx.compile` makes one array of two `mx.zeros`
    of the same shape, and none of what two calls of a kernel give.
    """
    zeros = cuda_kernel("nothing_told", (), ("told",), WORDS=_WORDS_A_BLOCK)
    n_words = -(-n_tiles * (n_states // 2 + 1) * n_channels // _WORDS_A_BLOCK) * _WORDS_A_BLOCK
    arguments = {
        "inputs": [],
        "output_shapes": [(n_words, 2)],
        "output_dtypes": [mx.int64],
        "grid": (n_words, 1, 1),
        "threadgroup": (_WORDS_A_BLOCK, 1, 1),
    }
    return lambda: zeros(**arguments)[0]
