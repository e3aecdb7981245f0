"""The report that ``ezmsg-mlx selftest`` prints."""

import dataclasses
import json
import math

import pytest
from helpers import warm

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import kernels, selftest
from ezmsg.mlx import selftest as selftestchain
from ezmsg.mlx import selftest as selftestfused
from ezmsg.mlx.kernels.cpu import ewma


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a machine that is busy with other tests, three processes take a while to start."""
    monkeypatch.setattr(selftestchain, "LIMIT", 300.0)


@pytest.fixture
def short(monkeypatch):
    """What takes seconds takes none."""
    monkeypatch.setattr(selftest, "SHAPES", ((30, 3), (30, 4)))
    monkeypatch.setattr(selftest, "CHAIN_SECONDS", 0.1)
    monkeypatch.setattr(selftest, "CHAIN_SHAPES", ((30, 4),))
    monkeypatch.setattr(selftestfused, "N_TIMED", 4)
    monkeypatch.setattr(selftest, "run_graph", selftestchain.run_bare)


@pytest.fixture
def backend() -> str:
    return (selftest.gpu_backend() or "gpu") if selftest.uses_gpu() else "cpu"


def test_it_says_that_all_is_right(short, backend, capsys):
    assert selftest.main(backend) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("| right |") for line in lines) == 8
    for start in (
        "| mlx |",
        "| device |",
        "| zscore, 30 x 3 |",
        "| chain",
        "| the same in a graph",
        "| fused chain of eight, 30 x 4 |",
        "| largest free buffer",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_a_backend_that_is_missing_fails(short, backend, capsys):
    assert selftest.main("metal" if backend != "metal" else "cuda", as_json=True) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows if row["verdict"] == "MISSING"] == ["device"]


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_is_wrong_fails(short, backend, fault, monkeypatch, capsys):
    if backend != "cpu":
        pytest.skip("a fault is put into the kernel for the CPU")

    def run(x, alpha, zi, axis, chunk_sizes):
        if fault == "raises":
            raise RuntimeError("no such luck")
        return x, zi

    monkeypatch.setattr(ewma, "run", run)
    monkeypatch.setattr(selftest, "_speed", lambda: [])
    monkeypatch.setattr(selftest, "_chain", lambda: [])
    monkeypatch.setattr(selftest, "_fused", lambda: [])
    assert selftest.main() == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("| WRONG |")]
    assert line.startswith("| ewma")


def test_a_kernel_that_was_replaced_fails(short, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "default_path", lambda: "metal")
    monkeypatch.setattr(selftest, "kernel", lambda recurrence, path: kernels.kernel(recurrence, "plain"))
    assert any(row.verdict == "WRONG" and "fails" in row.found for row in selftest._right())


def ends_early(seconds):
    return dataclasses.replace(selftestchain.run_bare(seconds), n_messages=1)


def gives_something_else(seconds):
    outcome = selftestchain.run_bare(seconds)
    return dataclasses.replace(outcome, sum_of_means=outcome.sum_of_means * 1.001)


def gives_nan(seconds):
    return dataclasses.replace(selftestchain.run_bare(seconds), sum_of_means=math.nan)


def fails(seconds):
    raise selftestchain.GraphError("does not end within 60 s")


@pytest.mark.parametrize("run_graph", [ends_early, gives_something_else, gives_nan, fails])
def test_a_graph_that_is_wrong_fails(short, run_graph, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "run_graph", run_graph)
    for name in ("_right", "_speed", "_cache", "_fused"):
        monkeypatch.setattr(selftest, name, lambda: [])
    assert selftest.main(as_json=True) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows if row["verdict"] == "WRONG"] == ["the same in a graph of three processes"]


@pytest.mark.parametrize("difference", [1.0, math.nan])
def test_a_fused_chain_that_is_wrong_fails(short, difference, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "time_chains", lambda *shape: selftestfused.Times(1.0, 2.0, difference))
    for name in ("_speed", "_chain", "_right", "_cache"):
        monkeypatch.setattr(selftest, name, lambda: [])
    assert selftest.main() == 1
    assert "| 1 us, 0.50 times stage by stage | WRONG |" in capsys.readouterr().out


def test_the_graph_gives_what_the_bare_chain_gives():
    assert selftestchain.run_graph(0.1).is_that_of(selftestchain.run_bare(0.1))


def test_a_graph_that_does_not_end_is_ended(monkeypatch):
    # It has no time to start.
    monkeypatch.setattr(selftestchain, "LIMIT", 0.01)
    with pytest.raises(selftestchain.GraphError, match=r"does not end within 0\.01 s"):
        selftestchain.run_graph(0.1)


def test_the_error_of_a_graph_is_shown():
    with pytest.raises(selftestchain.GraphError, match=r"exit status 1: .*'duration' must be .*, got -1"):
        selftestchain.run_graph(-1)


def test_it_is_a_command():
    done = warm.run(["-m", "ezmsg.mlx", "selftest", "--help"])
    assert done.returncode == 0 and "--require" in done.stdout
