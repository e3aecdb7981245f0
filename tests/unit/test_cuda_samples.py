"""What can be tested without a compiler of which samples a block of the kernels for CUDA works on."""

import pytest

pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels.cuda.kernel import LANES, THREADS, TILE, blocks


def test_there_is_a_block_for_each_tile_and_32_channels():
    for n_samples in (2 * TILE + 1, 3 * TILE):
        assert blocks(n_samples, 65) == {"grid": (3 * 3 * LANES, THREADS, 1), "threadgroup": (LANES, THREADS, 1)}
