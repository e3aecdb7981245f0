"""The advice that pages of uploads and results stay on the host, with a driver that only notes it."""

import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ezmsg.mlx.stream import device as hostpages
from ezmsg.mlx.stream.device import PAGE, keep_on_host, leave_host


@pytest.fixture
def advised(monkeypatch):
    """Address, size and kind of each advice."""
    noted = []
    monkeypatch.setattr(hostpages, "_advise", lambda: lambda *advice: noted.append(advice))
    monkeypatch.setattr(hostpages, "_advised", {})
    return noted


@pytest.mark.parametrize(
    ("n_bytes", "size"), [(PAGE // 2 + 2, PAGE), (PAGE, PAGE), (PAGE + 2, 2 * PAGE), (30 * 256 * 2, PAGE)]
)
def test_what_has_pages_of_its_own_is_advised_once_as_a_whole(advised, n_bytes, size):
    array = mx.zeros(n_bytes // 2, mx.int16)
    mx.eval(array)
    assert keep_on_host(array) is array
    assert [advice[1] for advice in advised] == [size, size]
    keep_on_host(array)
    assert len(advised) == 2


def test_what_shares_a_page_is_advised_only_if_that_is_asked_for(advised):
    array = mx.zeros(250)
    mx.eval(array)
    keep_on_host(array)
    assert not advised
    keep_on_host(array, least=1)
    # Not more than MLX has allocated.
    assert [advice[1] for advice in advised] == [1024, 1024]
    keep_on_host(mx.zeros(0), least=1)
    assert len(advised) == 2


def test_advice_is_taken_back_before_others_get_the_memory(advised):
    array = mx.zeros(5000)
    mx.eval(array)
    leave_host(array)
    assert not advised
    keep_on_host(array)
    leave_host(array)
    leave_host(array)
    (set_location, set_access, *_), taken_back = advised[:2], advised[2:]
    assert [advice[:2] for advice in taken_back] == [set_location[:2], set_access[:2]]
    assert [advice[2] for advice in advised] == [3, 5, 4, 6]
