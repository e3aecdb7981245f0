"""The limit that finds itself: its rules on a stand-in for MLX's allocators, then on MLX itself."""

import gc

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.allocator import MIB, Allocator, Node, OverlappingMessages, stand_in
from helpers.processes import RecordedLog, in_forked_child, in_fresh_process

from ezmsg.mlx import AsArraySettings, AsArrayTransformer, apply_cache_limit, cache_limit
from ezmsg.mlx.cache import auto, follow_cache_limit, lifted_cache_limit, withdraw_cache_limit

STEADY, STALL, OTHER = (300, 4), (9000, 4), (600, 4)
ENOUGH = 200
"""Messages after which a steady stream has been measured, however often the limit had to be doubled."""


@pytest.fixture
def cpu(monkeypatch) -> Allocator:
    return stand_in(monkeypatch, gpu=False)


@pytest.fixture
def gpu(monkeypatch) -> Allocator:
    return stand_in(monkeypatch, gpu=True)


@pytest.fixture(params=["cpu", "gpu"])
def mlx(request, monkeypatch) -> Allocator:
    return stand_in(monkeypatch, gpu=request.param == "gpu")


def run(mlx: Allocator, node: object, shape: tuple[int, ...], working_set: float, n: int = ENOUGH) -> None:
    """So many messages, each of which leaves so many MiB in the cache, as far as the limit lets it."""
    for _ in range(n):
        follow_cache_limit(node, shape)
        mlx.leave(shape, working_set)


def margin(mlx: Allocator) -> float:
    return auto.GPU_MARGIN if mlx.gpu else auto.MARGIN


def test_on_the_cpu_the_limit_begins_with_that_of_mlx_and_goes_below_it_for_a_small_working_set(cpu):
    run(cpu, node := Node("A"), STEADY, 8.0, n=auto.N_QUIET)
    assert cpu.limit_mb == cache_limit().limit_mb == 32.0
    run(cpu, node, STEADY, 8.0)
    assert cpu.limit_mb == cache_limit().limit_mb == 10.0
    assert cache_limit().node == "A (auto)"


@pytest.mark.parametrize("working_set", [30.0, 60.0, 100.0, 400.0])
def test_a_larger_working_set_gets_its_limit_and_a_margin(mlx, working_set):
    run(mlx, node := Node(), STEADY, working_set)
    assert mlx.limit_mb == pytest.approx(margin(mlx) * working_set, rel=0.11)
    assert mlx.cached == working_set * MIB
    assert node is not None


def test_on_a_gpu_the_limit_comes_down_from_the_start(gpu):
    run(gpu, node := Node(), STEADY, 3.0, n=1)
    assert gpu.limit_mb == 512.0
    run(gpu, node, STEADY, 3.0)
    assert gpu.limit_mb == 9.0


@pytest.mark.parametrize(("live", "back_at"), [(0.0, 0.5), (3000.0, 0.5), (0.0, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_on_a_gpu_messages_that_overlap_find_their_buffers(monkeypatch, lag, live, back_at):
    # As many and as large as those of the example chain.
    mlx = OverlappingMessages(lag, [0.3] * 32 + [0.6] * 4 + [0.02] * 8, live, back_at)
    stand_in(monkeypatch, gpu=True, mlx=mlx)
    node = Node()

    def steady(n: int) -> int:
        before = mlx.n_misses
        for _ in range(n):
            follow_cache_limit(node, STEADY)
            mlx.compute()
        return mlx.n_misses - before

    steady(60)
    needed = mlx.working_set / MIB
    assert steady(100) == 0
    # No more than the few messages that overlap.
    assert needed < mlx.limit_mb <= (lag + 1.5) * auto.GPU_MARGIN * needed
    # The stall's buffers are new in any case; those of the steady message are lost once, and found again.
    follow_cache_limit(node, STALL)
    mlx.compute(scale=20.0)
    assert steady(10) <= (lag + 2) * len(mlx.sizes)
    assert steady(100) == 0


def test_the_limit_follows_the_steady_message_up_and_down(mlx):
    node = Node()
    for shape, working_set in ((STEADY, 40.0), (OTHER, 160.0), (STEADY, 40.0)):
        run(mlx, node, shape, working_set)
        assert mlx.limit_mb == pytest.approx(margin(mlx) * working_set, rel=0.11)


def test_the_next_stream_begins_anew(mlx):
    node = Node()
    run(mlx, node, STEADY, 100.0)
    withdraw_cache_limit(node)
    begin = auto.GPU_START_MB if mlx.gpu else 32.0
    # The same node and the same shape of messages, as in a graph that is started again.
    follow_cache_limit(node, STEADY)
    assert mlx.limit_mb == begin
    run(mlx, node, STEADY, 4.0)
    assert mlx.limit_mb < 16.0


LARGE, LARGE_STALL = (3000, 1024), (15000, 1024)


def test_on_the_cpu_a_steady_message_misses_nothing_once_it_is_measured(cpu):
    run(cpu, node := Node(), LARGE, 100.0, n=auto.N_QUIET + 1)
    cpu.n_missed = 0
    run(cpu, node, LARGE, 100.0)
    assert (cpu.n_missed, cpu.limit_mb, cpu.cached) == (0, 125.0, 100 * MIB)


def test_on_the_cpu_a_large_stall_finds_its_buffers_again_and_takes_none_of_the_steady_message(cpu):
    node = Node()
    run(cpu, node, LARGE, 40.0)
    with RecordedLog() as log:
        for length in (15000, 14000, 16000):
            stall = (length, 1024)
            run(cpu, node, stall, 120.0, n=1)
            assert cpu.held(stall) == 120 * MIB
            cpu.n_missed = 0
            run(cpu, node, LARGE, 40.0)
            assert (cpu.n_missed, cpu.limit_mb, cpu.held(LARGE)) == (0, 50.0, 40 * MIB)
            assert cpu.cached <= 50 * MIB
    assert not log.infos and not log.warnings


@pytest.mark.parametrize("by", ["a node", "the user"])
def test_on_the_cpu_a_limit_that_is_lifted_for_a_stall_is_no_disagreement(cpu, by):
    fixed, node = Node("fixed"), Node("auto")
    with RecordedLog() as log:
        if by == "a node":
            apply_cache_limit(fixed, 60.0)
        else:
            cpu.set_outside(60.0)
        run(cpu, node, LARGE, 40.0)
        run(cpu, node, LARGE_STALL, 120.0, n=1)
        assert cpu.limit_mb == 60.0
        run(cpu, node, LARGE, 40.0)
    assert cpu.limit_mb == 50.0
    assert not [line for line in log.infos + log.warnings if "512" in line]


def test_on_the_cpu_a_small_stall_which_malloc_serves_gets_no_room(cpu):
    node = Node()
    run(cpu, node, STEADY, 2.0)
    run(cpu, node, STALL, 60.0, n=1)
    assert cpu.limit_mb == 3.0 and cpu.cached <= 3 * MIB


def test_on_the_cpu_what_the_steady_message_needs_after_a_stall_is_measured_again_if_it_has_grown(cpu):
    node = Node()
    run(cpu, node, LARGE, 70.0)
    run(cpu, node, LARGE_STALL, 120.0, n=1)
    # A stage keeps a part of a bin, and needs one more buffer from now on.
    run(cpu, node, LARGE, 106.0)
    assert cpu.limit_mb == 133.0 and cpu.held(LARGE) == 106 * MIB
    before = cpu.calls["clear_cache"]
    run(cpu, node, LARGE_STALL, 120.0, n=1)
    run(cpu, node, LARGE, 106.0)
    assert cpu.calls["clear_cache"] == before


def test_on_the_cpu_a_buffer_that_is_new_once_after_a_stall_empties_no_cache(cpu):
    node = Node()
    run(cpu, node, LARGE, 70.0)
    before = cpu.calls["clear_cache"]
    run(cpu, node, LARGE_STALL, 120.0, n=1)
    run(cpu, node, LARGE, 70.0, n=auto.N_QUIET + 4)
    assert cpu.limit_mb == auto.LIFTED_MB
    cpu.leave((1, 1), 30.0)
    run(cpu, node, LARGE, 70.0)
    assert (cpu.calls["clear_cache"], cpu.limit_mb, cpu.held(LARGE)) == (before, 88.0, 70 * MIB)


def test_on_the_cpu_a_stream_that_stays_unsteady_gets_no_room_for_good(cpu):
    node = Node()
    run(cpu, node, LARGE, 40.0)
    for length in range(20):
        run(cpu, node, (15000 + length, 1024), 120.0, n=1)
    assert cpu.limit_mb == 50.0 and cpu.cached <= 50 * MIB


def test_stalls_that_come_often_do_not_keep_the_limit_from_being_found(mlx):
    node = Node()
    with RecordedLog() as log:
        for number in range(60):
            run(mlx, node, (9000 + number, 4), 45.0, n=1)
            run(mlx, node, STEADY, 100.0, n=8)
    # Not by the limit in force, which may be lifted at this moment.
    (found,) = (line for line in log.infos if "the working set of the running stream is 100.0 MiB" in line)
    assert f"-> {margin(mlx) * 100.0:g} MiB" in found


def test_stalls_that_fill_nothing_cost_nothing(cpu):
    node = Node()
    run(cpu, node, STEADY, 10.0)
    before = cpu.calls["clear_cache"]
    for _ in range(10):
        run(cpu, node, STALL, 1.0, n=1)
        run(cpu, node, STEADY, 10.0, n=20)
    assert cpu.calls["clear_cache"] == before


def test_on_a_gpu_a_stall_is_left_to_mlx(gpu):
    node = Node()
    run(gpu, node, STEADY, 40.0)
    before = gpu.calls["clear_cache"]
    run(gpu, node, STALL, 400.0, n=1)
    run(gpu, node, STEADY, 40.0)
    assert gpu.calls["clear_cache"] == before
    assert gpu.limit_mb == 120.0


def test_a_stream_that_is_never_steady_is_left_at_the_start(mlx):
    node, start = Node(), 512.0 if mlx.gpu else 32.0
    for length in range(1, 300):
        run(mlx, node, (length, 4), 1.0, n=1)
    assert mlx.limit_mb == start and mlx.calls["clear_cache"] == 0


def test_each_change_is_logged_with_its_reason(cpu):
    with RecordedLog() as log:
        run(cpu, node := Node("CHAIN/TO_MLX"), STEADY, 40.0)
    (change,) = (line for line in log.infos if line.startswith("CHAIN/TO_MLX (auto): "))
    assert "32 MiB -> 50 MiB" in change and "working set of the running stream is 40.0 MiB" in change
    assert not log.warnings
    assert node is not None


def test_nodes_share_one_limit(mlx):
    a, b = Node("A"), Node("B")
    with RecordedLog() as log:
        for _ in range(ENOUGH):
            run(mlx, a, STEADY, 60.0, n=1)
            run(mlx, b, OTHER, 60.0, n=1)
    assert mlx.limit_mb == margin(mlx) * 120.0
    assert not log.warnings
    withdraw_cache_limit(a)
    assert cache_limit().source == "node"
    del b
    gc.collect()
    apply_cache_limit(Node(), None)
    assert mlx.limit_mb != margin(mlx) * 120.0


def test_a_tighter_limit_that_another_node_asks_for_is_kept(cpu):
    fixed, node = Node("fixed"), Node("auto")
    apply_cache_limit(fixed, 16.0)
    run(cpu, node, STEADY, 100.0)
    assert cpu.limit_mb == 16.0


def test_a_limit_that_a_tighter_one_overrules_does_not_grow(cpu):
    fixed = Node("fixed")
    apply_cache_limit(fixed, 30.0)
    with RecordedLog() as log:
        run(cpu, node := Node("auto"), STEADY, 100.0)
    assert not [line for line in log.infos if line.startswith("auto (auto): ")]
    assert cache_limit().node == "fixed"
    assert node is not None


def test_the_last_request_by_a_number_or_by_auto_is_the_one_that_counts(cpu):
    node, other = Node(), Node("other")
    run(cpu, node, STEADY, 100.0)
    apply_cache_limit(node, 256.0)
    assert cache_limit().limit_mb == 256.0
    run(cpu, other, STEADY, 1.0, n=1)
    assert cache_limit().node == "other (auto)"


def test_on_a_gpu_no_working_set_is_too_small_for_a_limit_of_1_mib(gpu):
    run(gpu, node := Node(), STEADY, 0.1)
    assert gpu.limit_mb == 1.0
    assert node is not None


def test_a_node_may_change_between_a_number_and_auto(cpu):
    node = Node()
    apply_cache_limit(node, 16.0)
    run(cpu, node, STEADY, 100.0)
    assert cpu.limit_mb == 125.0
    apply_cache_limit(node, 16.0)
    assert cpu.limit_mb == 16.0
    run(cpu, node, STEADY, 100.0)
    assert cpu.limit_mb == 125.0


def test_the_limit_does_not_outgrow_the_machine(cpu, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 19, "SC_PAGE_SIZE": 4096}.__getitem__)
    run(cpu, node := Node(), STEADY, 1e6)
    assert cpu.limit_mb == 512.0
    assert node is not None


def test_while_the_limit_is_lifted_nothing_is_measured(mlx):
    node = Node()
    with lifted_cache_limit():
        before = mlx.calls["clear_cache"]
        run(mlx, node, STEADY, 60.0)
        assert mlx.calls["clear_cache"] == before
    run(mlx, node, STEADY, 60.0)
    assert mlx.limit_mb == margin(mlx) * 60.0


@in_fresh_process
def test_on_mlx_the_limit_is_the_working_set_and_a_margin_and_a_stall_leaves_nothing():
    import mlx.core as mx

    def working_set(chain, given):
        for _ in range(20):
            chain(given)
        return mx.get_cache_memory()

    def message(n_samples: int) -> AxisArray:
        data = np.ones((n_samples, 1024), np.float32)
        return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})

    def chain(given: AxisArray) -> None:
        x = node(given).data
        y = mx.sqrt(x * 2 + 1)
        mx.eval(mx.sum(y * x))
        del x, y
        mx.synchronize()

    node = AsArrayTransformer(backend="mlx", mlx_cache_limit_mb="auto")
    chain(message(3000))
    if mx.default_device().type == mx.cpu:
        assert cache_limit().limit_mb == 32.0
    for _ in range(60):
        chain(message(3000))
    needed = auto_working_set = mx.get_cache_memory() / MIB
    assert cache_limit().limit_mb == pytest.approx(auto.MARGIN * needed, rel=0.1)
    for length in (9000, 5000, 7000):
        chain(message(length))
    for _ in range(60):
        chain(message(3000))
    assert mx.get_cache_memory() / MIB <= 1.3 * auto_working_set


@in_fresh_process
def test_in_a_forked_child_of_a_process_that_used_mlx_nothing_is_measured():
    import mlx.core as mx

    mx.eval(mx.ones(1000) + 1)
    if mx.default_device().type != mx.cpu:
        return

    def child() -> bool:
        import threading

        node, done = Node(), []
        # In a thread of its own, as the units of a graph.
        thread = threading.Thread(target=lambda: done.append([follow_cache_limit(node, STEADY) for _ in range(100)]))
        thread.start()
        thread.join(100)
        return bool(done)

    assert in_forked_child(child)


def test_settings_take_it():
    assert AsArraySettings(mlx_cache_limit_mb="auto").mlx_cache_limit_mb == "auto"
    with pytest.raises(TypeError, match='must be None, "auto" or a finite number'):
        AsArraySettings(mlx_cache_limit_mb="Auto")
