"""The kernels for Metal on Metal."""

import pytest

mx = pytest.importorskip("mlx.core")

from helpers.metal_mutants import CHECKS
from helpers.metal_texts import MODULES

from ezmsg.mlx.kernels import kernel, proof

pytestmark = pytest.mark.skipif(not mx.metal.is_available(), reason="needs Metal")


@pytest.mark.parametrize("recurrence", MODULES)
def test_kernels_prove_themselves(recurrence):
    assert kernel(recurrence, "metal") is MODULES[recurrence]
    assert proof.difference_of(recurrence, MODULES[recurrence], "metal") <= 1e-5


@pytest.mark.parametrize("recurrence", CHECKS)
def test_kernels_are_right(recurrence):
    CHECKS[recurrence]()
