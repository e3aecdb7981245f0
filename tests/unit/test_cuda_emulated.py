"""The kernels for CUDA as they are, on the CPU: what a machine without a GPU can tell of them."""

import dataclasses
import math

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation  # noqa: E402
from helpers.ewma_cases import OWN_CASES  # noqa: E402
from helpers.recurrence_cases import CASES, EXACT_CASES  # noqa: E402
from helpers.recurrences import FILTERS  # noqa: E402
from helpers.recurrences import RECURRENCES as ALL  # noqa: E402
from helpers.sosfilt_cases import CASES as SOSFILT_CASES  # noqa: E402
from helpers.transformers import filtered, using  # noqa: E402

from ezmsg.mlx.ewma import EWMATransformer  # noqa: E402
from ezmsg.mlx.filter import FilterTransformer  # noqa: E402
from ezmsg.mlx.kernels import cuda, cuda_lookback, cuda_sosfilt  # noqa: E402

# Some of all coefficients, for each number of sections is a kernel of its own, which takes most of a second to build.
SOME = {
    "ewma": ("0.01 s", "300.0 s", "alpha 0.999999"),
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
    cuda_lookback._zeros.cache_clear()
    for module in (cuda, cuda_sosfilt):
        module._kernel.cache_clear()
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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 2, 7), (3, 4, 257)], ids=repr)
def test_nothing_is_told_at_first(sizes):
    told = np.asarray(cuda_lookback.nothing_told(*sizes))
    assert told.dtype == np.int64 and told.size >= 2 * math.prod(sizes) and not told.any()


@pytest.mark.parametrize("case", OWN_CASES)
def test_case_of_ewma(case):
    OWN_CASES[case]("cuda")


@pytest.mark.parametrize("case", SOSFILT_CASES)
def test_case_of_sosfilt(case):
    SOSFILT_CASES[case]("cuda")


@pytest.mark.parametrize("n_channels", [1, 3, 40])
@pytest.mark.parametrize("kind", [EWMATransformer, FilterTransformer])
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
