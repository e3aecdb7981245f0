"""What the memory monitor reports, on each platform, and when."""

import ctypes
import dataclasses
import math
import mmap
import os
import sys
import types

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import RecordedLog, in_forked_child, in_fresh_process, run_code

from ezmsg.mlx.cache import MIB, CacheLimit, apply_cache_limit
from ezmsg.mlx.memory import (
    MEMORY_METRICS,
    MemoryMonitorProducer,
    MemoryMonitorSettings,
    MemorySnapshot,
    memory_snapshot,
    monitor,
)
from ezmsg.mlx.memory import monitor as snapshots
from ezmsg.mlx.memory import monitor as system
from ezmsg.mlx.stream.hostmemory import HostMemoryUse

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


@pytest.fixture
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch):
    monkeypatch.setattr(snapshots, "_told", set())


# MLX's own counters


def test_metrics_have_names_and_an_order():
    assert MEMORY_METRICS == (
        "mlx_active",
        "mlx_cache",
        "mlx_peak",
        "mlx_cache_limit",
        "result_memory",
        "resident_set",
        "footprint",
        "device_memory",
    )


def test_snapshot_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        memory_snapshot().mlx_active = 0.0


def test_mlx_that_is_not_loaded_stays_so_and_uses_nothing():
    run_code("""
        import math, sys
        from ezmsg.mlx.memory import memory_snapshot
        snapshot = memory_snapshot()
        assert not any(name.split(".")[0] == "mlx" for name in sys.modules)
        assert (snapshot.mlx_active, snapshot.mlx_cache, snapshot.mlx_peak) == (0.0, 0.0, 0.0)
        assert math.isnan(snapshot.mlx_cache_limit) and math.isnan(snapshot.device_memory)
    """)


@pytest.mark.usefixtures("needs_mlx")
@in_fresh_process
def test_mlx_counters_are_those_of_mlx_and_the_limit_is_left_alone():
    import mlx.core as mx

    mx.set_cache_limit(100 * MIB)
    x = mx.zeros((4, MIB), mx.float32)
    mx.eval(x)
    mx.clear_cache()
    y = mx.ones((2, MIB), mx.float32)
    mx.eval(y)
    del y

    def refuse(limit: int) -> int:
        raise AssertionError(f"set_cache_limit({limit}) was called")

    set_cache_limit, mx.set_cache_limit = mx.set_cache_limit, refuse
    snapshot = memory_snapshot()
    assert (round(snapshot.mlx_active), round(snapshot.mlx_cache), round(snapshot.mlx_peak)) == (16, 8, 24)
    assert math.isnan(snapshot.mlx_cache_limit)

    mx.set_cache_limit = set_cache_limit
    node = Clock()
    apply_cache_limit(node, 64.0)
    assert memory_snapshot().mlx_cache_limit == 64.0


def test_limit_is_what_the_guard_knows(monkeypatch):
    monkeypatch.setattr(snapshots, "cache_limit", lambda: CacheLimit(12.5, "outside"))
    assert memory_snapshot().mlx_cache_limit == 12.5


@linux
@pytest.mark.usefixtures("needs_mlx")
@in_fresh_process
def test_forked_child_of_a_process_that_used_mlx_can_be_watched():
    import mlx.core as mx

    mx.eval(mx.zeros((MIB,)) + 1)
    assert in_forked_child(lambda: memory_snapshot().resident_set) > 0


# The process, on Linux


@linux
def test_private_memory_is_in_both_and_shared_memory_only_in_the_resident_set():
    def touch(memory: mmap.mmap) -> None:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1

    before = memory_snapshot()
    # Not from malloc, which may have as much from earlier tests.
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        touch(private)
        between = memory_snapshot()
        with mmap.mmap(-1, 32 * MIB) as shared:
            touch(shared)
            after = memory_snapshot()
    assert between.resident_set - before.resident_set == pytest.approx(64, abs=4)
    assert between.footprint - before.footprint == pytest.approx(64, abs=4)
    assert after.resident_set - between.resident_set == pytest.approx(32, abs=4)
    assert after.footprint - between.footprint == pytest.approx(0, abs=4)


STATUS = b"""Name:\tpython
VmPeak:\t  400000 kB
VmRSS:\t   20480 kB
RssAnon:\t    8192 kB
RssFile:\t    4096 kB
RssShmem:\t    8192 kB
VmSwap:\t    1024 kB
Threads:\t4
"""


def test_footprint_on_linux_is_anonymous_memory_swapped_out_or_not():
    assert system._parse_status(STATUS) == (20 * MIB, 9 * MIB)


def test_footprint_is_nan_where_linux_does_not_tell_anonymous_memory_apart():
    resident_set, footprint = system._parse_status(STATUS.replace(b"RssAnon", b"RssOther"))
    assert resident_set == 20 * MIB
    assert math.isnan(footprint)


# The process, on macOS


class RusageInfoV0(ctypes.Structure):
    """As sys/resource.h of macOS has it."""

    _fields_ = [
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    ]


class LibProc:
    """Stands for /usr/lib/libproc.dylib."""

    def __init__(self, status: int) -> None:
        self.status = status

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: ctypes.Array) -> int:
        assert (pid, flavor) == (os.getpid(), 0)
        info = RusageInfoV0(ri_wired_size=1, ri_resident_size=3 * MIB, ri_phys_footprint=2**40, ri_proc_start_abstime=5)
        assert ctypes.sizeof(buffer) >= ctypes.sizeof(info)
        ctypes.memmove(buffer, ctypes.byref(info), ctypes.sizeof(info))
        return self.status


@pytest.fixture
def macos(monkeypatch) -> LibProc:
    library = LibProc(status=0)
    monkeypatch.setattr(system.sys, "platform", "darwin")
    monkeypatch.setattr(system.ctypes, "CDLL", lambda path: {"/usr/lib/libproc.dylib": library}[path])
    return library


def test_macos_tells_resident_set_and_physical_footprint(macos):
    snapshot = memory_snapshot()
    assert (snapshot.resident_set, snapshot.footprint) == (3.0, 2**20)


def test_macos_that_does_not_tell_gives_nan(macos):
    macos.status = -1
    snapshot = memory_snapshot()
    assert math.isnan(snapshot.resident_set) and math.isnan(snapshot.footprint)


# What a platform cannot give


def test_missing_metrics_are_nan_and_told_once(monkeypatch, macos):
    macos.status = -1
    mlx = fake_mlx(cuda=False)
    monkeypatch.setitem(sys.modules, "mlx.core", mlx)
    monkeypatch.setattr(snapshots, "cache_limit", lambda: CacheLimit(None, "default"))
    monkeypatch.setattr(snapshots, "memory_in_use", lambda: HostMemoryUse(0, 0, 0))
    with RecordedLog() as log:
        for _ in range(3):
            snapshot = memory_snapshot()
    nan = pytest.approx(math.nan, nan_ok=True)
    assert snapshot == MemorySnapshot(1.0, 2.0, 3.0, nan, 0.0, nan, nan, nan)
    assert [text.split(":")[0] for text in log.infos] == [
        f"The memory metric {name} is NaN" for name in ("resident_set", "footprint", "device_memory")
    ]
    assert not log.warnings


def test_device_memory_is_not_told_to_be_missing_before_mlx_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with RecordedLog() as log:
        assert math.isnan(memory_snapshot().device_memory)
    assert not [text for text in log.infos if "device_memory" in text]


def fake_mlx(cuda: bool, **info: int) -> types.SimpleNamespace:
    """Stands for ``mlx.core``, with 1, 2 and 3 MiB in its counters."""
    return types.SimpleNamespace(
        get_active_memory=lambda: MIB,
        get_cache_memory=lambda: 2 * MIB,
        get_peak_memory=lambda: 3 * MIB,
        cuda=types.SimpleNamespace(is_available=lambda: cuda),
        device_info={"the gpu": info}.__getitem__,
        gpu="the gpu",
    )


def test_device_memory_in_use_on_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", fake_mlx(True, total_memory=139 * MIB, free_memory=100 * MIB))
    assert memory_snapshot().device_memory == 39.0


def test_device_memory_is_nan_where_the_driver_does_not_tell(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", fake_mlx(True))
    assert math.isnan(memory_snapshot().device_memory)


# Rows


class Clock:
    """Stands for ``time``: sleeping moves it on, by nothing else does it pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    return clock


def test_row_holds_the_snapshot(monkeypatch, clock):
    found = MemorySnapshot(1.0, 2.0, 3.0, math.nan, 4.5, 5.0, 6.0, 7.0)
    monkeypatch.setattr(monitor, "memory_snapshot", lambda: found)
    message = MemoryMonitorProducer(MemoryMonitorSettings(interval=0.5))()
    np.testing.assert_array_equal(message.data, [[1.0, 2.0, 3.0, math.nan, 4.5, 5.0, 6.0, 7.0]])
    assert message.data.dtype == np.float64
    assert (message.dims, message.stream_dim) == (["time", "metric"], "time")
    assert message.axes["time"] == AxisArray.LinearAxis(unit="s", gain=0.5, offset=1000.0)
    assert tuple(message.axes["metric"].data) == MEMORY_METRICS
    assert message.axes["metric"].dims == ["metric"]
    assert message.attrs.items() >= {"unit": "MiB", "pid": os.getpid()}.items()
    assert message.attrs["shapes"].keys() >= {"nodes", "cache_mb", "compiled", "n_lengths"}


def test_first_row_comes_at_once_and_then_one_every_interval_without_drift(clock):
    producer = MemoryMonitorProducer(MemoryMonitorSettings(interval=2.0))
    offsets = []
    for _ in range(4):
        offsets.append(producer().axes["time"].offset)
        clock.now += 0.25
    assert offsets == [1000.0, 1002.0, 1004.0, 1006.0]
    assert clock.slept == [0.0, 1.75, 1.75, 1.75]


async def test_waiting_leaves_the_event_loop_to_others(monkeypatch, clock):
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(monitor.asyncio, "sleep", sleep)
    producer = MemoryMonitorProducer(MemoryMonitorSettings(interval=2.0))
    offsets = [(await producer.__acall__()).axes["time"].offset for _ in range(2)]
    assert offsets == [1000.0, 1002.0]
    assert waited == [0.0, 2.0]
    assert clock.slept == []


def test_rows_that_were_due_while_the_process_was_busy_are_left_out(clock):
    producer = MemoryMonitorProducer(MemoryMonitorSettings(interval=2.0))
    producer()
    clock.now += 7.0
    offsets = [producer().axes["time"].offset for _ in range(3)]
    assert offsets == [1007.0, 1008.0, 1010.0]


def test_metric_axis_is_one_object_for_the_whole_stream(clock):
    producer = MemoryMonitorProducer()
    first = producer()
    producer.update_settings(MemoryMonitorSettings(interval=3.0))
    second, third = producer(), producer()
    assert first.axes["metric"] is second.axes["metric"] is third.axes["metric"]
    assert third.axes["time"].gain == 3.0
    assert [message.axes["time"].offset for message in (first, second, third)] == [1000.0, 1001.0, 1004.0]


# Settings


@pytest.mark.parametrize("interval", [0, -1.0, math.nan, math.inf, 10**400])
def test_interval_must_be_finite_and_positive(interval):
    with pytest.raises(ValueError, match="^'interval' must be a finite number > 0, got .*"):
        MemoryMonitorSettings(interval=interval)


@pytest.mark.parametrize("interval", [None, True, np.True_, "1", 1j])
def test_interval_must_be_a_number(interval):
    with pytest.raises(TypeError, match="^'interval' must be a finite number > 0, got .*"):
        MemoryMonitorSettings(interval=interval)


def test_interval_becomes_a_plain_number():
    assert type(MemoryMonitorSettings(interval=np.float32(2)).interval) is float
