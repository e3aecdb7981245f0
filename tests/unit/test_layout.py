"""Memory that the kernels of the CPU compute in."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.ewma import ewma  # noqa: E402
from ezmsg.mlx.kernels.layout import KEPT_FLOATS, scratch  # noqa: E402


def address(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]


@pytest.mark.parametrize("size", [1, 76800, KEPT_FLOATS, KEPT_FLOATS + 1])
def test_scratch_has_the_size_and_begins_half_a_page_into_a_page(size):
    memory = scratch(size)
    assert (memory.dtype, memory.shape) == (np.float32, (size,))
    assert address(memory) % 4096 == 2048


def test_scratch_is_kept_for_short_messages_and_not_for_long_ones():
    assert address(scratch(1000)) == address(scratch(5000))
    longer = scratch(KEPT_FLOATS + 1)
    assert not np.shares_memory(longer, scratch(KEPT_FLOATS + 1))


def test_threads_do_not_share_scratch():
    with ThreadPoolExecutor(1) as other:
        assert not np.shares_memory(scratch(1000), other.submit(scratch, 1000).result())


def test_a_result_stays_as_it_is_when_the_next_is_computed():
    first, _ = ewma(mx.ones((300, 8)), 0.5, axis=0, path="cpu")
    before = np.array(first)
    ewma(mx.zeros((300, 8)), 0.5, axis=0, path="cpu")
    np.testing.assert_array_equal(np.array(first), before)
