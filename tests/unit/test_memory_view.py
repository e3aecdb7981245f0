"""What the command for a running graph shows, at the widths and heights of terminals."""

import math
import sys

import pytest

pytest.importorskip("rich")

from rich.console import Console

from ezmsg.mlx.memory import __main__ as command
from ezmsg.mlx.memory.__main__ import PANELS, lengths_table, memory_table, save_plot
from ezmsg.mlx.memory.monitor import MemorySnapshot

LONG = "EXPERIMENT/RECORDING/PREPROCESSING/TO_MLX_CONVERTER_FOR_THE_ARRAY_IN_MOTOR_CORTEX"
MEMORY = MemorySnapshot(12.3, 511.2, 88.0, 512.0, 24.0, 1234.0, 1000.0, math.nan)


def node(name: str, n_lengths: int = 45) -> dict:
    lengths = [
        {"length": 300 * number, "n_messages": 10_000 if number == 1 else 1, "estimate_mb": 120.5 / number}
        for number in range(1, min(n_lengths, 12) + 1)
    ]
    n_messages = 10_000 + n_lengths - 1
    return {"node": name, "n_messages": n_messages, "n_lengths": n_lengths, "n_once": n_lengths - 1, "lengths": lengths}


def lines_of(shown: object, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_broken_and_names_keep_their_end(width):
    memory = lines_of(memory_table(MEMORY), width)
    assert len(memory) == 2 and "footprint" in memory[0] and "device" not in memory[0]
    lines = lines_of(lengths_table({"nodes": [node(LONG), node("CHAIN/TO_MLX", 2)]}, width), width)
    assert max(map(len, lines)) <= width
    assert lines[0].endswith("IN_MOTOR_CORTEX: 45 lengths, 44 of them once")
    assert lines[0].startswith(LONG if width == 120 else "…")
    assert lines[1].split()[:3] == ["samples", "messages", "share"]
    assert lines[2].split() == ["300", "10000", "99.6%", "120.5"]
    assert lines[3].split() == ["600", "1", "<0.1%", "60.2"]
    assert lines[8].split() == ["39", "more", "39", "0.4%"]
    assert lines[9:] == ["CHAIN/TO_MLX: 2 lengths, 1 of them once", *lines[10:12]]


@pytest.mark.parametrize("n_nodes", [0, 1, 3, 12])
@pytest.mark.parametrize("most_lines", [4, 20, 36])
def test_it_fits_into_the_terminal(n_nodes, most_lines):
    nodes = [node(f"CHAIN/TO_MLX{number}") for number in range(n_nodes)]
    lines = lines_of(lengths_table({"nodes": nodes}, 80, most_lines), 80)
    assert len(lines) <= max(most_lines, 5)
    n_shown = sum(line.startswith("CHAIN") for line in lines)
    assert n_shown == n_nodes or lines[-1] == f"{n_nodes - n_shown} more nodes"


def test_plans_are_told_where_there_are_any():
    plans = {"FFT plans": {"at_most": 45, "capacity": 128}}
    lines = lines_of(lengths_table({"nodes": [node("CHAIN/TO_MLX")], "plans": plans}), 80)
    assert lines[-1] == "FFT plans: 45 of 128 by each stage with one, at most"


def test_the_picture_has_a_curve_for_each_figure_that_is_known(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda *figures: None)
    save_plot([(0.0, MEMORY), (1.0, MEMORY)], str(tmp_path / "memory.png"), stalls=[0.5])
    curves = {line.get_label() for axes in pyplot.gcf().axes for line in axes.lines if len(line.get_xdata()) == 2}
    assert {label for panel in PANELS for label, *_ in panel.values()} <= curves


@pytest.mark.parametrize(("name", "options"), [("rich", []), ("matplotlib", ["--plot", "memory.png"])])
def test_what_it_lacks_is_named_before_it_looks_for_a_graph(name, options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        command.main(options)
    assert ended.value.code == 1
    assert f'This needs {name}: pip install "ezmsg-mlx[examples]".' in capsys.readouterr().err
