"""The cases of all recurrences, on the kernels of the GPU."""

import pytest
from helpers.recurrence_cases import CASES, EXACT_CASES
from helpers.recurrences import RECURRENCES

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels import default_path


@pytest.mark.parametrize("path", ["cuda", "plain"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_case(recurrence, case, path):
    CASES[case](RECURRENCES[recurrence], path)


@pytest.mark.parametrize("case", EXACT_CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_exact_case(recurrence, case):
    EXACT_CASES[case](RECURRENCES[recurrence], "cuda")


def test_cuda_is_what_a_gpu_takes_by_itself():
    assert default_path() == "cuda"
    default = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert default_path() == "cpu"
    finally:
        mx.set_default_device(default)
