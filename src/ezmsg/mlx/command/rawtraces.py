"""Some channels of a recording, for the picture of its results."""

import typing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from ..offline import open_recording
from ..stream.sampling import value_at
from .page import Traces
from .recordingoptions import Asked

PLACES = 400
"""Where a long recording is looked at."""

WHOLE_MB = 64.0
"""A shorter part is read as a whole."""

PIECE_MB = 0.25


def read_traces(path: Path, options: Asked, labels: list[str], times: npt.NDArray[np.float64]) -> Traces | None:
    """The lowest and highest values of the channels of these *labels* in the time that *times* span.

    Returns:
        The traces; None if the recording has none of the labels.

    Raises:
        OSError: The recording cannot be read.
        ValueError: It is damaged, or is of no format that is known.
    """
    source = open_recording(path, **{"chunk_mb": PIECE_MB, **options})
    first = next(iter(source.read(0)))
    ch = first.axes.get("ch")
    known = [str(label) for label in ch.data] if isinstance(ch, CoordinateAxis) else ["0"]
    channels = [known.index(label) for label in labels if label in known]
    if not channels:
        return None
    rate, origin = source.sampling_rate, _time(first).offset
    begin, end = ((time - origin) * rate for time in (times[0], times[-1]))
    begin, end = max(round(begin), 0), min(round(end), source.n_samples)
    n_bytes = (end - begin) * first.data[:1].nbytes
    found: list[tuple[float, npt.NDArray, npt.NDArray]] = []
    if n_bytes <= WHOLE_MB * 2**20:
        length = max((end - begin) // PLACES, 1)
        for message in source.read(begin):
            axis, data = _time(message), message.data[: end - begin]
            for place in range(0, len(data), length):
                part = data[place : place + length].reshape(-1, len(known))[:, channels]
                found.append((value_at(axis, place) + len(part) / rate / 2, part.min(axis=0), part.max(axis=0)))
            begin += len(data)
            if begin == end:
                break
    else:
        for start in np.linspace(begin, end - 1, PLACES).astype(int).tolist():
            message = next(iter(source.read(start)))
            part = message.data.reshape(-1, len(known))[:, channels]
            found.append((_time(message).offset, part.min(axis=0), part.max(axis=0)))
    when, low, high = (np.array(part, np.float64) for part in zip(*found, strict=True))
    gain = np.asarray(first.attrs.get("nwb_scaling_gain", 1.0), np.float64)
    gain = gain[channels] if gain.ndim else gain
    unit = str(first.attrs.get("nwb_scaling_unit", ""))
    if unit in ("volts", "V"):
        gain, unit = gain * 1e6, "µV"
    return Traces(when, low * gain, high * gain, [known[channel] for channel in channels], unit)


def _time(message: AxisArray) -> LinearAxis:
    return typing.cast(LinearAxis, message.axes["time"])
