"""What can be tested without a compiler of which samples a block of the kernels for CUDA works on."""

import pytest

pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels.cuda_samples import LANES, blocks  # noqa: E402


def test_there_is_a_block_for_each_tile_and_32_channels():
    assert blocks(3, 8, 65) == {"grid": (3 * 3 * LANES, 8, 1), "threadgroup": (LANES, 8, 1)}
