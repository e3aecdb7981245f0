"""The options of the comparison with SpikeInterface, which is not installed here, and the file that it writes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_path = ROOT / "tests" / "benchmarks" / "spikeinterface_comparison.py"
_spec = importlib.util.spec_from_file_location("spikeinterface_comparison", _path)
comparison = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(comparison)


def test_each_kind_of_results_is_made_in_both_ways(capsys):
    options = comparison.parse_options(["--channels", "4", "--samples", "60000", "--workers", "1"])
    cases = list(comparison.cases(options))
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert options.piece == 60.0
    with pytest.raises(SystemExit) as stopped:
        comparison.parse_options(["--rounds", "0"])
    assert stopped.value.code == 2
    assert "argument --rounds: must be an integer of at least 1, got 0" in capsys.readouterr().err


def test_ours_is_that_of_one_run_in_float64_and_the_file_makes_a_table(tmp_path, monkeypatch):
    pytest.importorskip("mlx.core")
    pytest.importorskip("zarr")
    options = comparison.parse_options(["--channels", "3", "--samples", "9000", "--work", str(tmp_path)])
    comparison.write_recording(tmp_path / "recording.bin", 9000, 3)
    comparison.write_references(tmp_path, 3, ["mean"])
    comparison.write_input(tmp_path, "short", options, 3000)
    case = comparison.Case(comparison.OURS, "mean", "float32", "compressed", 1)
    measured = comparison.measure(case, options)
    assert 0 < measured["difference"] < 1e-3
    assert measured["size"] > 0.01 and measured["peak"] > 10 and measured["cpu"] > 0
    assert not (tmp_path / "results.zarr").exists()

    found = comparison.as_results(options, [comparison.row_of(case, [measured, measured])])
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "results" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    (tmp_path / "x.json").write_text(json.dumps(found))
    monkeypatch.setattr(render, "DATA", tmp_path)
    assert "| ezmsg-mlx | mean | float32, compressed | 1 |" in render.markdown("x")
