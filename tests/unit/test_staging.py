"""Memory that messages are copied to."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ezmsg.mlx.chain import compiledrun as staging
from ezmsg.mlx.chain.compiledrun import DTYPES, Staging


@pytest.mark.parametrize("dtype", sorted(map(str, DTYPES)))
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (30, 256), (5, 2, 3)])
def test_the_memory_is_that_of_the_last_message_of_its_shape(dtype, shape):
    kept, rng = Staging(), np.random.default_rng(0)
    first, second = (rng.integers(0, 100, shape).astype(dtype) for _ in range(2))
    array = kept.filled(first)
    np.testing.assert_array_equal(np.array(array + 0), first)
    assert kept.filled(second) is array
    np.testing.assert_array_equal(np.array(array + 0), second)
    assert str(array.dtype).endswith(dtype) and array.shape == shape


def test_another_dtype_has_memory_of_its_own():
    kept = Staging()
    for dtype in ("int16", "uint8", "int16"):
        x = np.arange(6).reshape(2, 3).astype(dtype)
        assert kept.filled(x).dtype == getattr(mx, dtype)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 64])
def test_several_threads_copy_all_of_a_large_message(n_rows, monkeypatch):
    monkeypatch.setattr(staging, "LARGE", 1)
    monkeypatch.setattr(staging.os, "cpu_count", lambda: 8)
    kept = Staging()
    # Neither contiguous nor writable, as what comes from another process may be.
    whole = np.random.default_rng(n_rows).integers(-99, 99, (2 * n_rows, 6)).astype(np.int16)
    whole.flags.writeable = False
    for x in (whole[::2], whole[1::2, ::-1]):
        np.testing.assert_array_equal(np.array(kept.filled(x)), x)
