"""What an error of the system, a hostile file or a fork does to partial results."""

import errno
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from ezmsg.baseproc import BaseStatefulTransformer, processor_state
from ezmsg.util.messages.axisarray import AxisArray
from helpers import warm
from helpers.nwb_files import write
from helpers.offline_memory import MemorySink, MemorySource
from helpers.processes import RecordedLog, in_forked_child

from ezmsg.mlx import (
    AsArrayTransformer,
    EWMATransformer,
    NWBSource,
    RechunkSettings,
    RechunkTransformer,
    ZarrSink,
    process_recording,
)
from ezmsg.mlx.offline import checkpoint
from ezmsg.mlx.offline import zarrsink as durable
from ezmsg.mlx.offline.checkpoint import pack, unpack

zarr = pytest.importorskip("zarr")
pytest.importorskip("mlx.core")


class Killed(BaseException):
    pass


def make_chain():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        EWMATransformer(time_constant=0.1),
        AsArrayTransformer(backend="numpy"),
    ]


def process(path, source=None, sink=None, progress=None, **options):
    return process_recording(
        source or MemorySource(),
        make_chain,
        sink or ZarrSink(path, chunk_mb=256 * 16 / 2**20),
        rechunk=RechunkSettings(sizes=(64,)),
        checkpoint_seconds=0.3,
        progress=progress,
        **options,
    )


def interrupted(path, source=None, sink=None):
    """Partial results that end with a checkpoint."""

    def stop(done, total):
        if done > 0.85 * total:
            raise Killed

    with pytest.raises(Killed):
        process(path, source, sink, progress=stop)


def contents(path):
    group = zarr.open_group(str(path), mode="r")
    return {name: group[name][:] for name in ("data", "time")}


def assert_same(path, expected):
    for name, values in contents(path).items():
        np.testing.assert_array_equal(values, expected[name])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("expected") / "results.zarr"
    process(path)
    return contents(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.zarr"


def files(path):
    return {str(entry) for entry in path.parent.rglob("*")}


# --------------------------------------------------------------------------------------------------- hostile files


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_hostile_checkpoint_does_not_run_and_the_run_starts_over(path, expected, tmp_path):
    interrupted(path)
    (tmp_path / "results.zarr.partial" / "checkpoint").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    assert not (tmp_path / "ran").exists()
    assert len([info for info in log.infos if "starting over" in info]) == 1
    assert_same(path, expected)


@pytest.mark.parametrize("where", ["chain", "step", "bytes for ezmsg-baseproc", "another chain"])
def test_a_hostile_state_in_a_checkpoint_does_not_run_and_the_run_starts_over(path, expected, tmp_path, where):
    interrupted(path)
    file = tmp_path / "results.zarr.partial" / "checkpoint"
    saved = unpack(file.read_bytes(), ())
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    done, states = unpack(saved["state"])
    n_states = sum(state is not None for state in states)
    assert n_states
    if where == "chain":
        saved["state"] = evil
    elif where == "step":
        saved["state"] = pack((done, [state and evil for state in states]))
    elif where == "another chain":
        saved["state"] = pack((done, states[:-1]))
    else:
        # The setter of a state there reads bytes as a pickle.
        saved["state"] = pack((done, [state and pack(evil) for state in states]))
    file.write_bytes(pack(saved))
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    assert not (tmp_path / "ran").exists()
    assert len([info for info in log.infos if "starting over with noise 0" in info]) == 1
    assert_same(path, expected)


def test_bytes_never_become_the_state_of_a_step(tmp_path):
    """The setter of a state in ezmsg-baseproc reads bytes as a pickle."""
    step = HoldingTransformer()
    step._state = None
    with pytest.raises(ValueError, match="not one of HoldingTransformer"):
        checkpoint.restore(step, pack(pickle.dumps(Evil(tmp_path / "ran"))))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_an_earlier_format_starts_over(path, expected, tmp_path):
    interrupted(path)
    file = tmp_path / "results.zarr.partial" / "checkpoint"
    file.write_bytes(pickle.dumps(unpack(file.read_bytes(), ())))
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    (told,) = [info for info in log.infos if "starting over" in info]
    assert "results.zarr.partial cannot be read (not values of this version of ezmsg-mlx" in told
    assert_same(path, expected)


# ------------------------------------------------------------------------------------------------ errors of the system


def failing(monkeypatch, owner, name, affects):
    """Have calls fail whose first arguments *affects* picks."""
    original = getattr(owner, name)

    def patched(*args, **kwargs):
        if affects(*args):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)


@pytest.mark.parametrize("what", ["checkpoint", "results", "whether there are results", "chunks"])
def test_an_error_of_the_system_is_raised_and_removes_nothing(path, expected, what):
    interrupted(path)
    before = files(path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if what == "checkpoint":
            failing(monkeypatch, Path, "read_bytes", lambda file: file.name == "checkpoint")
        elif what == "results":
            failing(monkeypatch, zarr, "open_group", lambda *_: True)
        elif what == "chunks":
            failing(monkeypatch, zarr.Array, "__getitem__", lambda *_: True)
        else:
            failing(monkeypatch, durable.os, "stat", lambda file, *_: str(file).endswith("results.zarr"))
        with pytest.raises(OSError, match="Stale file handle"):
            process(path)
    assert files(path) == before
    assert process(path).first_sample > 0
    assert_same(path, expected)


def test_an_error_of_the_system_at_finished_results_is_raised(path, monkeypatch):
    process(path)
    before = files(path)
    failing(monkeypatch, zarr, "open_group", lambda *_: True)
    with pytest.raises(OSError, match="Stale file handle") as raised:
        process(path)
    assert not isinstance(raised.value, FileExistsError)
    assert files(path) == before


# ------------------------------------------------------------------------------------------------------------- locks


def is_locked(path):
    """Whether the results are locked for another process."""
    code = "import sys; from ezmsg.mlx import ZarrSink; ZarrSink(sys.argv[1]).open('recipe', 'fingerprint')"
    done = warm.run(["-c", code, str(path)])
    assert done.returncode == 0 or "BlockingIOError" in done.stderr, done.stderr
    return done.returncode != 0


def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(path):
    sink = ZarrSink(path)
    sink.open("recipe", "fingerprint")
    in_forked_child(sink.close)
    assert is_locked(path)

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # It lives on while the parent lets go.
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    sink.close()
    assert not is_locked(path)
    os.close(writing)
    os.waitpid(child, 0)


def test_closing_in_a_child_closes_nothing_that_is_not_its_own(path):
    sink = ZarrSink(path)
    sink.open("recipe", "fingerprint")

    number = sink._lock._descriptor

    def close_and_look():
        # Something else has the number of the lock: one of these, or what was opened before.
        for _ in range(20):
            os.open(os.devnull, os.O_RDONLY)
        before = os.fstat(number)
        sink.close()
        return os.path.samestat(before, os.fstat(number))

    assert in_forked_child(close_and_look)
    sink.close()


def test_a_copy_of_the_descriptor_does_not_keep_the_lock(tmp_path):
    """As one has a child between its fork and its exec."""
    lock = durable.FolderLock(tmp_path / "folder", 0.0, tmp_path)
    copy = os.dup(lock._descriptor)
    lock.release()
    durable.FolderLock(tmp_path / "folder", 0.0, tmp_path).release()
    os.close(copy)


def test_a_child_of_a_process_that_died_does_not_keep_the_lock(path):
    code = """
import os, signal, sys
from ezmsg.mlx import ZarrSink
sink = ZarrSink(sys.argv[1])
sink.open("recipe", "fingerprint")
reading, writing = os.pipe()
if os.fork():
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGKILL)
print(os.getpid(), flush=True)
os.write(writing, b"x")
sys.stdin.read()
"""
    parent = warm.start(["-c", code, str(path)], environment=os.environ)
    try:
        assert int(parent.stdout.readline())
        parent.wait()
        assert not is_locked(path)
    finally:
        parent.communicate()


def test_a_lock_is_waited_for_until_another_process_lets_go(path):
    code = """
import sys
from ezmsg.mlx import ZarrSink
sink = ZarrSink(sys.argv[1])
sink.open("recipe", "fingerprint")
print("locked", flush=True)
sys.stdin.read()
sink.close()
"""
    waits, opened = threading.Event(), []
    sleep = durable.time.sleep

    def note(seconds):
        waits.set()
        sleep(seconds)

    other = warm.start(["-c", code, str(path)], environment=os.environ)
    try:
        assert other.stdout.readline() == "locked\n"
        sink = ZarrSink(path, wait=warm.TIME_LIMIT)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(durable.time, "sleep", note)
            thread = threading.Thread(target=lambda: opened.append(sink.open("recipe", "fingerprint")))
            thread.start()
            assert waits.wait(warm.TIME_LIMIT) and not opened
            other.stdin.close()
            thread.join(warm.TIME_LIMIT)
    finally:
        # Not communicate(), which flushes what may be closed by now.
        other.stdin.close()
        other.wait(warm.TIME_LIMIT)
    assert opened == [(False, None)]
    sink.close()


def test_descriptors_of_synced_folders_are_closed(tmp_path):
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else os.listdir("/dev/fd")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    for _ in range(10):
        durable.sync_tree(tmp_path)
    after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else os.listdir("/dev/fd")
    assert len(after) == len(before)


# -------------------------------------------------------------------------------------------- identity, states, errors


def test_a_recording_that_was_corrected_starts_over_and_finished_results_are_of_another(path, tmp_path):
    h5py = pytest.importorskip("h5py")
    file = write(tmp_path / "recording.nwb", {})
    interrupted(path, NWBSource(file, chunk_mb=0.001))
    with h5py.File(file, "r+") as raw:
        raw["acquisition/Raw/starting_time"][()] = 100.0
    with RecordedLog() as log:
        assert process(path, NWBSource(file, chunk_mb=0.001)).first_sample == 0
    assert any("of another recording" in info for info in log.infos)
    np.testing.assert_allclose(contents(path)["time"][[0, -1]], [100.0, 100.0 + 999 / 2000.0])
    with h5py.File(file, "r+") as raw:
        raw["acquisition/Raw/starting_time"][()] = 5.0
    with pytest.raises(FileExistsError, match="results of another recording"):
        process(path, NWBSource(file, chunk_mb=0.001))


@processor_state
class HoldingState:
    held: object = None


class HoldingTransformer(BaseStatefulTransformer[None, AxisArray, AxisArray, HoldingState]):
    """Its transformer is in a list, where restoring would lose the hash."""

    def _reset_state(self, message):
        self._state.held = [RechunkTransformer()]

    def _process(self, message):
        return message


def test_a_transformer_in_a_list_inside_a_state_cannot_be_saved():
    step = HoldingTransformer()
    step(MemorySource().message(0, 10))
    with pytest.raises(
        checkpoint.CannotSave, match="state of HoldingTransformer cannot be saved .it holds a .*Rechunk"
    ):
        checkpoint.save(step)
    with RecordedLog() as log:
        sink = MemorySink()
        process_recording(MemorySource(), HoldingTransformer, sink, checkpoint_seconds=0.3, rechunk=None)
    assert sink.n_checkpoints == 0
    assert len([info for info in log.infos if "No checkpoints" in info]) == 1
