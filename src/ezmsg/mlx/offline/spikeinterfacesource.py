"""Recordings of SpikeInterface, with its formats, probes, choices of channels and preprocessing, as a source."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .reading import Runs, one_run, runs_in
from .signals import ELECTRODE, ChannelChoice, Channels, Sampled, SampledSource, Segment

if typing.TYPE_CHECKING:
    from .contracts import RecordingSource

BaseRecording: typing.TypeAlias = typing.Any
"""That of SpikeInterface, which need not be installed."""


def as_source(recording: RecordingSource | BaseRecording) -> RecordingSource:
    """A recording of SpikeInterface as a source; anything else as it is."""
    core = sys.modules.get("spikeinterface.core")
    return SpikeInterfaceSource(recording) if core and isinstance(recording, core.BaseRecording) else recording


@dataclass
class _Segment(Segment):
    recording: BaseRecording
    number: int

    def runs(self) -> Runs:
        """See :class:`Segment`."""
        if not self.recording.has_time_vector(self.number):
            return one_run(float(self.recording.get_start_time(self.number)))
        nanoseconds = np.round(np.asarray(self.recording.get_times(self.number)) * 1e9).astype(np.int64)
        return runs_in(nanoseconds, 1e9 / self.channels.rate, 1e-9, Path(type(self.recording).__name__))

    def samples(self, begin: int, end: int, columns: Sequence[int]) -> npt.NDArray:
        """See :class:`Segment`."""
        ids = self.recording.channel_ids[list(columns)]
        return np.array(self.recording.get_traces(self.number, begin, end, channel_ids=ids))


class SpikeInterfaceSource(SampledSource):
    """A recording of SpikeInterface as a source; :func:`ezmsg.mlx.process_recording` takes the recording alone, too.

    Messages hold the traces as the recording gives them, of shape (time, ch), read chunk by chunk. The axis ``ch`` has
    records of the channel id as ``label``, and where the recording knows them ``group`` and ``x``, ``y`` and ``z`` in
    micrometres: ``CommonRereferenceSettings(channel_groups="group")`` has a reference for each group, and results of
    :class:`ezmsg.mlx.ZarrSink` hold ``ch_group``, ``ch_x`` and so on. Gains and offsets are said in volts, in the words
    of :class:`ezmsg.mlx.NWBSource`. Times are those of the recording; jumps in its time vector are gaps.

    Args:
        recording: A ``spikeinterface.BaseRecording``. For workers it must be one that can be pickled.
        segment: Number of the segment, from 0, or ``"all"`` of them, one after the other. None: the only one.
        channels: Labels and indices of channels, to read no others.
        chunk_mb: Size of a message in MiB, at most.

    Raises:
        ValueError: It has several segments and it is not said which; no samples; channels with several offsets.
        TypeError: An argument is not of its type.
    """

    def __init__(
        self,
        recording: BaseRecording,
        *,
        segment: int | typing.Literal["all"] | None = None,
        channels: ChannelChoice | None = None,
        chunk_mb: float = 4.0,
    ) -> None:
        if not callable(getattr(recording, "get_traces", None)):
            raise TypeError(f"'recording' must be a recording of SpikeInterface, got {recording!r}")
        self._recording = recording
        super().__init__(Path(type(recording).__name__), None, segment, channels, chunk_mb)
        self.identity = f"{type(recording).__name__} spikeinterface {self.identity}, made by {_digest(recording)}"

    def _sampled(self) -> list[Sampled]:
        recording, channels = self._recording, _channels(self._recording)
        segments: list[Segment] = [
            _Segment(channels, int(recording.get_num_samples(number)), str(number), recording, number)
            for number in range(recording.get_num_segments())
        ]
        return [Sampled("traces", "0", segments)]


def _channels(recording: BaseRecording) -> Channels:
    labels = [str(each) for each in recording.channel_ids]
    n, known = len(labels), set(recording.get_property_keys())
    more: dict[str, npt.NDArray] = {}
    if "group" in known:
        more["group"] = np.asarray(recording.get_property("group"))
    if recording.has_probe() or "location" in known:
        places = np.asarray(recording.get_channel_locations(), np.float64)
        more |= dict(zip("xyz", places.T, strict=False))
    is_scaled = recording.has_scaleable_traces()
    gains = np.asarray(recording.get_channel_gains() if is_scaled else np.ones(n), np.float64)
    offsets = np.asarray(recording.get_channel_offsets() if is_scaled else np.zeros(n), np.float64)
    units = ["uV" if is_scaled else ""] * n
    return Channels(labels, float(recording.sampling_frequency), gains, offsets, units, [ELECTRODE] * n, more)


def _digest(recording: BaseRecording) -> str:
    """Tells how a recording is made, preprocessing included, from other ways; wherever its files are."""
    made = recording.to_dict(include_annotations=False, include_properties=False)
    return hashlib.sha256(json.dumps(_plain(made), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    """The same for JSON: arrays by a digest, files by their names, other objects by their class."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, (str, os.PathLike)):
        return os.path.basename(os.fspath(value)) if os.sep in os.fspath(value) else os.fspath(value)
    return value if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
