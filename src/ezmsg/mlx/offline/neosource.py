"""Recordings in the formats that neo reads (SpikeGLX, Open Ephys, Blackrock, Intan and others), read in chunks."""

import hashlib
import itertools
import os
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..stream.checks import check_number, check_path
from .extra import import_extra
from .faults import fault, faults_of
from .neochecks import runs_of
from .neoreaders import Channels, Piece, Stream, channels_of, choose, open_reader
from .neoruns import Runs
from .neoscaling import scaling_of

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO

_COMPARED = 32
"""Samples at the beginning and at the end of a segment that tell it from others."""


class _Part(typing.NamedTuple):
    """A segment that is read."""

    piece: Piece
    n_samples: int
    before: int
    """Samples of the segments before it."""

    runs: Runs


class NeoSource:
    """A stream of a recording that neo reads as a source for :func:`ezmsg.mlx.process_recording`.

    Messages hold samples as they are stored, usually counts, of shape (time, ch), read from the files chunk by chunk.
    Channels have the names of the file. The attrs say how to get from counts to volts, as those of
    :class:`ezmsg.mlx.NWBSource` do: ``ezmsg.nwb.NWBScalingTransformer`` in the chain does it. Voltages in other units
    are said in volts.

    Times are those of the format, in seconds: of the first sample of a run of SpikeGLX (``firstSample``), of the sample
    numbers of Open Ephys and Intan, of Blackrock's clock; raw binary files begin at 0. A message ends in front of each
    gap in the sample numbers or time stamps of Open Ephys (binary), Intan and Blackrock (with a time stamp for each
    sample). A pause in other files of Blackrock begins another segment. Open Ephys (legacy) with gaps is refused.

    Files whose length is not the one that their headers announce are refused, for SpikeGLX, Open Ephys, Intan,
    Blackrock and raw binary files. Of other formats, neo's word is taken.

    Args:
        path: The file or folder. One file of a SpikeGLX folder stands for its own stream and segment, but neo reads the
            headers of all others beside it. Of Intan's headerless formats: the folder, or ``info.rhd``.
        stream: Name of the stream, or its id. None: the only one, not counting what was recorded beside the
            electrodes (synchronization lines, auxiliary inputs, digital lines).
        segment: Number of the segment, from 0 and through all blocks. ``"all"``: all of them, one after the other.
            None: the only one.
        format: Name of the format: that of neo's class without ``RawIO``, in lower case, for example ``"spikeglx"``.
        chunk_mb: Size of a message in MiB, at most.
        options: Further arguments of neo's class, for example ``experiment_names`` of Open Ephys.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is nothing at *path*.
        OSError: A file cannot be opened or read.
        ValueError: neo has no such format, or cannot read the files; they are truncated or disagree with their headers;
            there is no such stream or segment, or there are several and it is not said which; it has no samples, a
            rate, a gain or a time that is not finite, or channels of different kinds; *chunk_mb* is not finite and
            above 0. While it is read, too.
        TypeError: An argument is not of its type, or neo's class takes no such option.
    """

    n_samples: int
    sampling_rate: float
    identity: str

    def __init__(
        self,
        path: str | os.PathLike,
        stream: str | None = None,
        *,
        format: str,
        segment: int | typing.Literal["all"] | None = None,
        chunk_mb: float = 4.0,
        **options: object,
    ) -> None:
        check_path("path", path)
        if not isinstance(stream, (str, type(None))):
            raise TypeError(f"stream is {stream!r}; allowed are a name and None.")
        if not (segment is None or segment == "all" or (isinstance(segment, int) and not isinstance(segment, bool))):
            raise TypeError(f"segment is {segment!r}; allowed are a number, 'all' and None.")
        check_number("chunk_mb", chunk_mb)
        self.path, self._format, self._options = Path(path), format, options
        reader = self._reader()
        with faults_of(self.path):
            self._stream, pieces = choose(reader, format, self.path, stream, segment)
        with faults_of(self.path, self._stream.name):
            channels = self._channels(reader, self._stream)
            self._parts = self._parts_of(reader, pieces)
            self.n_samples = sum(part.n_samples for part in self._parts)
            self.sampling_rate = channels.rate
            scaling, digest = scaling_of(channels, self.path, self._stream.name)
            ends, dtype = self._ends(reader, len(channels.labels))
        self._chunk = max(int(chunk_mb * 2**20 / (len(channels.labels) * dtype.itemsize)), 1)
        self._template = AxisArray(
            data=np.zeros((0, len(channels.labels)), dtype),
            dims=["time", "ch"],
            axes={
                "time": AxisArray.TimeAxis(fs=self.sampling_rate),
                "ch": AxisArray.CoordinateAxis(data=channels.labels, dims=["ch"]),
            },
            attrs=scaling,
            key=self._stream.name,
            stream_dim="time",
        )
        numbers = [f"{part.piece.block}.{part.piece.segment}" for part in self._parts]
        times = hashlib.sha256(b"".join(array.tobytes() for part in self._parts for array in part.runs)).hexdigest()
        # Everything that results depend on but the samples, and enough of those to tell recordings apart.
        self.identity = (
            f"{self.path.name} {format} {self._stream.name}, segments {' '.join(numbers)}, {self.n_samples} samples of "
            f"({len(channels.labels)},) {dtype} at {self.sampling_rate!r} Hz, times {times[:16]}, labels and scaling "
            f"{digest}, ends {ends}, options {sorted(options.items())!r}, read {self._chunk} samples at a time"
        )

    @property
    def gaps(self) -> list[int]:
        """The samples in front of which time jumps, counted from the first sample that is read."""
        firsts = [part.before + int(first) for part in self._parts for first in part.runs.firsts]
        return firsts[1:]

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """The samples from number *start* on, see :obj:`ezmsg.mlx.RecordingSource`."""
        reader = self._reader()
        for part in self._parts:
            with faults_of(self.path, self._stream.name):
                n = reader.get_signal_size(part.piece.block, part.piece.segment, self._stream.number)
            if n != part.n_samples:
                raise fault(self.path, self._stream.name, f"has {n} samples now, not {part.n_samples}.")
            skipped = max(start - part.before, 0)
            for chunk in range(skipped - skipped % self._chunk, part.n_samples, self._chunk):
                begin, end = max(chunk, skipped), min(chunk + self._chunk, part.n_samples)
                samples = self._samples(reader, part.piece, begin, end)
                for first, last, time in _runs_between(part.runs, begin, end, self.sampling_rate):
                    axes = {**self._template.axes, "time": replace(self._template.axes["time"], offset=time)}
                    yield replace(self._template, data=samples[first - begin : last - begin], axes=axes)

    def _reader(self) -> "BaseRawIO":
        if not self.path.exists():
            raise FileNotFoundError(2, os.strerror(2), str(self.path))
        import_extra("neo.rawio")
        return open_reader(self.path, self._format, self._options)

    def _channels(self, reader: "BaseRawIO", stream: Stream) -> Channels:
        return channels_of(reader, stream)

    def _parts_of(self, reader: "BaseRawIO", pieces: Sequence[Piece]) -> list[_Part]:
        parts: list[_Part] = []
        before = 0
        for piece in pieces:
            n = int(reader.get_signal_size(piece.block, piece.segment, self._stream.number))
            if n < 1:
                raise fault(self.path, self._stream.name, f"has no samples in segment {piece.segment}.")
            parts.append(_Part(piece, n, before, runs_of(reader, self._format, self.path, self._stream, piece)))
            before += n
        return parts

    def _samples(self, reader: "BaseRawIO", piece: Piece, begin: int, end: int) -> npt.NDArray:
        with faults_of(self.path, self._stream.name):
            found = reader.get_analogsignal_chunk(piece.block, piece.segment, begin, end, self._stream.number)
            # A copy, since this may be a view of a file that is mapped into memory.
            samples = np.array(found)
        if samples.shape != (end - begin, self._template.data.shape[1]) or samples.dtype != self._template.data.dtype:
            raise fault(
                self.path,
                self._stream.name,
                f"gives samples {begin} to {end} with shape {samples.shape} and dtype {samples.dtype}; allowed is what "
                f"its header says, {self._template.data.shape[1]} channels in {self._template.data.dtype}.",
            )
        return samples

    def _ends(self, reader: "BaseRawIO", n_channels: int) -> tuple[str, np.dtype]:
        """A digest of the first and the last samples of each segment, and the dtype of all.

        The last ones are there only if the file is as long as it has to be.
        """
        digest, dtypes = hashlib.sha256(), set()
        for part in self._parts:
            n = part.n_samples
            for begin, end in ((0, min(_COMPARED, n)), (max(n - _COMPARED, 0), n)):
                found = np.array(reader.get_analogsignal_chunk(*part.piece, begin, end, self._stream.number))
                if found.shape != (end - begin, n_channels):
                    raise fault(
                        self.path,
                        self._stream.name,
                        f"has {n_channels} channels in its header, and samples of shape {found.shape}; allowed is "
                        f"({end - begin}, {n_channels}).",
                    )
                digest.update(found.tobytes())
                dtypes.add(found.dtype)
        if len(dtypes) > 1 or next(iter(dtypes)).kind not in "iuf":
            names = ", ".join(sorted(map(str, dtypes)))
            raise fault(self.path, self._stream.name, f"has samples of dtype {names}; allowed are integers and floats.")
        return digest.hexdigest()[:16], dtypes.pop()


def _runs_between(runs: Runs, begin: int, end: int, rate: float) -> Iterator[tuple[int, int, float]]:
    """The runs of regular samples from *begin* to *end*, with the time at which each begins."""
    first, last = np.searchsorted(runs.firsts, [begin, end])
    inner = [int(start) for start in runs.firsts[first:last] if begin < start < end]
    for one, other in itertools.pairwise([begin, *inner, end]):
        number = int(np.searchsorted(runs.firsts, one, side="right")) - 1
        yield one, other, float(runs.times[number] + (one - runs.firsts[number]) / rate)
