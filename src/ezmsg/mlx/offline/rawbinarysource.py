"""Raw binary files: samples without a header, whose layout the user knows."""

import math
import os
import typing
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..stream.checks import check_count, check_number, is_real
from .neoreaders import Channels, Stream
from .neosource import NeoSource

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO


class RawBinarySource(NeoSource):
    """A file of samples without a header, channel after channel for each time, as a source.

    Messages are those of :class:`ezmsg.mlx.NeoSource`; times begin at 0. A file that does not hold whole samples of all
    channels is refused.

    Args:
        path: The file.
        sampling_rate: Samples a second.
        n_channels: Channels in the file.
        dtype: Of a sample, with its byte order: ``"int16"``, ``">i2"``, ``"float32"``.
        gain: What one count is, in *unit*; a number, or one for each channel.
        offset: What is to be added then, in *unit*.
        unit: Of the values that *gain* and *offset* make. Voltages are said in volts.
        labels: Names of the channels. None: ``ch0``, ``ch1`` and so on.
        header_bytes: Bytes in front of the first sample.
        chunk_mb: Size of a message in MiB, at most.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is no such file.
        OSError: The file cannot be opened or read.
        ValueError: The file has no samples, or not whole ones; an argument is not in its range; *labels* or *gain* are
            not as many as the channels.
        TypeError: An argument is not of its type.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        sampling_rate: float,
        n_channels: int,
        dtype: npt.DTypeLike = "int16",
        gain: float | Sequence[float] = 1.0,
        offset: float = 0.0,
        unit: str = "",
        labels: Sequence[str] | None = None,
        header_bytes: int = 0,
        chunk_mb: float = 4.0,
    ) -> None:
        rate = check_number("sampling_rate", sampling_rate)
        count = check_count("n_channels", n_channels)
        check_count("header_bytes", header_bytes, 0)
        if np.dtype(dtype).kind not in "iuf":
            raise ValueError(f"dtype is {dtype!r}; allowed are integers and floats.")
        if not is_real(offset) or not math.isfinite(offset):
            raise ValueError(f"offset is {offset!r}; allowed is a finite number.")
        if not isinstance(unit, str):
            raise TypeError(f"unit is {unit!r}; allowed is text.")
        gains = np.broadcast_to(np.asarray(gain, np.float64), (count,)) if np.ndim(gain) == 0 else np.asarray(gain)
        names = [f"ch{number}" for number in range(count)] if labels is None else [str(each) for each in labels]
        if gains.shape != (count,):
            raise ValueError(f"gain is {gain!r}; allowed are a number and {count} numbers, one for each channel.")
        if len(names) != count:
            raise ValueError(f"labels is {labels!r}; allowed are {count} names, one for each channel.")
        self._given = Channels(np.array(names), rate, gains, np.full(count, float(offset)), [unit] * count)
        super().__init__(
            path,
            format="rawbinary",
            chunk_mb=chunk_mb,
            sampling_rate=rate,
            nb_channel=count,
            dtype=np.dtype(dtype).str,
            bytesoffset=header_bytes,
        )

    def _channels(self, reader: "BaseRawIO", stream: Stream) -> Channels:
        return self._given
