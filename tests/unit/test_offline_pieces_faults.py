"""Workers that die, a full disk, two runs at a time: nothing half-written has the final name, and no bit is another."""

import errno
import functools
import os
import shutil
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from helpers.offline_faults import DeadlySink, DeadlySource, Endless, Marking, WaitingForAnother, deadly_chain
from helpers.processes import RecordedLog
from helpers.warm import TIME_LIMIT

from ezmsg.mlx import RechunkSettings, process_recording
from ezmsg.mlx.offline import process as offline_process
from ezmsg.mlx.offline import workers as processes
from ezmsg.mlx.offline.workers import ProcessCrew

zarr = pytest.importorskip("zarr")


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


def assert_same(path, expected):
    for one, other in zip(contents(path), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not list(path.parent.glob("*.partial"))


def test_workers_killed_in_each_phase_cost_their_piece_and_no_bit(tmp_path, path, expected, executor, monkeypatch):
    # The last piece kills two workers, which is one too many.
    monkeypatch.setattr(processes, "RETRIES", 1)
    monkeypatch.setattr(offline_process, "ProcessCrew", functools.partial(ProcessCrew, works_itself=False))
    with RecordedLog() as log, pytest.raises(RuntimeError, match=r"died 2 times at the same place \(exit status -9\)"):
        process(tmp_path, path, 1, deadly=tmp_path)
    markers = ["computing-1", "reading-1", "writing-1", "writing-2"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [*markers[:2], "results.zarr.partial", *markers[2:]]
    assert len([warning for warning in log.warnings if "A worker died (exit status -9)" in warning]) == 3
    assert process(tmp_path, path, executor).first_sample == 3000
    assert_same(path, expected)


def test_workers_end_with_the_run_and_when_nobody_waits_for_them(monkeypatch):
    # Enough on a machine that is busy with other tests, too.
    monkeypatch.setattr(processes, "_SECONDS_TO_END", TIME_LIMIT)
    crew = ProcessCrew(2, works_itself=False)
    try:
        for number in range(2):
            crew.submit(number, Endless())
        told = set()
        while len(told) < 2:
            told |= {event.number for event in crew.wait()}
        abandoned, other = (worker.process for worker in crew._workers.values())
        # As the system does when this process is killed.
        next(iter(crew._workers)).close()
        abandoned.join(TIME_LIMIT)
        assert abandoned.exitcode == 0 and other.is_alive()
    finally:
        crew.close()
    assert other.exitcode == 128 + signal.SIGTERM


def test_this_process_works_too_and_hears_the_others_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_TO_START", 0.0)
    crew = ProcessCrew(2)
    try:
        crew.submit(0, WaitingForAnother(tmp_path / "other"))
        crew.submit(1, Marking(tmp_path / "other"))
        finished = {}
        while len(finished) < 2:
            # The first is done here, and ends when the second is done elsewhere.
            finished |= {event.number: event.outcome for event in crew.wait() if event.is_finished}
    finally:
        crew.close()
    assert finished[0] == os.getpid() != finished[1]


def test_no_process_is_started_that_does_not_pay_and_bits_do_not_follow_from_the_number(path, expected, monkeypatch):
    def started():
        raise AssertionError("A process was started.")

    monkeypatch.setattr(processes, "_Worker", started)
    assert process(path.parent, path, 8).n_pieces == 4
    assert_same(path, expected)


def test_a_full_disk_is_an_error_and_the_next_run_goes_on(tmp_path, path, expected, executor):
    with pytest.raises(OSError, match="No space left"):
        process(tmp_path, path, executor, is_full=True)
    assert not path.exists()
    assert process(tmp_path, path, executor).first_sample == 3000
    assert_same(path, expected)


def test_a_full_disk_when_the_pieces_are_joined_leaves_all_of_them(tmp_path, path, expected, executor, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        with pytest.raises(OSError, match="No space left"):
            process(tmp_path, path, executor)
    assert not path.exists()
    assert process(tmp_path, path, executor).first_sample == 4000
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
    assert process(tmp_path, path, executor).first_sample <= 2000
    assert_same(path, expected)
