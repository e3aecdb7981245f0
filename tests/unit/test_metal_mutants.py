"""Whether the cases for the kernels for Metal notice faults: some of them here, all with EZMSG_MLX_ALL_METAL=1."""

import os

import pytest

pytest.importorskip("mlx.core")

from helpers import metal_emulation
from helpers.metal_mutants import CHECKS, MUTANTS
from helpers.metal_texts import MODULES

from ezmsg.mlx.kernels.metal import kernel

ALL = bool(os.environ.get("EZMSG_MLX_ALL_METAL"))

SOME = MUTANTS if ALL else [mutant for mutant in MUTANTS if mutant.recurrence in ("ewma", "sosfilt", "zscore")][8::23]
"""The checks of other kernels compile a dozen texts each."""

pytestmark = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")


@pytest.mark.parametrize("recurrence", CHECKS if ALL else ["ewma"])
def test_a_kernel_without_a_fault_passes(recurrence, monkeypatch):
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        CHECKS[recurrence]()


@pytest.mark.parametrize("mutant", SOME, ids=str)
def test_a_fault_is_noticed(mutant, monkeypatch):
    monkeypatch.setattr(kernel, "read_source", mutant.read_source)
    with metal_emulation.installed(monkeypatch, *MODULES.values()), pytest.raises(AssertionError):
        CHECKS[mutant.recurrence]()
