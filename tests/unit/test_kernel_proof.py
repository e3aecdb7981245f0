"""A kernel that does not compute what it should on a machine is not used there."""

import logging
import os
import threading
from types import SimpleNamespace

import pytest

mx = pytest.importorskip("mlx.core")

from helpers import metal_emulation
from helpers.metal_mutants import MUTANTS
from helpers.metal_texts import MODULES

from ezmsg.mlx import kernels
from ezmsg.mlx.kernels import default_path, proof
from ezmsg.mlx.kernels.cuda import ewma as cuda_ewma
from ezmsg.mlx.kernels.metal import ewma
from ezmsg.mlx.kernels.metal import kernel as making
from ezmsg.mlx.kernels.plain import ewma as plain_ewma
from ezmsg.mlx.stream import device

needs_compiler = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")


@pytest.fixture
def metal_machine(monkeypatch):
    """MLX says that it has Metal; what runs there does not."""
    monkeypatch.setattr(device, "backend_in_use", lambda: "metal")
    kernels.kernel.cache_clear()
    yield
    kernels.kernel.cache_clear()


@pytest.fixture
def emulated(monkeypatch):
    # A C++ compiler takes longer than that of a GPU.
    monkeypatch.setattr(proof, "LIMIT", 100.0)
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        yield


@needs_compiler
@pytest.mark.parametrize("recurrence", MODULES)
def test_kernels_that_are_right_are_used(recurrence, metal_machine, emulated, caplog):
    assert kernels.kernel(recurrence, "metal") is MODULES[recurrence]
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS[5::24], ids=str)
def test_a_fault_is_noticed(mutant, monkeypatch, emulated):
    monkeypatch.setattr(making, "read_source", mutant.read_source)
    assert proof.trouble_of(mutant.recurrence, MODULES[mutant.recurrence], "metal") is not None


@pytest.mark.skipif(mx.metal.is_available(), reason="a machine that runs it")
def test_plain_operations_take_the_place_of_a_kernel_that_fails(metal_machine, caplog):
    # There is no Metal.
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kernels.kernel("ewma", "metal") is plain_ewma
    (record,) = caplog.records
    assert "'ewma' for metal raises RuntimeError" in record.message and "Plain MLX operations" in record.message


@pytest.mark.parametrize("path", ["metal", "cuda"])
@pytest.mark.parametrize("fault", ["wrong value", "lost NaN", "lost state"])
def test_wrong_results_are_told_from_right_ones(fault, path):
    def run(x, alpha, zi, axis, chunk_sizes):
        y, zf = plain_ewma.run(x, alpha, zi, axis, chunk_sizes)
        if fault == "wrong value":
            y = mx.where(mx.arange(y.size).reshape(y.shape) == y.size - 1, y * 1.01, y)
        return (mx.nan_to_num(y) if fault == "lost NaN" else y), (zi if fault == "lost state" else zf)

    assert proof.trouble_of("ewma", SimpleNamespace(run=run), path) is not None


def test_a_kernel_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(proof, "LIMIT", 0.05)
    end = threading.Event()

    def run(*arguments):
        end.wait()
        raise RuntimeError("at last")

    assert proof.trouble_of("ewma", SimpleNamespace(run=run), "metal") == "does not end within 0.05 s"
    end.set()


@pytest.mark.parametrize(("module", "backend"), [
    (ewma, "cpu"), (ewma, "cuda"), (cuda_ewma, "cpu"), (cuda_ewma, "metal"),
])  # fmt: skip
def test_nothing_is_proved_where_the_kernel_is_not_for_the_device(monkeypatch, module, backend):
    monkeypatch.setattr(device, "backend_in_use", lambda: backend)
    monkeypatch.setattr(proof, "holds", lambda *arguments: pytest.fail("was asked"))
    kernels.kernel.cache_clear()
    assert kernels.kernel("ewma", "metal" if module is ewma else "cuda") is module
    kernels.kernel.cache_clear()


@pytest.mark.parametrize("value", ["", "plain"])
def test_plain_operations_can_be_chosen_by_hand(monkeypatch, value):
    monkeypatch.setenv(kernels.VARIABLE, value)
    kernels._chosen_by_hand.cache_clear()
    try:
        assert (default_path() == "plain") == (value == "plain")
    finally:
        kernels._chosen_by_hand.cache_clear()


def test_another_choice_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "fast")
    kernels._chosen_by_hand.cache_clear()
    try:
        with pytest.raises(ValueError, match="EZMSG_MLX_KERNELS must be 'plain' or not set, got 'fast'"):
            default_path()
    finally:
        kernels._chosen_by_hand.cache_clear()


def test_plain_operations_can_be_chosen_by_a_call(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "")
    before = default_path()
    try:
        kernels.use_plain_kernels()
        # Processes that are started now see it, too.
        assert default_path() == "plain" and os.environ[kernels.VARIABLE] == "plain"
        kernels.use_plain_kernels(False)
        assert default_path() == before
    finally:
        kernels._chosen_by_hand.cache_clear()
