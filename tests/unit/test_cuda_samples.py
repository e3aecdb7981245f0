"""What can be tested without a GPU of how the kernels for CUDA link tiles."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels.cuda_lookback import LANES, blocks, nothing_told  # noqa: E402


def test_nothing_is_told_at_first():
    told = nothing_told(5, 2, 7)
    assert (told.shape, told.dtype) == ((5, 4, 7), mx.int64)
    assert not np.asarray(told).any()


@pytest.mark.parametrize("transform", [lambda function: function, mx.compile], ids=["plain", "compiled"])
def test_kernels_of_one_graph_do_not_share_what_they_write_to(transform):
    def of_two_kernels(x):
        return x + 1, nothing_told(3, 1, 4).reshape(-1), nothing_told(3, 1, 4).reshape(6, 4)

    _, *both = transform(of_two_kernels)(mx.zeros((2,)))
    mx.eval(both)
    windows = [np.asarray(told) for told in both]
    windows[0][...] = 1
    assert not windows[1].any()


def test_there_is_a_block_for_each_tile_and_32_channels():
    assert blocks(3, 8, 65) == {"grid": (3 * 3 * LANES, 8, 1), "threadgroup": (LANES, 8, 1)}
