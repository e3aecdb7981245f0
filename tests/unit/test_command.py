"""``ezmsg-mlx``: usage, exit statuses, lines of JSON, dry runs."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import nwb_files, recording_files
from helpers.processes import TESTS, TIME_LIMIT
from helpers.scripts import Script

pytest.importorskip("mlx.core")
pytest.importorskip("pynwb")
zarr = pytest.importorskip("zarr")

from ezmsg.mlx import chains, command
from ezmsg.mlx.command import info
from ezmsg.mlx.command import options as jobs
from ezmsg.mlx.command import options as resultoptions
from ezmsg.mlx.command import progress as events
from ezmsg.mlx.command import progress as views
from ezmsg.mlx.command.options import Parser

ROOT = TESTS.parent
CHAIN = ["--chain", "helpers.command_chains:make_chain"]
Lines = list[dict]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with two recordings, one from 5 s and one from 7 s on."""
    folder = tmp_path_factory.mktemp("recordings")
    nwb_files.write(folder / "a.nwb", {})
    nwb_files.write(folder / "b.nwb", {"starting_time": 7.0})
    return folder


@pytest.fixture(autouse=True)
def this_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import ezmsg.core as ez

    monkeypatch.setenv("EZMSG_LOGLEVEL", "WARNING")
    monkeypatch.setattr(ez.logger, "level", ez.logger.level)


@pytest.fixture
def run(recordings, tmp_path, capsys):
    """Call ``ezmsg-mlx process`` on both recordings; its exit status and the lines of JSON."""

    def call(*options: object) -> tuple[int, Lines]:
        status = command.main(["process", str(recordings), "--output", str(tmp_path / "out"), *map(str, options)])
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    said, hint = capsys.readouterr().err.strip().splitlines()
    assert hint == f"{said.partition(':')[0]} --help lists the options."
    return said


def test_recordings_become_groups_and_each_event_is_a_line(run, recordings, tmp_path):
    status, lines = run(*CHAIN)
    assert status == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["a.zarr", "b.zarr"]
    group = zarr.open_group(str(out / "b.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:], nwb_files.DATA)
    np.testing.assert_allclose(group["time"][:], 7.0 + np.arange(1000) / nwb_files.RATE)
    kinds = [line["event"] for line in lines]
    assert kinds == ["started", "progress", "finished", "progress", "finished", "ended"]
    assert lines[0] == {
        "event": "started",
        "recordings": 2,
        "chain": "helpers.command_chains:make_chain",
        "output": str(out),
    }
    finished = [line for line in lines if line["event"] == "finished"]
    assert [line["recording"] for line in finished] == [str(recordings / "a.nwb"), str(recordings / "b.nwb")]
    assert [line["results"] for line in finished] == [str(out / "a.zarr"), str(out / "b.zarr")]
    assert {line["seconds"] for line in finished} == {line["processed"] for line in finished} == {0.5}
    end = lines[-1]
    assert (end["finished"], end["there"], end["failed"], end["left"], end["status"]) == (2, 0, 0, 0, 0)


def test_what_is_there_is_left_alone_and_what_fails_does_not_stop_the_others(run, recordings, tmp_path, capsys):
    assert run(*CHAIN)[0] == 0
    status, lines = run(*CHAIN)
    assert status == 0
    assert [line["processed"] for line in lines if line["event"] == "finished"] == [0.0, 0.0]
    assert (lines[-1]["finished"], lines[-1]["there"]) == (2, 2)

    broken = tmp_path / "broken.nwb"
    broken.write_bytes(b"no recording")
    failing = ["--chain", "helpers.command_chains:make_failing", "--output", str(tmp_path / "other")]
    assert command.main(["process", str(recordings), str(broken), *failing]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failed = {pathlib.Path(line["recording"]).name: line["error"] for line in lines if line["event"] == "failed"}
    assert failed.keys() == {"b.nwb", "broken.nwb"}
    assert failed["b.nwb"] == "ValueError: no such luck"
    assert "broken.nwb" in failed["broken.nwb"]
    assert (lines[-1]["finished"], lines[-1]["failed"], lines[-1]["status"]) == (1, 2, 1)
    assert [path.name for path in (tmp_path / "other").glob("*.zarr")] == ["a.zarr"]


def test_other_settings_do_not_replace_results(run, tmp_path):
    ready = ["--chain", "spike-band-power", "--low", 100, "--bin-seconds", 0.1]
    assert run(*ready, "--high", 500)[0] == 0
    before = zarr.open_group(str(tmp_path / "out" / "a.zarr"), mode="r")["data"][:]
    assert before.shape == (5, 3) and before.dtype == np.float32
    status, lines = run(*ready, "--high", 600)
    assert status == 1
    failed = [line["error"] for line in lines if line["event"] == "failed"]
    named = "cutoff of ButterworthFilterTransformer is 600.0, there it is 500.0."
    assert all("FileExistsError" in error and error.endswith(f"Here {named}") for error in failed)
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "out" / "a.zarr"), mode="r")["data"][:], before)


@pytest.mark.parametrize(("name", "codec"), [("none", None), ("zstd", ("zstd", 5, 2)), ("lz4:9", ("lz4", 9, 2))])
def test_results_are_compressed_as_asked_for(run, tmp_path, name, codec):
    assert run(*CHAIN, "--compressor", name)[0] == 0
    written = json.loads((tmp_path / "out" / "a.zarr" / "data" / ".zarray").read_text())["compressor"]
    assert (written and (written["cname"], written["clevel"], written["shuffle"])) == codec


def test_results_are_kept_as_asked_for(run, tmp_path):
    assert run(*CHAIN, "--dtype", "int16", "--chunk-samples", 300, "--chunk-channels", 2, "--chunk-mb", 1)[0] == 0
    data = zarr.open_group(str(tmp_path / "out" / "a.zarr"), mode="r")["data"]
    assert (data.dtype, data.chunks) == (np.int16, (300, 2))
    np.testing.assert_array_equal(data[:], nwb_files.DATA)


def test_the_dtype_is_a_parameter_of_a_chain_that_has_it(run, tmp_path):
    assert run("--chain", "band-pass", "--low", 50, "--high", 200, "--dtype", "int16")[0] == 0
    recipe = zarr.open_group(str(tmp_path / "out" / "a.zarr"), mode="r").attrs["recipe"]
    assert "dtype='int16'" in recipe and "results as" not in recipe


def test_margin_and_tolerance_are_handed_on(run, monkeypatch):
    given = {}

    def noted(*_, **options):
        given.update(options)
        yield from ()

    monkeypatch.setattr("ezmsg.mlx.offline.process_recordings", noted)
    run(*CHAIN, "--tolerance", "1e-4", "--margin", "2.5")
    assert (given["tolerance"], given["margin"]) == (1e-4, 2.5)


def test_dtypes_are_those_of_the_package():
    from ezmsg.mlx.offline import zarrlayout as resultlayout

    assert resultoptions.DTYPES == resultlayout.DTYPES


def test_ctrl_c_leaves_nothing_under_a_final_name(run, recordings, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.Job, "open", small_messages(jobs.Job.open))
    status, lines = run("--chain", "helpers.command_chains:make_interrupted")
    assert status == 130
    assert (lines[-1]["finished"], lines[-1]["left"], lines[-1]["status"]) == (0, 2, 130)
    assert not list((tmp_path / "out").glob("*.zarr"))
    assert run(*CHAIN)[0] == 0


@pytest.mark.parametrize(("workers", "chain"), [(1, "make_endless"), (2, "make_endless_elsewhere")])
def test_ctrl_c_on_a_terminal_ends_all_processes_and_leaves_what_to_go_on_with(
    workers, chain, tmp_path, monkeypatch, request
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    np.zeros((12_000, 2), np.int16).tofile(tmp_path / "noise.bin")
    layout = ["sampling_rate=1000", "n_channels=2", "chunk_mb=0.002"]
    how = ["--format", "rawbinary", *(text for each in layout for text in ("--source", each))]
    # Pieces of two messages.
    pieces = ["--workers", str(workers), "--margin", "0", "--checkpoint", "6"]
    there = ["process", str(tmp_path / "noise.bin"), "--output", str(tmp_path / "out")]
    runs = ["--chain", f"helpers.command_chains:{chain}", *pieces]
    script = Script("-m", "ezmsg.mlx.command", *there, *how, *runs)
    request.addfinalizer(lambda: script.process.poll() is None and script.kill())
    script.read_until("waiting")
    assert len(script.processes()) >= workers
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    ended = json.loads(out.splitlines()[-1])
    assert (ended["event"], ended["finished"], ended["left"], ended["status"]) == ("ended", 0, 1, 130)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["noise.zarr.partial"]
    script.assert_nothing_left()


@pytest.mark.parametrize(
    "given",
    [
        *(["--help"], ["--version"], ["process", "--help"], ["process", "--list-chains"], ["info", "--formats"]),
        *(["show", "--help"], ["selftest", "--help"], ["memory", "--help"], ["process", "RECORDINGS"]),
    ],
    ids=" ".join,
)
def test_the_end_of_who_reads_the_output_ends_the_command_without_a_word(
    given, recordings, tmp_path, monkeypatch, capfd
):
    if given[-1] == "RECORDINGS":
        given = ["process", str(recordings), "--output", str(tmp_path), *CHAIN]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert command.main(given) == 141
        broken.write("what Python writes at the end of a process")
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.glob("*.zarr"))


def test_a_pipe_that_breaks_is_a_status_of_a_process_and_nothing_else():
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from ezmsg.mlx.command import main; sys.exit(main(['--help']))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = [sys.executable, "-c", code]
    ended = subprocess.run(line, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=TIME_LIMIT)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def small_messages(opened):
    """Recordings come in two messages, and are cut into ones of 500 samples."""

    def open(self):
        source = opened(self)
        source._chunk = 500
        return source

    return open


@pytest.fixture
def short_pieces(monkeypatch):
    from ezmsg.mlx import RechunkSettings
    from ezmsg.mlx.offline import process

    monkeypatch.setattr(process, "DEFAULT_RECHUNK", RechunkSettings(sizes=(100,)))


def test_a_dry_run_says_how_long_and_how_large_and_leaves_nothing(run, recordings, tmp_path, short_pieces):
    status, lines = run(*CHAIN, "--dry-run")
    assert status == 0
    assert [line["event"] for line in lines] == ["estimate"] * 3
    assert [os.path.basename(line["recording"]) for line in lines] == ["a.nwb", "b.nwb", ""]
    assert [line["seconds"] for line in lines] == [0.5, 0.5, 1.0]
    # Two like each other are measured once.
    assert lines[0]["measured"] > 0 and lines[1]["measured"] == 0
    for line in lines:
        parts = sum(line[part] for part in ("start", "read", "chain", "write"))
        assert line["wall"] == pytest.approx(parts, abs=0.01)
        assert line["free"] > 0
    assert lines[-1]["size"] == lines[0]["size"] + lines[1]["size"]
    assert list(tmp_path.iterdir()) == []
    # It all was measured, so it is what a run writes.
    assert run(*CHAIN)[0] == 0
    written = sum(file.stat().st_size for file in (tmp_path / "out" / "a.zarr").rglob("*") if file.is_file())
    assert lines[0]["size"] == pytest.approx(written, rel=0.1)


def test_a_dry_run_says_what_would_fail(run):
    status, lines = run("--chain", "helpers.command_chains:make_failing", "--dry-run")
    assert status == 0  # both are of one kind, of which the first is measured
    status, lines = run("--chain", "band-pass", "--low", 100, "--dry-run")
    assert status == 1
    assert "'cutoff' must be below half the sampling rate (1000 Hz), got 6000.0" in lines[0]["error"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chain", "none"], "argument --chain: must be one of band-pass, ewma-features, "),
        (["--chain", "no_such_module:f"], "argument --chain: module 'no_such_module' cannot be imported"),
        (["--chain", "helpers.command_chains:f"], "argument --chain: module 'helpers.command_chains' has no function"),
        (["--chain", "helpers.command_chains:no_function"], "argument --chain: module 'helpers.command_chains' has no"),
        (["--chain", "json:dumps"], "argument --chain: TypeError: dumps() missing 1 required positional argument"),
        (["--chain", "band-pass", "--low", "-1"], "argument --low: 'low' must be a finite number > 0, got -1.0"),
        (["--chain", "ewma-features", "--smooth-seconds", "0"], "argument --smooth-seconds: 'smooth_seconds' must be "),
        (["--chain", "band-pass", "--reference", "mode"], "argument --reference: invalid choice: 'mode'"),
        ([*CHAIN, "--workers", "0"], "argument --workers: must be an integer of at least 1, got '0'"),
        ([*CHAIN, "--workers", "2", "--scheduler", "a:1"], "argument --workers: not allowed with --scheduler"),
        ([*CHAIN, "--checkpoint", "-1"], "argument --checkpoint: must be a number > 0 or "),
        ([*CHAIN, "--margin", "nan"], "argument --margin: must be a finite number >= 0 or "),
        ([*CHAIN, "--tolerance", "0"], "argument --tolerance: must be a finite number > 0, got '0'"),
        ([*CHAIN, "--compressor", "zstd:10"], "argument --compressor: must be default, none, lz4 or zstd"),
        ([*CHAIN, "--chunk-mb", "inf"], "argument --chunk-mb: must be a finite number > 0, got 'inf'"),
        ([*CHAIN, "--chunk-samples", "0"], "argument --chunk-samples: must be an integer of at least 1, got '0'"),
        ([*CHAIN, "--low", "3"], "unrecognized arguments: --low"),
        ([], "the following arguments are required: --chain"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, said, recordings, tmp_path, capsys):
    output = tmp_path / "out"
    line = refused(["process", str(recordings), "--output", str(output), *options], capsys)
    assert line.startswith(f"ezmsg-mlx process: error: {said}")
    assert not output.exists()


def test_wrong_places_are_refused_in_one_line(recordings, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    same = tmp_path / "a.nwb"
    same.write_bytes(b"")
    for recording, output, said in (
        (tmp_path / "none", tmp_path, "argument RECORDING: there is no "),
        (tmp_path / "empty", tmp_path, f"argument RECORDING: '{tmp_path / 'empty'}' has no recordings"),
        (recordings, tmp_path / "file" / "out", "argument --output: "),
    ):
        assert said in refused(["process", str(recording), "--output", str(output), *CHAIN], capsys)
    arguments = ["process", str(recordings), str(same), "--output", str(tmp_path), *CHAIN]
    assert "have one name, and so would their results" in refused(arguments, capsys)


def test_a_scheduler_that_does_not_answer_is_told_in_one_line(run, tmp_path, monkeypatch, capsys):
    distributed = pytest.importorskip("distributed")

    def client(address):
        raise OSError("no connection")

    monkeypatch.setattr(distributed, "Client", client)
    arguments = ["process", __file__, "--output", str(tmp_path / "out"), "--scheduler", "tcp://nowhere:1", *CHAIN]
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert "argument --scheduler: no Dask scheduler answers at 'tcp://nowhere:1'" in err
    assert out == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_missing_package_is_told_in_one_line(options, recordings, tmp_path, monkeypatch, capsys):
    def missing(job):
        raise ImportError('This needs neo: pip install "ezmsg-mlx[offline]".')

    monkeypatch.setattr(jobs.Job, "open", missing)
    assert command.main(["process", str(recordings), "--output", str(tmp_path / "out"), *CHAIN, *options]) == 2
    error = 'ezmsg-mlx process: error: This needs neo: pip install "ezmsg-mlx[offline]".'
    assert capsys.readouterr().err.splitlines() == [error]


def test_ctrl_c_before_the_run_is_told_in_one_line(monkeypatch, capsys):
    def interrupted(prog, arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "main", interrupted)
    assert command.main(["info", "a.nwb"]) == 130
    assert capsys.readouterr().err.splitlines() == ["Interrupted."]


def test_chains_are_listed_and_each_tells_its_parameters(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["process", "--list-chains"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == sorted(chains.READY)
    with pytest.raises(SystemExit):
        command.main(["process", "--chain", "spike-band-power", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--low X Lower cut-off in Hz. [300.0]", "--reference {none,mean,median}", "--log, --no-log"):
        assert option in text


def test_parameters_have_names_of_their_own():
    from ezmsg.mlx.command import options as processoptions

    for name in chains.READY:
        parser = processoptions.make_parser("test")
        known = {action.dest for action in parser._actions}
        from ezmsg.mlx.command.options import add_parameters

        assert known.isdisjoint(add_parameters(parser, name))


@pytest.mark.parametrize("given", [["--help"], ["process", "--help"], ["selftest", "--help"], ["show", "--help"]])
def test_help_loads_neither_mlx_nor_numpy(given):
    code = f"""
import sys
from ezmsg.mlx.command import main
try:
    main({given!r})
except SystemExit as stopped:
    assert stopped.code == 0
loaded = [name for name in ("mlx.core", "numpy", "ezmsg.core") if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ezmsg-mlx ")


def test_every_command_is_a_module_and_the_script_is_the_entry_point(capsys):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'ezmsg-mlx = "ezmsg.mlx.command:main"' in project
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    for name, what in command.COMMANDS.items():
        assert f"{name} " in text and what in text
    assert "invalid choice: 'fly'" in refused(["fly"], capsys)


def test_the_other_programs_are_those_of_the_package(monkeypatch):
    from ezmsg.mlx import selftest as program
    from ezmsg.mlx.memory import __main__ as memory_program

    called = []
    for module in (program, memory_program):
        monkeypatch.setattr(module, "main", lambda *given, **named: called.append((given, named)) or 0)
    assert command.main(["selftest", "--json"]) == command.main(["memory", "--seconds", "1"]) == 0
    assert called == [((None,), {"as_json": True}), ((["--seconds", "1"], "ezmsg-mlx memory", Parser), {})]


def test_without_arguments_there_is_help(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: ezmsg-mlx ") and "ezmsg-mlx info recordings/" in out


@pytest.mark.parametrize("name", [None, "process", "info", "show", "selftest", "memory"])
def test_help_has_examples_and_fits_a_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        command.main([*([] if name is None else [name]), "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    examples = out.partition("examples:\n")[2].partition("\n\n")[0]
    assert f"ezmsg-mlx{' ' if name is None else f' {name}'}" in examples
    assert max(map(len, out.splitlines())) <= 80


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "ezmsg.mlx", "--version"], capture_output=True, timeout=TIME_LIMIT)
    assert done.returncode == 0 and done.stdout.strip()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(shell, capsys):
    pytest.importorskip("shtab", reason="shtab writes the completion")
    assert command.main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(part in script for part in (*command.COMMANDS, "--chain", "--channels", "--start", "--require"))
    if shell == "bash":
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=TIME_LIMIT)
        assert (checked.returncode, checked.stderr) == (0, "")


RAW = ["--format", "rawbinary", "--source", "sampling_rate=2000", "--source", "n_channels=3"]


def test_a_process_without_standard_output_works_all_the_same(tmp_path):
    """As a job that was started with ``>&-``; no file of the results may become its standard output."""
    nwb_files.DATA.tofile(tmp_path / "noise.bin")
    options = [*RAW, *CHAIN, "--output", "out", "--json"]
    line = [sys.executable, "-m", "ezmsg.mlx", "process", "noise.bin", *options]
    closed = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *line]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(closed, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, timeout=TIME_LIMIT)
    assert done.returncode == 0
    group = zarr.open_group(str(tmp_path / "out" / "noise.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:], nwb_files.DATA)


def test_names_that_are_no_text_are_processed_and_shown(tmp_path, monkeypatch):
    name = os.fsdecode(b"caf\xe9.bin")
    nwb_files.DATA.tofile(tmp_path / name)
    with open(tmp_path / "terminal", "w", encoding="utf-8") as terminal:
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        options = [*RAW, *CHAIN, "--output", str(tmp_path / "out")]
        assert command.main(["process", str(tmp_path / name), *options]) == 0
        assert command.main(["info", str(tmp_path / name), *RAW]) == 0
    shown = (tmp_path / "terminal").read_text(encoding="utf-8")
    assert "caf\\udce9.bin: 0.5 s in" in shown and "caf\\udce9.bin: rawbinary" in shown
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".zarr"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_an_output_that_cannot_be_made_is_told_in_one_line(options, recordings, tmp_path, capsys):
    (tmp_path / "dead").symlink_to("nowhere")
    output = str(tmp_path / "dead")
    line = refused(["process", str(recordings), *CHAIN, "--output", output, *options], capsys)
    assert "argument --output: " in line and "is a link to 'nowhere', which is not there" in line


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="there is no folder in which nothing can be made")
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_an_output_that_the_system_refuses_is_told_in_one_line(options, recordings, capsys):
    arguments = ["process", str(recordings), *CHAIN, "--output", "/proc/nothing/out", *options]
    try:
        status = command.main(arguments)
    except SystemExit as stopped:  # it may not be root that asks
        status = stopped.code
    assert status == 2
    assert "argument --output: " in capsys.readouterr().err.splitlines()[0]


def test_info_of_a_folder_tells_all_that_process_would_take(recordings, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.nwb", "b.nwb"):
        (tmp_path / "in" / name).symlink_to(recordings / name)
    assert command.main(["info", str(tmp_path / "in")]) == 0
    found = [json.loads(line)["path"] for line in capsys.readouterr().out.splitlines()]
    assert found == [str(tmp_path / "in" / name) for name in ("a.nwb", "b.nwb")]
    (tmp_path / "empty").mkdir()
    assert command.main(["info", str(tmp_path / "empty")]) == 2
    assert "has no recordings of a format that is known" in capsys.readouterr().err


def test_info_shows_kind_gain_offset_and_unit_of_each_group(tmp_path, monkeypatch, capsys):
    path = recording_files.write_spikeglx_nidq(tmp_path)
    intan = recording_files.write_intan_in_one_file(tmp_path)
    monkeypatch.setattr(info, "on_terminal", lambda: True)
    assert command.main(["info", str(path), str(intan)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "nidq: 0.5 s of 2 analog channels at 2000 Hz (XA0, XA1)" in lines
    assert "int16, a count is 0.152588 mV" in lines and "int16 without a unit" in lines
    assert "nidq-XD: 0.5 s of 1 digital channel at 2000 Hz (XD0)" in lines
    assert "uint16, a count is 0.195 µV, and -6389.76 µV are added" in lines


@pytest.mark.parametrize(
    ("value", "text"), [(0.381, "0.38"), (5.64, "5.6"), (56.4, "56"), (129.6, "130"), (9.96, "10"), (0, "0")]
)
def test_figures_have_two_digits(value, text):
    assert views.two_digits(value) == text


def test_the_progress_line_fits_into_80_columns(monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    import io

    screen = io.StringIO()
    made = rich_console.Console
    monkeypatch.setattr(
        "rich.progress.get_console", lambda: made(file=screen, force_terminal=True, width=80, color_system=None)
    )
    view = views.Terminal()
    view.take(events.Started(100, "band-pass", "out"))
    for number in range(2):
        view.take(events.Progress(f"/x/{'a_long_name_' * 5}_{number}.imec0.ap.bin", 500.0 * number, 4000.0))
    view.take(events.Progress("/x/run [red] [1].bin", 500.0, 4000.0))
    view._draw(after=-1e9)
    view.close()
    lines = [line for line in screen.getvalue().splitlines() if "━" in line]
    assert any("run [red] [1].bin" in line for line in lines)
    assert max(len(re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", line)) for line in lines) <= 80


def test_progress_is_told_once_a_second_for_each_recording(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(views.time, "monotonic", lambda: now[0])
    view = views.JsonLines()
    for when, recording in ((100.0, "a"), (100.5, "a"), (100.6, "b"), (101.1, "a")):
        now[0] = when
        view.take(events.Progress(recording, when, 200.0))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["recording"], line["seconds"]) for line in lines] == [("a", 100.0), ("b", 100.6), ("a", 101.1)]


def test_info_tells_what_is_in_a_recording(recordings, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "broken.nwb"
    broken.write_bytes(b"no recording")
    assert command.main(["info", str(recordings / "b.nwb")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    (stream,) = found["streams"]
    assert (found["format"], stream["sampling_rate"], stream["labels"]) == ("nwb", 2000.0, ["e2", "e0", "e3"])
    assert stream["segments"] == [{"n_samples": 1000, "start": 7.0, "duration": 0.5, "gaps": [], "differs": []}]

    assert command.main(["info", str(broken), str(recordings / "b.nwb")]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and err.startswith(f"ezmsg-mlx info: error: {broken}: ")
    assert command.main(["info", str(tmp_path / "none.nwb")]) == 2
    capsys.readouterr()

    monkeypatch.setattr(info.sys.stdout, "isatty", lambda: True, raising=False)
    assert command.main(["info", str(recordings / "b.nwb")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{recordings / 'b.nwb'}: nwb"
    assert "0.5 s of 3 channels at 2000 Hz (e2, e0, e3)" in lines[1]
    assert lines[2] == "    int16, a count is 0.25 µV"
    assert lines[3] == "    segment 0: 1000 samples from 7 s on"


def test_info_lists_formats(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["info", "--formats"])
    assert stopped.value.code == 0
    assert {"nwb", "spikeglx", "rawbinary"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def test_a_file_without_a_header_is_read_as_the_options_say(tmp_path, capsys):
    nwb_files.DATA.tofile(tmp_path / "noise.bin")
    layout = ["--format", "rawbinary", "--source", "sampling_rate=2000", "--source", "n_channels=3"]
    arguments = ["process", str(tmp_path / "noise.bin"), "--output", str(tmp_path / "out"), *layout, *CHAIN]
    assert command.main(arguments) == 0
    group = zarr.open_group(str(tmp_path / "out" / "noise.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:], nwb_files.DATA)
    assert command.main(arguments[: -len(CHAIN) - 2] + CHAIN) == 1
    assert "n_channels" in json.loads(capsys.readouterr().out.splitlines()[-2])["error"]
    assert "must be NAME=VALUE" in refused([*arguments, "--source", "rate"], capsys)
    assert "must be an integer of at least 0 or 'all', got 'one'" in refused([*arguments, "--segment", "one"], capsys)
    arguments[3] = str(tmp_path / "again")
    assert command.main([*arguments, "--segment", "0"]) == 0


def test_folders_below_keep_their_names(recordings, tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.nwb").symlink_to(recordings / "a.nwb")
    assert command.main(["process", str(tmp_path / "in"), "--output", str(tmp_path / "out"), *CHAIN]) == 0
    assert sorted(path.parent.name for path in (tmp_path / "out").glob("*/a.zarr")) == ["one", "two"]


def test_a_terminal_shows_a_bar_and_a_line_for_each_recording(monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    import io

    screen = io.StringIO()
    made = rich_console.Console

    def console(*args, **kwargs):
        return made(file=screen, force_terminal=True, width=100, color_system=None)

    monkeypatch.setattr("rich.progress.get_console", console)
    view = views.Terminal()
    view.take(events.Started(2, "band-pass low=1", "out"))
    view.take(events.Progress("/x/a.nwb", 1.0, 4.0))
    assert len(view._bar.tasks) == 2
    view.take(events.Finished("/x/a.nwb", "out/a.zarr", 4.0, 4.0, 2.0))
    assert len(view._bar.tasks) == 1
    view.take(events.Failed("/x/b.nwb", "ValueError: no"))
    view.take(events.Ended(1, 0, 1, 0, 4.0, 2.0, 1))
    view.close()
    text = screen.getvalue()
    for part in (
        "2 recordings, band-pass low=1, into out",
        "a.nwb: 4.0 s in 2.0 s",
        "b.nwb: ValueError: no",
        "2 of 2 recordings",
        "1 recording done: 4.0 s in 2.0 s, 2.0x real time; 1 failed.",
    ):
        assert part in text, part


def test_sizes_and_times_are_in_the_unit_that_fits():
    assert [views.size(n) for n in (0, 999, 1234, 99_600, 5e8, 1.25e9, 7e12)] == [
        "0 bytes",
        "999 bytes",
        "1.2 kB",
        "100 kB",
        "500 MB",
        "1.2 GB",
        "7.0 TB",
    ]
    assert [views.duration(s) for s in (0.04, 99.9, 100.0, 5999.0, 36_000.0)] == [
        "0.0 s",
        "99.9 s",
        "2 min",
        "1 h 40 min",
        "10 h 00 min",
    ]


def test_events_are_documented():
    page = (ROOT / "docs" / "guides" / "command.md").read_text(encoding="utf-8")
    for event in events.EVENTS:
        name = event.__name__.lower()
        (line,) = re.findall(rf"^\| `{name}` \| .*$", page, re.M)
        assert re.findall(r"`(\w+)`", line) == [name, *event.__dataclass_fields__], name
    for status in (jobs.DONE, jobs.SOME_FAILED, jobs.USAGE, jobs.INTERRUPTED):
        assert re.search(rf"^\| {status} \|", page, re.M)
