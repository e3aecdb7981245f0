"""Recordings in NWB files (Neurodata Without Borders, HDF5), read in chunks."""

import contextlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..stream.checks import check_number, check_path
from .extra import import_extra

if typing.TYPE_CHECKING:
    import h5py
    import pynwb


class NWBSource:
    """An electrical series of an NWB file as a source for :func:`ezmsg.mlx.process_recording`.

    Messages hold samples as they are stored, shape (time, ch), under the offsets that the file gives them, in seconds
    on its own clock. The channels are named by the column ``label`` of the electrode table, or else ``ch_<id>``. The
    attrs say how to get from counts to volts, as those of ezmsg-nwb do: ``ezmsg.nwb.NWBScalingTransformer`` in the
    chain does it.

    A series with a rate is read here, in bounded memory; ezmsg-nwb's reader makes a vector of all time stamps when it
    opens the file (measured: 16 bytes a sample, 1.6 GiB for an hour at 30 kHz). A series with ``timestamps`` instead is
    read by ``ezmsg.nwb.NWBAxisArrayIterator``, which finds its rate and its gaps; there, memory does grow with the
    length, by the time stamps (8 to 24 bytes a sample).

    Args:
        path: The file.
        series: Name of the series, or its path in the file (``"/acquisition/ElectricalSeries"``). None: the only one.
        chunk_mb: Size of a message in MiB, at most: whole chunks of the file if they fit, since those are
            decompressed as a whole.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is no such file.
        ValueError: It is no NWB file; there is no electrical series, or none of that name, or several and *series*
            does not say which; it has no samples, a rate that is not above 0, or time stamps that follow no rate;
            *chunk_mb* is not finite and above 0.
        TypeError: *path* is no path; *series* is neither None nor text; *chunk_mb* is no number (bool is none).
    """

    n_samples: int
    sampling_rate: float
    identity: str

    def __init__(self, path: str | os.PathLike, series: str | None = None, *, chunk_mb: float = 16.0) -> None:
        check_path("path", path)
        if not isinstance(series, (str, type(None))):
            raise TypeError(f"series is {series!r}; allowed are a name and None.")
        check_number("chunk_mb", chunk_mb)
        self.path = Path(path)
        pynwb = import_extra("pynwb")
        with contextlib.ExitStack() as stack:
            try:
                nwbfile = stack.enter_context(pynwb.NWBHDF5IO(str(self.path), "r")).read()
            except (OSError, TypeError) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                raise ValueError(f"{self.path} is no NWB file ({str(error).splitlines()[0]}).") from error
            found = _select(nwbfile, series, self.path)
            data = found.data
            self.n_samples = data.shape[0]
            if not self.n_samples or 0 in data.shape:
                raise ValueError(f"{self.path}: {found.name} has no samples (shape {data.shape}).")
            self._name = found.name
            # Which may be in another file, linked from this one.
            self._data_file, self._data_path = data.file.filename, data.name
            self._has_rate = found.timestamps is None
            if self._has_rate:
                self._template = _template(found)
                self._start, self.sampling_rate = float(found.starting_time or 0.0), float(found.rate)
            else:
                self.sampling_rate = self._rate_of_timestamps(nwbfile)
            if not self.sampling_rate > 0:
                raise ValueError(
                    f"{self.path}: {found.name} has {f'a rate of {found.rate} Hz' if self._has_rate else 'time stamps'}"
                    f"{'; allowed is a number above 0' if self._has_rate else ' that follow no rate'}."
                )
            self._chunk = _chunk_length(data, chunk_mb)
            self.identity = (
                f"{self.path.name} {data.name} {found.object_id}, {self.n_samples} samples of {data.shape[1:]} "
                f"{data.dtype} at {self.sampling_rate!r} Hz, read {self._chunk} samples at a time"
            )

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """The samples from number *start* on, see :obj:`ezmsg.mlx.RecordingSource`."""
        return self._read(start) if self._has_rate else self._read_timestamped(start)

    def _read(self, start: int) -> Iterator[AxisArray]:
        h5py = import_extra("h5py")
        with h5py.File(self._data_file, "r") as file:
            data = file[self._data_path]
            for begin in range(start, self.n_samples, self._chunk):
                # From the sample number each time: adding up gains would drift away from it.
                time = replace(self._template.axes["time"], offset=self._start + begin / self.sampling_rate)
                axes = {**self._template.axes, "time": time}
                yield replace(self._template, data=data[begin : min(begin + self._chunk, self.n_samples)], axes=axes)

    def _rate_of_timestamps(self, nwbfile: "pynwb.NWBFile") -> float:
        names = [obj.name for obj in nwbfile.objects.values() if hasattr(obj, "timestamps")]
        if names.count(self._name) > 1:
            raise ValueError(
                f"{self.path} has several series named {self._name}; with time stamps instead of a rate, names must "
                "differ (ezmsg-nwb finds series by name)."
            )
        nwb = import_extra("ezmsg.nwb")
        slicer = nwb.NWBSlicer(
            self.path, nwb.ReferenceClockType.UNKNOWN, stream_keys=[self._name], dejitter_cache=False
        )
        try:
            return float(slicer.get_stream_info(self._name).fs)
        finally:
            slicer.close()

    def _read_timestamped(self, start: int) -> Iterator[AxisArray]:
        nwb = import_extra("ezmsg.nwb")
        messages = nwb.NWBAxisArrayIterator(
            filepath=self.path,
            chunk_dur=self._chunk / self.sampling_rate,
            reference_clock=nwb.ReferenceClockType.UNKNOWN,
            stream_keys=[self._name],
            dejitter_cache=False,
        )
        done = 0
        try:
            for message in messages:
                n = len(message.data)
                # It cannot start elsewhere than at the beginning.
                if n and done >= start:
                    yield message
                done += n
        finally:
            messages.close()


def _select(nwbfile: "pynwb.NWBFile", wanted: str | None, path: Path) -> "pynwb.ecephys.ElectricalSeries":
    ecephys = import_extra("pynwb.ecephys")
    found = {
        obj.data.name.removesuffix("/data"): obj
        for obj in nwbfile.objects.values()
        if isinstance(obj, ecephys.ElectricalSeries)
    }
    if not found:
        raise ValueError(f"{path} has no electrical series.")
    matching = [obj for address, obj in found.items() if wanted in (None, address, obj.name)]
    if len(matching) != 1:
        problem = "several electrical series" if matching else f"no electrical series {wanted!r}"
        raise ValueError(f"{path} has {problem}; allowed as series are {', '.join(sorted(found))}.")
    return matching[0]


def _template(series: "pynwb.ecephys.ElectricalSeries") -> AxisArray:
    """A message without samples."""
    nwb = import_extra("ezmsg.nwb")

    data, table = series.data, series.electrodes.table
    rows = np.asarray(series.electrodes.data)
    if "label" in table.colnames:
        labels = nwb.as_text_array(np.asarray(table["label"].data[:])[rows])
    else:
        labels = np.array([f"ch_{number}" for number in np.asarray(table.id.data[:])[rows]])
    axes = {"time": AxisArray.TimeAxis(fs=float(series.rate) or 1.0)}
    if data.ndim > 1:
        axes["ch"] = AxisArray.CoordinateAxis(data=labels, dims=["ch"])
    return AxisArray(
        data=np.zeros((0, *data.shape[1:]), data.dtype),
        dims=["time", "ch", *(f"dim_{number}" for number in range(2, data.ndim))][: data.ndim],
        axes=axes,
        attrs=nwb.describe_stream_scaling(data, series.channel_conversion, is_electrical=True).as_attrs(),
        key=series.name,
        stream_dim="time",
    )


def _chunk_length(data: "h5py.Dataset", chunk_mb: float) -> int:
    """Samples of a message: as many as *chunk_mb* holds, and if possible whole chunks of the file."""
    bytes_per_sample = data.dtype.itemsize
    for length in data.shape[1:]:
        bytes_per_sample *= length
    n = max(int(chunk_mb * 2**20 / bytes_per_sample), 1)
    in_file = data.chunks[0] if data.chunks else 1
    return n - n % in_file if n >= in_file else n
