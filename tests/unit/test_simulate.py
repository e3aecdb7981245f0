"""The simulated acquisition stream: message lengths, offsets, samples, pacing, and its end in a graph."""

import asyncio
import dataclasses
import itertools
import math
import subprocess
import sys

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.ports import free_port

from ezmsg.mlx import simulate as acquisition
from ezmsg.mlx.simulate import (
    MICROVOLTS_PER_COUNT,
    SimulatedAcquisition,
    SimulatedAcquisitionProducer,
    SimulatedAcquisitionSettings,
    message_lengths,
    simulated_acquisition,
)

# Small and quick, and longer than the recording that repeats (5 s), so that every stream wraps.
SMALL = SimulatedAcquisitionSettings(
    sampling_rate=2000.0,
    n_channels=8,
    samples_per_message=30,
    stall_every=20,
    n_stall_lengths=7,
    shortest_stall=0.02,
    longest_stall=0.5,
    duration=12.3456,
    seed=3,
)


def with_settings(**changes) -> SimulatedAcquisitionSettings:
    return dataclasses.replace(SMALL, **changes)


def samples(settings: SimulatedAcquisitionSettings) -> np.ndarray:
    return np.concatenate([message.data for message in simulated_acquisition(settings)])


# Message lengths


def test_every_so_many_messages_one_comes_after_a_stall():
    lengths = list(itertools.islice(message_lengths(with_settings(duration=None)), 200))
    stalls = lengths[19::20]
    assert set(stalls) <= set(SMALL.stall_lengths)
    del lengths[19::20]
    assert set(lengths) == {30}


def test_default_settings_are_those_of_the_example_chain():
    lengths = list(message_lengths(SimulatedAcquisitionSettings(duration=400.0)))
    stalls = [length for length in lengths if length != 300]
    assert lengths.index(stalls[0]) == 299
    assert len(set(stalls[:40])) == 40
    assert (min(stalls[:40]), max(stalls[:40])) == (600, 15000)


def test_stalls_bring_new_lengths_until_all_have_been_seen_and_then_another_order():
    stalls = list(itertools.islice(message_lengths(with_settings(duration=None)), 3 * 7 * 20))[19::20]
    cycles = [stalls[:7], stalls[7:14], stalls[14:]]
    assert all(sorted(cycle) == list(SMALL.stall_lengths) for cycle in cycles)
    assert cycles[0] != sorted(cycles[0])
    assert cycles[0] != cycles[1] != cycles[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_stall_lengths": 3}, (40, 520, 1000)),
        ({"n_stall_lengths": 1}, (1000,)),
        ({"n_stall_lengths": 4, "shortest_stall": 0.02, "longest_stall": 0.0215}, (40, 41, 42, 43)),
        ({"n_stall_lengths": 3, "shortest_stall": 0.02, "longest_stall": 0.0215}, (40, 42, 43)),
        ({"stall_every": None}, ()),
    ],
)
def test_stall_lengths_are_spread_evenly_and_distinct(changes, expected):
    assert with_settings(**changes).stall_lengths == expected


@pytest.mark.parametrize("stall_every", [0, None])
def test_stalls_can_be_turned_off(stall_every):
    # Nor do the settings of stalls matter then.
    settings = with_settings(stall_every=stall_every, samples_per_message=100, duration=1.0)
    assert list(message_lengths(settings)) == [100] * 20


def test_every_message_can_come_after_a_stall():
    lengths = list(itertools.islice(message_lengths(with_settings(stall_every=1, duration=None)), 7))
    assert sorted(lengths) == list(SMALL.stall_lengths)


@pytest.mark.parametrize("duration", [0.0004, 0.015, 0.0152, 1 / 3, 12.3456])
def test_message_lengths_add_up_to_the_duration(duration):
    settings = with_settings(duration=duration)
    lengths = list(message_lengths(settings))
    assert sum(lengths) == settings.n_samples == round(duration * 2000.0)
    assert min(lengths) > 0


def test_last_message_is_cut_even_after_a_stall():
    settings = with_settings(duration=0.3)
    assert list(message_lengths(settings)) == [30] * 19 + [30]
    assert min(SMALL.stall_lengths) > 30


def test_seed_decides_the_order_of_stalls():
    assert list(message_lengths(SMALL)) == list(message_lengths(with_settings()))
    assert list(message_lengths(SMALL)) != list(message_lengths(with_settings(seed=4)))


# Messages


@pytest.mark.parametrize("sampling_rate", [2000.0, 1999.99, np.float32(2048.0)])
def test_stream_agrees_with_message_lengths_and_is_contiguous_to_the_last_bit(sampling_rate):
    settings = with_settings(sampling_rate=sampling_rate)
    messages = list(simulated_acquisition(settings))
    lengths = [message.data.shape[0] for message in messages]
    assert lengths == list(message_lengths(settings))
    starts = [0, *itertools.accumulate(lengths)]
    assert starts.pop() == settings.n_samples
    assert [message.axes["time"].offset for message in messages] == [start / float(sampling_rate) for start in starts]
    assert all(type(message.axes["time"].offset) is float for message in messages)


def test_messages_are_int16_counts_with_the_axes_of_a_recording():
    messages = list(simulated_acquisition(SMALL))
    first = messages[0]
    assert first.data.shape == (30, 8)
    for message in messages:
        assert message.data.dtype == np.int16
        assert message.dims == ["time", "ch"]
        assert message.stream_dim == "time"
        assert message.key == "simulated"
        assert message.attrs == {"microvolts_per_count": MICROVOLTS_PER_COUNT}
        assert message.axes["time"].gain == 1 / 2000.0
        assert message.axes["time"].unit == "s"
        assert message.axes["ch"] is first.axes["ch"]
    assert first.axes["ch"].data.tolist() == [f"ch{number}" for number in range(1, 9)]


def test_consumers_can_corrupt_neither_the_recording_nor_each_other():
    whole = samples(SMALL).copy()
    producer = SimulatedAcquisitionProducer(settings=SMALL)
    position = 0
    for message in producer:
        with pytest.raises(ValueError, match="read-only"):
            message.data[:] = 0
        if message.data.base is not None:
            with pytest.raises(ValueError, match="WRITEABLE"):
                message.data.flags.writeable = True
        message.attrs["mine"] = message.dims.pop()
        message.axes.clear()
        np.testing.assert_array_equal(message.data, whole[position : position + len(message.data)])
        position += len(message.data)
    assert position == len(whole)


def test_messages_stay_the_same_while_they_are_held():
    held = list(simulated_acquisition(SMALL))
    copies = [message.data.copy() for message in simulated_acquisition(SMALL)]
    for message, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(message.data, copy)


# Samples


def test_generator_producer_and_coroutine_give_the_same_stream():
    async def awaited() -> list[AxisArray]:
        producer = SimulatedAcquisitionProducer(settings=SMALL)
        messages = []
        with pytest.raises(ez.Complete):
            while True:
                messages.append(await producer.__acall__())
        return messages

    def called() -> list[AxisArray]:
        producer = SimulatedAcquisitionProducer(settings=SMALL)
        messages = [producer() for _ in message_lengths(SMALL)]
        with pytest.raises(ez.Complete):
            producer()
        return messages

    generated = list(simulated_acquisition(SMALL))
    assert generated == called() == asyncio.run(awaited())
    assert len(generated) == len(list(message_lengths(SMALL)))


def test_samples_do_not_depend_on_how_they_are_cut_into_messages():
    whole = samples(SMALL)
    # 11 s in one message: longer than the recording, so that it wraps within the message, twice.
    for changes in (
        {"samples_per_message": 22000, "stall_every": 0},
        {"samples_per_message": 7, "stall_every": 3},
    ):
        np.testing.assert_array_equal(samples(with_settings(**changes)), whole)


def test_seed_decides_the_samples():
    np.testing.assert_array_equal(samples(SMALL), samples(with_settings()))
    assert np.mean(samples(SMALL) == samples(with_settings(seed=4))) < 0.1


def test_changed_settings_start_a_new_stream():
    producer = SimulatedAcquisitionProducer(settings=SMALL)
    for _ in range(25):
        producer()
    producer.update_settings(with_settings(n_channels=4))
    assert list(producer) == list(simulated_acquisition(with_settings(n_channels=4)))


@pytest.fixture(scope="module")
def microvolts() -> np.ndarray:
    """Three seconds of 32 channels at 30 kHz, shape (time, ch)."""
    settings = SimulatedAcquisitionSettings(n_channels=32, duration=3.0)
    return samples(settings) * MICROVOLTS_PER_COUNT


def high_pass(microvolts: np.ndarray, width: int = 60) -> np.ndarray:
    """What is left after subtracting the mean of the ``width`` samples (2 ms) around each."""
    sums = np.cumsum(microvolts, axis=0)
    return microvolts[width // 2 : -width // 2] - (sums[width:] - sums[:-width]) / width


def test_channels_have_white_noise_of_a_few_microvolts(microvolts):
    fast = high_pass(microvolts)
    noise = np.median(np.abs(fast), axis=0) / 0.6745
    assert np.all((6 < noise) & (noise < 10))


def test_every_channel_has_spikes_at_a_few_hertz(microvolts):
    fast = high_pass(microvolts)
    below = fast < -40.0  # five times the noise: a normal distribution is there once in 3.5 million samples
    spikes_per_second = np.sum(below[1:] & ~below[:-1], axis=0) / 3.0
    assert np.all(spikes_per_second > 0)
    assert 1 < np.median(spikes_per_second) < 15
    # Negative first, and the largest several times the noise.
    assert np.all(-fast.min(axis=0) > 1.5 * fast.max(axis=0))
    assert np.all((50 < -fast.min(axis=0)) & (-fast.min(axis=0) < 250))


def test_slow_background_is_shared_by_all_channels_and_more_by_neighbours(microvolts):
    slow = microvolts.reshape(-1, 300, 32).mean(axis=1)
    correlation = np.corrcoef(slow.T)
    neighbours = np.mean([correlation[ch, ch + 1] for ch in range(31)])
    distant = np.mean([correlation[ch, ch + 16] for ch in range(16)])
    assert 0.3 < distant < neighbours < 0.99


def test_common_reference_takes_away_most_of_the_shared_background(microvolts):
    referenced = microvolts - microvolts.mean(axis=1, keepdims=True)
    assert np.mean(referenced.var(axis=0)) < 0.6 * np.mean(microvolts.var(axis=0))


def test_recording_repeats_without_a_visible_seam():
    settings = SimulatedAcquisitionSettings(n_channels=32, duration=5.5)
    stream = samples(settings).astype(float)
    # The slow background dominates, so a jump at the seam would tower above the change within a millisecond elsewhere.
    smooth = stream[: len(stream) // 30 * 30].reshape(-1, 30, 32).mean(axis=1)
    steps = np.abs(np.diff(smooth, axis=0)).mean(axis=1)
    period = 150000 // 30
    assert np.array_equal(stream[:1000], stream[150000:151000])
    assert steps[period - 1] < 2 * np.median(steps)


@pytest.mark.parametrize("settings", [{"n_channels": 1}, {"sampling_rate": 1.0}, {"sampling_rate": 250.0}])
def test_any_channel_count_and_rate_gives_a_signal(settings):
    stream = samples(with_settings(**settings, stall_every=None, duration=100.0))
    assert np.all(stream.std(axis=0) > 0)


# Real time


class Clock:
    """Stands for the ``time`` and ``asyncio`` modules; time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = []

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class SyncClock(Clock):
    def sleep(self, seconds: float) -> None:
        self.pass_by(seconds)


class AsyncClock(Clock):
    async def sleep(self, seconds: float) -> None:
        self.pass_by(seconds)


def due_times(settings: SimulatedAcquisitionSettings) -> np.ndarray:
    return 1000.0 + np.cumsum(list(message_lengths(settings))) / settings.sampling_rate


def test_real_time_messages_come_when_their_last_sample_is_due(monkeypatch):
    clock = SyncClock()
    monkeypatch.setattr(acquisition, "time", clock)
    settings = with_settings(real_time=True)
    arrivals = [clock.now for _ in simulated_acquisition(settings)]
    np.testing.assert_allclose(arrivals, due_times(settings), rtol=0, atol=1e-9)
    # So a stall is felt: nothing for up to half a second, then one large message.
    assert max(clock.slept) == pytest.approx(0.5)


async def test_real_time_holds_for_awaited_messages_too(monkeypatch):
    clock = AsyncClock()
    monkeypatch.setattr(acquisition, "time", clock)
    monkeypatch.setattr(acquisition, "asyncio", clock)
    settings = with_settings(real_time=True)
    producer = SimulatedAcquisitionProducer(settings=settings)
    arrivals = []
    for _ in message_lengths(settings):
        await producer.__acall__()
        arrivals.append(clock.now)
    np.testing.assert_allclose(arrivals, due_times(settings), rtol=0, atol=1e-9)


def test_late_consumer_gets_overdue_messages_at_once_until_it_has_caught_up(monkeypatch):
    clock = SyncClock()
    monkeypatch.setattr(acquisition, "time", clock)
    settings = with_settings(real_time=True, stall_every=None)
    producer = SimulatedAcquisitionProducer(settings=settings)
    producer()
    clock.now += 0.0525  # three and a half messages
    arrivals = []
    for _ in range(5):
        producer()
        arrivals.append(clock.now - 1000.0)
    np.testing.assert_allclose(arrivals, [0.0675] * 3 + [0.075, 0.09], rtol=0, atol=1e-9)


def test_messages_come_as_fast_as_possible_by_default(monkeypatch):
    clock = SyncClock()
    monkeypatch.setattr(acquisition, "time", clock)
    list(simulated_acquisition(SMALL))
    assert clock.slept == []


# Settings


@pytest.mark.parametrize("name", ["sampling_rate", "shortest_stall", "longest_stall", "duration"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 10**400])
def test_quantities_must_be_finite_and_positive(name, value):
    with pytest.raises(ValueError, match=f"^'{name}' must be a finite number > 0, got .*"):
        with_settings(**{name: value})


@pytest.mark.parametrize("name", ["sampling_rate", "shortest_stall", "longest_stall", "duration"])
@pytest.mark.parametrize("value", [True, np.True_, "1", 1j, [1.0]])
def test_quantities_must_be_numbers(name, value):
    with pytest.raises(TypeError, match=f"^'{name}' must be a finite number > 0, got .*"):
        with_settings(**{name: value})


@pytest.mark.parametrize("name", ["sampling_rate", "shortest_stall", "longest_stall"])
def test_quantities_other_than_the_duration_are_required(name):
    with pytest.raises(TypeError, match=f"^'{name}' must be a finite number > 0, got None"):
        with_settings(**{name: None})


@pytest.mark.parametrize(
    ("name", "smallest"),
    [("n_channels", 1), ("samples_per_message", 1), ("stall_every", 0), ("n_stall_lengths", 1), ("seed", 0)],
)
def test_counts_must_be_integers_that_are_large_enough(name, smallest):
    with pytest.raises(ValueError, match=f"^'{name}' must be an integer of at least {smallest}, got {smallest - 1}"):
        with_settings(**{name: smallest - 1})
    for value in (True, 2.0, math.nan, "2"):
        with pytest.raises(TypeError, match=f"^'{name}' must be an integer of at least {smallest}, got .*"):
            with_settings(**{name: value})


def test_real_time_must_be_a_bool():
    with pytest.raises(TypeError, match="^'real_time' must be True or False, got 1"):
        with_settings(real_time=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"longest_stall": 0.01}, r"^'longest_stall' must be at least shortest_stall, 0.02, got 0.01"),
        ({"samples_per_message": 40}, "^'shortest_stall' must be .*=40, got 0.02, which is 40 samples"),
        ({"n_stall_lengths": 962}, "^'n_stall_lengths' must be at most 961, .* from 40 to 1000 samples, got 962"),
        ({"duration": 0.0002}, "^'duration' must hold one sample or more at 2000.0 Hz, got 0.0002"),
        ({"duration": 1e308}, r"^'duration \* sampling_rate' must be a finite number > 0, got inf"),
        ({"longest_stall": 1e308}, r"^'longest_stall \* sampling_rate' must be a finite number > 0, got inf"),
    ],
)
def test_settings_must_fit_together(changes, message):
    with pytest.raises(ValueError, match=message):
        with_settings(**changes)


def test_numpy_numbers_become_plain_ones():
    settings = with_settings(
        sampling_rate=np.float32(2000), n_channels=np.int64(8), stall_every=np.int8(20), real_time=np.False_
    )
    assert settings == SMALL
    assert type(settings.sampling_rate) is float
    assert type(settings.n_channels) is type(settings.stall_every) is int
    assert type(settings.real_time) is bool


# In a graph


class SinkSettings(ez.Settings):
    n_samples: int
    received: list[AxisArray]
    time_limit: float = 240.0


class Sink(ez.Unit):
    """Keeps what it receives and ends the graph after so many samples, or when the time limit is over."""

    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.SETTINGS.received.append(message)
        if sum(len(message.data) for message in self.SETTINGS.received) >= self.SETTINGS.n_samples:
            raise ez.NormalTermination

    @ez.task
    async def watchdog(self) -> None:
        await asyncio.sleep(self.SETTINGS.time_limit)
        raise ez.NormalTermination


def test_unit_ends_by_itself_and_every_sample_arrives():
    received = []
    source = SimulatedAcquisition(SMALL)
    sink = Sink(SinkSettings(n_samples=SMALL.n_samples, received=received))
    ez.run(
        SOURCE=source,
        SINK=sink,
        connections=[(source.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)],
        force_single_process=True,
        graph_address=("127.0.0.1", free_port()),
        auto_start=True,
    )
    assert received == list(simulated_acquisition(SMALL))


async def test_unit_completes_after_its_last_message():
    unit = SimulatedAcquisition(SMALL)
    await unit.initialize()
    published = []
    with pytest.raises(ez.Complete):
        async for stream, message in unit.produce():
            published.append((stream, message))
    assert {stream.name for stream, _ in published} == {"OUTPUT_SIGNAL"}
    assert sum(len(message.data) for _, message in published) == SMALL.n_samples


def test_import_brings_in_neither_mlx_nor_a_compiler():
    code = "import sys, ezmsg.mlx.simulate; sys.exit(not {'mlx', 'numba', 'llvmlite'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


@pytest.mark.parametrize("settings", [256, None, {}], ids=repr)
def test_what_is_no_settings_is_refused_at_the_call(settings):
    with pytest.raises(TypeError, match="'settings' must be SimulatedAcquisitionSettings, got .*"):
        simulated_acquisition(settings)
