"""A simulated neural recording that arrives the way acquisition systems deliver it: with stalls.

Most messages have the same length. Now and then nothing arrives for a while, and then everything unread arrives
as one large message, of a length not seen before. Those rare lengths are what fills MLX's buffer cache, so this is
the stream to try a pipeline on before the real one::

    settings = SimulatedAcquisitionSettings(n_channels=128, duration=60.0)
    for message in simulated_acquisition(settings):
        ...

:obj:`SimulatedAcquisition` is the same stream as the source of a graph, bit for bit.
"""

import asyncio
import functools
import math
import numbers
import time
import typing

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray

from .recording import MICROVOLTS_PER_COUNT, make_recording


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
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        for name, smallest in (("n_channels", 1), ("samples_per_message", 1), ("n_stall_lengths", 1), ("seed", 0)):
            object.__setattr__(self, name, _count(name, getattr(self, name), smallest))
        if self.stall_every is not None:
            object.__setattr__(self, "stall_every", _count("stall_every", self.stall_every, 0))
        if not isinstance(self.real_time, (bool, np.bool_)):
            raise TypeError(f"real_time must be True or False, got {self.real_time!r}.")
        object.__setattr__(self, "real_time", bool(self.real_time))
        if self.duration is not None:
            object.__setattr__(self, "duration", _positive("duration", self.duration))
            _positive("duration * sampling_rate", self.duration * self.sampling_rate)
            if self.n_samples == 0:
                raise ValueError(
                    f"duration must hold at least one sample at {self.sampling_rate} Hz, got {self.duration} s."
                )
        if self.longest_stall < self.shortest_stall:
            raise ValueError(
                f"longest_stall must be at least shortest_stall ({self.shortest_stall} s), got {self.longest_stall} s."
            )
        if self.stall_every:
            self._check_stall_lengths()

    def _check_stall_lengths(self) -> None:
        _positive("longest_stall * sampling_rate", self.longest_stall * self.sampling_rate)
        shortest, longest = self._stall_range
        if shortest <= self.samples_per_message:
            raise ValueError(
                f"shortest_stall must be longer than a message of samples_per_message={self.samples_per_message}, "
                f"got {self.shortest_stall} s, which is {shortest} samples."
            )
        if self.n_stall_lengths > longest - shortest + 1:
            raise ValueError(
                f"n_stall_lengths must be at most {longest - shortest + 1}, the number of different lengths from "
                f"{shortest} to {longest} samples, got {self.n_stall_lengths}."
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


def _positive(name: str, value: float) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r}.")
    return number


def _count(name: str, value: int, smallest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value!r}.")
    return int(value)


def message_lengths(settings: SimulatedAcquisitionSettings) -> typing.Iterator[int]:
    """The lengths in samples of all messages of the stream, in order, without making any data.

    They add up to ``settings.n_samples`` (the last message is cut to fit), and go on for ever if ``duration`` is None.
    """
    n_messages = n_samples = 0
    while length := _next_length(settings, n_messages, n_samples):
        yield length
        n_messages += 1
        n_samples += length


def _next_length(settings: SimulatedAcquisitionSettings, n_messages: int, n_samples: int) -> int:
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


@processor_state
class SimulatedAcquisitionState:
    """State for :obj:`SimulatedAcquisitionProducer`."""

    recording: npt.NDArray[np.int16] | None = None
    """The recording that is played in a loop, in counts, shape (time, ch)."""

    ch_axis: AxisArray.CoordinateAxis | None = None
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
        self._state.recording = make_recording(settings.sampling_rate, settings.n_channels, settings.seed)
        labels = np.array([f"ch{number}" for number in range(1, settings.n_channels + 1)])
        self._state.ch_axis = AxisArray.CoordinateAxis(data=labels, dims=["ch"])
        self._state.n_messages = 0
        self._state.n_samples = 0
        self._state.started_at = time.monotonic()

    def __call__(self) -> AxisArray:
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
        length = _next_length(settings, state.n_messages, state.n_samples)
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

    SETTINGS = SimulatedAcquisitionSettings


def simulated_acquisition(settings: SimulatedAcquisitionSettings) -> typing.Iterator[AxisArray]:
    """The stream as a plain iterator that ends after ``settings.duration``.

    See :obj:`SimulatedAcquisitionProducer` for what the messages hold.

    Raises:
        TypeError: *settings* is something else.
    """
    if not isinstance(settings, SimulatedAcquisitionSettings):
        raise TypeError(f"settings is {settings!r}; allowed is {SimulatedAcquisitionSettings.__qualname__}.")
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
