"""All recurrences: the cases common to all paths on the two that run anywhere, arguments, path, and memory."""

import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.recurrence_cases import CASES, EXACT_CASES
from helpers.recurrences import RECURRENCES, Recurrence, check_close, noise

import ezmsg.mlx.kernels as module
from ezmsg.mlx.kernels import proof
from ezmsg.mlx.kernels.cpu.compiled import KEPT_FLOATS

PATHS = ["cpu", "plain"]


@pytest.fixture(params=RECURRENCES)
def recurrence(request) -> Recurrence:
    return RECURRENCES[request.param]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_case(recurrence, case, path):
    CASES[case](recurrence, path)


@pytest.mark.parametrize("case", EXACT_CASES)
def test_exact_case(recurrence, case):
    EXACT_CASES[case](recurrence, "cpu")


@pytest.mark.parametrize("axis", [0, 1])
def test_cpu_computes_many_samples_as_it_does_few(recurrence, axis):
    # More than it has memory for beside MLX's; with a bad sample in one channel, and with nothing else in another.
    x = noise(KEPT_FLOATS // 200 + 1, 200)
    x[700, 3] = x[:, 150] = np.inf
    zi = np.full(recurrence.state_shape(x.shape, 0, pair=False), 0.1)
    few, last = recurrence.in_pieces(mx.array(x), [500], recurrence.short, recurrence.pairs_of(zi), "cpu")
    data, states = (x.T, np.moveaxis(zi, -1, -2)) if axis else (x, zi)
    pairs = recurrence.pairs_of(states, axis)
    many, zf = recurrence.function(mx.array(data), recurrence.short, pairs, axis=axis, path="cpu")
    many, zf = np.array(many), recurrence.state_of(zf, axis)
    check_close(many.T if axis else many, few, 1e-6, peak=1.0)
    np.testing.assert_allclose(np.moveaxis(zf, -1, -2) if axis else zf, recurrence.state_of(last), atol=1e-6)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("shape", [(5, 3), (5,), ()])
def test_axis_must_be_one_of_the_data(recurrence, shape):
    for axis in (len(shape), -len(shape) - 1):
        with pytest.raises(ValueError, match=f"axis is {axis}"):
            recurrence.function(mx.zeros(shape), recurrence.short, axis=axis)


@pytest.mark.parametrize("axis", ["time", True, 0.0, None], ids=repr)
def test_axis_must_be_an_integer(recurrence, axis):
    with pytest.raises(TypeError, match=f"^'axis' must be an integer, got {axis!r}"):
        recurrence.function(mx.zeros((5, 3)), recurrence.short, axis=axis)


@pytest.mark.parametrize("n", [0, 5])
def test_state_of_another_shape_is_refused(recurrence, n):
    taken = [recurrence.state_shape((n, 3), 0, pair=pair) for pair in recurrence.forms]
    named = [re.escape(str(each)) for each in reversed(taken)]
    shape, axis = taken[-1], recurrence.state_axis(0)
    wrong = [shape[:-1], (1, *shape), (*shape, 1), (*shape[:-1], 4), (shape[0] + 5, *shape[1:])]
    wrong += [(*shape[:axis], length, 3) for length in (0, 3, 5)]
    for shape in wrong:
        with pytest.raises(ValueError, match=".*".join(["zi has shape", *named])):
            recurrence.function(mx.zeros((n, 3)), recurrence.short, mx.zeros(shape), axis=0)


@pytest.mark.parametrize("sizes", [(), (0,), (1025,), (32.0,), (True,), 32, None], ids=repr)
def test_bad_chunk_sizes_are_refused_on_every_path(recurrence, sizes):
    for path in PATHS:
        with pytest.raises(ValueError, match="'chunk_sizes' must be "):
            recurrence.function(mx.zeros((5,)), recurrence.short, chunk_sizes=sizes, path=path)


@pytest.mark.parametrize("path", ["gpu", "", "CPU", "sosfilt"])
def test_unknown_path_is_refused_with_those_known(recurrence, path):
    with pytest.raises(ValueError, match=f"'path' must be .*cpu.*metal.*plain.*, got '{path}'"):
        recurrence.function(mx.zeros((5,)), recurrence.short, path=path)


@pytest.mark.parametrize("name", ["x", "zi"])
def test_arrays_of_other_libraries_are_refused(recurrence, name):
    zi = mx.zeros(recurrence.state_shape((5,), 0, pair=recurrence.forms[-1]))
    arrays = {"x": mx.zeros((5,)), "zi": zi, name: np.zeros(5, np.float32)}
    with pytest.raises(TypeError, match=f"'{name}' must be an MLX array.*, got an ndarray"):
        recurrence.function(arrays["x"], recurrence.short, arrays["zi"])


@pytest.mark.parametrize("path", PATHS)
def test_a_state_of_another_dtype_is_taken_as_float32(recurrence, path):
    x = mx.array(noise(20, 3))
    zi = mx.ones(recurrence.state_shape((20, 3), 0, pair=recurrence.forms[-1]))
    expected = recurrence.function(x, recurrence.short, zi, axis=0, path=path)
    for dtype in (mx.float16, mx.int32):
        results = recurrence.function(x, recurrence.short, zi.astype(dtype), axis=0, path=path)
        for result, other in zip(results, expected, strict=True):
            assert result.dtype == mx.float32
            np.testing.assert_array_equal(np.array(result), np.array(other))


@pytest.mark.parametrize("n", [0, 5])
def test_complex_data_and_state_are_refused(recurrence, n):
    x = mx.zeros((n, 3))
    with pytest.raises(TypeError, match="complex64"):
        recurrence.function(x.astype(mx.complex64), recurrence.short, axis=0)
    zi = mx.zeros(recurrence.state_shape(x.shape, 0, pair=recurrence.forms[-1]), dtype=mx.complex64)
    with pytest.raises(TypeError, match="complex64"):
        recurrence.function(x, recurrence.short, zi, axis=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 3), 0), ((3, 0), 1), ((2, 0, 3), 1), ((5, 0), 0), ((0,), -1)])
def test_no_samples_or_no_channels_give_an_empty_float32_and_the_state_unchanged(recurrence, path, shape, axis):
    for pair in recurrence.forms:
        zi = mx.full(recurrence.state_shape(shape, axis, pair=pair), 0.5)
        y, zf = recurrence.function(mx.zeros(shape, dtype=mx.int16), recurrence.short, zi, axis=axis, path=path)
        assert (y.shape, y.dtype) == (shape, mx.float32)
        np.testing.assert_array_equal(np.array(zf), np.array(zi))
    _, zf = recurrence.function(mx.zeros(shape), recurrence.short, axis=axis, path=path)
    assert zf.shape == recurrence.state_shape(shape, axis, pair=recurrence.starts_with_a_pair)


# -------------------------------------------------------------------------------------------------------------- path


@pytest.fixture
def taken(recurrence, monkeypatch) -> list[str]:
    """The paths whose kernels ran, up to now; no real ones do."""
    paths: list[str] = []

    def stand_in(path: str) -> SimpleNamespace:
        def run(x, coefficients, zi, axis, chunk_sizes):
            paths.append(path)
            return x, zi

        return SimpleNamespace(run=run)

    for path in ("cpu", "cuda", "metal", "plain"):
        name = f"ezmsg.mlx.kernels.{path}.{recurrence.kernel or recurrence.name}"
        monkeypatch.setitem(sys.modules, name, stand_in(path))
    # They would have nothing to prove.
    monkeypatch.setattr(proof, "holds", lambda recurrence, path, kernel: True)
    module.kernel.cache_clear()
    yield paths
    module.kernel.cache_clear()


@pytest.mark.parametrize(
    ("device", "cuda", "metal", "expected"),
    [
        (mx.cpu, False, False, "cpu"),
        (mx.cpu, True, False, "cpu"),
        (mx.cpu, False, True, "cpu"),
        (mx.gpu, True, False, "cuda"),
        (mx.gpu, False, True, "metal"),
        (mx.gpu, False, False, "plain"),
    ],
)
def test_path_follows_the_default_device_at_call_time(recurrence, taken, monkeypatch, device, cuda, metal, expected):
    recurrence.function(mx.zeros((5,)), recurrence.short)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device, 0))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    for path in (None, "plain", "metal"):
        recurrence.function(mx.zeros((5,)), recurrence.short, path=path)
    assert taken[1:] == [expected, "plain", "metal"]


# --------------------------------------------------------------------------------------------------------- ownership


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 32, 40, 1024, 1500])
def test_results_share_no_memory_with_the_arguments_or_each_other(recurrence, path, n):
    for pair in recurrence.forms:
        x, zi = mx.array(noise(n, 3)), mx.array(noise(*recurrence.state_shape((n, 3), 0, pair=pair)))
        y, zf = recurrence.function(x, recurrence.short, zi, axis=0, path=path)
        mx.eval(y, zf)
        # np.asarray of an MLX array is a writable window into it.
        windows = [np.asarray(array) for array in (x, zi, y, zf)]
        for i, a in enumerate(windows):
            assert not any(np.shares_memory(a, b) for b in windows[i + 1 :])
        expected = np.array(y), np.array(zf)
        windows[0][:] = windows[1][:] = 99
        np.testing.assert_array_equal(np.array(y), expected[0])
        np.testing.assert_array_equal(np.array(zf), expected[1])


@pytest.mark.parametrize("path", PATHS)
def test_what_was_made_in_one_thread_serves_another(recurrence, path):
    x, coefficients, results = mx.array(noise(100, 3)), recurrence.unused, []

    def first():
        y, zf = recurrence.function(x, coefficients, axis=0, path=path)
        mx.eval(y, zf)
        results.extend((np.array(y), zf))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    y, _ = recurrence.function(x, coefficients, results[1], axis=0, path=path)
    expected, _ = recurrence.reference(np.tile(np.array(x), (2, 1)), coefficients)
    check_close(np.concatenate([results[0], np.array(y)]), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cpu_result_is_contiguous(recurrence, axis):
    # With rows apart, whatever is computed from it next takes several times as long.
    y, _ = recurrence.function(mx.array(noise(5, 6, 7)), recurrence.short, axis=axis, path="cpu")
    assert np.asarray(y).flags.c_contiguous
