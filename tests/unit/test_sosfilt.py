"""The function sosfilt(): the cases of its own on the paths that run anywhere, and what is particular to one."""

import math

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.recurrences import BAND_PASS, FILTERS, HIGH_PASS, SOSFILT, check_close, noise
from helpers.sosfilt_cases import CASES

from ezmsg.mlx.sosfilt import sosfilt

PATHS = ["cpu", "plain"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_case(case, path):
    CASES[case](path)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("sos", [np.zeros((0, 6)), np.ones((2, 5)), np.ones((1, 2, 6)), 1.0, []], ids=np.shape)
def test_coefficients_of_another_shape_are_refused(sos):
    with pytest.raises(ValueError, match=r"'sos' must have the shape \(n_sections, 6\)"):
        sosfilt(mx.zeros((5,)), sos)


@pytest.mark.parametrize("a0", [0.0, 2.0])
def test_coefficients_that_are_not_normalised_are_refused(a0):
    with pytest.raises(ValueError, match=rf"'sos\[:, 3\]' must be ones, got \[1.0, {a0}\]"):
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
    check_close(y, SOSFILT.reference(x, expected.astype(np.float64))[0])


@pytest.mark.parametrize("path", PATHS)
def test_chunks_have_up_to_512_samples(path):
    with pytest.raises(ValueError, match="'chunk_sizes' must be "):
        sosfilt(mx.zeros((5,)), BAND_PASS, chunk_sizes=(513,), path=path)


# ------------------------------------------------------------------------------------------ why it is done like this


def test_a_state_without_what_rounding_lost_drifts():
    x = noise(3000, 2) + 50
    start = SOSFILT.settled_state(HIGH_PASS, x)
    expected, _ = SOSFILT.reference(x, HIGH_PASS, start)
    errors = []
    for zi in (mx.array(start), SOSFILT.pairs_of(start)):
        y, _ = SOSFILT.in_pieces(mx.array(x), [10] * 299, HIGH_PASS, zi, "cpu")
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
    from ezmsg.mlx.kernels.cuda import kernel as samples
    from ezmsg.mlx.kernels.cuda import sosfilt

    sos, tile = FILTERS[name], samples.TILE
    size = 2 * len(sos)
    table = sosfilt.table(sos)
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
    expected = SOSFILT.without(x, sos, start)
    np.testing.assert_allclose(np.concatenate(results), expected[:, 0], rtol=1e-8, atol=1e-8)


def test_transition_of_a_section_over_the_samples_of_a_cuda_thread():
    from ezmsg.mlx.kernels.cuda import sosfilt

    for section in BAND_PASS:
        over = sosfilt.table(section[None])[5:9].reshape(2, 2)
        for start in np.eye(2):
            _, last = SOSFILT.reference(np.zeros(sosfilt.SHORT_SAMPLES), section[None], start[None])
            np.testing.assert_allclose(over @ start, last[0], rtol=1e-12, atol=1e-12)
