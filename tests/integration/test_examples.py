"""The example scripts, each run as a user runs it."""

import argparse
import dataclasses
import math
import os
import re
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from support import checked_options, ewma_chain

import cache_behaviour
import compare_cache_limits
import ewma_chain_graph
import ewma_chain_offline
import numpy as np
import offline_recordings
import pytest
import rechunk_before_boundary
import spike_band_power
import transformer_shapes
from helpers import reference
from helpers.examples import EXAMPLES
from helpers.scripts import SHARED_MEMORY, Script

from ezmsg.mlx import SimulatedAcquisitionSettings, memory_snapshot, message_lengths, simulated_acquisition
from ezmsg.mlx.kernels import default_path

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
    return {name: (out, np.load(files[name])) for name, out in zip(SCRIPTS, outputs, strict=True)}


def test_both_examples_give_the_same_features(runs):
    (_, offline), (_, graph) = runs.values()
    assert offline.dtype == graph.dtype == np.float32
    np.testing.assert_array_equal(offline, graph)


def test_unit_by_unit_and_stage_by_stage_the_features_are_the_same(runs, start, tmp_path):
    files = {"offline": tmp_path / "offline.npy", "graph": tmp_path / "graph.npy"}
    scripts = [
        start("ewma_chain_offline.py", *OPTIONS, "--stage-by-stage", "--save", str(files["offline"])),
        start("ewma_chain_graph.py", *OPTIONS, "--real-time", "--unit-by-unit", "--save", str(files["graph"])),
    ]
    for script in scripts:
        code, _, err = script.finish()
        assert (code, err) == (0, "")
    _, fused = runs["ewma_chain_graph"]
    # Bit for bit on the CPU; a compiled function on a GPU may round otherwise.
    tolerance = 0.0 if default_path() == "cpu" else 1e-5
    for file in files.values():
        np.testing.assert_allclose(np.load(file), fused, rtol=0, atol=tolerance)


def test_rechunked_and_monitored_the_graph_gives_the_same_features_and_a_picture(runs, start, tmp_path):
    files = {"--save": tmp_path / "features.npy", "--plot": tmp_path / "memory.png"}
    # Building Matplotlib's list of fonts would be told on stderr; now it is there.
    figures = pytest.importorskip("matplotlib.pyplot")
    # Pieces end elsewhere than bins do: of 45000 samples the last 200 stay behind, and with them the last bin.
    options = (*OPTIONS, "--real-time", "--samples-per-message", "400", "--rechunk", "--monitor")
    script = start("ewma_chain_graph.py", *options, *(str(word) for pair in files.items() for word in pair))
    script.read_until("x real time")
    script.note_segments()
    code, out, err = script.finish()
    assert (code, err) == (0, "")
    script.assert_nothing_left()
    assert re.search(r"^messages .* of [23] different lengths$", out, re.MULTILINE)
    heads, values = re.findall(r"^(MLX active .* footprint.*?) *\n(.*) MiB$", out, re.MULTILINE)[-1]
    numbers = dict(zip(re.split(r"  +", heads), values.split(), strict=True))
    assert numbers["cache limit"] in ("512", "-")
    assert int(numbers["RSS"]) > 0
    _, offline = runs["ewma_chain_offline"]
    features = np.load(files["--save"])
    assert features.shape == (149, 16)
    # Bit for bit on the CPU; on a GPU the order of additions may depend on the length of a message.
    np.testing.assert_allclose(features, offline[:149], rtol=0, atol=1e-5)
    picture = figures.imread(files["--plot"])
    assert picture.shape[:2] == (800, 1200)
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
    node = {"ewma_chain_offline": "AsArrayTransformer", "ewma_chain_graph": "CHAIN/STAGES/AsArray"}[script]
    assert re.search(rf"^limit +512 MiB, asked for by {node}", out, re.MULTILINE)


def test_the_memory_stands_below_the_last_line_even_if_it_was_told_later(capsys):
    with ewma_chain.ProgressLine(1.0) as progress:
        progress.update(0.1, ewma_chain.Meter(memory=memory_snapshot()))
        progress.memory = memory_snapshot()
    assert "MLX active" in capsys.readouterr().out.splitlines()[1]


def test_the_line_of_progress_fits_into_80_columns(monkeypatch):
    import io

    from rich.console import Console

    memory = dataclasses.replace(memory_snapshot(), mlx_cache=1234.5, resident_set=12_345.6)
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    progress = ewma_chain.ProgressLine(3600.0)
    progress.update(10.0, ewma_chain.Meter(memory=memory))
    progress.wall = 100.0
    console = Console(file=screen, width=80, force_terminal=True, color_system=None)
    console.print(progress._bar)
    (line,) = [line for line in screen.getvalue().splitlines() if "cache 1234" in line]
    assert len(line.rstrip()) <= 79 and "lengths" in line


def swallow_an_interrupt() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return
    pytest.fail("no KeyboardInterrupt")


def test_an_interrupt_that_was_swallowed_ends_the_run_all_the_same():
    handler = signal.getsignal(signal.SIGINT)
    with ewma_chain.ProgressLine(1.0) as progress:
        swallow_an_interrupt()
        # Where a graph shows its progress, in a thread of its own, there is nothing to end.
        with ThreadPoolExecutor(1) as other:
            other.submit(progress.update, 0.1, ewma_chain.Meter(memory=memory_snapshot())).result()
        progress.update(0.2, ewma_chain.Meter(memory=memory_snapshot()))
        pytest.fail("it went on")
    assert progress.interrupted
    with pytest.raises(KeyboardInterrupt), offline_recordings.View([]) as view:
        swallow_an_interrupt()
        view.report("recording", 100, 200)
    assert signal.getsignal(signal.SIGINT) is handler


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


def test_the_graph_example_leaves_nothing_behind_at_ctrl_c(start):
    script = start("ewma_chain_graph.py", *ENDLESS, "--limit", "64")
    script.read_until("x real time")
    script.note_segments()
    assert script.segments or not SHARED_MEMORY.is_dir()
    # To the main process alone, as a service manager may do.
    os.kill(script.pid, signal.SIGINT)
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    assert re.search(r"^stream .*interrupted$", out, re.MULTILINE)
    assert re.search(r"^limit +64 MiB", out, re.MULTILINE)
    script.assert_nothing_left()


def test_the_graph_example_ends_at_ctrl_c_while_its_processes_start(start):
    # The processes import what they need in the meantime.
    script = start("ewma_chain_graph.py", *ENDLESS, spawns_anew=True)
    script.read_until("starting")
    # To all processes, as a terminal does.
    os.killpg(script.pid, signal.SIGINT)
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    assert re.search(r"^stream .*interrupted$", out, re.MULTILINE)
    script.assert_nothing_left()


# A graph that never gets to the point where it asks.
STARTS_FOR_EVER = """
import multiprocessing, time
from support.interrupts import GraphInterrupts
if __name__ == "__main__":
    interrupts = GraphInterrupts(patience={patience})
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    print("starting", flush=True)
    interrupts.asked.wait()
    print("asked", flush=True)
    process.join()
"""


@pytest.mark.parametrize(("patience", "times"), [(0.5, 1), (600, 2)], ids=["after-a-while", "at-the-second"])
def test_processes_that_never_start_are_ended(start, patience, times):
    script = start("-c", STARTS_FOR_EVER.format(patience=patience))
    script.read_until("starting")
    os.killpg(script.pid, signal.SIGINT)
    if times == 2:
        # Signals do not queue: the second one counts once the first has been taken.
        script.read_until("asked")
        os.killpg(script.pid, signal.SIGINT)
    code, _, err = script.finish()
    assert code == 130
    assert err.startswith("interrupted while the processes started\n")
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
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    sink = ewma_chain_graph.Sink(ewma_chain_graph.RunSettings(STREAM))
    sink.interrupts = SimpleNamespace(check=lambda: None)
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


PICTURES = (spike_band_power, ewma_chain_graph, compare_cache_limits)
ARRAYS = (ewma_chain_offline, ewma_chain_graph, spike_band_power)
NUMBERS = (compare_cache_limits, transformer_shapes, rechunk_before_boundary)


def error_of(module, options, monkeypatch, capsys) -> str:
    """The last line of an example that does not even begin with these options."""
    monkeypatch.setattr(sys, "argv", ["example", *options])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "option", "value", "allowed"),
    [
        (ewma_chain_offline, "--limit", "-1", "a finite number of MiB, 0 or above"),
        (ewma_chain_offline, "--limit", "true", "a finite number of MiB, 0 or above"),
        (ewma_chain_offline, "--channels", "0", "an integer of at least 1"),
        (ewma_chain_offline, "--duration", "0", "a finite number above 0"),
        (ewma_chain_graph, "--rate", "inf", "a finite number above 0"),
        (ewma_chain_graph, "--samples-per-message", "2.5", "an integer of at least 1"),
        (spike_band_power, "--stall-every", "-1", "an integer of at least 0"),
        (spike_band_power, "--seed", "-1", "an integer of at least 0"),
        (offline_recordings, "--count", "0", "an integer of at least 1"),
        (offline_recordings, "--channels", "-3", "an integer of at least 1"),
        (offline_recordings, "--seconds", "0", "a finite number above 0"),
        (offline_recordings, "--workers", "0", "an integer of at least 1"),
        (offline_recordings, "--limit", "True", "a finite number of MiB, 0 or above"),
        (offline_recordings, "--checkpoint", "nan", "a number above 0 and"),
        (compare_cache_limits, "--minutes", "1e-06", "at least 0.00017"),
        (compare_cache_limits, "--channels", "0", "an integer of at least 1"),
        (compare_cache_limits, "--repeats", "0", "an integer of at least 1"),
        (compare_cache_limits, "--limits", "lots", "a finite number of MiB, 0 or above"),
        (transformer_shapes, "--shapes", "0", "an integer of at least 1"),
        (rechunk_before_boundary, "--samples-per-message", "0", "an integer of at least 1"),
        (rechunk_before_boundary, "--stall", "-1", "a finite number above 0"),
        (cache_behaviour, "--only", "much", "reuse, lengths, rare, concat"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(
    module, option, value, allowed, monkeypatch, capsys
):
    line = error_of(module, [option, value], monkeypatch, capsys)
    assert f"error: argument {option}: got " in line
    assert value in line and allowed in line


def test_a_recording_of_less_than_a_sample_is_refused_before_it_is_written(monkeypatch, capsys):
    line = error_of(offline_recordings, ["--seconds", "1e-6"], monkeypatch, capsys)
    assert "argument --seconds: 'duration' must hold one sample or more" in line


@pytest.mark.parametrize(
    ("module", "option"),
    [
        *((module, "--plot") for module in PICTURES),
        *((module, "--save") for module in ARRAYS),
        *((module, "--json") for module in NUMBERS),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(module, option, monkeypatch, capsys, tmp_path):
    line = error_of(module, [option, str(tmp_path / "nowhere" / "file.png")], monkeypatch, capsys)
    assert f"argument {option}: cannot write" in line and f"no folder '{tmp_path / 'nowhere'}'" in line
    assert f"argument {option}: '{tmp_path}' is a folder" in error_of(
        module, [option, str(tmp_path)], monkeypatch, capsys
    )


@pytest.mark.parametrize("module", PICTURES)
def test_a_picture_that_matplotlib_cannot_draw_is_refused_before_the_run(module, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("picture.xyz", "picture.npy", "picture.pgf"):
        line = error_of(module, ["--plot", str(tmp_path / name)], monkeypatch, capsys)
        assert "argument --plot: got " in line and name in line and ".png" in line


def test_results_under_a_file_are_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    line = error_of(offline_recordings, ["--output", str(tmp_path / "file" / "features")], monkeypatch, capsys)
    assert f"argument --output: '{tmp_path / 'file' / 'features'}' cannot be a folder" in line


def test_options_that_are_right_are_taken(tmp_path):
    assert [checked_options.mib(text) for text in ("none", "0", "12.5")] == [None, 0.0, 12.5]
    assert checked_options.positive_or_inf("inf") == math.inf
    assert (checked_options.count("1"), checked_options.whole("0"), checked_options.positive("1e-3")) == (1, 0, 1e-3)
    assert checked_options.folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    # As numpy.save and Matplotlib name them.
    assert checked_options.array(f"{tmp_path}/a") == checked_options.array(f"{tmp_path}/a.npy") == f"{tmp_path}/a.npy"
    pytest.importorskip("matplotlib")
    assert checked_options.picture(f"{tmp_path}/a") == f"{tmp_path}/a.png"
    assert checked_options.picture(f"{tmp_path}/a.PDF") == f"{tmp_path}/a.PDF"


def test_a_file_without_permission_is_refused(monkeypatch, tmp_path):
    # Root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for parse in (checked_options.file, checked_options.folder):
        with pytest.raises(argparse.ArgumentTypeError, match="no permission"):
            parse(str(tmp_path / "a"))


# To the import system, a module that is None is not there.
WITHOUT = (
    "import runpy, sys; sys.modules[{!r}] = None; sys.path[0] = '.'; runpy.run_path(sys.argv.pop(), None, '__main__')"
)
RUNNABLE = sorted(path.name for path in EXAMPLES.glob("*.py"))
SHORT = ("bare.py", "graph.py", "offline.py")


def test_the_folder_holds_examples_that_run_and_one_folder_of_helpers():
    others = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".py"} - {"__pycache__"}
    assert others == {"support"}
    assert all('if __name__ == "__main__":' in (EXAMPLES / name).read_text() for name in RUNNABLE)


@pytest.mark.parametrize("name", SHORT)
def test_the_short_examples_need_no_helper_and_fit_a_screen(name):
    text = (EXAMPLES / name).read_text()
    assert "support" not in text
    assert len(text.splitlines()) <= 80


def ended_without(start, module: str, names: list[str]) -> dict[str, str]:
    """What each example prints to stderr in the end, without the module."""
    errors = {}
    for name in names:
        script = start("-c", WITHOUT.format(module), name)
        code, out, errors[name] = script.finish()
        assert (code, out) == (1, "")
        assert len(errors[name].splitlines()) == 1
    return errors


def test_without_mlx_the_examples_end_with_one_line_that_names_the_extra(start):
    names = ["bare.py", "graph.py", "ewma_chain_offline.py", "compare_cache_limits.py", "transformer_shapes.py"]
    assert all("ezmsg-mlx[cpu]" in error for error in ended_without(start, "mlx", names).values())


def test_without_rich_the_examples_end_with_one_line_that_names_the_extra(start):
    names = ["ewma_chain_graph.py", "rechunk_before_boundary.py"]
    assert all("ezmsg-mlx[examples]" in error for error in ended_without(start, "rich", names).values())
    # What imports Rich does so after the check.
    for name in set(RUNNABLE) - set(SHORT):
        text = (EXAMPLES / name).read_text()
        assert "from rich" not in text or text.index("from support") < text.index("from rich")


def test_without_zarr_the_offline_examples_end_with_one_line_that_names_the_extra(start, tmp_path):
    (tmp_path / "a.nwb").touch()
    assert "ezmsg-mlx[offline]" in ended_without(start, "zarr", ["offline_recordings.py"])["offline_recordings.py"]


def test_bare_prints_what_it_did(start):
    code, out, _ = start("bare.py", "--seconds", "0.2").finish()
    assert code == 0
    assert re.search(r"^6000 samples x 64 channels, float32$", out, re.MULTILINE)
    assert re.search(r"^MLX's cache: \d+ MiB, (128) MiB at most$", out, re.MULTILINE)


def test_graph_prints_the_power_and_ends(start):
    script = start("graph.py", "--seconds", "1.5")
    code, out, _ = script.finish()
    assert code == 0
    assert re.search(r"^1\.50 s: power of channel 0 is \d+\.\d counts squared$", out, re.MULTILINE)
    script.assert_nothing_left()


def test_offline_writes_the_power_of_a_recording(start, tmp_path):
    pytest.importorskip("pynwb")
    zarr = pytest.importorskip("zarr")
    from support.synthetic_recordings import write_recordings

    (recording,) = write_recordings(tmp_path, 1, n_channels=4, seconds=0.5)
    code, out, err = start("offline.py", str(recording), str(tmp_path / "power.zarr")).finish()
    assert code == 0, err
    assert "15000 samples" in out and "power.zarr" in out
    assert zarr.open_group(str(tmp_path / "power.zarr"), mode="r")["data"].shape == (15000, 4)


def test_offline_says_which_file_is_missing_in_one_line(start, tmp_path):
    code, out, err = start("offline.py", str(tmp_path / "nothing.nwb")).finish()
    assert (code, out) == (1, "")
    assert "nothing.nwb" in err and "Traceback" not in err


def test_nothing_is_written_into_the_folder_of_the_examples(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example"])
    output = offline_recordings.parse_options().output
    assert output.is_relative_to(tempfile.gettempdir())
    assert compare_cache_limits.parse_options().plot is None
