"""The limit that is recommended for a chain, on chains whose working set is known, and what is left as it was found.

A measurement does not depend on what the process did before; what it leaves behind is tested in fresh processes.
"""

import functools
import sys
import threading
from collections.abc import Callable

import ezmsg.sigproc.asarray as sigproc
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.processes import RecordedLog, in_forked_child, in_fresh_process

from ezmsg.mlx.asarray import ArrayBackend, AsArraySettings, AsArrayTransformer
from ezmsg.mlx.cache import MIB, cache_limit
from ezmsg.mlx.ewma import EWMASettings, EWMATransformer
from ezmsg.mlx.plan import MARGIN, CacheRecommendation, _limit, measure_working_set, recommend_cache_limit
from ezmsg.mlx.rechunk import RechunkSettings, RechunkTransformer

N_CHANNELS = 512
SAMPLE_MB = N_CHANNELS * 4 / MIB
"""MiB of one sample in float32. Lengths below are multiples of 8 samples, 16 KiB: what allocators round up to."""


@pytest.fixture(autouse=True)
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


def message(n_samples: int, offset: float = 0.0) -> AxisArray:
    data = np.random.default_rng(n_samples).standard_normal((n_samples, N_CHANNELS), np.float32)
    axes = {"time": AxisArray.TimeAxis(fs=30000.0, offset=offset)}
    return AxisArray(data, dims=["time", "ch"], axes=axes, key="amp", stream_dim="time")


def keeping(n_buffers: int) -> Callable[[AxisArray], AxisArray]:
    """A step from NumPy to NumPy with so many MLX arrays of the size of the message, all alive at the same time."""

    def step(message: AxisArray) -> AxisArray:
        import mlx.core as mx

        arrays = [mx.array(message.data) for _ in range(n_buffers)]
        return replace(message, data=np.array(mx.max(arrays[-1], axis=0, keepdims=True)))

    return step


def to_mlx(limit_mb: float | None = None) -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend=ArrayBackend.mlx, mlx_cache_limit_mb=limit_mb))


def to_numpy() -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend=ArrayBackend.numpy))


def ewma() -> EWMATransformer:
    return EWMATransformer(EWMASettings(time_constant=0.01))


def limit_in_force() -> float:
    """In MiB, of MLX itself: it has no getter, and a huge limit changes nothing."""
    import mlx.core as mx

    old = mx.set_cache_limit(1 << 50)
    mx.set_cache_limit(old)
    return old / MIB


# The working set


def test_working_set_is_what_is_alive_at_the_same_time_whatever_was_cached_before():
    import mlx.core as mx

    for n_buffers, n_samples in ((1, 800), (5, 800), (5, 1600)):
        mx.eval(mx.zeros((4, MIB)))
        measured = measure_working_set(keeping(n_buffers), message(n_samples))
        assert measured == pytest.approx(n_buffers * n_samples * SAMPLE_MB, abs=0.05)


def test_steps_are_applied_in_order_and_lazy_results_are_evaluated():
    import mlx.core as mx

    def two_more(message: AxisArray) -> AxisArray:
        return replace(message, data=mx.stack([message.data, message.data]), dims=["x", *message.dims])

    # The upload and, twice its size, the result.
    assert measure_working_set([to_mlx(), two_more], message(800)) == pytest.approx(3 * 800 * SAMPLE_MB, abs=0.05)


def test_messages_in_a_list_are_fed_on_one_by_one_and_none_ends_the_message():
    def halves(message: AxisArray) -> list[AxisArray]:
        return [replace(message, data=half) for half in np.split(message.data, 2)]

    assert measure_working_set([halves, keeping(3)], message(800)) == pytest.approx(3 * 400 * SAMPLE_MB, abs=0.05)
    assert measure_working_set([lambda message: None, keeping(3)], message(800)) == 0.0


def test_repetitions_are_one_stream_without_gaps():
    spans = []

    def note(message: AxisArray) -> None:
        axis = message.axes["time"]
        spans.append((axis.offset, axis.value(len(message.data))))

    measure_working_set(note, message(300, offset=7.0), repetitions=4)
    recommend_cache_limit(note, [message(300), message(900, offset=50.0)], repetitions=4)
    for stream in (spans[:4], spans[4:]):
        assert [start for start, _ in stream[1:]] == [end for _, end in stream[:-1]]
    assert spans[0][0] == 7.0
    assert len(spans[4:]) == 4 + 2


def test_one_repetition_is_the_message_itself():
    calls = []

    def note(message: AxisArray) -> AxisArray:
        calls.append(message.axes["time"].offset)
        return keeping(3)(message)

    assert measure_working_set(note, message(800, offset=2.0), repetitions=1) == pytest.approx(
        3 * 800 * SAMPLE_MB, abs=0.05
    )
    assert calls == [2.0]
    recommendation = recommend_cache_limit(note, [message(800), message(1600)], repetitions=1)
    assert recommendation.working_set_mb == pytest.approx(3 * 800 * SAMPLE_MB, abs=0.05)


def test_a_step_may_be_a_function_that_calls_itself():
    counter = Counter()

    def again(message: AxisArray, depth: int = 3) -> AxisArray:
        return counter(message) if depth == 0 else again(message, depth - 1)

    measure_working_set([again, keeping(2)], message(800), repetitions=2)
    assert counter.n_calls == 2


def test_chain_that_emits_now_and_then_shows_its_working_set_with_enough_repetitions():
    seen = []

    def every_fourth(message: AxisArray) -> AxisArray | None:
        seen.append(message)
        return None if len(seen) % 4 else message

    assert measure_working_set([every_fourth, keeping(2)], message(800), repetitions=3) == 0.0
    seen.clear()
    measured = measure_working_set([every_fourth, keeping(2)], message(800), repetitions=8)
    assert measured == pytest.approx(2 * 800 * SAMPLE_MB, abs=0.05)


# The recommendation


def test_recommendation_for_one_length_is_its_working_set_and_a_margin():
    recommendation = recommend_cache_limit(keeping(5), [message(800)] * 3)
    assert recommendation.working_set_mb == pytest.approx(5 * 800 * SAMPLE_MB, abs=0.05)
    assert recommendation.limit_mb >= MARGIN * recommendation.working_set_mb
    assert recommendation.limit_mb - MARGIN * recommendation.working_set_mb < 1.0
    assert (recommendation.steady_length, recommendation.n_lengths, recommendation.added_mb) == (800, 1, {})
    assert recommendation.reason.startswith(f"{recommendation.limit_mb:g} MiB: the working set of the steady message")
    assert AsArraySettings(mlx_cache_limit_mb=recommendation.limit_mb).mlx_cache_limit_mb == recommendation.limit_mb


def test_most_common_length_is_the_steady_one_and_the_others_add_what_they_need():
    lengths = [1600, 0, 800, 2400, 800, 2400, 800]
    recommendation = recommend_cache_limit(keeping(5), (message(n) for n in lengths))
    assert recommendation.steady_length == 800
    assert recommendation.n_lengths == 3
    assert list(recommendation.added_mb) == [1600, 2400]
    for length, added in recommendation.added_mb.items():
        assert added == pytest.approx(5 * length * SAMPLE_MB, abs=0.05)


def test_chain_that_rechunks_needs_no_more_for_rare_lengths():
    chain = [RechunkTransformer(RechunkSettings(sizes=(400,))), keeping(5)]
    recommendation = recommend_cache_limit(chain, [message(400), message(400), message(4000), message(1234)])
    assert recommendation.working_set_mb == pytest.approx(5 * 400 * SAMPLE_MB, abs=0.05)
    # Garbage of other tests may be freed meanwhile; without Rechunk it would be ten working sets.
    assert max(recommendation.added_mb.values()) < 0.5 * recommendation.working_set_mb


def test_allocator_that_trims_needs_room_for_the_costliest_length_only():
    limit, reason = _limit(8.0, 300, {600: 16.0, 900: 24.0, 1200: 20.0}, trims=True)
    assert limit == MARGIN * (8 + 24)
    assert "(3 seen), 900 samples, adds 24.0 MiB" in reason


def test_allocator_that_does_not_trim_needs_room_for_all_lengths():
    limit, reason = _limit(8.0, 300, {600: 16.0, 900: 24.0, 1200: 20.0}, trims=False)
    assert limit == MARGIN * (8 + 60)
    assert "(3 seen) add 60.0 MiB" in reason


@pytest.mark.parametrize("trims", [False, True])
def test_the_answer_does_not_grow_with_each_length_that_is_shown(trims, monkeypatch):
    monkeypatch.setattr("ezmsg.mlx.plan.has_gpu_allocator", lambda: trims)
    lengths = range(8, 8 * 200, 8)
    found = [
        recommend_cache_limit(keeping(2), [message(n) for n in [800] * 3 + list(lengths)[:-1:step] + [8 * 199]])
        for step in (2, 1)
    ]
    assert found[0].n_lengths < found[1].n_lengths == len(lengths)
    assert found[0].limit_mb == pytest.approx(found[1].limit_mb, rel=0.02)
    needed = MARGIN * (800 + 8 * 199) * 2 * SAMPLE_MB
    assert found[1].limit_mb == pytest.approx(needed, abs=1.5)
    # Half of the lengths were not measured; what they add lies on the line between those that were.
    assert found[1].added_mb[400] == pytest.approx(400 * 2 * SAMPLE_MB, rel=0.02)


def test_rechunk_is_named_with_both_figures_where_it_needs_a_tenth():
    lengths = [16 + 8 * k for k in range(1, 60)]
    found = recommend_cache_limit(keeping(2), [message(n) for n in [16] * 100 + lengths])
    assert found.rechunk_sizes == (16, 64, 256)
    expected = MARGIN * 2 * SAMPLE_MB * (16 + 64 + 256)
    assert found.rechunk_limit_mb == pytest.approx(expected, abs=1.0)
    assert found.rechunk_limit_mb <= 0.1 * found.limit_mb
    assert "RechunkSettings(sizes=(16, 64, 256))" in found.reason
    assert f"{found.rechunk_limit_mb:g} MiB instead of {found.limit_mb:g} do" in found.reason


def test_rechunk_is_not_named_where_it_would_save_little():
    found = recommend_cache_limit(keeping(2), [message(n) for n in [800] * 5 + [1600]])
    assert (found.rechunk_sizes, found.rechunk_limit_mb) == ((), None)
    assert "Rechunk" not in found.reason


def test_a_callable_may_return_an_array():
    import mlx.core as mx

    def lazy(message: AxisArray) -> mx.array:
        return mx.sqrt(mx.array(message.data) + 1.0)

    assert measure_working_set(lazy, message(800)) >= 800 * SAMPLE_MB
    assert measure_working_set([lazy, lambda array: array + 1.0], message(800)) >= 800 * SAMPLE_MB
    assert measure_working_set(lambda message: np.ones(3), message(800)) == 0.0


def test_limit_is_never_zero_which_would_turn_the_cache_off():
    for trims in (True, False):
        assert _limit(0.0, 300, {}, trims)[0] == 1.0


def missing_from_cache(step: Callable[[AxisArray], AxisArray], message: AxisArray) -> float:
    """MiB that MLX has to ask the system for, for one message."""
    import mlx.core as mx

    old = mx.set_cache_limit(1 << 50)
    before = mx.get_cache_memory()
    step(message)
    mx.synchronize()
    after = mx.get_cache_memory()
    mx.set_cache_limit(old)
    return (after - before) / MIB


@in_fresh_process
def test_steady_message_finds_its_working_set_in_the_cache_whatever_came_before():
    import mlx.core as mx

    step, steady, rare = keeping(5), message(800), [message(n) for n in (2000, 3000, 4000)]
    recommendation = recommend_cache_limit(step, [steady, steady, *rare])
    for limit_mb in (recommendation.limit_mb, MARGIN * recommendation.working_set_mb):
        mx.set_cache_limit(int(limit_mb * MIB))
        mx.clear_cache()
        for one in (*rare, *[steady] * 5, *rare, steady):
            step(one)
        mx.synchronize()
        missing = missing_from_cache(step, steady)
        if limit_mb == recommendation.limit_mb:
            assert missing == pytest.approx(0.0, abs=0.05)
        elif not (mx.metal.is_available() or mx.cuda.is_available()):
            # Why the limit holds the rare lengths, too: on the CPU, their buffers took the place and stay.
            assert missing > 0.2 * recommendation.working_set_mb


# What is left as it was found


@in_fresh_process
def test_limit_and_size_of_the_cache_are_as_before():
    import mlx.core as mx

    mx.set_cache_limit(77 * MIB)
    for chain in (keeping(9), lambda: keeping(9), [to_mlx(), ewma()], lambda: [to_mlx(), ewma()]):
        mx.eval(mx.zeros((MIB,)))
        recommend_cache_limit(chain, [message(800), message(1600)])
        assert limit_in_force() == 77.0
        assert mx.get_cache_memory() == 0
        assert mx.get_active_memory() < MIB / 100

    # Also when the chain fails.
    counter = Counter()

    def fail(message: AxisArray) -> None:
        mx.eval(mx.zeros((MIB,)))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_working_set([counter, fail], message(800))
    assert limit_in_force() == 77.0
    assert mx.get_cache_memory() == 0
    assert counter.n_calls == 0


@in_fresh_process
def test_limits_that_the_chain_asks_for_neither_hold_while_measuring_nor_stay():
    expected = 800 * SAMPLE_MB
    with RecordedLog() as log:
        for limit_mb in (0.0, 0.5, None):
            assert measure_working_set([to_mlx(limit_mb), to_numpy()], message(800)) == pytest.approx(
                expected, abs=0.05
            )
        assert cache_limit().source == "default"
        assert log.infos == log.warnings == []

        # The same where a limit is in force, and nodes that had asked still count.
        node = to_mlx(64.0)
        node(message(8))
        assert measure_working_set([node, to_numpy()], message(800)) == pytest.approx(expected, abs=0.05)
        assert measure_working_set([to_mlx(1.0), to_numpy()], message(800)) == pytest.approx(expected, abs=0.05)
        assert (limit_in_force(), cache_limit().limit_mb) == (64.0, 64.0)
        to_mlx(32.0)(message(8))
        assert limit_in_force() == 32.0
        node(message(8))
        assert limit_in_force() == 64.0
    assert len(log.warnings) == 1


@in_fresh_process
def test_chain_that_sets_the_limit_by_itself_is_refused_and_its_limit_stays():
    theirs = sigproc.AsArrayTransformer(sigproc.AsArraySettings(backend=ArrayBackend.mlx, mlx_cache_limit_mb=48.0))
    with pytest.raises(RuntimeError, match="cache limit was set to 48 MiB while"):
        measure_working_set(theirs, message(800))
    assert limit_in_force() == 48.0
    # It does so once in a process.
    assert measure_working_set(theirs, message(800)) == pytest.approx(800 * SAMPLE_MB, abs=0.05)
    assert limit_in_force() == 48.0


class Counter:
    """A step of a user's own, with state."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.seen: list[int] = []

    def __call__(self, message: AxisArray) -> AxisArray:
        self.n_calls += 1
        self.seen.append(self.n_calls)
        self.added_later = True
        return message

    count = __call__


in_module = ewma()


def chain_around(place: str, to_mlx: AsArrayTransformer, average: EWMATransformer) -> object:
    """Chains that all compute the same, with the transformers where users put them."""
    together = [to_mlx, average]

    def in_list(message: AxisArray) -> AxisArray:
        for step in together:
            message = step(message)
        return message

    def of(average: EWMATransformer, message: AxisArray) -> AxisArray:
        return average(to_mlx(message))

    return {
        "sequence": (to_mlx, average),
        "function": lambda message: average(to_mlx(message)),
        "list in a function": in_list,
        "function in a function": lambda message: in_list(message),
        "partial": functools.partial(of, average),
        "bound method": [to_mlx.send, average.send],
        "module": lambda message: in_module(to_mlx(message)),
    }[place]


@pytest.mark.parametrize(
    "place",
    ["sequence", "function", "list in a function", "function in a function", "partial", "bound method", "module"],
)
def test_state_of_transformers_is_as_before_and_the_stream_goes_on(place):
    upload, average = to_mlx(), in_module if place == "module" else ewma()
    reference_upload, reference = to_mlx(), ewma()
    for n_samples in (300, 17):
        average(upload(message(n_samples)))
        reference(reference_upload(message(n_samples)))
    state, attributes = average.state, dict(vars(average))
    n_seen = state.n_seen

    recommend_cache_limit(chain_around(place, upload, average), [message(300), message(800)])
    assert average.state is state
    assert average.state.n_seen == n_seen
    assert vars(average) == attributes
    expected = reference(reference_upload(message(300)))
    np.testing.assert_array_equal(np.array(average(upload(message(300))).data), np.array(expected.data))


def test_state_of_objects_of_the_users_own_is_as_before():
    for chain_of in (lambda counter: counter, lambda counter: [counter], lambda counter: counter.count):
        counter = Counter()
        counter.n_calls = 5
        measure_working_set(chain_of(counter), message(8))
        assert vars(counter) == {"n_calls": 5, "seen": []}


def test_state_that_cannot_be_copied_needs_a_factory():
    class Locked(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    locked = Locked()
    with pytest.raises(TypeError, match="cannot be copied .*lock.*give a factory"):
        measure_working_set([to_mlx(), locked], message(8))
    assert locked.n_calls == 0
    measure_working_set(lambda: [to_mlx(), Locked()], message(8))


def test_factory_builds_one_chain_for_a_measurement():
    built = []

    def build(n_buffers: int = 3) -> list[Callable[[AxisArray], AxisArray]]:
        built.append(Counter())
        return [built[-1], keeping(n_buffers)]

    for factory, explicit in ((lambda: build(), None), (build, True), (functools.partial(build, 3), True)):
        built.clear()
        recommendation = recommend_cache_limit(factory, [message(800), message(1600)], repetitions=3, factory=explicit)
        assert recommendation.working_set_mb == pytest.approx(3 * 800 * SAMPLE_MB, abs=0.05)
        assert [counter.n_calls for counter in built] == [3 + 2]


@pytest.mark.skipif(sys.platform != "linux", reason="fork with MLX is told from its state on Linux only")
@in_fresh_process
def test_forked_child_of_a_process_that_used_mlx_is_refused_and_does_not_hang():
    measure_working_set(keeping(1), message(8))

    def measure() -> str:
        with pytest.raises(RuntimeError) as error:
            measure_working_set(keeping(1), message(8))
        return str(error.value)

    assert "was forked from one that had used MLX" in in_forked_child(measure)


# Arguments


def test_wrong_arguments_are_told_by_name():
    for messages in ([], [message(0)]):
        with pytest.raises(ValueError, match="^messages holds no message with samples"):
            recommend_cache_limit(keeping(1), messages)
    for chain in (None, [keeping(1), 3], lambda: "text"):
        with pytest.raises(
            TypeError, match="^'chain' must be a callable or a sequence of one or more callables, got .*"
        ):
            measure_working_set(chain, message(8))
    for wrong in (np.zeros((3, 4)), None):
        with pytest.raises(TypeError, match="^'messages' must hold AxisArray messages, got an? "):
            measure_working_set(keeping(1), wrong)
        with pytest.raises(TypeError, match="^'messages' must hold AxisArray messages, got an? "):
            recommend_cache_limit(keeping(1), [wrong])
    for wrong in (message(0), None, 3):
        with pytest.raises(TypeError, match="^'messages' must be an iterable of AxisArray, got an? .*"):
            recommend_cache_limit(keeping(1), wrong)
    for chain, factory, named in (
        (keeping(1), "yes", "^'factory' must be True, False or None, got .*"),
        ([keeping(1)], True, "^'chain' must be a callable without arguments if factory=True"),
    ):
        with pytest.raises(TypeError, match=named):
            measure_working_set(chain, message(8), factory=factory)
        with pytest.raises(TypeError, match=named):
            recommend_cache_limit(chain, [message(8)], factory=factory)
    for repetitions, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        for measure, given in ((measure_working_set, message(8)), (recommend_cache_limit, [message(8)])):
            with pytest.raises(error, match="^'repetitions' must be an integer of at least 1, got .*"):
                measure(keeping(1), given, repetitions=repetitions)


def test_recommendation_cannot_be_changed():
    recommendation = CacheRecommendation(2.0, 1.0, 300, {}, "")
    with pytest.raises(AttributeError):
        recommendation.limit_mb = 3.0
