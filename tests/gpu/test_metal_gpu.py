"""The kernels for Metal, whose text runs on an NVIDIA GPU, too: with the same bits as in the emulation on the CPU.

``metal_on_cuda.py`` does this and more in two minutes: under compute-sanitizer, and with faults put in.
"""

import pytest
from helpers import metal_emulation
from helpers.metal_suite import suite
from helpers.metal_texts import MODULES

mx = pytest.importorskip("mlx.core")

CASES = {f"{kernel}: {name}": case for kernel, cases in suite().items() for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES)
def test_case_on_both(case, monkeypatch):
    pytest.importorskip("cupy", reason="needs CuPy")
    with metal_emulation.installed(monkeypatch, *MODULES.values()), metal_emulation.using(device="both"):
        CASES[case]()
