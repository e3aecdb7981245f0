"""The cache is given back in silence and under pressure, and comes back with the next message."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import RecordedLog, in_forked_child, in_fresh_process

from ezmsg.mlx import AsArrayTransformer, MemoryMonitorProducer, MemoryMonitorSettings
from ezmsg.mlx.cache import lifted_cache_limit, release_cache
from ezmsg.mlx.memory import monitor as pressure
from ezmsg.mlx.memory import monitor as release
from ezmsg.mlx.memory.monitor import CacheRelease, LinuxPressure, mac_pressure

mx = pytest.importorskip("mlx.core")
MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gauge:
    """Stands for an operating system that is short of memory."""

    said = ""

    def __call__(self) -> str:
        return self.said


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fill_cache(mib: int = 8) -> None:
    x = mx.ones((mib, MIB), mx.uint8)
    mx.eval(x)


def message(n_samples: int = 300) -> AxisArray:
    data = np.ones((n_samples, 64), np.float32)
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})


def test_the_cache_is_given_back_once_after_silence(clock):
    node, idle = AsArrayTransformer(backend="mlx"), CacheRelease(10.0, None, clock)
    with RecordedLog() as log:
        for _ in range(3):
            node(message())
            fill_cache()
            assert idle.poll() == 0.0
            clock.now += 9.9
            assert idle.poll() == 0.0
            clock.now += 0.1
            assert idle.poll() >= 8.0
            assert mx.get_cache_memory() == 0
            fill_cache()
            clock.now += 100.0
            # Not again before another message has come.
            assert idle.poll() == 0.0
    assert len([line for line in log.infos if "no message came for 10 s" in line]) == 3


def test_a_node_that_is_gone_is_no_message(clock):
    node, idle = AsArrayTransformer(backend="mlx"), CacheRelease(10.0, None, clock)
    node(message())
    idle.poll()
    fill_cache()
    clock.now += 10.0
    del node
    gc.collect()
    assert idle.poll() >= 8.0


def test_without_the_option_nothing_is_given_back(clock):
    keep = CacheRelease(None, None, clock)
    fill_cache()
    clock.now += 1e6
    assert keep.poll() == 0.0 and mx.get_cache_memory() > 0


def test_pressure_gives_the_cache_back_at_once_but_not_at_every_look(clock):
    gauge = Gauge()
    release_under = CacheRelease(None, gauge, clock)
    fill_cache()
    assert release_under.poll() == 0.0
    gauge.said = "the machine is short"
    assert release_under.poll() >= 8.0
    fill_cache()
    clock.now += release.SECONDS_BETWEEN / 2
    assert release_under.poll() == 0.0
    clock.now += release.SECONDS_BETWEEN / 2
    assert release_under.poll() >= 8.0


def test_while_the_limit_is_lifted_nothing_is_given_back():
    with lifted_cache_limit():
        fill_cache()
        assert release_cache() == 0 and mx.get_cache_memory() > 0
    fill_cache()
    assert release_cache() >= 8 * MIB and mx.get_cache_memory() == 0


def write_stalls(file: Path, microseconds: int) -> None:
    line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\n"
    file.write_text(f"some {line}full {line}")


def test_linux_is_short_when_tasks_wait_for_memory(clock, tmp_path):
    stalls = tmp_path / "memory"
    write_stalls(stalls, 5_000_000)
    gauge = LinuxPressure(stalls, None, clock)
    clock.now += 1.0
    write_stalls(stalls, 5_040_000)
    assert gauge() == ""
    clock.now += 1.0
    write_stalls(stalls, 5_240_000)
    assert gauge() == "tasks of this machine waited for memory 20% of the time"
    clock.now += 1.0
    assert gauge() == ""


def test_linux_is_short_when_the_control_group_is_at_its_limit(clock, tmp_path):
    (tmp_path / "cgroup").write_text("5:memory:/old\n0::/a/b\n")
    events = tmp_path / "root" / "a" / "b" / "memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 9\nhigh 2\nmax 1\noom 0\noom_kill 0\n")
    assert pressure._events_of_group(tmp_path / "cgroup", tmp_path / "root") == events
    gauge = LinuxPressure(tmp_path / "missing", events, clock)
    clock.now += 1.0
    events.write_text("low 99\nhigh 2\nmax 1\noom 0\noom_kill 0\n")
    assert gauge() == ""
    clock.now += 1.0
    events.write_text("low 99\nhigh 2\nmax 2\noom 0\noom_kill 0\n")
    assert "control group" in gauge()
    assert gauge() == ""


def test_without_control_groups_there_are_no_events(tmp_path):
    (tmp_path / "cgroup").write_text("0::/gone\n")
    assert pressure._events_of_group(tmp_path / "cgroup", tmp_path) is None
    assert pressure._events_of_group(tmp_path / "missing", tmp_path) is None


@pytest.mark.parametrize(("level", "short"), [(1, False), (2, True), (4, True)])
def test_macos_is_short_from_its_warning_on(level, short):
    assert bool(mac_pressure(lambda: level)) is short


def test_macos_is_asked_through_sysctl(monkeypatch):
    import ctypes

    class LibSystem:
        def __init__(self, path: str) -> None:
            assert path == "/usr/lib/libSystem.dylib"

        def sysctlbyname(self, name, level, size, new, n_new) -> int:
            assert name == b"kern.memorystatus_vm_pressure_level"
            ctypes.cast(level, ctypes.POINTER(ctypes.c_int))[0] = 4
            return 0

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(pressure.ctypes, "CDLL", LibSystem)
    assert "level 4" in pressure.pressure_gauge()()


def test_the_monitor_does_it_by_its_settings(monkeypatch):
    node, clock = AsArrayTransformer(backend="mlx"), Clock()
    monkeypatch.setattr("ezmsg.mlx.memory.monitor.CacheRelease", lambda *given: CacheRelease(*given, clock))
    monitor = MemoryMonitorProducer(MemoryMonitorSettings(interval=1e-6, release_after_idle=5.0))
    node(message())
    monitor()
    fill_cache()
    clock.now += 5.0
    monitor()
    assert mx.get_cache_memory() == 0
    monitor.update_settings(MemoryMonitorSettings(interval=1e-6))
    fill_cache()
    clock.now += 50.0
    monitor()
    assert mx.get_cache_memory() > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("release_after_idle", 0),
        ("release_after_idle", "5"),
        ("release_after_idle", True),
        ("release_under_pressure", 1),
    ],
)
def test_nonsense_is_refused(field, value):
    with pytest.raises((TypeError, ValueError), match=f"'{field}' must be .*, got .*"):
        MemoryMonitorSettings(**{field: value})


@in_fresh_process
def test_after_silence_the_footprint_is_that_of_before_and_one_working_set_comes_back():
    from ezmsg.mlx import memory_snapshot

    def chain(given: AxisArray) -> None:
        x = node(given).data
        mx.eval(mx.sum(mx.sqrt(x * 2 + 1) * x))

    clock = Clock()
    node = AsArrayTransformer(backend="mlx")
    chain(message())
    idle = CacheRelease(10.0, None, clock)
    release_cache()
    fresh = memory_snapshot().footprint
    for n_samples in range(9000, 60000, 9000):
        chain(message(n_samples))
    # The C library keeps what is freed between buffers that are in use: here 125 MiB between eleven of 64 KiB, the last
    # of which lies behind all others.
    buffers = [mx.zeros(1 << 14) for _ in range(2000)]
    mx.eval(buffers)
    in_use = [*buffers[::200], buffers[-1]]
    del buffers
    chain(message())
    assert memory_snapshot().mlx_cache > 192
    idle.poll()
    clock.now += 10.0
    idle.poll()
    assert memory_snapshot().footprint <= 1.1 * fresh
    assert len(in_use) == 11
    chain(message())
    assert memory_snapshot().mlx_cache < 1.0


@in_fresh_process
def test_in_a_forked_child_where_mlx_would_hang_nothing_is_touched():
    mx.eval(mx.ones(1000) + 1)
    if mx.default_device().type == mx.cpu:
        assert in_forked_child(lambda: release_cache() == 0)


@pytest.mark.skipif(sys.platform == "darwin", reason="the gauges of Linux")
@pytest.mark.parametrize("has_group", [True, False])
def test_the_gauge_is_that_of_what_the_system_has(has_group, tmp_path, monkeypatch):
    monkeypatch.setattr(pressure.Path, "exists", lambda path: False)
    monkeypatch.setattr(pressure, "_events_of_group", lambda *paths: tmp_path if has_group else None)
    assert isinstance(pressure.pressure_gauge(), LinuxPressure) == has_group
