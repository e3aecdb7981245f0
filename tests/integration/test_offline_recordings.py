"""A folder of recordings to features: in one process, on a cluster, with a worker killed in the middle, at Ctrl-C."""

import argparse
import contextlib
import io
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from support import offline_features
from support.offline_features import Job, Outcome

import ezmsg.core as ez
import numpy as np
import offline_recordings
import psutil
import pytest
from helpers import warm
from helpers.examples import EXAMPLES
from helpers.warm import TIME_LIMIT

from ezmsg.mlx import (
    AsArrayTransformer,
    EWMATransformer,
    NWBSource,
    ZarrSink,
    cache_limit,
    process_recording,
    withdraw_cache_limit,
)

pytest.importorskip("mlx.core")
distributed = pytest.importorskip("distributed")
zarr = pytest.importorskip("zarr")
pytest.importorskip("pynwb")

LIMIT_MB = 48.0


class Script:
    """The example at work, in a session of its own, as a terminal starts it."""

    def __init__(self, *options: str | os.PathLike) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("EZMSG_", "FORCE_COLOR"))}
        arguments = [str(EXAMPLES / "offline_recordings.py"), *map(str, options)]
        self.process = warm.start(arguments, environment=environment, modules=warm.OFFLINE)

    def finish(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, out, err

    def others(self) -> list[psutil.Process]:
        """All other processes of its session."""
        found = []
        for process in psutil.process_iter():
            try:
                is_one = os.getsid(process.pid) == self.process.pid != process.pid
                if is_one and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found


@pytest.fixture(scope="module", autouse=True)
def this_process_as_it_was() -> Iterator[None]:
    """The example asks for a limit, and for fewer log messages, in the process that it runs in; Dask sets variables."""
    environment, level = dict(os.environ), ez.logger.level
    os.environ["EZMSG_LOGLEVEL"] = "WARNING"
    warm.spawn_here_too(warm.OFFLINE)
    yield
    warm.spawn_here_too()
    withdraw_cache_limit(offline_features.WORKER)
    ez.logger.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """The folder that a run in one process writes recordings and features to, and what it prints."""
    folder = tmp_path_factory.mktemp("alone")
    options = f"--output {folder} --count 3 --channels 8 --seconds 4 --limit {LIMIT_MB}"
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as out:
        monkeypatch.setattr(sys, "argv", ["offline_recordings.py", *options.split()])
        assert offline_recordings.main() == 0
    return folder, out.getvalue()


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with distributed.Client(cluster) as client:
        yield client


def features(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {path.name: zarr.open_group(str(path), mode="r")["data"][:] for path in sorted(folder.glob("*.zarr"))}


def assert_same_features(folder: pathlib.Path, expected: pathlib.Path) -> None:
    found, wanted = features(folder), features(expected)
    assert found.keys() == wanted.keys() and len(wanted) == 3
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)
    assert not list(folder.glob("*.partial"))


def jobs(recordings: pathlib.Path, output: pathlib.Path, **options: object) -> list[Job]:
    return [
        Job(str(file), str(output / f"{file.stem}.zarr"), limit_mb=LIMIT_MB, **options)
        for file in sorted(recordings.glob("*.nwb"))
    ]


def test_one_process_writes_features_and_says_how_it_went(alone):
    folder, out = alone
    found = features(folder)
    assert [values.shape for values in found.values()] == [(400, 8)] * 3
    assert all(np.isfinite(values).all() and values.std() > 0.1 for values in found.values())
    assert re.search(r"^3 recordings of 12\.0 s in .* s: .* a minute, .*; 0 were there, 0 failed$", out, re.MULTILINE)
    row = re.search(r"^ *\d+ +3 +12\.0 +(\d+) +48 *$", out, re.MULTILINE)
    assert int(row[1]) > 50


def test_a_cluster_gives_the_same_features_and_each_worker_has_its_limit(alone, cluster, client, tmp_path):
    folder, _ = alone
    options = argparse.Namespace(scheduler=cluster.scheduler_address, workers=None)
    reported: dict[str, tuple[float, float]] = {}
    todo = jobs(folder / "recordings", tmp_path)
    results = dict(
        offline_recordings.run_on_cluster(todo, options, lambda name, *seconds: reported.update({name: seconds}))
    )
    assert [results[job].seconds_done for job in todo] == [4.0] * 3
    assert {outcome.pid for outcome in results.values()} <= set(client.run(os.getpid).values())
    assert reported == {job.recording: (4.0, 4.0) for job in todo}
    assert_same_features(tmp_path, folder)

    # Both workers, however the recordings were shared out: a worker applies its limit with its first recording.
    for worker in client.scheduler_info()["workers"]:
        client.submit(
            offline_features.extract_features_on_worker,
            todo[0],
            pure=False,
            workers=[worker],
        ).result()
    limits = client.run(cache_limit)
    assert len(limits) == 2
    pids = client.run(os.getpid)
    for worker, limit in limits.items():
        assert (limit.limit_mb, limit.source) == (LIMIT_MB, "node")
        assert limit.node == f"worker {pids[worker]}"


def test_a_worker_killed_in_the_middle_costs_a_retry_of_its_recording(alone, client, tmp_path):
    folder, _ = alone
    pids: queue.Queue[int] = queue.Queue()
    client.subscribe_topic("stuck", lambda event: pids.put(event[1]))

    def get_stuck_once(job, marker):
        import os
        import threading

        from support import offline_features

        import distributed

        def report(seconds, total):
            if seconds >= 2.0 and not os.path.exists(marker):
                open(marker, "w").close()
                distributed.get_worker().log_event("stuck", os.getpid())
                threading.Event().wait()

        return offline_features.extract_features(job, report), os.getpid()

    # 0.1 s are read at once.
    todo = jobs(folder / "recordings", tmp_path, checkpoint_seconds=0.5, chunk_mb=3000 * 16 / 2**20)
    futures = [
        client.submit(get_stuck_once, job, str(tmp_path / "marker") if number == 1 else os.devnull, pure=False)
        for number, job in enumerate(todo)
    ]
    stuck = pids.get(timeout=TIME_LIMIT)
    # What is written goes on in a thread of its own.
    saved, latest = pathlib.Path(todo[1].results + ".partial", "checkpoint"), time.monotonic() + TIME_LIMIT
    while not saved.is_file() and time.monotonic() < latest:
        time.sleep(0.01)
    assert saved.is_file()
    os.kill(stuck, signal.SIGKILL)
    outcomes, workers = zip(*client.gather(futures), strict=True)
    assert_same_features(tmp_path, folder)
    assert workers[1] != stuck
    # Its recording went on at a checkpoint, the others ran once and as a whole.
    assert 2.0 < outcomes[1].seconds_done < 4.0
    assert [outcomes[number].seconds_done for number in (0, 2)] == [4.0, 4.0]
    # The worker in its place has the limit, too.
    assert all(outcome.limit_mb == LIMIT_MB for outcome in outcomes)


def test_pieces_of_a_recording_on_a_cluster_are_those_of_this_machine(alone, client, tmp_path):
    # Not importable on the workers, so that it is sent as it is.
    def make_chain():
        return [
            AsArrayTransformer(backend="mlx", dtype="float32"),
            EWMATransformer(time_constant=0.02),
            AsArrayTransformer(backend="numpy"),
        ]

    folder, _ = alone
    source = NWBSource(next((folder / "recordings").glob("*-1.nwb")))
    with ThreadPoolExecutor(1) as here:
        for name, executor in (("cluster", client.get_executor(pure=False, retries=2)), ("here", here)):
            done = process_recording(
                source,
                make_chain,
                ZarrSink(tmp_path / name),
                workers=executor,
                checkpoint_seconds=1.5,
                progress=False,
            )
            assert done.n_pieces == 3 and done.largest_difference <= 1e-6
    cluster, here = (zarr.open_group(str(tmp_path / name), mode="r")["data"][:] for name in ("cluster", "here"))
    np.testing.assert_array_equal(cluster, here)


def test_ctrl_c_leaves_what_to_go_on_with_and_no_process(alone, tmp_path):
    folder, _ = alone
    script = Script("--recordings", folder / "recordings", "--output", tmp_path, "--workers", "1")
    for line in script.process.stdout:
        if ".nwb: " in line:
            break
    os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does
    code, out, err = script.finish()
    assert (code, err) == (130, "")
    told = re.search(
        r"^interrupted; the same command leaves (\d) finished .* alone, goes on with (\d) .*, and begins (\d) at",
        out,
        re.M,
    )
    left = [path.name for path in tmp_path.iterdir()]
    n_finished = sum(name.endswith(".zarr") for name in left)
    n_begun = sum((tmp_path / name / "checkpoint").exists() for name in left)
    assert [int(number) for number in told.groups()] == [n_finished, n_begun, 3 - n_finished - n_begun]
    _, alive = psutil.wait_procs(script.others(), timeout=TIME_LIMIT)
    assert alive == []
    left = sorted(path.name for path in tmp_path.iterdir())
    assert all(name.endswith((".zarr", ".zarr.partial")) for name in left)
    assert any(name.endswith(".zarr") for name in left)

    todo = jobs(folder / "recordings", tmp_path)
    results = dict(offline_recordings.run_here(todo, lambda *_: None))
    assert 0.0 in {outcome.seconds_done for outcome in results.values()}
    assert_same_features(tmp_path, folder)


def test_a_recording_that_finishes_during_ctrl_c_counts(monkeypatch, capsys, tmp_path):
    for name in ("early", "late", "never"):
        (tmp_path / f"{name}.nwb").touch()
    (tmp_path / "out" / "early.zarr").mkdir(parents=True)

    def interrupted_at_the_end(job, report):
        if "late" in job.recording:
            os.mkdir(job.results)
            raise KeyboardInterrupt
        raise ValueError("bad")

    monkeypatch.setattr(offline_features, "extract_features", interrupted_at_the_end)
    options = ["--recordings", str(tmp_path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["offline_recordings.py", *options])
    assert offline_recordings.main() == 130
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("; 0 were there, 1 failed, 1 finished during Ctrl-C")


def test_a_bad_recording_is_told_and_the_others_are_done(alone, tmp_path):
    folder, _ = alone
    good = next((folder / "recordings").glob("*-1.nwb"))
    os.link(good, tmp_path / "good.nwb")
    (tmp_path / "bad.nwb").write_bytes(good.read_bytes()[:1000])
    out: list[object] = []
    todo = jobs(tmp_path, tmp_path / "out")
    for job, result in offline_recordings.run_here(todo, lambda *told: out.append(told)):
        assert isinstance(result, Exception) == (pathlib.Path(job.recording).name == "bad.nwb")
    assert out == [(str(tmp_path / "good.nwb"), 4.0, 4.0)]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.zarr"]


def test_a_scheduler_that_is_not_there_is_told_in_one_line():
    options = argparse.Namespace(scheduler="nowhere://1", workers=None)
    with pytest.raises(SystemExit, match="^--scheduler nowhere://1: there is no Dask scheduler that answers"):
        list(offline_recordings.run_on_cluster([], options, lambda *_: None))


def test_a_scheduler_that_goes_away_ends_in_a_summary(alone, tmp_path):
    folder, _ = alone
    file = tmp_path / "scheduler.json"
    command = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    scheduler = warm.start(
        [*command, "--scheduler-file", str(file)], environment=os.environ, with_stderr=True, modules=warm.OFFLINE
    )
    try:
        deadline = time.monotonic() + TIME_LIMIT
        while not file.exists():
            assert scheduler.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        script = Script("--recordings", folder / "recordings", "--output", tmp_path / "out", "--scheduler", address)
        with distributed.Client(address) as client:
            # There are no workers, so the tasks stay.
            while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) < 3:
                assert script.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        os.kill(scheduler.pid, signal.SIGKILL)
        scheduler.communicate()
    code, out, err = script.finish()
    assert (code, err) == (1, "")
    gone = f"--scheduler {address}: it does not answer any more; the same command leaves 0 finished recordings alone"
    assert gone in out
    assert out.splitlines()[-1].startswith("0 recordings of 0.0 s")


def test_the_bar_moves_with_the_recordings_not_only_when_they_are_finished(tmp_path):
    some = [Job(str(tmp_path / f"{number}.nwb"), str(tmp_path / f"{number}.zarr")) for number in range(4)]
    with offline_recordings.View(some) as view:
        (task,) = view._bar.tasks
        view.report(some[0].recording, 5.0, 10.0)
        view.report(some[1].recording, 2.0, 8.0)
        assert (task.completed, task.total) == (0.75, 4)
        outcome = Outcome(some[0], 10.0, 10.0, 1.0, 1, 1.0, None)
        view.finished(some[0], outcome)
        assert task.completed == 1.25 and task.fields["finished"] == 1


def test_help_shows_the_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offline_recordings.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        offline_recordings.main()
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for name in "recordings series output workers scheduler limit checkpoint count channels seconds".split():
        assert f"--{name}" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers", "1", "--scheduler", "tcp://nowhere:1"], "give one of them"),
        (["--recordings", "nowhere"], "--recordings nowhere is no folder"),
    ],
)
def test_options_that_do_not_fit_are_named(options, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offline_recordings.py", *options])
    with pytest.raises(SystemExit) as stopped:
        offline_recordings.main()
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
