"""Which samples of a message a thread of a kernel for CUDA works on, and how they come to it."""

from __future__ import annotations

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
