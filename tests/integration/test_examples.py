"""The example scripts, each run as a user runs it."""

import dataclasses
import os
import re
import signal
import sys

import ewma_chain
import ewma_chain_graph
import ewma_chain_offline
import numpy as np
import pytest
from helpers import reference
from helpers.scripts import SHARED_MEMORY, Script

from ezmsg.mlx import SimulatedAcquisitionSettings, message_lengths, simulated_acquisition

pytest.importorskip("mlx.core")

SCRIPTS = ("ewma_chain_offline", "ewma_chain_graph")

STREAM = SimulatedAcquisitionSettings(duration=1.5, n_channels=16, stall_every=40, seed=7)
OPTIONS = ("--duration", "1.5", "--channels", "16", "--stall-every", "40", "--seed", "7")
ENDLESS = ("--duration", "3600", "--channels", "16", "--real-time")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, np.ndarray]]:
    """What each script prints for the same stream, and the features that it saves."""
    folder = tmp_path_factory.mktemp("features")
    files = {name: folder / f"{name}.npy" for name in SCRIPTS}
    offline = Script("ewma_chain_offline.py", *OPTIONS, "--save", str(files["ewma_chain_offline"]))
    graph = Script("ewma_chain_graph.py", *OPTIONS, "--real-time", "--save", str(files["ewma_chain_graph"]))
    try:
        graph.read_until("x real time")
        graph.note_segments()
        outputs = []
        for script in (offline, graph):
            code, out, err = script.finish()
            assert (code, err) == (0, "")
            script.assert_nothing_left()
            outputs.append(out)
    finally:
        offline.kill()
        graph.kill()
    return {name: (out, np.load(files[name])) for name, out in zip(SCRIPTS, outputs)}


def test_both_examples_give_the_same_features(runs):
    (_, offline), (_, graph) = runs.values()
    assert offline.dtype == graph.dtype == np.float32
    np.testing.assert_array_equal(offline, graph)


def test_rechunked_and_monitored_the_graph_gives_the_same_features_and_a_picture(runs, start, tmp_path):
    files = {"--save": tmp_path / "features.npy", "--plot": tmp_path / "memory.png"}
    # Pieces end elsewhere than bins do: of 45000 samples the last 200 stay behind, and with them the last bin.
    options = (*OPTIONS, "--real-time", "--samples-per-message", "400", "--rechunk", "--monitor")
    script = start("ewma_chain_graph.py", *options, *(str(word) for pair in files.items() for word in pair))
    script.read_until("x real time")
    script.note_segments()
    # Building Matplotlib's list of fonts would be told on stderr; now it is there.
    figures = pytest.importorskip("matplotlib.pyplot")
    code, out, err = script.finish()
    assert (code, err) == (0, "")
    script.assert_nothing_left()
    assert re.search(r"^messages .* of [23] different lengths$", out, re.MULTILINE)
    heads, values = re.findall(r"^(MLX active .* device) *\n(.*) MiB$", out, re.MULTILINE)[-1]
    numbers = dict(zip(re.split(r"  +", heads), values.split()))
    assert numbers["cache limit"] in ("512", "-")
    assert int(numbers["RSS"]) > 0
    _, offline = runs["ewma_chain_offline"]
    features = np.load(files["--save"])
    assert features.shape == (149, 16)
    # Bit for bit on the CPU; on a GPU the order of additions may depend on the length of a message.
    np.testing.assert_allclose(features, offline[:149], rtol=0, atol=1e-5)
    picture = figures.imread(files["--plot"])
    assert picture.shape[:2] == (700, 1200)
    assert np.ptp(picture[..., :3]) > 0.5


@pytest.mark.parametrize("script", SCRIPTS)
def test_features_follow_the_float64_reference(runs, script):
    _, features = runs[script]
    expected = reference.log_power(
        np.concatenate([message.data for message in simulated_acquisition(STREAM)]),
        STREAM.sampling_rate,
        baseline=ewma_chain.BASELINE.time_constant,
        power=ewma_chain.POWER.time_constant,
        bin_duration=ewma_chain.BIN.bin_duration,
    )
    assert features.shape == expected.shape == (150, 16)
    # Decimal logarithms: 1e-5 is 2.3e-5 of the power.
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_summary_tells_the_stream_and_the_limit_in_force(runs, script):
    out, _ = runs[script]
    lengths = list(message_lengths(STREAM))
    assert re.search(r"^stream +1\.50 s$", out, re.MULTILINE)
    assert f"messages   {len(lengths)}, of {len(set(lengths))} different lengths" in out
    node = {"ewma_chain_offline": "AsArrayTransformer", "ewma_chain_graph": "CHAIN/TO_MLX"}[script]
    assert re.search(rf"^limit +512 MiB, asked for by {node}", out, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_plain_lines_where_stdout_is_no_terminal(runs, script):
    out, _ = runs[script]
    assert "x real time" in out
    assert all(character == "\n" or (character.isascii() and character.isprintable()) for character in out)


def test_the_offline_example_ends_at_ctrl_c(start):
    script = start("ewma_chain_offline.py", "--duration", "3600", "--channels", "16")
    script.read_until("x real time")
    os.kill(script.pid, signal.SIGINT)
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    assert re.search(r"^stream .*interrupted$", out, re.MULTILINE)


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["from-a-terminal", "to-the-main-process"])
def test_the_graph_example_leaves_nothing_behind_at_ctrl_c(start, send):
    script = start("ewma_chain_graph.py", *ENDLESS, "--limit", "64")
    script.read_until("starting")
    # One that comes too early is ignored, instead of leaving the processes waiting for each other.
    send(script.pid, signal.SIGINT)
    script.read_until("x real time")
    script.note_segments()
    assert script.segments or not SHARED_MEMORY.is_dir()
    send(script.pid, signal.SIGINT)
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    assert re.search(r"^stream .*interrupted$", out, re.MULTILINE)
    assert re.search(r"^limit +64 MiB", out, re.MULTILINE)
    script.assert_nothing_left()


def test_the_sink_of_the_graph_example_waits_for_no_bin_that_is_not_filled():
    for n_samples, fills in ((61499, False), (61500, True)):
        stream = dataclasses.replace(STREAM, duration=n_samples / STREAM.sampling_rate)
        assert stream.n_samples == n_samples
        # 205 * 0.01 * 30000 is just below 61500, where 205 * (0.01 * 30000), ezmsg-sigproc's way, is 61500.
        assert ewma_chain_graph.RunSettings(stream).fills(205) is fills


async def test_the_graph_example_ends_when_one_of_its_processes_dies(monkeypatch, capsys):
    class Process:
        terminated = False

        def terminate(self) -> None:
            self.terminated = True

    both = [Process(), Process()]
    seen = iter([both, both, both[1:]])
    monkeypatch.setattr("multiprocessing.active_children", lambda: next(seen, both[1:]))
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    sink = ewma_chain_graph.Sink(ewma_chain_graph.RunSettings(STREAM))
    await sink.setup()
    with pytest.raises(SystemExit) as stopped:
        sink.wait()
    assert stopped.value.code == 1
    assert both[1].terminated
    assert capsys.readouterr().err == "a process of the graph has died\n"


@pytest.mark.parametrize(
    ("module", "own"),
    [(ewma_chain_offline, []), (ewma_chain_graph, ["real-time", "rechunk", "monitor", "plot"])],
    ids=["offline", "graph"],
)
def test_help_shows_the_options(module, own, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for name in ["duration", "channels", "rate", "samples-per-message", "stall-every", "limit", "seed", "save", *own]:
        assert f"--{name}" in out


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("--limit", "-1", "mlx_cache_limit_mb"), ("--limit", "much", "--limit"), ("--channels", "0", "n_channels")],
)
def test_a_wrong_option_is_named(option, value, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ewma_chain_offline", option, value])
    with pytest.raises(SystemExit) as stopped:
        ewma_chain_offline.main()
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_without_mlx_the_examples_end_with_one_line_that_names_the_extra(start):
    # To the import system, a module that is None is not there.
    without = (
        "import runpy, sys; sys.modules['mlx'] = None; sys.path[0] = '.'; runpy.run_path(sys.argv.pop(), None, %r)"
    )
    for script in [start("-c", without % "__main__", f"{name}.py") for name in SCRIPTS]:
        code, out, err = script.finish()
        assert (code, out) == (1, "")
        assert len(err.splitlines()) == 1
        assert "ezmsg-mlx[cpu]" in err
