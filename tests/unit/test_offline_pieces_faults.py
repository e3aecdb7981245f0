"""Workers that die, a full disk, two runs at a time: nothing half-written has the final name, and no bit is another."""

import contextlib
import functools
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from helpers.offline_faults import DeadlySink, DeadlySource, Marking, deadly_chain
from helpers.offline_memory import MemorySource
from helpers.processes import TIME_LIMIT, environment

from ezmsg.mlx import AsArrayTransformer, RechunkSettings, ZarrSink, process_recording, process_recordings
from ezmsg.mlx.offline import executors

zarr = pytest.importorskip("zarr")
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")


def process(folder, path, workers, **attributes):
    sink = DeadlySink(path, chunk_mb=0.004)
    vars(sink).update(attributes)
    return process_recording(
        DeadlySource(folder),
        functools.partial(deadly_chain, str(folder)),
        sink,
        rechunk=RechunkSettings(sizes=(50,)),
        checkpoint_seconds=1.0,
        workers=workers,
        progress=False,
    )


def contents(path):
    group = zarr.open_group(str(path), mode="r")
    return group["data"][:], group["time"][:]


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def expected(tmp_path_factory, executor):
    """Of a run without faults, with the same pieces."""
    folder = tmp_path_factory.mktemp("expected")
    assert process(folder, folder / "results.zarr", executor).n_pieces == 4
    return contents(folder / "results.zarr")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.zarr"


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return ["spawn_main"]


def assert_same(path, expected):
    for one, other in zip(contents(path), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not list(path.parent.glob("*.partial"))


@pytest.fixture(scope="module")
def cluster():
    """Two processes, as ``workers=2`` starts them; a piece at which two have died is given up."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        executors._local_cluster(2, lambda event: None) as found,
    ):
        yield found


def test_workers_killed_in_each_phase_cost_their_piece_and_no_bit(tmp_path, path, expected, cluster, monkeypatch):
    monkeypatch.setattr(executors, "_local_cluster", lambda n_workers, hear: contextlib.nullcontext(cluster))
    # The last piece kills two workers, which is one too many.
    with pytest.raises(distributed.KilledWorker, match="2 different workers"):
        process(tmp_path, path, 1, deadly=tmp_path)
    markers = {"computing-1", "reading-1", "writing-1", "writing-2"}
    assert {entry.name for entry in tmp_path.iterdir()} == {*markers, "results.zarr.partial"}
    assert process(tmp_path, path, 1).first_sample == 3072
    assert_same(path, expected)


def as_it_is():
    return AsArrayTransformer(backend="numpy")


def test_recordings_that_are_not_cut_are_run_side_by_side(tmp_path, cluster):
    files = [tmp_path / "one", tmp_path / "other"]
    pairs = [
        (Marking(number, *order), ZarrSink(tmp_path / f"{number}.zarr"))
        for number, order in enumerate((files, files[::-1]))
    ]
    outcomes = dict(process_recordings(pairs, as_it_is, workers=cluster, margin="exact"))
    assert all(outcome.n_samples == 2000 and outcome.n_pieces == 1 for outcome in outcomes.values()), outcomes
    pids = {int(file.read_text()) for file in files}
    assert len(pids) == 2 and os.getpid() not in pids


def test_what_cannot_be_sent_is_named_and_does_not_stop_the_others(tmp_path, cluster):
    bad, good = MemorySource(), MemorySource(n_samples=20_000)
    bad.lock = threading.Lock()
    pairs = [(source, ZarrSink(tmp_path / f"{n}.zarr")) for n, source in enumerate((bad, good))]
    outcomes = dict(process_recordings(pairs, lambda: as_it_is(), workers=cluster))
    assert isinstance(outcomes[0], TypeError) and "one of them cannot be pickled" in str(outcomes[0])
    assert "lock" in str(outcomes[0]) and outcomes[1].n_pieces > 1


def test_processes_of_this_machine_tell_how_far_they_are_and_end_with_the_run(tmp_path, path):
    mine = psutil.Process()
    before = set(mine.children(recursive=True))
    started, told, source = set(), [], Marking(0, tmp_path / "read", tmp_path / "told")

    def tell(done, total):
        started.update(mine.children(recursive=True))
        told.append((done, total))
        # The rest of the piece waits for this.
        source.other.touch()

    process_recording(source, as_it_is, ZarrSink(path), workers=1, checkpoint_seconds=math.inf, progress=tell)
    assert told[-1] == (2000, 2000) and told == sorted(told) and told[0][0] < 2000
    # Python's own process for what is shared stays.
    workers = [each for each in started - before if "spawn_main" in " ".join(cmdline(each))]
    assert workers and not psutil.wait_procs(workers, TIME_LIMIT)[1]
    np.testing.assert_array_equal(contents(path)[0], source.data)


def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from helpers.offline_memory import MemorySource\n"
        "from ezmsg.mlx import AsArrayTransformer, ZarrSink, process_recording\n"
        "process_recording(MemorySource(), AsArrayTransformer, ZarrSink('r.zarr'), workers=1, progress=False)\n"
    )
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 1 and "needs the line `if __name__ == '__main__':`" in done.stderr, done.stderr


def test_a_full_disk_is_an_error_and_the_next_run_goes_on(tmp_path, path, expected, executor):
    with pytest.raises(OSError, match="No space left"):
        process(tmp_path, path, executor, is_full=True)
    assert not path.exists()
    assert process(tmp_path, path, executor).first_sample == 3072
    assert_same(path, expected)


def test_two_runs_at_a_time_do_not_write_the_same_results(tmp_path, path, expected, executor):
    during: list[type] = []

    def second(done, total):
        if not during:
            with pytest.raises(BlockingIOError, match=r"results.zarr is being written by another process"):
                process(tmp_path, path, executor)
            during.append(BlockingIOError)

    sink = DeadlySink(path, chunk_mb=0.004)
    process_recording(
        DeadlySource(tmp_path),
        functools.partial(deadly_chain, str(tmp_path)),
        sink,
        rechunk=RechunkSettings(sizes=(50,)),
        checkpoint_seconds=1.0,
        workers=executor,
        progress=second,
    )
    assert during
    assert_same(path, expected)


class Gone(ThreadPoolExecutor):
    """Whose scheduler goes away: what it has not done yet is cancelled, as Dask's client does."""

    def __init__(self, n_done):
        super().__init__(1)
        self.n_left = n_done

    def submit(self, function, /, *args, **kwargs):
        self.n_left -= 1
        if self.n_left >= 0:
            return super().submit(function, *args, **kwargs)
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def test_an_executor_that_goes_away_is_an_error_and_the_next_run_goes_on(tmp_path, path, expected, executor):
    with Gone(2) as gone, pytest.raises(RuntimeError, match="The workers are gone"):
        process(tmp_path, path, gone)
    assert not path.exists()
    assert process(tmp_path, path, executor).first_sample <= 2048
    assert_same(path, expected)
