"""The short form of the soak test, tests/soak/run.py, and what its verdict finds."""

import copy
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from soak.figures import figures
from soak.verdict import PROCESSES, problems

SCRIPT = pathlib.Path(__file__).parents[1] / "soak" / "run.py"

TIME_LIMIT = 400.0
"""Seconds. The script's own, after which it shows where the graph hangs, is shorter."""


def test_graph_with_faults_loses_nothing_and_leaves_nothing():
    pytest.importorskip("mlx.core", exc_type=ImportError)
    command = [sys.executable, str(SCRIPT), "--messages", "50", "--change-every", "20", "--refuse-every", "12"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"The script did not end within {TIME_LIMIT:g} s.\n{output}", pytrace=False)
    assert process.returncode == 0, output


# The verdict


def make_run() -> dict:
    """A run that is as it should be."""
    reports = {name: {"others": []} for name in PROCESSES}
    reports["chain"] |= {"refused": [[300, 600]], "cache": 16.0, "excess": 0.0, "limits": [6.0, 16.0]}
    reports["chain"] |= {
        "lengths": ["CHAIN/TO_MLX has met 32 message lengths"],
        "wrong": [],
        "spectrum": 90,
        "band": 90,
    }
    reports["sink"] |= {"gaps": [[300, 600]], "wrong": [], "at_end": True, "n_changes": 3, "n_taken": 2}
    return {
        "status": 0,
        "reports": reports,
        "observer": {name: (200.0, 200.0) for name in ("resident_set", "shared")},
        "rows": [5, 4],
        "left": [],
    }


def verdict(run: dict) -> list[str]:
    observer = SimpleNamespace(
        settled_after=120.0, started_at=0.0, first_and_last=lambda name, quantity: run["observer"][quantity]
    )
    visitor = SimpleNamespace(rows=run["rows"], errors=[])
    return problems(run["status"], run["reports"], observer, visitor, run["left"])


def test_verdict_on_a_good_run_is_empty():
    assert verdict(make_run()) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: run.update(status=None), "the graph did not end by itself"),
        (lambda run: run.update(status=1), "the graph ended with status 1"),
        (lambda run: run.update(left=["psm_1"]), "psm_1 is left"),
        (lambda run: run.update(rows=[5, 0]), "the monitor told its visitors [5, 0] rows"),
        (lambda run: run["reports"].pop("source"), "no report from source"),
        (lambda run: run["reports"]["sink"]["wrong"].append("samples 0 to 9 came twice"), "samples 0 to 9 came twice"),
        (lambda run: run["reports"]["sink"]["gaps"].append([900, 901]), "missing that no unit refused: [[900, 901]]"),
        (lambda run: run["reports"]["chain"]["refused"].append([300, 600]), "are not logged once"),
        (lambda run: run["reports"]["chain"]["refused"].clear(), "missing that no unit refused: [[300, 600]]"),
        (
            lambda run: (run["reports"]["sink"]["gaps"].clear(), run["reports"]["chain"]["refused"].clear()),
            "no message was",
        ),
        (lambda run: run["reports"]["chain"].update(band=89), "90 spectra and 89 filtered messages"),
        (lambda run: run["reports"]["chain"]["wrong"].append("a spectrum is not finite"), "is not finite"),
        (lambda run: run["reports"]["chain"]["lengths"].append("again"), "more than once"),
        (lambda run: run["reports"]["sink"].update(at_end=False), "the last sample has not arrived"),
        (lambda run: run["reports"]["sink"].update(n_taken=0), "no change of settings was seen"),
        (lambda run: run["reports"]["chain"].update(excess=3.8), "MLX's cache was 3.8 MiB above its limit"),
        (lambda run: run["reports"]["source"]["others"].append("oh"), "source logged: oh"),
        (lambda run: run["observer"].update(resident_set=(200.0, 240.0)), "the resident set of source grew"),
        (lambda run: run["observer"].update(resident_set=(math.nan, math.nan)), "the resident set of source grew"),
        (lambda run: run["observer"].update(shared=(46.7, 48.7)), "the shared memory of source grew"),
        (
            lambda run: run["reports"]["chain"].update(memory=[(t, 1.0, 8.0, 900.0 + t) for t in range(1000)]),
            "the device memory in use grew",
        ),
    ],
)
def test_verdict_names_what_is_not_so(change, expected):
    run = copy.deepcopy(make_run())
    change(run)
    assert any(expected in problem for problem in verdict(run))


def test_figures_name_what_was_lost_and_compare_first_and_last():
    reports = make_run()["reports"]
    reports["sink"]["gaps"].append([900, 950])
    cached = [8.0 if second < 3000 else 9.0 for second in range(3600)]
    reports["chain"]["memory"] = [(1000.0 + second, 2.0, cache, None) for second, cache in enumerate(cached)]
    reports["chain"]["device"] = "a device"

    def first_and_last(name: str, quantity: str) -> tuple[float, float]:
        # As on a system that does not tell it.
        return (math.nan, math.nan) if quantity == "shared" else (1.0, 2.0)

    observer = SimpleNamespace(settled_after=120.0, started_at=1000.0, first_and_last=first_and_last)
    found = json.loads(json.dumps(figures("python tests/soak/run.py", 60.0, reports, observer, []), allow_nan=False))
    rows = {row["name"]: (row["first"], row["last"]) for row in found["rows"]}
    assert rows["samples lost, repeated or wrong outside those"] == (None, 50)
    assert rows["resident set of chain, MiB"] == (1.0, 2.0)
    assert rows["shared memory of chain, MiB"] == (None, None)
    assert (rows["MLX's active memory, MiB"], rows["MLX's cache, MiB"]) == ((2.0, 2.0), (8.0, 9.0))
    assert "device memory in use, MiB" not in rows
    assert found["machine"].startswith("a device, ")
