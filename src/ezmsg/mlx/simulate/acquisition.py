"""A simulated acquisition, as a producer, as a source of graphs and as an iterator."""

import asyncio
import time
import typing

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProducerUnit, BaseStatefulProducer, processor_state
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis

from .. import stream as stream  # each unit brings the workarounds in it
from .lengths import next_length
from .recording import MICROVOLTS_PER_COUNT, make_recording
from .settings import SimulatedAcquisitionSettings


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
        self._state.recording = make_recording(settings.sampling_rate, settings.n_channels, settings.seed)
        labels = np.array([f"ch{number}" for number in range(1, settings.n_channels + 1)])
        self._state.ch_axis = AxisArray.CoordinateAxis(data=labels, dims=["ch"])
        self._state.n_messages = 0
        self._state.n_samples = 0
        self._state.started_at = time.monotonic()

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
