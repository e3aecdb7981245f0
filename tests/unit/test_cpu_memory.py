"""Where the kernels of the CPU compute, and that results are nobody else's."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.ewma import ewma
from ezmsg.mlx.kernels.cpu.compiled import KEPT_FLOATS, computed


def address(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]


def target_of(n_samples: int) -> np.ndarray:
    targets = []

    def run(source: np.ndarray, target: np.ndarray) -> None:
        targets.append(target)
        target[:] = 2 * source

    result = computed(np.arange(n_samples, dtype=np.float32), (1, n_samples), run)
    np.testing.assert_array_equal(np.asarray(result), np.arange(n_samples, dtype=np.float32)[None] * 2)
    return targets[0]


def test_few_samples_are_computed_beside_mlx_and_many_in_its_memory():
    samples = np.ones((KEPT_FLOATS + 1,), np.float32)
    for n_samples, in_place in ((1, False), (KEPT_FLOATS, False), (KEPT_FLOATS + 1, True)):
        arrays = []
        result = computed(samples[:n_samples], (n_samples,), lambda *both, arrays=arrays: arrays.extend(both))
        assert (arrays[0] is arrays[1]) == in_place == np.shares_memory(np.asarray(result), arrays[1])
        assert not np.shares_memory(arrays[1], samples)


@pytest.mark.parametrize("n_samples", [1, 76800, KEPT_FLOATS])
def test_memory_beside_mlx_is_kept_and_begins_half_a_page_into_a_page(n_samples):
    assert address(target_of(n_samples)) == address(target_of(5))
    assert address(target_of(n_samples)) % 4096 == 2048


def test_threads_do_not_share_memory():
    with ThreadPoolExecutor(1) as other:
        assert not np.shares_memory(target_of(1000), other.submit(target_of, 1000).result())


@pytest.mark.parametrize("n_samples", [300, KEPT_FLOATS])
def test_a_result_stays_as_it_is_when_the_next_is_computed(n_samples):
    first, _ = ewma(mx.ones((n_samples, 8)), 0.5, axis=0, path="cpu")
    before = np.array(first)
    ewma(mx.zeros((n_samples, 8)), 0.5, axis=0, path="cpu")
    np.testing.assert_array_equal(np.array(first), before)
