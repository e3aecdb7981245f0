"""The kernels for CUDA as they are, on the CPU: what a machine without a GPU can tell of them."""

import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation  # noqa: E402
from helpers.ewma_cases import OWN_CASES  # noqa: E402
from helpers.recurrence_cases import CASES, EXACT_CASES  # noqa: E402
from helpers.recurrences import RECURRENCES  # noqa: E402
from helpers.sosfilt_cases import CASES as SOSFILT_CASES  # noqa: E402

from ezmsg.mlx.kernels import cuda, cuda_sosfilt  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="needs Linux and a C++ compiler")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_emulation.CudaKernel)
    for module in (cuda, cuda_sosfilt):
        module._kernel.cache_clear()
    yield
    for module in (cuda, cuda_sosfilt):
        module._kernel.cache_clear()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_case_of_all_recurrences(recurrence, case):
    CASES[case](RECURRENCES[recurrence], "cuda")


@pytest.mark.parametrize("case", EXACT_CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_exact_case_of_all_recurrences(recurrence, case, monkeypatch):
    # So many that all tiles that a tile looks back to at first wait as well, for two groups of channels.
    monkeypatch.setattr(cuda_emulation, "blocks_at_once", 24)
    EXACT_CASES[case](RECURRENCES[recurrence], "cuda")


@pytest.mark.parametrize("case", OWN_CASES)
def test_case_of_ewma(case):
    OWN_CASES[case]("cuda")


@pytest.mark.parametrize("case", SOSFILT_CASES)
def test_case_of_sosfilt(case):
    SOSFILT_CASES[case]("cuda")
