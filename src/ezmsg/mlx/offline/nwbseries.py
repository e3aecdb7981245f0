"""The electrical series of an NWB file: where it is, what its samples are, and what its channels are called.

Read with h5py, by the rules of the NWB schema (2.x), and no more of the file than that. pynwb builds an object of
everything in the file before it gives one series away, and fails where anything else in it is broken.
"""

import hashlib
import math
import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt

from .extra import import_extra
from .faults import fault, faults_of
from .scaling import Scaling, one_gain

if typing.TYPE_CHECKING:
    import h5py

_OTHER_NAMESPACES = ("core", "hdmf-common", "hdmf-experimental")
"""All types of these are known here; those of extensions are looked up in the file."""


class Place(typing.NamedTuple):
    """A dataset, which may be in another file, linked from this one."""

    file: str
    path: str

    @classmethod
    def of(cls, dataset: "h5py.Dataset") -> "Place":
        """The place of *dataset*."""
        return cls(dataset.file.filename, dataset.name)


class Series(typing.NamedTuple):
    """An electrical series that a message can be made of."""

    name: str
    address: str
    """Its path in the file."""

    object_id: str
    data: Place
    shape: tuple[int, ...]
    dtype: np.dtype
    rows_per_chunk: int
    """Samples that the file stores, and compresses, as one."""

    labels: npt.NDArray[np.str_]
    """One for each channel."""

    scaling: dict[str, object]
    """How to get from samples to volts, in the words of ezmsg-nwb's attrs."""

    @property
    def digest(self) -> str:
        """Tells labels and scaling from all others."""
        parts = [repr(self.labels.tolist())]
        for key, value in self.scaling.items():
            parts.append(f"{key}={np.asarray(value).tolist()!r}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def list_series(file: "h5py.File", path: Path) -> list[str]:
    """The addresses of all series.

    Raises:
        ValueError: It is not an NWB file.
    """
    _check_version(file, path)
    return sorted(addresses[0] for addresses, _ in _Found(file).series)


def _check_version(file: "h5py.File", path: Path) -> None:
    if "nwb_version" not in file.attrs and _text(file.attrs.get("neurodata_type")) != "NWBFile":
        raise fault(path, None, "is an HDF5 file, but not an NWB file of version 2.")


def find_series(file: "h5py.File", wanted: str | None, path: Path) -> tuple[str, "h5py.Group"]:
    """The address and the group of the series that *wanted* names; None: of the only one."""
    _check_version(file, path)
    found = _Found(file)
    listed = sorted(addresses[0] for addresses, _ in found.series)
    matching = [
        (addresses[0], group)
        for addresses, group in found.series
        if wanted is None or wanted in addresses or wanted in {address.rpartition("/")[2] for address in addresses}
    ]
    if len(matching) == 1:
        if found.dead and wanted is None:
            ez.logger.warning(f"{path} has links that lead nowhere: {', '.join(sorted(found.dead))}.")
        return matching[0]
    if not matching and wanted is not None and any(wanted in (a, a.rpartition("/")[2]) for a in found.events):
        raise fault(path, wanted, "is a SpikeEventSeries; allowed is an electrical series sampled without breaks.")
    if not listed:
        dead = f"; links that lead nowhere: {', '.join(sorted(found.dead))}" if found.dead else ""
        raise fault(path, None, f"has no electrical series{dead}.")
    problem = "several electrical series" if matching else f"no electrical series {wanted!r}"
    raise fault(path, None, f"has {problem}; allowed as series are {', '.join(listed)}.")


class _Found:
    """All electrical series that can be reached from the root of a file, each once."""

    def __init__(self, file: "h5py.File") -> None:
        self._file = file
        self._catalog: typing.Any = None
        self._addresses: dict[object, tuple[list[str], h5py.Group]] = {}
        self.events: list[str] = []
        self.dead: list[str] = []
        self._seen: set[object] = set()
        # Groups that are really there before those that are linked, so that each goes by its own address.
        linked: list[tuple[str, h5py.Group]] = []
        self._walk([("", file)], linked)
        while linked:
            self._walk([linked.pop()], linked)

    @property
    def series(self) -> list[tuple[list[str], "h5py.Group"]]:
        return list(self._addresses.values())

    def _walk(self, todo: list[tuple[str, "h5py.Group"]], linked: list[tuple[str, "h5py.Group"]]) -> None:
        h5py = import_extra("h5py")
        while todo:
            address, group = todo.pop()
            info = h5py.h5o.get_info(group.id)
            key = (info.fileno, info.addr)
            kind = self._kind(group) if address else ""
            if kind == "ElectricalSeries":
                self._addresses.setdefault(key, ([], group))[0].append(address)
                continue
            if kind == "SpikeEventSeries":
                self.events.append(address)
                continue
            if key in self._seen:
                continue
            self._seen.add(key)
            for name in group:
                if not address and name == "specifications":
                    continue
                is_hard = isinstance(group.get(name, getlink=True), h5py.HardLink)
                try:
                    item = group[name]
                except (KeyError, OSError):
                    if is_hard:
                        raise
                    self.dead.append(f"{address}/{name}")
                    continue
                if isinstance(item, h5py.Group):
                    (todo if is_hard else linked).append((f"{address}/{name}", item))

    def _kind(self, group: "h5py.Group") -> str:
        kind, namespace = (_text(group.attrs.get(name)) for name in ("neurodata_type", "namespace"))
        if namespace in ("", *_OTHER_NAMESPACES):
            return kind
        if self._catalog is None:
            pynwb = import_extra("pynwb")
            types = pynwb.get_type_map()
            pynwb.NWBHDF5IO.load_namespaces(types, file=self._file)
            self._catalog = types.namespace_catalog
        for known in ("SpikeEventSeries", "ElectricalSeries"):
            try:
                if self._catalog.is_sub_data_type(namespace, kind, known):
                    return known
            except (KeyError, ValueError):
                continue  # the file does not bring the specification along
        return kind


def member(group: "h5py.Group", dataset: str, path: Path, name: str) -> "h5py.Dataset":
    """A dataset of a series, which may be in another file."""
    h5py = import_extra("h5py")
    try:
        return group[dataset]
    except KeyError as error:
        link = group.get(dataset, getlink=True) if dataset in set(group) else None
        if not isinstance(link, h5py.ExternalLink):
            raise
        raise fault(path, name, f"has its {dataset} in {link.filename!r}, which is not there or damaged.") from error


def read_series(group: "h5py.Group", address: str, path: Path) -> Series:
    """What *group* says of its samples and channels, checked."""
    name = address.rpartition("/")[2]
    with faults_of(path, name):
        data = member(group, "data", path, name)
        shape, dtype = tuple(data.shape or ()), data.dtype
        if dtype.kind not in "iuf":
            raise fault(path, name, f"has data of dtype {dtype}; allowed are integers and floats.")
        if not shape or 0 in shape:
            raise fault(path, name, f"has no samples (shape {shape}).")
        n_channels = shape[1] if len(shape) > 1 else 1
        if "electrodes" not in group:
            raise fault(path, name, "has no electrodes, so its channels are not known.")
        electrodes = group["electrodes"]
        rows = np.asarray(electrodes[()]).reshape(-1)
        if len(rows) != n_channels:
            turned = " It may be stored as (channel, time)." if len(shape) > 1 and len(rows) == shape[0] else ""
            raise fault(
                path,
                name,
                f"has data of shape {shape} and {len(rows)} electrodes; allowed is data of shape (time, channel), with "
                f"an electrode for each channel.{turned}",
            )
        labels = _labels(electrodes, rows, path, name)
        conversion = group["channel_conversion"] if "channel_conversion" in group else None
        return Series(
            name=name,
            address=address,
            object_id=_text(group.attrs.get("object_id")),
            data=Place.of(data),
            shape=shape,
            dtype=dtype,
            rows_per_chunk=data.chunks[0] if data.chunks else 1,
            labels=labels,
            scaling=_scaling(data, conversion, n_channels, path, name),
        )


def _labels(electrodes: "h5py.Dataset", rows: npt.NDArray[np.integer], path: Path, name: str) -> npt.NDArray[np.str_]:
    table = electrodes.file[electrodes.attrs["table"]]
    ids = np.asarray(table["id"][()])
    if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(ids):
        raise fault(path, name, f"has electrodes {rows.min()} to {rows.max()} of a table of {len(ids)}.")
    if "label" not in table:
        return np.array([f"ch_{number}" for number in ids[rows]])
    labels = np.asarray(table["label"][()])
    if labels.shape != ids.shape:
        raise fault(path, name, f"has electrodes with labels of shape {labels.shape}; allowed is one for each.")
    return np.array([each.decode() if isinstance(each, bytes) else str(each) for each in labels[rows]], dtype=str)


def _scaling(
    data: "h5py.Dataset", channel_conversion: "h5py.Dataset | None", n_channels: int, path: Path, name: str
) -> dict[str, object]:
    if channel_conversion is not None and channel_conversion.shape != (n_channels,):
        raise fault(
            path, name, f"has a channel_conversion of shape {channel_conversion.shape} for {n_channels} channels."
        )
    gain = float(data.attrs.get("conversion", 1.0))
    offset, unit = float(data.attrs.get("offset", 0.0)), data.attrs.get("unit", "")
    scaling = Scaling(
        gain if channel_conversion is None else gain * one_gain(np.asarray(channel_conversion[:], np.float64)),
        offset,
        unit.decode() if isinstance(unit, bytes) else str(unit),
        is_voltage=True,
    )
    if not (np.isfinite(scaling.gain).all() and math.isfinite(scaling.offset)):
        raise fault(
            path, name, f"has conversion {scaling.gain} and offset {scaling.offset}; allowed are finite numbers."
        )
    return scaling.as_attrs()


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, str) else ""
