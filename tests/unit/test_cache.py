"""The guard of MLX's cache limit: its rules on a stand-in for MLX's allocators, then on MLX itself."""

import decimal
import fractions
import gc
import importlib.machinery
import logging
import math
import sys
import threading
import types
from collections import Counter

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.allocator import Allocator, Node, stand_in
from helpers.processes import RecordedLog, in_forked_child, in_fresh_process, run_code

from ezmsg.mlx.asarray import AsArraySettings, AsArrayTransformer
from ezmsg.mlx.cache import (
    MIB,
    CacheLimit,
    apply_cache_limit,
    cache_limit,
    check_cache_limit,
    lifted_cache_limit,
    withdraw_cache_limit,
)
from ezmsg.mlx.cache.guard import MLX_CPU_DEFAULT, CacheGuard


@pytest.fixture
def cpu(monkeypatch) -> Allocator:
    return stand_in(monkeypatch, gpu=False)


@pytest.fixture
def gpu(monkeypatch) -> Allocator:
    return stand_in(monkeypatch, gpu=True)


@pytest.fixture(params=["cpu", "gpu"])
def mlx(request, monkeypatch) -> Allocator:
    """For the rules that hold on either allocator."""
    return stand_in(monkeypatch, gpu=request.param == "gpu")


@pytest.fixture
def log():
    with RecordedLog() as log:
        yield log


# Values


@pytest.mark.parametrize(
    "value",
    [None, 0, 0.0, -0.0, 512, 512.0, 1e-9, 2**43 - 1, math.nextafter(2.0**43, 0.0), fractions.Fraction(1, 3)]
    + [
        kind(100)
        for kind in (np.float16, np.float32, np.float64, np.longdouble, np.int8, np.uint8, np.int32, np.uint64)
    ],
)
def test_finite_numbers_and_none_are_limits(value):
    check_cache_limit(value)


@pytest.mark.parametrize(
    "value",
    [-1, -1e-300, math.nan, math.inf, -math.inf, 2**43, 2.0**43, 1e30]
    + [pytest.param(sign * 10**power, id=f"{sign} * 10**{power}") for sign in (1, -1) for power in (300, 400, 5000)]
    + [np.float32(np.nan), np.float64(np.inf), np.longdouble("1e4000"), np.int8(-1)],
)
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=r"^'my_limit' must be None or a finite number of MiB >= 0.*, got "):
        check_cache_limit(value, "my_limit")


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        "512",
        b"512",
        "",
        5j,
        [5.0],
        np.array(5.0),
        np.array([5.0]),
        object(),
        decimal.Decimal(5),
        np.timedelta64(5, "s"),
        np.datetime64(5, "s"),
    ],
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=r"^'my_limit' must be None or a finite number of MiB >= 0, got "):
        check_cache_limit(value, "my_limit")


def test_error_names_value_and_type():
    with pytest.raises(TypeError, match=r"^'mlx_cache_limit_mb' must be .*, got '512' \(str\)"):
        check_cache_limit("512")
    with pytest.raises(ValueError, match=r"^'mlx_cache_limit_mb' must be .*, got -1.5"):
        check_cache_limit(-1.5)


@pytest.mark.parametrize("value", [math.nan, -1, 2**43, "512", True, np.True_])
def test_refused_request_leaves_no_trace(mlx, value):
    node, other = Node(), Node()
    with pytest.raises((TypeError, ValueError), match="^'limit_mb' must be "):
        apply_cache_limit(node, value)
    assert mlx.calls["set_cache_limit"] == 0
    apply_cache_limit(other, 64)
    assert mlx.limit_mb == 64


@pytest.mark.parametrize(
    "value", [np.float16(512), np.int8(100), np.uint8(200), np.int32(4096), np.float32(0.1), fractions.Fraction(1, 3)]
)
def test_narrow_number_types_do_not_overflow(mlx, log, value):
    node, other = Node(), Node()
    apply_cache_limit(node, value)
    apply_cache_limit(other, 10_000)
    assert mlx.limit == int(float(value) * MIB)
    assert len(log.warnings) == 1


# One node


def test_nothing_is_asked_of_mlx_without_a_limit(mlx, log):
    node = Node()
    for _ in range(10):
        apply_cache_limit(node, None)
    withdraw_cache_limit(node)
    assert not mlx.calls
    assert not log.records
    assert cache_limit() == CacheLimit(None, "default")


def test_first_request_sets_the_limit_and_tells_old_new_and_who(mlx, log):
    node = Node("GRAPH/TO_MLX")
    default = f"{mlx.limit_mb:g}"
    apply_cache_limit(node, 512.0)
    assert mlx.limit_mb == 512
    assert log.infos == [f"MLX cache limit: {default} MiB -> 512 MiB, asked for by GRAPH/TO_MLX."]
    assert not log.warnings
    assert cache_limit() == CacheLimit(512.0, "node", "GRAPH/TO_MLX", "mlx_cache_limit_mb")


def test_after_the_first_message_the_cache_is_looked_at_and_nothing_else(mlx, log):
    node = Node()
    apply_cache_limit(node, 512.0)
    mlx.calls.clear()
    log.records.clear()
    for _ in range(1000):
        apply_cache_limit(node, 512.0)
    assert mlx.calls == {"get_cache_memory": 1000}
    assert not log.records


def test_cache_limit_asks_nothing_of_mlx(mlx):
    node = Node()
    apply_cache_limit(node, 64.0)
    mlx.calls.clear()
    assert cache_limit().limit_mb == 64
    assert not mlx.calls


def test_zero_turns_the_cache_off(mlx):
    node = Node()
    apply_cache_limit(node, 0)
    assert mlx.limit == 0
    assert cache_limit() == CacheLimit(0.0, "node", "Node#1", "mlx_cache_limit_mb")
    apply_cache_limit(node, 0)
    assert mlx.calls["set_cache_limit"] == 1


def test_node_replaces_its_own_request_and_so_may_raise_it(mlx, log):
    node = Node("A")
    for limit in (64.0, 256.0, 32.0, 64.0):
        apply_cache_limit(node, limit)
        assert mlx.limit_mb == cache_limit().limit_mb == limit
    assert [line.split(": ")[1] for line in log.infos[1:]] == [
        "64 MiB -> 256 MiB, asked for by A.",
        "256 MiB -> 32 MiB, asked for by A.",
        "32 MiB -> 64 MiB, asked for by A.",
    ]
    assert not log.warnings


def test_nodes_without_a_name_are_numbered(mlx, log):
    nodes = [Node(), Node("B"), Node()]
    for node, limit in zip(nodes, (64, 32, 16), strict=True):
        apply_cache_limit(node, limit)
    assert [line.rsplit(" ", 1)[1] for line in log.infos] == ["Node#1.", "B.", "Node#3."]


def test_node_that_cannot_be_referenced_weakly_is_refused_without_a_trace(mlx):
    node = Node()
    with pytest.raises(TypeError, match="weak reference"):
        apply_cache_limit("a text", 16)
    apply_cache_limit(node, 64)
    assert mlx.limit_mb == 64


# Several nodes


@pytest.mark.parametrize("limits", [(64, 128), (128, 64), (128, 64, 256), (256, 128, 64)])
def test_tightest_limit_is_in_force_whoever_comes_first(mlx, limits):
    nodes = [Node(str(limit)) for limit in limits]
    for _ in range(3):
        for node, limit in zip(nodes, limits, strict=True):
            apply_cache_limit(node, limit)
    assert mlx.limit_mb == 64
    assert cache_limit() == CacheLimit(64.0, "node", "64", "mlx_cache_limit_mb")


@pytest.mark.parametrize("limits", [(64, 128), (128, 64)])
def test_disagreement_is_told_once_with_both_values_and_the_outcome(mlx, log, limits):
    nodes = [Node("FIRST"), Node("SECOND")]
    for _ in range(30):
        for node, limit in zip(nodes, limits, strict=True):
            apply_cache_limit(node, limit)
    changes = mlx.calls["set_cache_limit"]
    assert changes == (1 if limits == (64, 128) else 2)
    # Neither do others who disagree on the same values.
    others = [Node("THIRD"), Node("FOURTH")]
    for node, limit in zip(others, limits, strict=True):
        apply_cache_limit(node, limit)
    assert len(log.warnings) == 1
    for part in (f"SECOND asks for an MLX cache limit of {limits[1]} MiB", f"FIRST for {limits[0]} MiB"):
        assert part in log.warnings[0]
    assert "the tightest, 64 MiB, is in force" in log.warnings[0]
    assert mlx.calls["set_cache_limit"] == changes


def test_another_disagreement_is_told_again(mlx, log):
    nodes = [Node("A"), Node("B"), Node("C")]
    for node, limit in zip(nodes, (64, 128, 256), strict=True):
        apply_cache_limit(node, limit)
    apply_cache_limit(nodes[0], 32)
    assert len(log.warnings) == 3


def test_agreement_is_not_told(mlx, log):
    nodes = [Node(), Node(), Node()]
    for node, limit in zip(nodes, (64, 64.0, np.float32(64)), strict=True):
        apply_cache_limit(node, limit)
    assert not log.warnings
    assert mlx.calls["set_cache_limit"] == 1


def test_raised_request_counts_only_as_far_as_the_others_let_it(mlx):
    a, b = Node(), Node()
    apply_cache_limit(a, 64)
    apply_cache_limit(b, 128)
    apply_cache_limit(a, 512)
    assert mlx.limit_mb == 128


def test_node_that_is_gone_no_longer_counts(mlx):
    a, b, c = Node("A"), Node("B"), Node("C")
    for node, limit in ((a, 64), (b, 128), (c, 256)):
        apply_cache_limit(node, limit)
    del a, node
    apply_cache_limit(c, 256)
    assert cache_limit() == CacheLimit(128.0, "node", "B", "mlx_cache_limit_mb")
    b.itself = b  # a cycle, which only the garbage collector takes apart
    del b
    gc.collect()
    apply_cache_limit(c, 256)
    assert mlx.limit_mb == cache_limit().limit_mb == 256


def test_node_that_goes_while_the_limit_is_being_put_back_no_longer_counts(cpu):
    kept = Node("KEPT")
    going = [Node("GOING")]
    apply_cache_limit(going[0], 64)
    apply_cache_limit(kept, 128)

    class LastReference(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            going.clear()

    cpu.set_outside(1024)
    cpu.free(100)
    handler = LastReference()
    ez.logger.addHandler(handler)
    try:
        apply_cache_limit(kept, 128)
    finally:
        ez.logger.removeHandler(handler)
    assert not going
    apply_cache_limit(kept, 128)
    assert cpu.limit_mb == 128


def test_withdrawn_request_no_longer_counts(mlx):
    a, b = Node(), Node()
    apply_cache_limit(a, 64)
    apply_cache_limit(b, 128)
    mlx.calls.clear()
    withdraw_cache_limit(a)
    assert not mlx.calls
    apply_cache_limit(b, 128)
    assert mlx.limit_mb == 128
    # That is settled then, and the messages after it cost what they did before.
    mlx.calls.clear()
    for _ in range(10):
        apply_cache_limit(b, 128)
    assert mlx.calls == {"get_cache_memory": 10}
    withdraw_cache_limit(Node())
    assert mlx.limit_mb == cache_limit().limit_mb == 128


def test_cache_limit_names_a_node_that_is_still_there(mlx):
    a, b = Node("A"), Node("B")
    apply_cache_limit(a, 64)
    apply_cache_limit(b, 64)
    assert cache_limit().node == "A"
    del a
    apply_cache_limit(b, 64)
    assert cache_limit().node == "B"
    assert mlx.calls["set_cache_limit"] == 1


def test_when_nobody_asks_any_more_the_limit_goes_back(cpu, log):
    node = Node("A")
    apply_cache_limit(node, 64)
    apply_cache_limit(node, None)
    assert cpu.limit == MLX_CPU_DEFAULT
    assert cache_limit() == CacheLimit(32.0, "default")
    assert log.infos[-1] == "MLX cache limit: 64 MiB -> 32 MiB, no node asks for one any more."
    apply_cache_limit(node, 128)
    assert cpu.limit_mb == 128
    assert not log.warnings


def test_limit_goes_back_to_the_last_one_set_outside(cpu):
    node = Node()
    apply_cache_limit(node, 64)
    cpu.set_outside(1024)
    cpu.free(100)
    apply_cache_limit(node, 64)
    assert cpu.limit_mb == 64
    apply_cache_limit(node, None)
    assert cpu.limit_mb == 1024
    assert cache_limit() == CacheLimit(1024.0, "outside")


def test_a_node_without_a_limit_notices_that_nobody_asks_any_more(mlx):
    before = mlx.limit
    node, without = Node(), Node()
    apply_cache_limit(node, 64)
    apply_cache_limit(without, None)
    assert mlx.limit_mb == 64
    del node
    apply_cache_limit(without, None)
    assert mlx.limit == before


def test_one_thread_at_a_time_changes_the_limit(mlx):
    together = threading.Barrier(2)
    met = []
    set_cache_limit = mlx.set_cache_limit

    def slow_set_cache_limit(limit: int) -> int:
        try:
            together.wait(0.2)
            met.append(limit)
        except threading.BrokenBarrierError:
            pass
        return set_cache_limit(limit)

    mlx.set_cache_limit = slow_set_cache_limit
    nodes = [Node(), Node()]
    threads = [threading.Thread(target=apply_cache_limit, args=(node, 64 + i)) for i, node in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    assert mlx.limit_mb == 64


# Somebody else's limits


def test_tighter_limit_that_was_there_before_stays_with_one_warning(mlx, log):
    mlx.set_outside(16)
    node = Node("A")
    for _ in range(30):
        apply_cache_limit(node, 512)
    assert mlx.limit_mb == 16
    assert len(log.warnings) == 1
    assert "A asks for an MLX cache limit of 512 MiB" in log.warnings[0]
    assert "16 MiB that was set outside of ezmsg-mlx stays in force" in log.warnings[0]
    assert not log.infos
    assert cache_limit() == CacheLimit(16.0, "outside")
    # It binds those who ask for more, not those who ask for less, and comes back after them.
    apply_cache_limit(node, 4)
    assert mlx.limit_mb == 4
    apply_cache_limit(node, 64)
    assert mlx.limit_mb == 16
    apply_cache_limit(node, None)
    assert cache_limit() == CacheLimit(16.0, "outside")
    assert mlx.limit_mb == 16


def test_looser_limit_that_was_there_before_is_replaced_in_silence(mlx, log):
    mlx.set_outside(1024)
    node = Node()
    apply_cache_limit(node, 64)
    assert mlx.limit_mb == 64
    assert not log.warnings
    apply_cache_limit(node, None)
    assert mlx.limit_mb == 1024


def test_the_default_limit_of_mlx_is_replaced_on_the_cpu_and_respected_on_a_gpu(monkeypatch, log):
    for is_gpu, in_force in ((False, 512), (True, 32)):
        mlx = stand_in(monkeypatch, is_gpu)
        mlx.limit = MLX_CPU_DEFAULT
        node = Node()
        apply_cache_limit(node, 512)
        assert mlx.limit_mb == in_force


def test_limit_raised_outside_is_put_back_once_the_cache_shows_it(cpu, log):
    node = Node("A")
    apply_cache_limit(node, 64)
    cpu.set_outside(1024)
    cpu.free(60)
    apply_cache_limit(node, 64)
    assert cpu.limit_mb == 1024  # nothing shows yet
    cpu.free(60)
    apply_cache_limit(node, 64)
    assert cpu.limit_mb == 64
    assert len(log.warnings) == 1
    assert "raised from 64 MiB to 1024 MiB outside of ezmsg-mlx" in log.warnings[0]
    assert "64 MiB that A asks for" in log.warnings[0]
    assert log.infos[-1] == "MLX cache limit: 1024 MiB -> 64 MiB, asked for by A."


def test_limit_raised_again_and_again_is_put_back_each_time_and_told_once(cpu, log):
    node = Node()
    for raised in (1024, 1024, 2048, 4096):
        apply_cache_limit(node, 64)
        cpu.set_outside(raised)
        cpu.free(100)
        apply_cache_limit(node, 64)
        assert cpu.limit_mb == 64
    assert len(log.warnings) == 1
    assert len(log.infos) == 5


def test_lower_limit_set_outside_is_never_undone(cpu, log):
    a, b = Node("A"), Node("B")
    apply_cache_limit(a, 128)
    cpu.set_outside(100)
    for _ in range(100):
        cpu.free(7)
        apply_cache_limit(a, 128)
    assert cpu.limit_mb == 100
    apply_cache_limit(b, 64)
    assert cpu.limit_mb == 64
    del b
    apply_cache_limit(a, 128)
    assert cpu.limit_mb == 100
    apply_cache_limit(a, 512)
    assert cpu.limit_mb == 100
    assert cache_limit() == CacheLimit(100.0, "outside")
    assert any("100 MiB that was set outside" in warning for warning in log.warnings)


def test_limit_between_the_old_and_the_new_request_stays(cpu, log):
    node = Node()
    apply_cache_limit(node, 64)
    cpu.set_outside(100)
    apply_cache_limit(node, 128)
    assert cpu.limit_mb == 100
    assert cache_limit() == CacheLimit(100.0, "outside")
    assert len(log.warnings) == 1


def test_limit_set_outside_meanwhile_is_not_undone_when_nobody_asks_any_more(mlx):
    node = Node()
    apply_cache_limit(node, 64)
    mlx.set_outside(48)
    apply_cache_limit(node, None)
    assert mlx.limit_mb == 48
    assert cache_limit() == CacheLimit(48.0, "outside")


def test_outcome_of_a_disagreement_names_the_limit_that_is_in_force(mlx, log):
    mlx.set_outside(16)
    nodes = [Node("A"), Node("B")]
    apply_cache_limit(nodes[0], 64)
    apply_cache_limit(nodes[1], 128)
    assert "16 MiB, is in force" in log.warnings[-1]


# The GPU allocators admit one buffer past the limit, and trim at the next allocation


def test_one_buffer_past_the_limit_is_no_raise(gpu, log):
    node = Node()
    apply_cache_limit(node, 64)
    gpu.free(63)
    gpu.free(50)
    gpu.calls.clear()
    apply_cache_limit(node, 64)
    assert gpu.calls["set_cache_limit"] == 0
    gpu.calls.clear()
    for _ in range(100):
        apply_cache_limit(node, 64)
    assert gpu.calls == {"get_cache_memory": 100}
    assert not log.warnings


def test_more_than_one_buffer_past_the_limit_is_a_raise(gpu, log):
    node = Node()
    apply_cache_limit(node, 64)
    gpu.set_outside(1024)
    for _ in range(4):
        gpu.free(50)
    apply_cache_limit(node, 64)
    assert gpu.limit_mb == 64
    assert len(log.warnings) == 1
    # What is still cached then is not another one.
    apply_cache_limit(node, 64)
    assert len(log.warnings) == 1
    assert len(log.infos) == 2


def test_cache_that_is_full_when_the_limit_comes_is_no_raise(gpu, log):
    gpu.free(500)
    gpu.free(500)
    gpu.peak = 0
    node = Node()
    for _ in range(10):
        apply_cache_limit(node, 64)
    assert gpu.limit_mb == 64
    assert not log.warnings
    assert len(log.infos) == 1


def test_cpu_allocator_has_no_overshoot(cpu):
    node = Node()
    apply_cache_limit(node, 64)
    cpu.set_outside(1024)
    cpu.free(64)
    apply_cache_limit(node, 64)
    assert cpu.limit_mb == 1024
    cpu.free(1 / MIB)
    apply_cache_limit(node, 64)
    assert cpu.limit_mb == 64


# Lifted for a measurement


def test_lifted_limit_is_back_afterwards_and_requests_made_meanwhile_wait(mlx):
    a, b = Node(), Node()
    apply_cache_limit(a, 64)
    with lifted_cache_limit():
        for _ in range(3):
            mlx.free(100)
            apply_cache_limit(a, 64)
            apply_cache_limit(b, 32)
        assert mlx.cached == 300 * MIB
    assert mlx.limit_mb == 64
    assert mlx.cached == 0
    apply_cache_limit(b, 32)
    assert mlx.limit_mb == 32


def test_the_end_of_an_inner_context_leaves_the_limit_lifted_for_the_outer(mlx):
    node = Node()
    apply_cache_limit(node, 64)
    with lifted_cache_limit():
        with lifted_cache_limit():
            pass
        for limit_mb in (32, 16):
            apply_cache_limit(node, limit_mb)
        mlx.free(100)
        assert mlx.cached == 100 * MIB
    assert mlx.limit_mb == 64


def test_limit_set_outside_while_it_is_lifted_stays_and_voids_the_measurement(mlx):
    node = Node()
    apply_cache_limit(node, 64)
    with pytest.raises(RuntimeError, match="was set to 48 MiB while it was lifted"):
        with lifted_cache_limit():
            mlx.set_outside(48)
    assert mlx.limit_mb == 48


# MLX itself, each in a process of its own


def message(data: np.ndarray) -> AxisArray:
    return AxisArray(data, dims=["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)}, key="amp")


def to_mlx(limit_mb: float | None = 512.0) -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend="mlx", mlx_cache_limit_mb=limit_mb))


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of MLX's memory functions."""
    import mlx.core as mx

    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(mx, name)

        def call(*args: int) -> int:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(mx, name, call)

    for name in ("set_cache_limit", "get_cache_memory", "get_peak_memory", "get_active_memory", "clear_cache"):
        count(name)
    return calls


def limit_in_force() -> float:
    """In MiB, of MLX itself: it has no getter, and a huge limit changes nothing."""
    import mlx.core as mx

    old = mx.set_cache_limit(1 << 50)
    mx.set_cache_limit(old)
    return old / MIB


def on_the_cpu() -> bool:
    import mlx.core as mx

    return not (mx.metal.is_available() or mx.cuda.is_available())


@pytest.fixture
def mlx_is_installed() -> None:
    pytest.importorskip("mlx.core")


@pytest.fixture
def mlx_is_cpu_only(mlx_is_installed) -> None:
    if not on_the_cpu():
        pytest.skip("a fork matters to MLX's CPU allocator only")


needs_mlx = pytest.mark.usefixtures("mlx_is_installed")
needs_cpu_only = pytest.mark.usefixtures("mlx_is_cpu_only")


def test_numpy_target_neither_imports_mlx_nor_does_asking_for_the_limit():
    run_code(
        """
        import sys
        import numpy as np
        from ezmsg.util.messages.axisarray import AxisArray
        from ezmsg.mlx import AsArraySettings, AsArrayTransformer, apply_cache_limit, cache_limit

        message = AxisArray(np.ones((3, 2), "f4"), dims=["time", "ch"])
        assert AsArrayTransformer(AsArraySettings())(message) is message
        for dtype in ("float64", "float32"):
            assert AsArrayTransformer(AsArraySettings(dtype=dtype))(message).data.dtype == dtype
        apply_cache_limit(object(), None)
        assert cache_limit().source == "default" and cache_limit().limit_mb is None
        assert {"mlx", "mlx.core"}.isdisjoint(sys.modules)
        """
    )


@needs_mlx
@in_fresh_process
def test_limit_is_set_once_in_a_thousand_messages():
    with pytest.MonkeyPatch.context() as monkeypatch, RecordedLog() as log:
        calls = counted(monkeypatch)
        back = AsArrayTransformer(AsArraySettings())
        without = to_mlx(None)
        x = message(np.ones((30, 4), "f4"))
        # MLX to NumPy, and to MLX without a limit, ask nothing of the allocator.
        back(without(x))
        # The size of the cache is looked at once for each new shape.
        assert calls["get_cache_memory"] <= 1 and calls.keys() <= {"get_cache_memory"}
        calls.clear()

        node = to_mlx()
        for _ in range(1000):
            node(x)
        assert calls["set_cache_limit"] == 1
        assert calls["get_cache_memory"] <= 1001
        calls.clear()
        for _ in range(1000):
            node(x)
        assert calls == {"get_cache_memory": 1000}
        assert len(log.infos) == 1
        if on_the_cpu():
            assert log.infos[0] == "MLX cache limit: 32 MiB -> 512 MiB, asked for by AsArrayTransformer#1."
        assert not log.warnings
    assert limit_in_force() == 512
    assert cache_limit() == CacheLimit(512.0, "node", "AsArrayTransformer#1", "mlx_cache_limit_mb")


@needs_mlx
@in_fresh_process
def test_limits_of_several_nodes_and_of_others_hold_in_mlx():
    import mlx.core as mx

    x = message(np.ones((30, 4), "f4"))
    with RecordedLog() as log:
        before = limit_in_force()
        a, b = to_mlx(64.0), to_mlx(128.0)
        for _ in range(30):
            b(x), a(x)
            assert limit_in_force() == 64
        assert len(log.warnings) == 1
        # Settings that change at run time replace the request.
        a.update_settings(AsArraySettings(backend="mlx", mlx_cache_limit_mb=256.0))
        a(x)
        assert limit_in_force() == 128
        b.update_settings(AsArraySettings(backend="numpy"))
        b(x), a(x)
        assert limit_in_force() == 256
        # A node that is gone no longer counts.
        c = to_mlx(16.0)
        c(x)
        assert limit_in_force() == 16
        del c
        a(x)
        assert limit_in_force() == cache_limit().limit_mb == 256
        a.update_settings(AsArraySettings(backend="mlx", mlx_cache_limit_mb=None))
        a(x)
        assert limit_in_force() == before

        # A tighter limit stays.
        log.records.clear()
        mx.set_cache_limit(8 * MIB)
        for _ in range(30):
            b = to_mlx(64.0)
            b(x)
            assert limit_in_force() == 8
        assert len(log.warnings) == 1

        # One that is raised is put back; buffers of 40 sizes let it show.
        log.records.clear()
        mx.set_cache_limit(1 << 40)
        for n in range(1000, 3000, 50):
            run_chain(b, n)
            b(x)
        assert limit_in_force() == 64
        warnings = [warning for warning in log.warnings if "message lengths" not in warning]
        assert len(warnings) == 1
        assert "raised from 8 MiB to 1.04858e+06 MiB" in warnings[0]


def run_chain(node: AsArrayTransformer, n_samples: int) -> int:
    """A few operations on a message of 256 channels; bytes in MLX's cache afterwards."""
    import mlx.core as mx

    x = node(message(np.ones((n_samples, 256), "f4"))).data
    mx.eval(mx.square(x - mx.mean(x, axis=1, keepdims=True)) + 1.0)
    mx.synchronize()
    return mx.get_cache_memory()


@needs_mlx
@in_fresh_process
def test_cache_stays_below_the_limit_however_many_lengths_come():
    import mlx.core as mx

    lengths = range(1000, 3000, 50)
    assert len(set(lengths)) == 40

    def largest_cache(node: AsArrayTransformer) -> int:
        return max(run_chain(node, n) for _ in range(2) for n in lengths)

    # Without a limit, and with the one of MLX lifted, it grows: or the rest would prove nothing.
    mx.set_cache_limit(1 << 40)
    unbounded = largest_cache(to_mlx(None))
    assert unbounded > 40 * MIB
    mx.clear_cache()

    limit = 8 * MIB
    one_buffer = 0 if on_the_cpu() else 3000 * 256 * 4
    assert limit / 2 < largest_cache(to_mlx(8.0)) <= limit + one_buffer


def stop_half_way(name: str, failed: threading.Event) -> threading.Event:
    """Let the import of an extension module pause where its module is in ``sys.modules``, but still empty.

    The event that is returned is set then.
    """
    assert name not in sys.modules
    half_way = threading.Event()

    class Finder:
        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname != name:
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                half_way.set()
                # As long as it takes the others to fail, if they do.
                failed.wait(0.5)
                execute(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)
    return half_way


@needs_mlx
@in_fresh_process
def test_threads_may_convert_at_once_through_different_nodes():
    # MLX has not been imported yet in this process: the first thread imports it, the others meet it half-way.
    failed = threading.Event()
    half_way = stop_half_way("mlx.core", failed)
    n_threads, n_messages = 8, 200
    nodes = [to_mlx(64.0 + i if i % 2 == 0 else None) for i in range(n_threads)]
    failures: list[str] = []

    def convert(i: int) -> None:
        data = np.full((20, 3), i, "f4")
        if i > 0:
            half_way.wait()
        try:
            for _ in range(n_messages):
                result = np.array(nodes[i](message(data)).data)
                assert result.dtype == np.float32 and np.all(result == i)
        except BaseException as error:
            failures.append(repr(error))
            failed.set()

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with RecordedLog() as log:
        threads = [threading.Thread(target=convert, args=(i,)) for i in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.setswitchinterval(switch_interval)
    assert not failures
    assert limit_in_force() == cache_limit().limit_mb == 64
    disagreements = [warning for warning in log.warnings if "asks for an MLX cache limit" in warning]
    assert len(disagreements) == len(set(disagreements)) <= 4 * 3 / 2


# Forks, of which the setter of MLX's CPU allocator waits for ever if the parent has used MLX


def convert_in_child() -> tuple[list[float], Counter[str], list[str], CacheLimit]:
    """Two nodes, many messages: what came out, calls of MLX, warnings, the limit."""
    with pytest.MonkeyPatch.context() as monkeypatch, RecordedLog() as log:
        calls = counted(monkeypatch)
        nodes = [to_mlx(64.0), to_mlx(128.0), to_mlx(None)]
        values = []
        for i in range(30):
            for node in nodes:
                values.append(float((node(message(np.full((3, 2), i, "f4"))).data * 2).sum()))
        return values, calls, log.warnings, cache_limit()


EXPECTED = [12.0 * i for i in range(30) for _ in range(3)]


@needs_cpu_only
@in_fresh_process
def test_forked_child_of_a_process_that_used_mlx_keeps_its_limit_and_says_so():
    import mlx.core as mx

    node = to_mlx(256.0)
    mx.eval(node(message(np.ones((3, 2), "f4"))).data * 2)
    values, calls, warnings, limit = in_forked_child(convert_in_child)
    assert values == EXPECTED
    assert calls["set_cache_limit"] == 0
    assert len(warnings) == 1
    assert "was forked from one that had used MLX" in warnings[0]
    assert "256 MiB stays in force" in warnings[0]
    assert 'multiprocessing.set_start_method("spawn")' in warnings[0]
    assert limit == CacheLimit(256.0, "node", "AsArrayTransformer#1", "mlx_cache_limit_mb")

    # That it was used is not forgotten when all that MLX counts is zero again, as between two runs of a benchmark.
    mx.clear_cache()
    mx.reset_peak_memory()
    assert mx.get_active_memory() == mx.get_cache_memory() == mx.get_peak_memory() == 0
    values, calls, warnings, _ = in_forked_child(convert_in_child)
    assert values == EXPECTED
    assert calls["set_cache_limit"] == 0
    assert len(warnings) == 1

    # Nor does a node that came along with the parent's request pass for one that has been told.
    def convert_with_the_node_of_the_parent() -> list[str]:
        with RecordedLog() as log:
            for _ in range(10):
                node(message(np.ones((3, 2), "f4")))
            return log.warnings

    (warning,) = in_forked_child(convert_with_the_node_of_the_parent)
    assert "was forked from one that had used MLX" in warning


@needs_cpu_only
@in_fresh_process
def test_an_array_that_is_alive_is_use_of_mlx_to_a_forked_child_whatever_was_reset():
    import mlx.core as mx

    alive = mx.ones(3) * 2
    mx.eval(alive)
    mx.clear_cache()
    mx.reset_peak_memory()
    assert mx.get_cache_memory() == mx.get_peak_memory() == 0 < mx.get_active_memory()
    values, calls, warnings, _ = in_forked_child(convert_in_child)
    assert values == EXPECTED
    assert calls["set_cache_limit"] == 0
    assert len(warnings) == 1 and "was forked from one that had used MLX" in warnings[0]


@needs_cpu_only
@in_fresh_process
def test_a_child_forked_while_the_limit_is_lifted_says_the_same_in_its_warning_and_when_asked():
    import mlx.core as mx

    mx.eval(to_mlx(256.0)(message(np.ones((3, 2), "f4"))).data * 2)
    with lifted_cache_limit():
        values, calls, warnings, limit = in_forked_child(convert_in_child)
    assert values == EXPECTED
    assert calls["set_cache_limit"] == 0
    assert limit.source == "outside" and limit.limit_mb > 2**40
    assert len(warnings) == 1 and f"{limit.limit_mb:g} MiB stays in force" in warnings[0]
    assert cache_limit().limit_mb == 256.0


@needs_cpu_only
@in_fresh_process
def test_forked_child_says_nothing_where_nobody_asks_for_a_limit():
    import mlx.core as mx

    mx.eval(mx.ones(3) * 2)

    def convert() -> tuple[int, list[str]]:
        with RecordedLog() as log:
            node = to_mlx(None)
            return float(node(message(np.ones((3, 2), "f4"))).data.sum()), log.warnings

    assert in_forked_child(convert) == (6.0, [])
    # Used without the guard: MLX's default is what the child keeps.
    _, calls, warnings, limit = in_forked_child(convert_in_child)
    assert calls["set_cache_limit"] == 0
    assert "MLX's default stays in force" in warnings[0]
    assert limit == CacheLimit(None, "default")


@needs_cpu_only
@in_fresh_process
def test_forked_child_of_a_process_that_did_not_use_mlx_has_its_own_limit():
    import mlx.core as mx

    def convert() -> tuple[object, ...]:
        return *convert_in_child(), limit_in_force()

    values, calls, warnings, limit, in_force = in_forked_child(convert)
    assert values == EXPECTED
    assert calls["set_cache_limit"] == 1
    assert len(warnings) == 1 and "forked" not in warnings[0]
    assert limit == CacheLimit(64.0, "node", "AsArrayTransformer#1", "mlx_cache_limit_mb")
    assert in_force == 64
    # The parent has nothing of it.
    assert cache_limit() == CacheLimit(None, "default")
    assert mx.get_peak_memory() == 0
    assert limit_in_force() == 32


def test_child_forked_while_the_limit_is_lifted_can_have_one_of_its_own():
    guard = CacheGuard()
    guard._lifted = 1
    guard.after_fork_in_child()
    assert not guard._lifted and guard.source.source == "outside"
