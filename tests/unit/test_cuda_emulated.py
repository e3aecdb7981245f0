"""The kernels for CUDA as they are, on the CPU: what a machine without a GPU can tell of them."""

import dataclasses
import math

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation
from helpers.ewma_cases import OWN_CASES
from helpers.recurrence_cases import CASES, EXACT_CASES
from helpers.recurrences import FILTERS
from helpers.recurrences import RECURRENCES as ALL
from helpers.sosfilt_cases import CASES as SOSFILT_CASES
from helpers.transformers import filtered, using
from helpers.zscore_cases import OWN_CASES as ZSCORE_CASES

from ezmsg.mlx.ewma import EWMATransformer
from ezmsg.mlx.filter import FilterTransformer
from ezmsg.mlx.kernels.cuda import ewma, sosfilt, zscore
from ezmsg.mlx.kernels.cuda import kernel as lookback
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.scaler import AdaptiveStandardScalerTransformer

# Some of all coefficients, for each number of sections is a kernel of its own, which takes most of a second to build.
SOME = {
    "ewma": ("0.01 s", "300.0 s", "alpha 0.999999"),
    "corrected": ("0.001 s", "300.0 s", "alpha 0.999999"),
    "zscore": ("0.001 s", "300.0 s", "alpha 0.999999"),
    "sosfilt": (
        "band-pass 2",
        "band-pass 0.5 to 10000 Hz 3",
        "band-pass 4",
        "high-pass 0.5 Hz 8",
        "notch 60 Hz",
        "no feedback",
    ),
}
RECURRENCES = {
    name: dataclasses.replace(ALL[name], coefficients={key: ALL[name].coefficients[key] for key in keys})
    for name, keys in SOME.items()
}

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="needs Linux and a C++ compiler")


def forget_kernels():
    cuda_kernel.cache_clear()
    for module in (ewma, zscore, sosfilt):
        module._launch.cache_clear()
        module._compile_ahead.cache_clear()


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_emulation.CudaKernel)
    forget_kernels()
    yield
    forget_kernels()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recurrence", ALL)
def test_case_of_all_recurrences(recurrence, case):
    CASES[case](RECURRENCES[recurrence], "cuda")


@pytest.mark.parametrize("case", EXACT_CASES)
@pytest.mark.parametrize("recurrence", ALL)
def test_exact_case_of_all_recurrences(recurrence, case, monkeypatch):
    # So many that all tiles that a tile looks back to at first wait as well, for two groups of channels.
    monkeypatch.setattr(cuda_emulation, "blocks_at_once", 24)
    EXACT_CASES[case](RECURRENCES[recurrence], "cuda")


@pytest.mark.parametrize("bad", ["none", "one", "many"])
@pytest.mark.parametrize(
    "case",
    [
        "ewma: 0.01 s",
        "ewma: 300.0 s",
        "corrected: 300.0 s",
        "zscore: 0.001 s",
        "zscore: 300.0 s",
        "sosfilt: band-pass 0.5 to 10000 Hz 3",
        "sosfilt: high-pass 0.5 Hz 8",
    ],
)
def test_which_tiles_were_quick_changes_no_bit(case, bad, monkeypatch):
    name, key = case.split(": ")
    recurrence = RECURRENCES[name]
    coefficients = recurrence.coefficients[key]
    x = np.random.default_rng(0).standard_normal((3000, 5), np.float32) + 5
    if bad == "one":
        x[300, 1] = math.nan
    elif bad == "many":
        x[700::900, 1] = x[:, 2] = x[1000:, 3] = math.nan
    zi = mx.ones(recurrence.state_shape(x.shape, 0, pair=True, coefficients=coefficients))
    results = []
    # With one at a time each tile finds the state after the last one, with many only what they make of a state of zero.
    for at_once in (1, 4, 24):
        monkeypatch.setattr(cuda_emulation, "blocks_at_once", at_once)
        y, zf = recurrence.in_pieces(mx.array(x), [], coefficients, zi, "cuda")
        results.append((y, np.asarray(zf)))
    for y, zf in results[1:]:
        np.testing.assert_array_equal(y, results[0][0])
        np.testing.assert_array_equal(zf, results[0][1])


@pytest.mark.parametrize("n_states, n_words", [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("n_tiles, n_channels", [(1, 1), (5, 7), (3, 257)])
def test_nothing_is_told_at_first(n_tiles, n_states, n_channels, n_words):
    told = np.asarray(lookback.nothing_published(n_tiles, n_states, n_channels)())
    assert told.dtype == np.int64 and told.nbytes >= 16 * n_tiles * n_words * n_channels and not told.any()


@pytest.mark.parametrize("case", OWN_CASES)
def test_case_of_ewma(case):
    OWN_CASES[case]("cuda")


@pytest.mark.parametrize("case", ZSCORE_CASES)
def test_case_of_zscore(case):
    ZSCORE_CASES[case]("cuda")


@pytest.mark.parametrize("case", SOSFILT_CASES)
def test_case_of_sosfilt(case):
    SOSFILT_CASES[case]("cuda")


@pytest.mark.parametrize("n_channels", [1, 3, 40])
@pytest.mark.parametrize("kind", [EWMATransformer, AdaptiveStandardScalerTransformer, FilterTransformer])
@pytest.mark.parametrize("lengths", [(300, 3000), (3000, 300)], ids=repr)
def test_the_first_message_compiles_all_that_a_stream_needs(kind, n_channels, lengths, monkeypatch):
    settings = {"coefs": FILTERS["band-pass 8"], "coef_type": "sos"} if kind is FilterTransformer else {}
    transformer = kind(**settings)
    launched = set()

    def note(kernel, **arguments):
        launched.add(kernel.name)
        return [mx.zeros(shape) for shape in arguments["output_shapes"]]

    monkeypatch.setattr(cuda_emulation.CudaKernel, "__call__", note)
    with using("cuda"):
        filtered(transformer, mx.ones((lengths[0], n_channels)))
        at_first = set(launched)
        filtered(transformer, mx.ones((lengths[1], n_channels)))
    assert launched == at_first and len(launched) > 1
