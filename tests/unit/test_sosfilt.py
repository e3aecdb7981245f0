"""The function sosfilt(): the cases common to all paths on the two that run anywhere, and what is particular to one."""

import math
import threading

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.sosfilt_cases import (  # noqa: E402
    BAND_PASS,
    CASES,
    FILTERS,
    HIGH_PASS,
    check_close,
    in_pieces,
    noise,
    pairs_of,
    reference,
    settled_state,
    without,
)

import ezmsg.mlx.recurrence as recurrence  # noqa: E402
import ezmsg.mlx.sosfilt as module  # noqa: E402
from ezmsg.mlx.sosfilt import sosfilt  # noqa: E402

PATHS = ["cpu", "plain"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_case(case, path):
    CASES[case](path)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("sos", [np.zeros((0, 6)), np.ones((2, 5)), np.ones((1, 2, 6)), 1.0, []], ids=np.shape)
def test_coefficients_of_another_shape_are_refused(sos):
    with pytest.raises(ValueError, match=r"sos has shape .*\(n_sections, 6\)"):
        sosfilt(mx.zeros((5,)), sos)


@pytest.mark.parametrize("a0", [0.0, 2.0])
def test_coefficients_that_are_not_normalised_are_refused(a0):
    with pytest.raises(ValueError, match=rf"sos\[:, 3\] is \[1.0, {a0}\]"):
        sosfilt(mx.zeros((5,)), [[1, 0, 0, 1, 0, 0], [1, 0, 0, a0, 0, 0]])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_coefficients_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        sosfilt(mx.zeros((5,)), [[value, 0, 0, 1, 0, 0]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["list", "one row", "mlx", "float32", "not contiguous"])
def test_coefficients_may_be_any_array(path, kind):
    given, expected = {
        "list": lambda: (BAND_PASS.tolist(), BAND_PASS),
        "one row": lambda: (BAND_PASS[0], BAND_PASS[:1]),
        "mlx": lambda: (mx.array(BAND_PASS), BAND_PASS.astype(np.float32)),
        "float32": lambda: (BAND_PASS.astype(np.float32), BAND_PASS.astype(np.float32)),
        "not contiguous": lambda: (np.asfortranarray(BAND_PASS)[::-1], BAND_PASS[::-1]),
    }[kind]()
    x = noise(50, 2)
    y, _ = sosfilt(mx.array(x), given, axis=0, path=path)
    check_close(y, reference(x, expected.astype(np.float64))[0])


@pytest.mark.parametrize("shape", [(5, 3), (5,), ()])
def test_axis_must_be_one_of_the_data(shape):
    for axis in (len(shape), -len(shape) - 1):
        with pytest.raises(ValueError, match=f"axis is {axis}"):
            sosfilt(mx.zeros(shape), BAND_PASS, axis=axis)


@pytest.mark.parametrize("shape", [(2, 3), (4, 3, 3), (1, 2, 3), (4, 1, 3), (4, 3, 2), (4, 2, 3, 1)])
@pytest.mark.parametrize("n", [0, 5])
def test_state_of_another_shape_is_refused(shape, n):
    with pytest.raises(ValueError, match=r"zi has shape .*\(4, 2, 3\) and \(4, 4, 3\)"):
        sosfilt(mx.zeros((n, 3)), BAND_PASS, mx.zeros(shape), axis=0)


@pytest.mark.parametrize("sizes", [(), (0,), (513,), (32.0,), (True,), 32, None], ids=repr)
def test_bad_chunk_sizes_are_refused_on_every_path(sizes):
    for path in PATHS:
        with pytest.raises(ValueError, match="chunk_sizes is "):
            sosfilt(mx.zeros((5,)), BAND_PASS, chunk_sizes=sizes, path=path)


@pytest.mark.parametrize("path", ["gpu", "", "CPU", "sosfilt"])
def test_unknown_path_is_refused_with_those_known(path):
    with pytest.raises(ValueError, match=f"path is '{path}'.*cpu.*metal.*plain"):
        sosfilt(mx.zeros((5,)), BAND_PASS, path=path)


@pytest.mark.parametrize("n", [0, 5])
def test_complex_data_and_state_are_refused(n):
    x = mx.zeros((n, 3))
    with pytest.raises(TypeError, match="complex64"):
        sosfilt(x.astype(mx.complex64), BAND_PASS, axis=0)
    with pytest.raises(TypeError, match="complex64"):
        sosfilt(x, BAND_PASS, mx.zeros((4, 2, 3), dtype=mx.complex64), axis=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 3), 0), ((3, 0), 1), ((2, 0, 3), 1), ((5, 0), 0), ((0,), -1)])
def test_no_samples_or_no_channels_give_an_empty_float32_and_the_state_unchanged(path, shape, axis):
    for length in (2, 4):
        zi = mx.full((4, *(length if dim == axis % len(shape) else n for dim, n in enumerate(shape))), 0.5)
        y, zf = sosfilt(mx.zeros(shape, dtype=mx.int16), BAND_PASS, zi, axis=axis, path=path)
        assert (y.shape, y.dtype) == (shape, mx.float32)
        np.testing.assert_array_equal(np.array(zf), np.array(zi))


# -------------------------------------------------------------------------------------------------------------- path


@pytest.mark.parametrize(
    ("device", "cuda", "metal", "expected"),
    [
        (mx.cpu, False, False, "cpu"),
        (mx.cpu, True, False, "cpu"),
        (mx.cpu, False, True, "cpu"),
        (mx.gpu, True, False, "cuda"),
        (mx.gpu, False, True, "plain"),
        (mx.gpu, False, False, "plain"),
    ],
)
def test_path_follows_the_default_device_at_call_time(monkeypatch, device, cuda, metal, expected):
    taken = []

    class Kernels:
        @staticmethod
        def sosfilt(x, sos, zi, axis, sizes):
            return x, zi

    monkeypatch.setattr(module, "kernels", lambda name: taken.append(name) or Kernels)
    sosfilt(mx.zeros((5,)), BAND_PASS)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device, 0))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(recurrence, "_gpu_path", recurrence._gpu_path.__wrapped__)
    for path in (None, "plain", "metal"):
        sosfilt(mx.zeros((5,)), BAND_PASS, path=path)
    assert taken[1:] == [f"{expected}_sosfilt", "plain_sosfilt", "plain_sosfilt"]


def test_kernels_are_modules_of_the_package():
    assert recurrence.kernels("cpu_sosfilt").__name__ == "ezmsg.mlx.kernels.cpu_sosfilt"


# --------------------------------------------------------------------------------------------------------- ownership


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 32, 40, 700])
def test_results_share_no_memory_with_the_arguments_or_each_other(path, n):
    for length in (2, 4):
        x, zi = mx.array(noise(n, 3)), mx.array(noise(4, length, 3))
        y, zf = sosfilt(x, BAND_PASS, zi, axis=0, path=path)
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
def test_state_and_coefficients_made_in_one_thread_serve_another(path):
    # Coefficients that no other test has used, so that the thread below is the first to make what kernels keep of them.
    x, sos, results = mx.array(noise(100, 3)), BAND_PASS * [[0.5, 0.5, 0.5, 1, 1, 1]], []

    def first():
        y, zf = sosfilt(x, sos, axis=0, path=path)
        mx.eval(y, zf)
        results.extend((np.array(y), zf))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    y, _ = sosfilt(x, sos, results[1], axis=0, path=path)
    check_close(np.concatenate([results[0], np.array(y)]), reference(np.tile(np.array(x), (2, 1)), sos)[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cpu_result_is_contiguous(axis):
    # With rows apart, whatever is computed from it next takes several times as long.
    y, _ = sosfilt(mx.array(noise(5, 6, 7)), BAND_PASS, axis=axis, path="cpu")
    assert np.asarray(y).flags.c_contiguous


# ------------------------------------------------------------------------------------------ why it is done like this


def test_a_state_without_what_rounding_lost_drifts():
    x = noise(3000, 2) + 50
    start = settled_state(HIGH_PASS, x)
    expected, _ = reference(x, HIGH_PASS, start)
    errors = []
    for zi in (mx.array(start), pairs_of(start)):
        y, _ = in_pieces(mx.array(x), [10] * 299, HIGH_PASS, zi, "cpu")
        errors.append(np.abs(y - expected).max() / np.abs(expected).max())
    assert errors[0] > 1e-4 and errors[1] < 1e-6, errors


# ------------------------------------------------------------------------------ the mathematics of the CUDA kernels


def sections_alone(rows: np.ndarray, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """What a thread does: all sections over the finite samples of *x* from the state *z*, which is changed."""
    y = x.copy()
    for n in np.flatnonzero(np.isfinite(x)):
        value = x[n]
        for i, (b0, g0, g1, a1, a2) in enumerate(rows[:, :5]):
            z0, z1 = z[2 * i], z[2 * i + 1]
            z[2 * i], z[2 * i + 1] = z1 - a1 * z0 + g0 * value, g1 * value - a2 * z0
            value = b0 * value + z0
        y[n] = value
    return y


@pytest.mark.parametrize("name", ["band-pass 4", "high-pass 0.5 Hz 4", "low-pass 50 Hz 4", "no feedback"])
def test_tiles_of_the_cuda_kernels_link_up(name):
    from ezmsg.mlx.kernels import cuda_sosfilt

    sos, tile = FILTERS[name], cuda_sosfilt.TILE
    size = 2 * len(sos)
    table = cuda_sosfilt.table(sos)
    rows, over_tile = table[: 9 * len(sos)].reshape(-1, 9), table[-size * size :].reshape(size, size)
    x = noise(5 * tile - 20, 1).astype(np.float64)
    x[[70, 100, 101, *range(2 * tile, 3 * tile)]] = math.nan
    start = np.random.default_rng(1).standard_normal((len(sos), 2, 1))
    z, results = start.flatten(), []
    for begin in range(0, len(x), tile):
        samples = x[begin : begin + tile, 0]
        alone = np.zeros(size)
        sections_alone(rows, samples, alone)
        after = z.copy()
        results.append(sections_alone(rows, samples, after))
        n_taken = np.isfinite(samples).sum()
        if n_taken == tile:
            z = over_tile @ z + alone
        else:
            sections_alone(rows, np.zeros(n_taken), z)
            z = z + alone
        np.testing.assert_allclose(z, after, rtol=1e-9, atol=1e-9)
    expected = without(x, sos, start)
    np.testing.assert_allclose(np.concatenate(results), expected[:, 0], rtol=1e-8, atol=1e-8)


def test_transition_of_a_section_over_the_samples_of_a_cuda_thread():
    from ezmsg.mlx.kernels import cuda_sosfilt

    for section in BAND_PASS:
        over = cuda_sosfilt.table(section[None])[5:9].reshape(2, 2)
        for start in np.eye(2):
            _, last = reference(np.zeros(cuda_sosfilt.LONE_SAMPLES), section[None], start[None])
            np.testing.assert_allclose(over @ start, last[0], rtol=1e-12, atol=1e-12)
