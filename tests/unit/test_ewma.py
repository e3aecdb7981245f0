"""The function ewma(): the cases common to all paths on the two that run anywhere, and what is particular to one."""

import math
import threading
from functools import partial

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import (  # noqa: E402
    CASES,
    alpha_of,
    check_close,
    in_pieces,
    noise,
    reference,
    state_of,
    zero_state,
)

import ezmsg.mlx.ewma as module  # noqa: E402
from ezmsg.mlx import recurrence  # noqa: E402
from ezmsg.mlx.ewma import ewma  # noqa: E402

PATHS = ["cpu", "plain"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_case(case, path):
    CASES[case](path)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0000001, math.nan, math.inf, True, "0.1", None, 0.1 + 0j], ids=repr)
def test_alpha_must_be_a_number_above_0_and_up_to_1(alpha):
    with pytest.raises(ValueError, match="alpha is .*> 0 and <= 1"):
        ewma(mx.zeros((5,)), alpha)


@pytest.mark.parametrize("alpha", [1, np.float32(0.25), np.float64(0.25), 5e-324])
def test_alpha_may_be_any_real_number(alpha):
    y, _ = ewma(mx.ones((1,)), alpha)
    assert y.item() == np.float32(alpha)


@pytest.mark.parametrize("shape", [(5, 3), (5,), ()])
def test_axis_must_be_one_of_the_data(shape):
    for axis in (len(shape), -len(shape) - 1):
        with pytest.raises(ValueError, match=f"axis is {axis}"):
            ewma(mx.zeros(shape), 0.1, axis=axis)


@pytest.mark.parametrize("shape", [(1,), (5, 3), (3, 3), (0, 3), (1, 2), (2, 4), (1, 1, 3)])
@pytest.mark.parametrize("n", [0, 5])
def test_state_of_another_shape_is_refused(shape, n):
    with pytest.raises(ValueError, match=r"zi has shape .*\(1, 3\), \(2, 3\)"):
        ewma(mx.zeros((n, 3)), 0.1, mx.zeros(shape), axis=0)


@pytest.mark.parametrize("sizes", [(), (0,), (1025,), (32.0,), (True,), 32, None], ids=repr)
def test_bad_chunk_sizes_are_refused_on_every_path(sizes):
    for path in PATHS:
        with pytest.raises(ValueError, match="chunk_sizes is "):
            ewma(mx.zeros((5,)), 0.1, chunk_sizes=sizes, path=path)


@pytest.mark.parametrize("path", ["gpu", "", "CPU", "ewma"])
def test_unknown_path_is_refused_with_those_known(path):
    with pytest.raises(ValueError, match=f"path is '{path}'.*cpu.*metal.*plain"):
        ewma(mx.zeros((5,)), 0.1, path=path)


@pytest.mark.parametrize("n", [0, 5])
def test_complex_data_and_state_are_refused(n):
    x = mx.zeros((n, 3))
    with pytest.raises(TypeError, match="complex64"):
        ewma(x.astype(mx.complex64), 0.1, axis=0)
    with pytest.raises(TypeError, match="complex64"):
        ewma(x, 0.1, mx.zeros((1, 3), dtype=mx.complex64), axis=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 3), 0), ((3, 0), 1), ((2, 0, 3), 1), ((5, 0), 0), ((0,), -1)])
def test_no_samples_or_no_channels_give_an_empty_float32_and_the_state_unchanged(path, shape, axis):
    for length in (1, 2):
        zi = zero_state(shape, axis, length) + 0.5
        y, zf = ewma(mx.zeros(shape, dtype=mx.int16), 0.1, zi, axis=axis, path=path)
        assert (y.shape, y.dtype) == (shape, mx.float32)
        np.testing.assert_array_equal(np.array(zf), np.array(zi))
    _, zf = ewma(mx.zeros(shape), 0.1, axis=axis, path=path)
    assert zf.shape == zero_state(shape, axis, 1).shape


# -------------------------------------------------------------------------------------------------------------- path


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
def test_path_follows_the_default_device_at_call_time(monkeypatch, device, cuda, metal, expected):
    taken = []

    class Kernels:
        @staticmethod
        def ewma(x, alpha, zi, axis, sizes):
            return x, zi

    monkeypatch.setattr(module, "_kernels", lambda path: taken.append(path) or Kernels)
    ewma(mx.zeros((5,)), 0.1)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device, 0))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(recurrence, "_gpu_path", recurrence._gpu_path.__wrapped__)
    ewma(mx.zeros((5,)), 0.1)
    ewma(mx.zeros((5,)), 0.1, path="plain")
    assert taken[1:] == [expected, "plain"]


# --------------------------------------------------------------------------------------------------------- ownership


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 32, 40, 1024, 1500])
def test_results_share_no_memory_with_the_arguments_or_each_other(path, n):
    for length in (1, 2):
        x, zi = mx.array(noise(n, 3)), mx.array(noise(length, 3))
        y, zf = ewma(x, 0.1, zi, axis=0, path=path)
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
def test_state_made_in_one_thread_serves_another(path):
    x, results = mx.array(noise(100, 3)), []

    def first():
        y, zf = ewma(x, 0.1, axis=0, path=path)
        mx.eval(y, zf)
        results.extend((np.array(y), zf))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    y, _ = ewma(x, 0.1, results[1], axis=0, path=path)
    check_close(np.concatenate([results[0], np.array(y)]), reference(np.tile(np.array(x), (2, 1)), 0.1))


# ------------------------------------------------------------------------------------- samples that are not finite


@pytest.mark.parametrize("axis", [0, 1])
def test_cpu_leaves_a_bad_sample_out_of_the_average_whatever_the_cutting(axis):
    alpha, x = alpha_of(0.01), noise(700, 9)
    x[[0, 5, 6, 300, 699], [0, 1, 1, 2, 3]] = [math.nan, math.inf, -math.inf, math.nan, math.inf]
    expected = x.astype(np.float64)
    for channel in range(9):
        finite = np.isfinite(x[:, channel])
        expected[finite, channel] = reference(x[finite, channel], alpha)
    if axis == 1:
        x, expected = x.T, expected.T
    for lengths in ([], [1] * 20, [6, 0, 300]):
        y, _ = in_pieces(mx.array(x), lengths, alpha, zero_state(x.shape, axis), "cpu", axis=axis)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


def test_plain_operations_count_a_bad_sample_as_one_at_the_average_before_its_chunk():
    alpha, x = alpha_of(0.01), noise(96, 2) + 3
    x[[40, 70, 71], [0, 1, 1]] = [math.nan, math.inf, -math.inf]
    run = partial(ewma, alpha=alpha, axis=0, chunk_sizes=(32,), path="plain")
    average, filled = [[2.0, 2.0]], x.copy()
    state = state_of(average, alpha)
    for start in (0, 32, 64):
        chunk = filled[start : start + 32]
        chunk[~np.isfinite(chunk)] = np.broadcast_to(average, chunk.shape)[~np.isfinite(chunk)]
        y, state = run(mx.array(chunk), zi=state)
        average = np.array(y)[-1:]
    y, _ = run(mx.array(x), zi=state_of([[2.0, 2.0]], alpha))
    expected, _ = run(mx.array(filled), zi=state_of([[2.0, 2.0]], alpha))
    finite = np.isfinite(x)
    check_close(np.array(y)[finite], np.array(expected)[finite], 1e-6)
    np.testing.assert_array_equal(np.array(y)[~finite], x[~finite])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cpu_result_is_contiguous(axis):
    # With rows apart, whatever is computed from it next takes several times as long.
    y, _ = ewma(mx.array(noise(5, 6, 7)), 0.1, axis=axis, path="cpu")
    assert np.asarray(y).flags.c_contiguous


@pytest.mark.parametrize("name", ["x", "zi"])
def test_arrays_of_other_libraries_are_refused(name):
    arrays = {"x": mx.zeros((5,)), "zi": mx.zeros((1,)), name: np.zeros(5, np.float32)}
    with pytest.raises(TypeError, match=f"{name} is a ndarray.*MLX array"):
        ewma(arrays["x"], 0.1, arrays["zi"])
