"""A simulated neural recording that arrives the way acquisition systems deliver it: with stalls.

Most messages have the same length. Now and then nothing arrives for a while, and then everything unread arrives
as one large message, of a length not seen before. Those rare lengths are what fills MLX's buffer cache, so this is
the stream to try a pipeline on before the real one::

    settings = SimulatedAcquisitionSettings(n_channels=128, duration=60.0)
    for message in simulated_acquisition(settings):
        ...

:obj:`SimulatedAcquisition` is the same stream as the source of a graph, bit for bit.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
import typing

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis

from . import stream as stream  # each unit brings the workarounds in it
from .stream.unit import check_count, check_fields, check_number


class SimulatedAcquisitionSettings(ez.Settings):
    """Settings for :obj:`SimulatedAcquisition`. A value that is out of range raises when the settings are built."""

    sampling_rate: float = 30000.0
    """Samples a second in each channel, in Hz."""

    n_channels: int = 256
    """Number of channels."""

    samples_per_message: int = 300
    """Length of an ordinary message, in samples."""

    stall_every: int | None = 300
    """Every ``stall_every``-th message comes after a stall. 0 or None: no stalls."""

    n_stall_lengths: int = 40
    """How many different lengths stalls have, spread evenly from the shortest to the longest.

    The stalls go through all of them in random order before any length comes again, then through all of them in
    another order, and so on. With 1, all stalls are as long as the longest."""

    shortest_stall: float = 0.02
    """Time from the message before the shortest stall to the message after it, in seconds.

    The message after a stall holds all samples of that time, so it must be longer than an ordinary message."""

    longest_stall: float = 0.5
    """The same for the longest stall, in seconds. The default is what a Blackrock source buffers at most."""

    duration: float | None = None
    """Length of the stream in seconds. None: the stream does not end."""

    real_time: bool = False
    """Whether messages come at the pace of the sampling rate, so that stalls take their time, or at once."""

    seed: int = 0
    """The same seed gives the same order of stalls and, at the same rate and channel count, the same samples."""

    def __post_init__(self) -> None:
        # Plain Python numbers from here on: a NumPy float32 as rate would make float32 of every offset.
        for name in ("sampling_rate", "shortest_stall", "longest_stall"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        counts = ("n_channels", 1), ("samples_per_message", 1), ("n_stall_lengths", 1), ("seed", 0), ("stall_every", 0)
        for name, smallest in counts:
            if (count := getattr(self, name)) is not None or name != "stall_every":
                object.__setattr__(self, name, check_count(name, count, smallest))
        check_fields(self, flags=("real_time",))
        object.__setattr__(self, "real_time", bool(self.real_time))
        if self.duration is not None:
            object.__setattr__(self, "duration", check_number("duration", self.duration))
            check_number("duration * sampling_rate", self.duration * self.sampling_rate)
            if self.n_samples == 0:
                raise ValueError(
                    f"'duration' must hold one sample or more at {self.sampling_rate} Hz, got {self.duration!r}"
                )
        if self.longest_stall < self.shortest_stall:
            raise ValueError(
                f"'longest_stall' must be at least shortest_stall, {self.shortest_stall}, got {self.longest_stall}"
            )
        if self.stall_every:
            self._check_stall_lengths()

    def _check_stall_lengths(self) -> None:
        check_number("longest_stall * sampling_rate", self.longest_stall * self.sampling_rate)
        shortest, longest = self._stall_range
        if shortest <= self.samples_per_message:
            raise ValueError(
                f"'shortest_stall' must be longer than a message of samples_per_message={self.samples_per_message}, "
                f"got {self.shortest_stall}, which is {shortest} samples"
            )
        if self.n_stall_lengths > longest - shortest + 1:
            raise ValueError(
                f"'n_stall_lengths' must be at most {longest - shortest + 1}, the number of lengths from {shortest} to "
                f"{longest} samples, got {self.n_stall_lengths}"
            )

    @property
    def _stall_range(self) -> tuple[int, int]:
        return round(self.shortest_stall * self.sampling_rate), round(self.longest_stall * self.sampling_rate)

    @property
    def n_samples(self) -> int | None:
        """Length of the whole stream in samples, ``round(duration * sampling_rate)``; None if it does not end."""
        return None if self.duration is None else round(self.duration * self.sampling_rate)

    @property
    def stall_lengths(self) -> tuple[int, ...]:
        """The different lengths in samples of the messages after a stall, ascending; empty without stalls."""
        if not self.stall_every:
            return ()
        shortest, longest = self._stall_range
        steps = max(self.n_stall_lengths - 1, 1)
        # In integers, since rounding evenly spaced seconds can put two of them on the same sample.
        return tuple(longest - step * (longest - shortest) // steps for step in reversed(range(self.n_stall_lengths)))


def message_lengths(settings: SimulatedAcquisitionSettings) -> typing.Iterator[int]:
    """The lengths in samples of all messages of the stream, in order, without making any data.

    They add up to ``settings.n_samples`` (the last message is cut to fit), and go on for ever if ``duration`` is None.
    """
    n_messages = n_samples = 0
    while length := next_length(settings, n_messages, n_samples):
        yield length
        n_messages += 1
        n_samples += length


def next_length(settings: SimulatedAcquisitionSettings, n_messages: int, n_samples: int) -> int:
    """Length of the message that follows ``n_messages`` with ``n_samples`` together; 0 when the stream is over."""
    length = settings.samples_per_message
    if settings.stall_every:
        n_stalls, position = divmod(n_messages, settings.stall_every)
        if position == settings.stall_every - 1:
            cycle, position = divmod(n_stalls, settings.n_stall_lengths)
            length = _stall_order(settings, cycle)[position]
    return length if settings.n_samples is None else min(length, settings.n_samples - n_samples)


@functools.lru_cache(maxsize=8)
def _stall_order(settings: SimulatedAcquisitionSettings, cycle: int) -> tuple[int, ...]:
    rng = np.random.default_rng([settings.seed, 1, cycle])
    return tuple(rng.permutation(settings.stall_lengths).tolist())


MICROVOLTS_PER_COUNT = 0.25
"""Microvolts per count of the simulated converter: that of Blackrock's 16-bit front ends."""

# Sizes typical of intracortical microelectrode arrays, in microvolts (noise and field potential: RMS, spikes: peak).
_NOISE = 8.0
_SHARED_FIELD_POTENTIAL = 40.0
_LOCAL_FIELD_POTENTIAL = 30.0
_SPIKE_RANGE = (60.0, 200.0)
_FIRING_RATE_RANGE = (1.0, 10.0)  # spikes a second, one neuron a channel
_REFRACTORY_PERIOD = 0.002  # s
_SPIKE_DURATION = 0.0016  # s

# The recording is played again and again: 32 MiB (2.2 s of 256 channels at 30 kHz), if that is 1 to 5 seconds.
_RECORDING_BYTES = 32 * 2**20
_RECORDING_SECONDS = (1.0, 5.0)


def make_recording(rate: float, n_channels: int, seed: int) -> npt.NDArray[np.int16]:
    """A few seconds of int16 counts, shape (time, ch), read-only, whose last sample goes on into the first."""
    rng = np.random.default_rng([seed, 0])
    shortest, longest = (seconds * rate for seconds in _RECORDING_SECONDS)
    # At least 1000 samples, for the field potential needs some spectrum at very low rates too.
    n_samples = int(max(min(_RECORDING_BYTES / (2 * n_channels), longest), shortest, 1000))

    sources, weights = _field_potential(rng, rate, n_samples, n_channels)
    recording = np.empty((n_samples, n_channels), np.int16)
    # In blocks, so that making the recording takes hardly more memory than the recording.
    for start in range(0, n_samples, 4096):
        block = recording[start : start + 4096]
        counts = rng.standard_normal(block.shape, np.float32)
        counts *= _NOISE / MICROVOLTS_PER_COUNT
        counts += sources[:, start : start + 4096].T @ weights
        block[:] = np.rint(counts, out=counts)
    _add_spikes(rng, rate, recording)
    # So that no view of it can be made writable again.
    recording.flags.writeable = False
    return recording


def _field_potential(
    rng: np.random.Generator, rate: float, n_samples: int, n_channels: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Slow sources (source, time) and their weights (source, ch) in counts.

    The power of each source is flat up to a knee at 2 Hz and falls with the square of the frequency above it, as the
    aperiodic part of field potentials does (Donoghue et al., Nature Neuroscience 2020). Made from its spectrum,
    it is periodic. Source 0 reaches all channels, the others a neighbourhood each.
    """
    n_sources = 16
    frequencies = np.fft.rfftfreq(n_samples, 1 / rate)
    spectrum = rng.standard_normal((n_sources, 2 * len(frequencies)), np.float32).view(np.complex64)
    spectrum /= np.hypot(1, frequencies / 2.0)
    spectrum[:, 0] = 0
    sources = np.fft.irfft(spectrum, n_samples).astype(np.float32, copy=False)
    sources /= sources.std(axis=1, keepdims=True)

    centres = np.linspace(0, n_channels, n_sources - 1)[:, np.newaxis]
    distances = (np.arange(n_channels) - centres) / (n_channels / n_sources)
    local = np.exp(-0.5 * distances**2)
    local *= _LOCAL_FIELD_POTENTIAL / np.linalg.norm(local, axis=0)
    shared = _SHARED_FIELD_POTENTIAL * rng.uniform(0.8, 1.2, (1, n_channels))
    weights = np.concatenate([shared, local]) / MICROVOLTS_PER_COUNT
    return sources, weights.astype(np.float32)


def _add_spikes(rng: np.random.Generator, rate: float, recording: npt.NDArray[np.int16]) -> None:
    """Add to each channel the spikes of a neuron that fires at random but for its refractory period, in place."""
    n_samples, n_channels = recording.shape
    seconds = np.arange(math.ceil(_SPIKE_DURATION * rate)) / rate
    # A sharp trough of 0.2 ms at half depth, then a rounder and lower hump: the extracellular action potential.
    waveform = 0.3 * np.exp(-0.5 * ((seconds - 0.0008) / 0.0002) ** 2) - np.exp(-0.5 * ((seconds - 0.0004) / 8e-5) ** 2)

    duration = n_samples / rate
    low, high = _FIRING_RATE_RANGE
    n_spikes = rng.poisson(duration * low * (high / low) ** rng.uniform(size=n_channels))
    channels = np.repeat(np.arange(n_channels), n_spikes)
    # Uniform times in what the refractory periods leave, moved apart by them afterwards: also across the end.
    fired = [
        np.sort(rng.uniform(0, duration - n * _REFRACTORY_PERIOD, n)) + np.arange(n) * _REFRACTORY_PERIOD
        for n in n_spikes
    ]
    starts = (np.concatenate(fired) * rate).astype(np.int64)
    lowest, highest = _SPIKE_RANGE
    peaks = np.asarray(rng.uniform(lowest, highest, n_channels)) / MICROVOLTS_PER_COUNT
    times = (starts[:, np.newaxis] + np.arange(len(waveform))) % n_samples
    counts = np.rint(peaks[channels][:, np.newaxis] * waveform).astype(np.int16)
    # += takes one addition a sample. That is enough, since spikes are shorter than the refractory period.
    recording[times, channels[:, np.newaxis]] += counts


@processor_state
class SimulatedAcquisitionState:
    """State for :obj:`SimulatedAcquisitionProducer`."""

    recording: npt.NDArray[np.int16] | None = None
    """The recording that is played in a loop, in counts, shape (time, ch)."""

    ch_axis: CoordinateAxis | None = None
    """The channel labels, one object for the whole stream: processors recognise it by identity."""

    n_messages: int = 0
    """Messages produced so far."""

    n_samples: int = 0
    """Samples produced so far."""

    started_at: float = 0.0
    """When the stream began, by ``time.monotonic()``, in seconds."""


class SimulatedAcquisitionProducer(
    BaseStatefulProducer[SimulatedAcquisitionSettings, AxisArray, SimulatedAcquisitionState]
):
    """Produces the stream message by message: call it, await it, or iterate over it.

    Messages are int16 counts (:obj:`MICROVOLTS_PER_COUNT`), shape (time, ch), with offsets in seconds since the start
    of the stream. Each channel has slow field potentials, one part of which all channels share and one part
    their neighbours, white noise, and the spikes of one neuron.

    The samples are a few seconds of recording, made on the first call and played in a loop without a seam. The data
    of a message are a read-only view of it (a read-only copy where a message runs across the end), so a consumer may
    hold a message for as long as it likes but must copy what it wants to change.

    With ``real_time`` a message comes when its last sample is due, counted from the start of the stream. Whoever calls
    late gets the messages that are overdue at once, one a call, until the stream has caught up.

    Changed settings start a new stream with the next message.

    Raises:
        ez.Complete: called or awaited after the end of the stream. Iterating just ends.
    """

    def _reset_state(self) -> None:
        settings = self.settings
        labels = np.array([f"ch{number}" for number in range(1, settings.n_channels + 1)])
        state = self._state = SimulatedAcquisitionState()
        state.recording = make_recording(settings.sampling_rate, settings.n_channels, settings.seed)
        state.ch_axis = AxisArray.CoordinateAxis(data=labels, dims=["ch"])
        state.started_at = time.monotonic()

    def __call__(self) -> AxisArray:
        """Return the next message; in real time, wait until it is due."""
        if self._hash == -1:
            self._reset_state()
            self._hash = 0
        message = self._make_message()
        if self.settings.real_time:
            time.sleep(self._seconds_until_due())
        return message

    async def _produce(self) -> AxisArray:
        message = self._make_message()
        if self.settings.real_time:
            await asyncio.sleep(self._seconds_until_due())
        return message

    def __next__(self) -> AxisArray:
        try:
            return self()
        except ez.Complete:
            raise StopIteration from None

    def _make_message(self) -> AxisArray:
        settings, state = self.settings, self._state
        assert state.recording is not None and state.ch_axis is not None
        length = next_length(settings, state.n_messages, state.n_samples)
        if length == 0:
            raise ez.Complete
        message = AxisArray(
            data=_loop(state.recording, state.n_samples, length),
            dims=["time", "ch"],
            axes={
                # Divided anew each time: adding up gains would drift away from the sample count.
                "time": AxisArray.TimeAxis(fs=settings.sampling_rate, offset=state.n_samples / settings.sampling_rate),
                "ch": state.ch_axis,
            },
            attrs={"microvolts_per_count": MICROVOLTS_PER_COUNT},
            key="simulated",
            stream_dim="time",
        )
        state.n_messages += 1
        state.n_samples += length
        return message

    def _seconds_until_due(self) -> float:
        due = self._state.started_at + self._state.n_samples / self.settings.sampling_rate
        return max(due - time.monotonic(), 0.0)


class SimulatedAcquisition(BaseProducerUnit[SimulatedAcquisitionSettings, AxisArray, SimulatedAcquisitionProducer]):
    """Source of the stream that :obj:`SimulatedAcquisitionProducer` describes.

    After ``duration`` it publishes no more, whatever settings it gets then; messages under way still arrive. ezmsg does
    not tell subscribers that a publisher has finished, so the graph is ended by whoever has received
    ``settings.n_samples`` samples, by raising ``ez.NormalTermination``.
    """

    SETTINGS = SimulatedAcquisitionSettings  # type: ignore[assignment]


def simulated_acquisition(settings: SimulatedAcquisitionSettings) -> typing.Iterator[AxisArray]:
    """The stream as a plain iterator that ends after ``settings.duration``.

    See :obj:`SimulatedAcquisitionProducer` for what the messages hold.

    Raises:
        TypeError: *settings* is something else.
    """
    if not isinstance(settings, SimulatedAcquisitionSettings):
        raise TypeError(f"'settings' must be {SimulatedAcquisitionSettings.__qualname__}, got {settings!r}")
    return iter(SimulatedAcquisitionProducer(settings=settings))


def _loop(recording: npt.NDArray[np.int16], start: int, length: int) -> npt.NDArray[np.int16]:
    """``length`` samples from sample ``start`` of the endlessly repeated recording, read-only."""
    start %= len(recording)
    if start + length <= len(recording):
        samples = recording[start : start + length]
    else:
        samples = recording.take(np.arange(start, start + length), axis=0, mode="wrap")
    samples.flags.writeable = False
    return samples
