"""The proof of the kernels for CUDA, on the CPU: before their first use, in the thread that uses them."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import cuda_emulation
from helpers.transformers import filtered

from ezmsg.mlx import kernels
from ezmsg.mlx.ewma import EWMATransformer
from ezmsg.mlx.kernels import proof
from ezmsg.mlx.kernels.cuda import crossings, ewma, sosfilt, zscore
from ezmsg.mlx.kernels.cuda import kernel as making
from ezmsg.mlx.kernels.plain import ewma as plain_ewma
from ezmsg.mlx.kernels.sources import read_source
from ezmsg.mlx.stream import device

MODULES = {"crossings": crossings, "ewma": ewma, "zscore": zscore, "sosfilt": sosfilt}

FAULTS = [
    # A state that is not gone on from, by the kernel for short messages and by that for long ones.
    ("ewma", "ewma_short.cu", "pair_at(zi + 2 * n_channels, channel, n_channels)", "0.0"),
    ("sosfilt", "sosfilt_long.cu", "state[i] = state_at(zi, pass * SIZE + i, channel, n_channels);", "state[i] = 0.0;"),
    # A thread whose samples the tiles behind do not learn of.
    ("zscore", "zscore_long.cu", "for (int i = 1; i < THREADS; ++i) {", "for (int i = 2; i < THREADS; ++i) {"),
    # Not even C++.
    ("zscore", "zscore_short.cu", "Moments before", "Moment before"),
]

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="needs Linux and a C++ compiler")


@pytest.fixture(autouse=True)
def cuda_machine(monkeypatch):
    """MLX says that it has CUDA, and its kernels run on the CPU."""

    def forget() -> None:
        kernels.kernel.cache_clear()
        making.cuda_kernel.cache_clear()
        for module in MODULES.values():
            module._launch.cache_clear()
            for name in ("_table", "_device_table"):
                if hasattr(module, name):
                    getattr(module, name).cache_clear()
            module._compile_ahead.cache_clear()

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_emulation.CudaKernel)
    monkeypatch.setattr(device, "backend_in_use", lambda: "cuda")
    forget()
    yield
    forget()


@pytest.mark.parametrize("recurrence", MODULES)
def test_kernels_that_are_right_are_used(recurrence, caplog, monkeypatch):
    launched = set()
    call = cuda_emulation.CudaKernel.__call__

    def note(kernel, **arguments):
        launched.add(kernel.name.removeprefix(f"ezmsg_mlx_{recurrence}_").partition("_")[0])
        return call(kernel, **arguments)

    monkeypatch.setattr(cuda_emulation.CudaKernel, "__call__", note)
    assert kernels.kernel(recurrence, "cuda") is MODULES[recurrence]
    # Crossings have one for all lengths.
    assert ({"short", "long"} <= launched or recurrence == "crossings") and launched and not caplog.records
    launched.clear()
    assert kernels.kernel(recurrence, "cuda") is MODULES[recurrence]
    assert not launched


@pytest.mark.parametrize(("recurrence", "source", "before", "after"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_plain_operations_take_the_place_of_a_kernel_that_fails(recurrence, source, before, after, monkeypatch, caplog):
    def mutated(package: str, name: str) -> tuple[str, str]:
        header, body = read_source(package, name)
        if name == source:
            assert before in body
            body = body.replace(before, after)
        return header, body

    monkeypatch.setattr(making, "read_source", mutated)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kernels.kernel(recurrence, "cuda") is kernels.kernel(recurrence, "plain")
    (record,) = caplog.records
    assert f"{recurrence!r} for cuda" in record.message and "Plain MLX operations" in record.message


def test_a_stream_begins_with_the_proof(monkeypatch):
    asked = []
    monkeypatch.setattr(proof, "holds", lambda *arguments: asked.append(arguments) or False)
    monkeypatch.setattr(plain_ewma, "compile_ahead", lambda *arguments: asked.append("compiled"))
    transformer = EWMATransformer()
    for _ in range(2):
        filtered(transformer, mx.ones((30, 2)))
    assert asked == [("ewma", "cuda", ewma), "compiled"]


@pytest.mark.parametrize("recurrence", MODULES)
def test_another_thread_may_use_what_the_proof_has_kept(recurrence):
    # A lazy array among it could be evaluated in the thread of the proof only.
    with ThreadPoolExecutor(1) as executor:
        difference = executor.submit(proof.difference_of, recurrence, MODULES[recurrence], "cuda").result()
    assert proof.difference_of(recurrence, MODULES[recurrence], "cuda") == difference


def test_the_thread_of_the_caller_is_used():
    threads = []

    def run(x, alpha, zi, axis, chunk_sizes):
        threads.append(threading.current_thread())
        return x, zi

    proof.trouble_of("ewma", SimpleNamespace(run=run), "cuda")
    assert set(threads) == {threading.current_thread()}


def test_messages_are_of_both_kinds():
    lengths = {len(message) > ewma.SHORT_TILE for message in proof._messages("cuda")}
    assert lengths == {False, True} and not np.isfinite(np.concatenate(proof._messages("cuda"))).all()
