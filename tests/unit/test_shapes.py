"""Which message lengths fill the cache: the counts of each node, the estimates, the warning, and the plan caches."""

import dataclasses
import gc
import pickle
import re

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import RecordedLog, in_fresh_process, run_code
from hypothesis import given
from hypothesis import strategies as st

from ezmsg.mlx import (
    AsArraySettings,
    AsArrayTransformer,
    MemoryMonitorProducer,
    apply_cache_limit,
    cache_limit,
    shape_report,
    withdraw_cache_limit,
)
from ezmsg.mlx.memory import shapes
from ezmsg.mlx.memory.shapes import suggested_sizes
from ezmsg.mlx.stream.workarounds import THRASHING_CHECK, plan_caches, tolerate_misses

pytest.importorskip("mlx.core")


def message(n_samples: int, n_channels: int = 4, dims: tuple[str, str] = ("time", "ch")) -> AxisArray:
    shape = (n_samples, n_channels) if dims[0] == "time" else (n_channels, n_samples)
    return AxisArray(np.ones(shape, np.float32), list(dims), axes={"time": AxisArray.TimeAxis(fs=30000.0)})


def node_that_met(name: str, lengths: list[int]) -> AsArrayTransformer:
    node = AsArrayTransformer(backend="mlx")
    node.node_name = name
    for length in lengths:
        node(message(length))
    return node


def report_of(name: str) -> shapes.NodeShapes:
    (found,) = (node for node in shape_report().nodes if node.node == name)
    return found


def test_each_converting_node_tells_its_lengths():
    nodes = node_that_met("A", [300] * 8 + [1000, 2000]), node_that_met("B", [50, 50, 0])
    a, b = report_of("A"), report_of("B")
    assert (a.n_messages, a.n_lengths, a.steady.length, a.steady_share) == (10, 3, 300, 0.8)
    assert a.once == (1000, 2000)
    assert {use.length: use.n_messages for use in a.lengths} == {300: 8, 1000: 1, 2000: 1}
    # Messages without samples hold nothing.
    assert (b.n_messages, b.n_lengths, b.steady_share) == (2, 1, 1.0)
    assert len(nodes) == 2


def test_lengths_are_along_the_stream_dimension():
    node = AsArrayTransformer(backend="mlx")
    node.node_name = "channels first"
    node(message(300, 4, ("ch", "time")))
    node(message(300, 5, ("ch", "time")))
    assert [(use.length, use.n_messages) for use in report_of("channels first").lengths] == [(300, 2)]


def test_what_converts_to_numpy_does_not_count_and_a_node_that_is_gone_is_left_out():
    node = node_that_met("gone", [300])
    to_numpy = AsArrayTransformer(backend="numpy")
    to_numpy.node_name = "to NumPy"
    to_numpy(message(300))
    names = [found.node for found in shape_report().nodes]
    assert "gone" in names and "to NumPy" not in names
    del node
    gc.collect()
    assert "gone" not in [found.node for found in shape_report().nodes]


def test_a_node_that_turns_to_numpy_and_back_counts_on_and_withdraws_its_limit_each_time():
    node, another = node_that_met("to and fro", [300]), node_that_met("another", [1])
    another.update_settings(AsArraySettings(backend="mlx", mlx_cache_limit_mb=None))
    for _ in range(2):
        node.update_settings(AsArraySettings(backend="numpy"))
        node(message(300))
        apply_cache_limit(another, None)
        assert cache_limit().node != "to and fro"
        node.update_settings(AsArraySettings(backend="mlx", mlx_cache_limit_mb=7.0))
        node(message(300))
        assert cache_limit().node == "to and fro"
    withdraw_cache_limit(node)
    assert report_of("to and fro").n_messages == 3


def test_a_node_keeps_a_bounded_number_of_shapes(monkeypatch):
    monkeypatch.setattr(shapes, "MOST_SHAPES", 3)
    node = node_that_met("bounded", [1, 2, 3, 4, 5, 1])
    found = report_of("bounded")
    assert (found.n_lengths, found.n_not_kept, found.n_messages) == (3, 2, 6)
    assert len(node._shapes.seen) == 3


@in_fresh_process
def test_estimates_add_up_to_what_the_cache_has_grown_by():
    import mlx.core as mx

    mx.set_cache_limit(1 << 40)
    node = AsArrayTransformer(backend="mlx", mlx_cache_limit_mb=None)
    for length in (300, 300, 1000, 300, 5000, 300, 20000, 300):
        y = node(message(length, 64)).data
        mx.eval(mx.sqrt(y * 2 + 1))
        del y
    mx.synchronize()
    report = shape_report()
    assert report.cache_mb == pytest.approx(mx.get_cache_memory() / 2**20)
    (found,) = report.nodes
    estimates = {use.length: use.estimate_mb for use in found.lengths}
    assert sum(estimates.values()) == pytest.approx(report.cache_mb, rel=0.05)
    assert list(estimates) == [20000, 5000, 1000, 300]
    assert 0.8 < estimates[20000] / (4 * estimates[5000]) < 1.25


@in_fresh_process
def test_what_the_cache_grows_by_is_the_length_that_came_last():
    import mlx.core as mx

    mx.set_cache_limit(1 << 40)
    node = AsArrayTransformer(backend="mlx", mlx_cache_limit_mb=None)
    for length, extra in ((300, 0), (1000, 8 << 20), (2000, 0), (300, 0), (3000, 0)):
        y = node(message(length, 64)).data
        mx.eval(y + 1, mx.ones(extra + 1, mx.uint8))
        del y
        mx.synchronize()
    (found,) = shape_report().nodes
    assert found.lengths[0].length == 1000
    assert found.lengths[0].estimate_mb > 8.0 > 4 * found.lengths[1].estimate_mb


@in_fresh_process
def test_where_the_cache_is_off_an_estimate_follows_from_the_size_of_the_message():
    node = AsArrayTransformer(backend="mlx", mlx_cache_limit_mb=0)
    node(message(1000, 256)), node(message(2000, 256))
    (found,) = shape_report().nodes
    assert [use.estimate_mb for use in found.lengths] == [
        pytest.approx(2000 * 1024 * 2 / 2**20),
        pytest.approx(1.953125),
    ]


@in_fresh_process
def test_one_warning_names_the_three_worst_and_what_helps():
    with RecordedLog() as log:
        node = AsArrayTransformer(backend="mlx")
        node.node_name = "CHAIN/TO_MLX"
        for length in range(1001, 1001 + shapes.WARN_AT_LENGTHS - 2):
            node(message(300)), node(message(length))
        assert not log.warnings
        node(message(9000)), node(message(700))
        for length in range(2000, 2100):
            node(message(length))
    (warning,) = log.warnings
    assert "CHAIN/TO_MLX has met 32 message lengths, 31 of them once" in warning
    assert "9000 samples (" in warning and len(re.findall(r"\d+ samples \(\d+\.\d MiB\)", warning)) == 3
    assert "RechunkSettings(sizes=(300, 1200, 4800))" in warning
    assert "FFT" not in warning


@in_fresh_process
def test_on_cuda_the_warning_tells_the_plan_caches_too():
    shapes.gpu_backend = lambda: "cuda"
    with RecordedLog() as log:
        node = AsArrayTransformer(backend="mlx")
        for length in range(1, shapes.WARN_AT_LENGTHS + 1):
            node(message(length))
    (warning,) = log.warnings
    assert "128 FFT plans" in warning and "makes others anew" in warning
    report = shape_report()
    assert report.plans == plan_caches()
    assert report.plans_at_most == {"FFT plans": 32, "convolution plans": 32}
    assert report.summary()["plans"]["FFT plans"] == {"at_most": 32, "capacity": 128}
    assert "128 FFT plans" in str(report) and "has taken 32 FFT plans or 32 convolution plans at most" in str(report)
    for length in range(33, 200):
        node(message(length))
    assert shape_report().plans_at_most["FFT plans"] == 128


def test_the_report_is_a_table():
    node = node_that_met("printed", [300] * 3 + list(range(400, 430)))
    text = str(shape_report())
    assert "printed: 31 lengths in 33 messages, 30 of them once; 9.1% of the messages have 300 samples" in text
    assert "21 more lengths" in text
    assert node is not None


def test_ten_lengths_are_all_in_the_table():
    node = node_that_met("ten", list(range(500, 510)))
    text = str(dataclasses.replace(shape_report(), nodes=(report_of("ten"),)))
    assert "    509 " in text and "more lengths" not in text
    assert node is not None


def test_the_monitor_publishes_it():
    node = node_that_met("monitored", [300])
    sent = MemoryMonitorProducer()().attrs["shapes"]
    assert sent == shape_report().summary()
    assert "monitored" in [found["node"] for found in sent["nodes"]]
    assert node is not None


def test_what_the_monitor_sends_fits_into_a_slot_of_shared_memory():
    node = node_that_met("many", [300] * 50 + list(range(1000, 4000)))
    message = MemoryMonitorProducer()()
    (sent,) = (found for found in message.attrs["shapes"]["nodes"] if found["node"] == "many")
    assert (sent["n_lengths"], sent["n_once"], sent["n_messages"]) == (3001, 3000, 3050)
    assert len(sent["lengths"]) == 12 and sent["lengths"][0]["length"] == 300
    assert len(pickle.dumps(message)) < 2**15
    assert node is not None


def test_a_transformer_can_still_be_copied_and_pickled():
    import copy

    node = node_that_met("copied", [300])
    for other in (copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        other(message(400))
    assert report_of("copied").n_lengths == 1


@given(st.dictionaries(st.integers(0, 10**6), st.integers(1, 1000), max_size=30))
def test_sizes_that_are_suggested_are_few_and_fit_the_stream(counts):
    sizes = suggested_sizes(counts)
    lengths = [length for length in counts if length]
    assert len(sizes) <= 3 and len(set(sizes)) == len(sizes)
    assert bool(sizes) == bool(lengths)
    assert all(0 < size <= max(lengths) for size in sizes)
    # No sample waits for more than the usual message has.
    assert not sizes or min(sizes) <= max(lengths, key=lambda length: counts[length])


# The caches of plans on CUDA


@pytest.mark.parametrize(("asked", "refuses"), [(None, True), ("0", False), ("1", True), ("2 ", True), ("off", False)])
def test_misses_are_tolerated_unless_the_user_has_said_otherwise(asked, refuses):
    environ = {"MLX_CUDA_FFT_CACHE_SIZE": "16"} | ({} if asked is None else {THRASHING_CHECK: asked})
    assert plan_caches(environ).refuses == refuses and plan_caches(environ).capacities["FFT plans"] == 16
    with RecordedLog() as log:
        tolerate_misses(environ)
        tolerate_misses(environ)
    assert environ[THRASHING_CHECK] == asked or (asked is None and environ[THRASHING_CHECK] == "0")
    assert plan_caches(environ).refuses == (refuses and asked is not None)
    # Of what the user has set, which stays as it is.
    assert [THRASHING_CHECK in line for line in log.warnings] == [True, True] * (refuses and asked is not None)


def test_a_stream_of_many_lengths_survives_the_plan_caches_of_cuda(monkeypatch):
    # A process of its own, where a stand-in for MLX's cache reads the variable as MLX does: in C, when it is made.
    code = """
import ctypes, sys
from ezmsg.mlx import AsArrayTransformer
assert "mlx.core" not in sys.modules
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
class PlanCache:
    def __init__(self):
        self.checks, self.misses, self.plans = int(getenv(b"MLX_ENABLE_CACHE_THRASHING_CHECK") or b"1"), 0, []
    def plan(self, length):
        if length not in self.plans:
            self.misses += 1
            if self.checks and self.misses > 2 * 128:
                raise RuntimeError("Cache thrashing is happening")
            self.plans = [*self.plans, length][-128:]
cache = PlanCache()
for length in range(1000):
    cache.plan(length)
print(cache.misses)
"""
    monkeypatch.delenv(THRASHING_CHECK, raising=False)
    assert run_code(code).strip() == "1000"
