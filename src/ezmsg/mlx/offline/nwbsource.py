"""Recordings in NWB files (Neurodata Without Borders, HDF5), read in chunks."""

import contextlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, LinearAxis
from ezmsg.util.messages.util import replace

from ..stream.checks import check_number, check_path
from .extra import import_extra
from .faults import fault, faults_of
from .nwbseries import Place, Series, find_series, list_series, read_series
from .nwbtimes import read_times

if typing.TYPE_CHECKING:
    import h5py


LARGEST_FILE_CHUNK = 4
"""How many times the size of a message a chunk of the file may be, to be read as one message."""


class NWBSource:
    """An electrical series of an NWB file as a source for :func:`ezmsg.mlx.process_recording`.

    Messages hold samples as they are stored, usually counts, of shape (time, ch). Their times are those of the file, in
    seconds on its own clock. The channels are named by the column ``label`` of the electrode table, or else
    ``ch_<id>``. The attrs say how to get from counts to volts, as those of ezmsg-nwb do:
    ``ezmsg.nwb.NWBScalingTransformer`` in the chain does it.

    **Time stamps** are followed through pauses and steps of the clock: a message ends in front of each, so its samples
    always follow the rate, which is estimated from all time stamps outside gaps. A clock that steps back gives one
    warning. Gaps of half a sample and more are found. Time stamps that jitter are smoothed within a message.

    Only this one series is read, in bounded memory, so that damage elsewhere in the file does no harm. A
    ``SpikeEventSeries`` is not a recording and does not count.

    Args:
        path: The file.
        series: Name of the series, or its path in the file (``"/acquisition/ElectricalSeries"``). None: the only one.
        chunk_mb: Size of a message in MiB, at most: whole chunks of the file if they fit, since those are
            decompressed as a whole; for that, one chunk of the file may be up to four times as large.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is no such file.
        OSError: The file cannot be opened or read: it is locked (BlockingIOError), no permission, an I/O error.
        ValueError: The file is not an NWB file or is damaged; there is no electrical series, or none of that name, or
            several and *series* does not say which; it has no samples, an electrode region of another length than its
            channels (data stored as (channel, time)), a rate, starting time or conversion that is not finite, or time
            stamps that follow no rate; *chunk_mb* is not finite and above 0. While it is read, too.
        TypeError: *path* is not a path; *series* is neither None nor text; *chunk_mb* is not a number.
    """

    n_samples: int
    sampling_rate: float
    identity: str

    def __init__(self, path: str | os.PathLike, series: str | None = None, *, chunk_mb: float = 4.0) -> None:
        check_path("path", path)
        if not isinstance(series, (str, type(None))):
            raise TypeError(f"series is {series!r}; allowed are a name and None.")
        check_number("chunk_mb", chunk_mb)
        self.path = Path(path)
        import_extra("h5py")
        with _opened(self.path) as file, faults_of(self.path):
            address, group = find_series(file, series, self.path)
            self._series = read_series(group, address, self.path)
            self.n_samples = self._series.shape[0]
            self._times = read_times(group, self.n_samples, self.path, self._series.name)
        self.sampling_rate = self._times.rate
        self._chunk = _chunk_length(self._series, chunk_mb)
        self._template = _template(self._series, self.sampling_rate)
        # Everything that results depend on but the samples, so that a file that was corrected is another recording.
        self.identity = (
            f"{self.path.name} {address} {self._series.object_id}, {self.n_samples} samples of "
            f"{self._series.shape[1:]} {self._series.dtype} {self._times.identity}, labels and scaling "
            f"{self._series.digest}, read {self._chunk} samples at a time"
        )

    @property
    def gaps(self) -> list[int]:
        """The samples in front of which time jumps."""
        return self._times.gaps

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """The samples from number *start* on, see :obj:`ezmsg.mlx.RecordingSource`."""
        name = self._series.name
        with contextlib.ExitStack() as stack:
            data = self._dataset(stack, self._series.data)
            stamps = self._dataset(stack, self._times.place) if self._times.place else None
            for begin in range(start - start % self._chunk, self.n_samples, self._chunk):
                end = min(begin + self._chunk, self.n_samples)
                with faults_of(self.path, name):
                    samples = data[begin:end]
                    runs = list(self._times.runs(begin, end, stamps))
                if len(samples) != end - begin:
                    raise fault(self.path, name, f"has fewer than its {self.n_samples} samples now.")
                for first, last, offset in runs:
                    if last <= start:
                        continue
                    time = replace(typing.cast(LinearAxis, self._template.axes["time"]), offset=offset)
                    if first < start:
                        offset += (start - first) / self.sampling_rate
                        time, first = replace(time, offset=offset), start
                    axes = {**self._template.axes, "time": time}
                    yield replace(self._template, data=samples[first - begin : last - begin], axes=axes)

    def _dataset(self, stack: contextlib.ExitStack, place: Place) -> "h5py.Dataset":
        file = stack.enter_context(_opened(Path(place.file)))
        with faults_of(self.path, self._series.name):
            return file[place.path]


def series_names(path: Path) -> list[str]:
    """The electrical series of a file, by their paths in it.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        OSError: The file cannot be opened or read.
        ValueError: The file is not an NWB file or is damaged.
    """
    import_extra("h5py")
    with _opened(path) as file, faults_of(path):
        return list_series(file, path)


@contextlib.contextmanager
def _opened(path: Path) -> "Iterator[h5py.File]":
    h5py = import_extra("h5py")
    with faults_of(path):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            if error.errno is not None:
                raise
            raise fault(path, None, f"is not an NWB file, or is damaged ({error}).") from error
    with file:
        yield file


def _template(series: Series, rate: float) -> AxisArray:
    """A message without samples."""
    n_dims = len(series.shape)
    axes: dict[str, AxisBase] = {"time": AxisArray.TimeAxis(fs=rate)}
    if n_dims > 1:
        axes["ch"] = AxisArray.CoordinateAxis(data=series.labels, dims=["ch"])
    return AxisArray(
        data=np.zeros((0, *series.shape[1:]), series.dtype),
        dims=["time", "ch", *(f"dim_{number}" for number in range(2, n_dims))][:n_dims],
        axes=axes,
        attrs=dict(series.scaling),
        key=series.name,
        stream_dim="time",
    )


def _chunk_length(series: Series, chunk_mb: float) -> int:
    """Samples of a message: as many as *chunk_mb* holds, and if possible whole chunks of the file.

    A message waits several times, so that memory is a multiple of it; one of 4 MiB is not slower than one of 16.
    """
    bytes_per_sample = series.dtype.itemsize
    for length in series.shape[1:]:
        bytes_per_sample *= length
    n = max(int(chunk_mb * 2**20 / bytes_per_sample), 1)
    in_file = series.rows_per_chunk
    if n >= in_file:
        return n - n % in_file
    return in_file if in_file <= LARGEST_FILE_CHUNK * n else n
