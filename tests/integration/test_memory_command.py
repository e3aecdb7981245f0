"""``ezmsg-mlx memory`` beside a running graph."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import warm

from ezmsg.mlx.memory import __main__ as command

pytest.importorskip("mlx.core")
pytest.importorskip("rich")

GRAPH = """
import ezmsg.core as ez

import ezmsg.mlx as mlx

SETTINGS = mlx.SimulatedAcquisitionSettings(n_channels=8, real_time=True, stall_every=5)


class Chain(ez.Collection):
    SOURCE = mlx.SimulatedAcquisition(SETTINGS)
    TO_MLX = mlx.AsArray(mlx.AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=64.0))
    MONITOR = mlx.MemoryMonitor(mlx.MemoryMonitorSettings(interval=0.1))

    def network(self):
        return ((self.SOURCE.OUTPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),)


if __name__ == "__main__":
    ez.run(CHAIN=Chain())
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A graph at work with a monitor in it, where ``ez.run`` starts its server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path_factory.mktemp("graph") / "graph.py"
    script.write_text(GRAPH)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {name: value for name, value in os.environ.items() if name != "EZMSG_GRAPHSERVER_ADDR"}
    environment["EZMSG_SERVER_PORT_START"] = str(port)
    graph = subprocess.Popen([sys.executable, str(script)], env=environment, **quiet)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        graph.kill()
        graph.wait()


def run(*options: str, first_port: str = "") -> subprocess.CompletedProcess:
    environment = os.environ | {"COLUMNS": "100", "EZMSG_LOGLEVEL": "WARNING"}
    if first_port:
        environment["EZMSG_SERVER_PORT_START"] = first_port
    return warm.run(["-m", "ezmsg.mlx", "memory", *options], environment=environment)


def test_it_shows_memory_and_lengths_of_the_process_and_draws_them(address, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    latest = time.monotonic() + warm.TIME_LIMIT
    while time.monotonic() < latest:
        # Until the graph has started and its monitor is there.
        done = run("--seconds", "3", "--plot", str(picture), first_port=address.rpartition(":")[2])
        if done.returncode == 0 and "CHAIN/TO_MLX" in done.stdout:
            break
    assert done.returncode == 0, done.stderr
    heads, values = done.stdout.splitlines()[:2]
    assert heads.split()[:4] == ["MLX", "active", "MLX", "cache"]
    assert "64" in values.split()
    lines = done.stdout.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("CHAIN/TO_MLX: ")]
    assert lines[number + 1].split()[:2] == ["samples", "messages"] and lines[number + 2].split()[0] == "300"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_graph_that_is_not_there_is_told_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = run("--address", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert done.stderr.startswith("There is no graph at 127.0.0.1:") and len(done.stderr.splitlines()) == 1


def test_a_graph_is_looked_for_at_all_places_and_what_else_listens_there_does_no_harm():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = run(first_port=str(silent.getsockname()[1]))
    assert done.returncode == 1
    assert done.stderr.startswith("There is no graph at 127.0.0.1:25978 or at 127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", [["--address", "here"], ["--seconds", "soon"]])
def test_wrong_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(options)
    assert stopped.value.code == 2
    assert options[1] in capsys.readouterr().err
