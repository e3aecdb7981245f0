"""Recordings in NWB files (Neurodata Without Borders, HDF5), read in chunks.

Read with h5py, by the rules of the NWB schema (2.x), and no more of the file than that. pynwb builds an object of
everything in the file before it gives one series away, and fails where anything else in it is broken.

Time stamps are read in blocks, so that memory does not grow with the length of the recording. They are cut into runs
without gaps; within a run the samples follow the rate, and each message is placed by the median of its time stamps.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import typing
from collections.abc import Iterator
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..stream.segments import GAP_TOLERANCE
from ..stream.unit import check_number, check_path
from .contracts import RecordingFormat, StreamInfo, describe_source, unreadable
from .reading import BLOCK, SHORTEST_RUN, Scaling, Unfit, fault, faults_of, import_extra, one_gain

if typing.TYPE_CHECKING:
    import h5py

_OTHER_NAMESPACES = ("core", "hdmf-common", "hdmf-experimental")
"""All types of these are known here; those of extensions are looked up in the file."""


class Place(typing.NamedTuple):
    """A dataset, which may be in another file, linked from this one."""

    file: str
    path: str


class _Found:
    """All electrical series that can be reached from the root of a file, each once."""

    def __init__(self, file: h5py.File) -> None:
        if "nwb_version" not in file.attrs and _text(file.attrs.get("neurodata_type")) != "NWBFile":
            raise Unfit("is an HDF5 file, but not an NWB file of version 2.")
        self._file = file
        self._catalog: typing.Any = None
        self._series: dict[object, tuple[list[str], h5py.Group]] = {}
        self.events: list[str] = []
        """Addresses of series of spikes."""
        self.dead: list[str] = []
        """Links that lead nowhere."""
        self._seen: set[object] = set()
        # Groups that are really there before those that are linked, so that each goes by its own address.
        linked: list[tuple[str, h5py.Group]] = []
        self._walk([("", file)], linked)
        while linked:
            self._walk([linked.pop()], linked)
        self.series = list(self._series.values())
        """The addresses of each, and its group."""
        self.listed = sorted(addresses[0] for addresses, _ in self.series)

    def _walk(self, todo: list[tuple[str, h5py.Group]], linked: list[tuple[str, h5py.Group]]) -> None:
        h5py = import_extra("h5py")
        while todo:
            address, group = todo.pop()
            info = h5py.h5o.get_info(group.id)
            key = (info.fileno, info.addr)
            kind = self._kind(group) if address else ""
            if kind == "ElectricalSeries":
                self._series.setdefault(key, ([], group))[0].append(address)
            elif kind == "SpikeEventSeries":
                self.events.append(address)
            elif key not in self._seen:
                self._seen.add(key)
                for name in group:
                    if address or name != "specifications":
                        self._look_at(group, name, address, todo, linked)

    def _look_at(self, group: h5py.Group, name: str, address: str, *lists: list[tuple[str, h5py.Group]]) -> None:
        h5py = import_extra("h5py")
        is_hard = isinstance(group.get(name, getlink=True), h5py.HardLink)
        try:
            item = group[name]
        except (KeyError, OSError):
            if is_hard:
                raise
            self.dead.append(f"{address}/{name}")
        else:
            if isinstance(item, h5py.Group):
                lists[not is_hard].append((f"{address}/{name}", item))

    def _kind(self, group: h5py.Group) -> str:
        kind, namespace = (_text(group.attrs.get(name)) for name in ("neurodata_type", "namespace"))
        if namespace in ("", *_OTHER_NAMESPACES):
            return kind
        if self._catalog is None:
            pynwb = import_extra("pynwb")
            types = pynwb.get_type_map()
            pynwb.NWBHDF5IO.load_namespaces(types, file=self._file)
            self._catalog = types.namespace_catalog
        for known in ("SpikeEventSeries", "ElectricalSeries"):
            # Where the file does not bring the specification along, nothing is known of the type.
            with contextlib.suppress(KeyError, ValueError):
                if self._catalog.is_sub_data_type(namespace, kind, known):
                    return known
        return kind


def find_series(file: h5py.File, wanted: str | None, path: Path) -> tuple[str, h5py.Group]:
    """The address and the group of the series that *wanted* names; None: of the only one."""

    def is_wanted(*addresses: str) -> bool:
        return wanted is None or any(wanted in (address, address.rpartition("/")[2]) for address in addresses)

    found = _Found(file)
    matching = [(addresses[0], group) for addresses, group in found.series if is_wanted(*addresses)]
    dead = ", ".join(sorted(found.dead))
    if len(matching) == 1:
        if dead and wanted is None:
            ez.logger.warning(f"{path} has links that lead nowhere: {dead}.")
        return matching[0]
    if not matching and wanted is not None and is_wanted(*found.events):
        raise fault(path, wanted, "is a SpikeEventSeries; allowed is an electrical series sampled without breaks.")
    if not found.listed:
        raise Unfit("has no electrical series" + (f"; links that lead nowhere: {dead}." if dead else "."))
    problem = "several electrical series" if matching else f"no electrical series {wanted!r}"
    raise Unfit(f"has {problem}; allowed as series are {', '.join(found.listed)}.")


def member(group: h5py.Group, dataset: str) -> h5py.Dataset:
    """A dataset of a series, which may be in another file."""
    h5py = import_extra("h5py")
    try:
        return group[dataset]
    except KeyError as error:
        link = group.get(dataset, getlink=True) if dataset in set(group) else None
        if not isinstance(link, h5py.ExternalLink):
            raise
        raise Unfit(f"has its {dataset} in {link.filename!r}, which is not there or damaged.") from error


def read_header(group: h5py.Group) -> tuple[AxisArray, str]:
    """A message without samples of the series in *group*, checked, and a digest of labels and scaling."""
    data = member(group, "data")
    shape, dtype = tuple(data.shape or ()), data.dtype
    if dtype.kind not in "iuf":
        raise Unfit(f"has data of dtype {dtype}; allowed are integers and floats.")
    if not shape or 0 in shape:
        raise Unfit(f"has no samples (shape {shape}).")
    n_channels = shape[1] if len(shape) > 1 else 1
    if "electrodes" not in group:
        raise Unfit("has no electrodes, so its channels are not known.")
    rows = np.asarray(group["electrodes"][()]).reshape(-1)
    if len(rows) != n_channels:
        turned = " It may be stored as (channel, time)." if len(shape) > 1 and len(rows) == shape[0] else ""
        raise Unfit(
            f"has data of shape {shape} and {len(rows)} electrodes; allowed is data of shape (time, channel), with an "
            f"electrode for each channel.{turned}"
        )
    labels = _labels(group["electrodes"], rows)
    scaling = _scaling(data, group["channel_conversion"] if "channel_conversion" in group else None, n_channels)
    parts = [repr(labels.tolist()), *(f"{key}={np.asarray(value).tolist()!r}" for key, value in scaling.items())]
    dims = ["time", "ch", *(f"dim_{number}" for number in range(2, len(shape)))][: len(shape)]
    message = AxisArray(
        data=np.zeros((0, *shape[1:]), dtype),
        dims=dims,
        axes={"ch": AxisArray.CoordinateAxis(data=labels, dims=["ch"])} if "ch" in dims else {},
        attrs=scaling,
        stream_dim="time",
    )
    return message, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _labels(electrodes: h5py.Dataset, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.str_]:
    table = electrodes.file[electrodes.attrs["table"]]
    ids = np.asarray(table["id"][()])
    if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(ids):
        raise Unfit(f"has electrodes {rows.min()} to {rows.max()} of a table of {len(ids)}.")
    if "label" not in table:
        return np.array([f"ch_{number}" for number in ids[rows]])
    labels = np.asarray(table["label"][()])
    if labels.shape != ids.shape:
        raise Unfit(f"has electrodes with labels of shape {labels.shape}; allowed is one for each.")
    return np.array([each.decode() if isinstance(each, bytes) else str(each) for each in labels[rows]], dtype=str)


def _scaling(data: h5py.Dataset, of_channels: h5py.Dataset | None, n_channels: int) -> dict[str, object]:
    gain: float | npt.NDArray[np.float64] = float(data.attrs.get("conversion", 1.0))
    offset, unit = float(data.attrs.get("offset", 0.0)), data.attrs.get("unit", "")
    if of_channels is not None:
        if of_channels.shape != (n_channels,):
            raise Unfit(f"has a channel_conversion of shape {of_channels.shape} for {n_channels} channels.")
        gain = gain * one_gain(np.asarray(of_channels[:], np.float64))
    if not (np.isfinite(gain).all() and math.isfinite(offset)):
        raise Unfit(f"has conversion {gain} and offset {offset}; allowed are finite numbers.")
    return Scaling(gain, offset, unit.decode() if isinstance(unit, bytes) else str(unit), is_voltage=True).as_attrs()


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, str) else ""


_WINDOW = 16
"""Samples before and after a gap that are compared: a single late time stamp between others is not a gap."""

_SAMPLED = 100_000
"""Intervals that the period is first estimated from."""


class Times(typing.NamedTuple):
    """A rate and a starting time, or time stamps with what was found out about them."""

    rate: float
    identity: str
    """That of these times, for that of the recording."""

    start: float = 0.0
    """Where there are no time stamps."""

    gaps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    """The samples in front of which time jumps."""

    place: Place | None = None
    """Of the time stamps."""

    def runs(self, begin: int, end: int, stamps: h5py.Dataset | None) -> Iterator[tuple[int, int, float]]:
        """Runs of regular samples from *begin* to *end*: first sample, the one behind the last, time of the first."""
        if stamps is None:
            # From the sample number each time: adding up gains would drift away from it.
            yield begin, end, self.start + begin / self.rate
            return
        values = np.asarray(stamps[begin:end], np.float64)
        inner = self.gaps[(begin < self.gaps) & (self.gaps < end)].tolist()
        for one, other in itertools.pairwise([begin, *inner, end]):
            run = values[one - begin : other - begin]
            yield one, other, float(run[0] + np.median(run - run[0] - np.arange(len(run)) / self.rate))


def read_times(group: h5py.Group, n_samples: int) -> Times:
    """The times of the series in *group*."""
    # By iteration: a link that leads nowhere is not "in" its group.
    names = set(group)
    if "timestamps" in names:
        return _stamped(member(group, "timestamps"), n_samples)
    if "starting_time" not in names:
        raise Unfit("has neither a rate nor time stamps.")
    start = float(group["starting_time"][()])
    rate = float(group["starting_time"].attrs["rate"])
    if not 0 < rate < math.inf:
        raise Unfit(f"has a rate of {rate} Hz; allowed is a finite number above 0.")
    if not math.isfinite(start):
        raise Unfit(f"has a starting time of {start} s; allowed is a finite number.")
    return Times(rate, f"from {start!r} s at {rate!r} Hz", start)


def _stamped(stamps: h5py.Dataset, n_samples: int) -> Times:
    if stamps.shape != (n_samples,) or stamps.dtype.kind not in "iuf":
        raise Unfit(
            f"has {n_samples} samples and time stamps of shape {stamps.shape} and dtype {stamps.dtype}; allowed is one "
            "number for each sample."
        )
    survey = _Survey(stamps)
    if survey.resolution > GAP_TOLERANCE * survey.mean_period > 0:
        raise Unfit(
            f"has time stamps in {stamps.dtype}, which go in steps of {survey.resolution:.2g} s there: too coarse for "
            f"samples {survey.mean_period:.2g} s apart."
        )
    follows = survey.period > 0 and survey.jitter <= GAP_TOLERANCE * survey.period
    gaps, jumps = _gaps(stamps, survey) if follows else (np.zeros(0, np.int64), 0.0)
    if not follows or (len(gaps) and n_samples < SHORTEST_RUN * (len(gaps) + 1)):
        raise Unfit("has time stamps that follow no rate.")
    covered = survey.span - jumps
    rate = (n_samples - 1 - len(gaps)) / covered if covered > 0 else 1 / survey.period
    place = Place(stamps.file.filename, stamps.name)
    return Times(rate, f"at time stamps {survey.digest}, {rate!r} Hz", gaps=gaps, place=place)


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK, n)) for begin in range(0, n, BLOCK))


class _Survey:
    """Summary of all time stamps, from one reading."""

    def __init__(self, stamps: h5py.Dataset) -> None:
        n, digest, sampled, largest = len(stamps), hashlib.sha256(), [], 0.0
        stride = -(-n // _SAMPLED)
        for begin, end in _blocks(n):
            values = np.asarray(stamps[begin : min(end + 1, n)]).astype(np.float64)
            if not np.isfinite(values).all():
                place = int(np.argmin(np.isfinite(values)))
                raise Unfit(f"has a time stamp of {values[place]} s at sample {begin + place}.")
            digest.update(values[: end - begin].tobytes())
            # A copy, since a view would keep all intervals.
            sampled.append(np.diff(values)[::stride].copy())
            largest = max(largest, float(np.abs(values).max()))
        intervals = np.concatenate(sampled)
        self.digest = digest.hexdigest()[:16]
        self.span = float(stamps[n - 1]) - float(stamps[0])
        self.mean_period = self.span / (n - 1) if n > 1 else 0.0
        self.resolution = float(np.spacing(stamps.dtype.type(largest))) if stamps.dtype.kind == "f" else 0.0
        self.period = float(np.median(intervals)) if len(intervals) else 0.0
        if self.period > 0:
            # The median alone is a multiple of the steps that the time stamps go in.
            near = np.abs(intervals - self.period) < GAP_TOLERANCE * self.period
            self.period = float(intervals[near].mean())
        self.jitter = float(np.median(np.abs(intervals - self.period))) if len(intervals) else 0.0


def _gaps(stamps: h5py.Dataset, survey: _Survey) -> tuple[npt.NDArray[np.int64], float]:
    """The samples in front of which time jumps, and the seconds that all jumps have together."""
    n, period = len(stamps), survey.period
    tolerance = GAP_TOLERANCE * period + 2 * survey.jitter + survey.resolution
    found, jumps, backward = [np.zeros(0, np.int64)], 0.0, list[int]()
    offsets = np.arange(1, _WINDOW + 1)
    for begin, end in _blocks(n):
        first, last = max(begin - _WINDOW, 0), min(end + _WINDOW + 1, n)
        values = np.asarray(stamps[first:last], np.float64)
        steps = np.diff(values[begin - first : end - first + 1])
        candidates = np.flatnonzero(np.abs(steps - period) > tolerance) + begin - first
        if not len(candidates):
            continue
        levels = values - values[0] - np.arange(len(values)) * period
        after = np.median(levels[np.minimum(candidates[:, None] + offsets, len(levels) - 1)], axis=1)
        before = np.median(levels[np.maximum(candidates[:, None] + 1 - offsets, 0)], axis=1)
        gaps = candidates[np.abs(after - before) > tolerance]
        found.append(gaps + first + 1)
        steps = values[gaps + 1] - values[gaps]
        jumps += float(steps.sum())
        backward += (gaps[steps < 0] + first + 1).tolist()
    if backward:
        ez.logger.warning(
            f"{stamps.file.filename}: the time stamps of {stamps.parent.name.rpartition('/')[2]} step back at sample "
            f"{backward[0]}; the results have the times of the file."
        )
    return np.concatenate(found), jumps


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
            raise TypeError(f"'series' must be a name or None, got {series!r}")
        check_number("chunk_mb", chunk_mb)
        self.path = Path(path)
        import_extra("h5py")
        with _opened(self.path) as file, faults_of(self.path):
            address, group = find_series(file, series, self.path)
            self._name = address.rpartition("/")[2]
            with faults_of(self.path, self._name):
                header, digest = read_header(group)
                data = group["data"]
                self.n_samples, self._data = len(data), Place(data.file.filename, data.name)
                self._times = read_times(group, self.n_samples)
                self._chunk = _chunk_length(data, chunk_mb)
                object_id = _text(group.attrs.get("object_id"))
        self.sampling_rate = self._times.rate
        axes = {"time": AxisArray.TimeAxis(fs=self.sampling_rate), **header.axes}
        self._template = replace(header, axes=axes, key=self._name)
        # Everything that results depend on but the samples, so that a file that was corrected is another recording.
        self.identity = (
            f"{self.path.name} {address} {object_id}, {self.n_samples} samples of {header.data.shape[1:]} "
            f"{header.data.dtype} {self._times.identity}, labels and scaling {digest}, read {self._chunk} samples at a "
            "time"
        )

    @property
    def gaps(self) -> list[int]:
        """The samples in front of which time jumps."""
        return self._times.gaps.tolist()

    def read(self, start: int = 0) -> Iterator[AxisArray]:
        """The samples from number *start* on, see :obj:`ezmsg.mlx.RecordingSource`."""
        with contextlib.ExitStack() as stack:
            data = self._dataset(stack, self._data)
            stamps = self._dataset(stack, self._times.place) if self._times.place else None
            for begin in range(start - start % self._chunk, self.n_samples, self._chunk):
                end = min(begin + self._chunk, self.n_samples)
                with faults_of(self.path, self._name):
                    samples = data[begin:end]
                    runs = list(self._times.runs(begin, end, stamps))
                    if len(samples) != end - begin:
                        raise Unfit(f"has fewer than its {self.n_samples} samples now.")
                for first, last, offset in runs:
                    if last <= start:
                        continue
                    if first < start:
                        offset, first = offset + (start - first) / self.sampling_rate, start
                    axes = {**self._template.axes, "time": replace(self._template.axes["time"], offset=offset)}
                    yield replace(self._template, data=samples[first - begin : last - begin], axes=axes)

    def _dataset(self, stack: contextlib.ExitStack, place: Place) -> h5py.Dataset:
        file = stack.enter_context(_opened(Path(place.file)))
        with faults_of(self.path, self._name):
            return file[place.path]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    h5py = import_extra("h5py")
    with faults_of(path):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            if error.errno is not None:
                raise
            raise Unfit(f"is not an NWB file, or is damaged ({error}).") from error
    with file:
        yield file


def _chunk_length(data: h5py.Dataset, chunk_mb: float) -> int:
    """Samples of a message: as many as *chunk_mb* holds, and if possible whole chunks of the file.

    A message waits several times, so that memory is a multiple of it; one of 4 MiB is not slower than one of 16.
    """
    n = max(int(chunk_mb * 2**20 / (data.dtype.itemsize * math.prod(data.shape[1:]))), 1)
    in_file = data.chunks[0] if data.chunks else 1
    if n >= in_file:
        return n - n % in_file
    return in_file if in_file <= LARGEST_FILE_CHUNK * n else n


def _locate(path: Path) -> Path | None:
    return path if path.suffix.lower() == ".nwb" and path.is_file() else None


def _open(
    path: Path, *, stream: str | None = None, segment: int | str | None = None, **options: typing.Any
) -> NWBSource:
    if segment not in (None, 0, "all"):
        raise ValueError(f"'segment' must be 0, since a series of an NWB file is one segment, got {segment!r}")
    return NWBSource(path, stream, **options)


def _describe(path: Path) -> tuple[StreamInfo, ...]:
    import_extra("h5py")
    with _opened(path) as file, faults_of(path):
        names = _Found(file).listed
    found = []
    for name in names:
        try:
            found.append(describe_source(name, [NWBSource(path, name, chunk_mb=2**-6)]))
        except (OSError, ValueError) as error:
            found.append(unreadable(name, error))
    return tuple(found)


NWB_FORMAT = RecordingFormat("nwb", "Neurodata Without Borders, in HDF5", _locate, _open, _describe)
