"""Messages as arrays of a Zarr group: axes, attributes, dtypes, chunks and compression.

Arrays are made and described by zarr-python, and their rows are written by tensorstore: for a band-pass of 64 channels
that saves a tenth to a third of the time of the whole run (docs/results/data/chunk_writers_cpu.json). Codecs that
tensorstore does not have are written by zarr-python.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import math
import os
import re
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis

from ..stream.convert import is_integer, is_mlx_array, mlx_to_numpy, numpy_to_integers
from ..stream.segments import same_axis, value_at
from ..stream.unit import check_count, check_number, check_one_of
from .reading import import_extra

if typing.TYPE_CHECKING:
    import zarr
    from numcodecs.abc import Codec

    Compressor: typing.TypeAlias = Codec | typing.Literal["default"] | None

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32")
"""Dtypes of results."""


@dataclass(frozen=True)
class ResultLayout:
    """See the arguments of :class:`ezmsg.mlx.ZarrSink`, which these are."""

    chunk_mb: float = 4.0
    chunk_samples: int | None = None
    chunk_channels: int | None = None
    compressor: Compressor = "default"
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_number("chunk_mb", self.chunk_mb)
        for name, value in (("chunk_samples", self.chunk_samples), ("chunk_channels", self.chunk_channels)):
            if value is not None:
                check_count(name, value, 1)
        check_one_of("dtype", self.dtype, DTYPES, none=True, error=TypeError)
        compressor = self.compressor
        if compressor is None or (isinstance(compressor, str) and compressor == "default"):
            return
        if not isinstance(compressor, import_extra("numcodecs.abc").Codec):
            raise TypeError(f"'compressor' must be a codec of numcodecs, None or 'default', got {compressor!r}")

    def converted(self, data: typing.Any) -> npt.NDArray:
        """Data of results as what is kept: integers are rounded to the nearest one and saturate."""
        values = mlx_to_numpy(data) if is_mlx_array(data) else np.asarray(data)
        if self.dtype is None or values.dtype == self.dtype:
            return values
        if values.dtype.kind not in "biuf":
            raise TypeError(f"Results have dtype {values.dtype}, which cannot become {self.dtype!r}.")
        return numpy_to_integers(values, self.dtype) if is_integer(self.dtype) else values.astype(self.dtype)

    def chunks(self, row: Sequence[int], dtype: np.dtype, n_rows: int) -> tuple[int, ...]:
        """Lengths of a chunk of rows of the shape *row*. Its rows divide *n_rows*, if they can and that is not 0."""
        n_bytes = max(dtype.itemsize * math.prod(row), 1)
        most = self.chunk_samples or max(int(self.chunk_mb * 2**20 / n_bytes), 1)
        first = [min(self.chunk_channels or length, length) for length in row[:1]]
        return (rows_of_chunk(most, n_rows), *first, *row[1:])

    def __str__(self) -> str:
        """Conversions that values depend on; empty where they are as the chain gives them."""
        return "" if self.dtype is None else f"results as {self.dtype}"


def rows_of_chunk(most: int, n_rows: int) -> int:
    """Length of a chunk: the largest divisor of *n_rows* that is *most* at most; *most* without such a number."""
    if not n_rows:
        return most
    return next(n_rows // n for n in range(-(-n_rows // most), n_rows + 1) if n_rows % n == 0)


def name_of_array(dim: str) -> str:
    """The name of a dimension or of labels as that of an array: a slash would begin a group, a dot a hidden file."""
    name = re.sub(r"[/\\]", "_", dim)
    return f"_{name}" if name[:1] in ("", ".") else name


LABEL = "label"
"""The field of records that gives the dimension its name."""


def times(axis: AxisBase | None, dim: str, n_samples: int) -> npt.NDArray[np.float64]:
    """When *n_samples* rows are; ValueError without an axis of that length, TypeError if it is not of real numbers."""
    if isinstance(axis, LinearAxis):
        return value_at(axis, np.arange(n_samples))
    if not isinstance(axis, CoordinateAxis):
        raise ValueError(f"Results need an axis {dim!r} that says when they are.")
    values = _values(axis, dim, n_samples)
    if values.dtype.kind not in "iuf":
        raise TypeError(f"The axis {dim!r} has values of dtype {values.dtype}; allowed are real numbers.")
    return values.astype(np.float64)


def check_axes(known: dict[str, AxisBase | None], message: AxisArray, dims: list[str]) -> None:
    """ValueError unless the axes along *dims* are the *known* ones, which those of the first message become."""
    for dim in dims:
        axis = message.axes.get(dim)
        first = known.setdefault(dim, axis)
        if first is not axis and (first is None or axis is None or not same_axis(first, axis)):
            raise ValueError(f"Results have another axis {dim!r} than those before: they do not fit together.")


def labels_of(message: AxisArray, dims: list[str], taken: set[str]) -> list[tuple[str, str, npt.NDArray]]:
    """For each array of values along *dims* its name, none of those *taken*, its dimension, and its values."""
    found = []
    for dim in dims:
        values_of = _coordinates(message.axes.get(dim), dim, message.data.shape[message.dims.index(dim)])
        found += [(name_of_array(name), name_of_array(dim), values) for name, values in values_of.items()]
    names = [*taken, *(name for name, _, _ in found)]
    for name in (*map(name_of_array, dims), *names):
        if name in taken & set(dims) or names.count(name) > 1:
            raise ValueError(f"An axis or a field of its labels is named {name!r}, which the group has already.")
    return found


def _coordinates(axis: AxisBase | None, dim: str, length: int) -> dict[str, npt.NDArray]:
    """The values of an axis under the names of their arrays; of records, each field as ``<dim>_<field>``."""
    if isinstance(axis, LinearAxis):
        return {dim: value_at(axis, np.arange(length))}
    if not isinstance(axis, CoordinateAxis):
        return {}
    values = _values(axis, dim, length)
    if not values.dtype.names:
        return {dim: _plain(values, dim)}
    return {
        dim if field == LABEL else f"{dim}_{field}": _plain(values[field], f"{dim}.{field}")
        for field in values.dtype.names
    }


def _values(axis: CoordinateAxis, dim: str, length: int) -> npt.NDArray:
    values = mlx_to_numpy(axis.data) if is_mlx_array(axis.data) else np.asarray(axis.data)
    if values.shape != (length,):
        raise ValueError(f"The axis {dim!r} has values of shape {values.shape}; allowed is ({length},), as the data.")
    return values


def _plain(values: npt.NDArray, name: str) -> npt.NDArray:
    """The same values in a dtype that every version of Zarr holds."""
    kind, items = values.dtype.kind, values.tolist()
    if values.ndim == 1 and kind in "biufc":
        return values
    if kind in "USTO" and all(isinstance(item, (str, bytes)) for item in items):
        texts = np.array([item.decode() if isinstance(item, bytes) else item for item in items], np.str_)
        return texts.astype("U1") if texts.dtype.itemsize == 0 else texts
    if kind == "O":
        numbers = np.array(items)
        if numbers.ndim == 1 and numbers.dtype.kind in "biufc":
            return numbers
    raise TypeError(f"The axis {name!r} has values of dtype {values.dtype}; allowed are numbers and text.")


MEANS_SOMETHING = frozenset(
    "_ARRAY_DIMENSIONS _FillValue _Unsigned _Encoding missing_value scale_factor add_offset units calendar dtype "
    "coordinates bounds grid_mapping cell_measures ancillary_variables formula_terms flag_values flag_meanings "
    "flag_masks valid_min valid_max valid_range actual_range axis positive standard_name compress "
    "chunksizes compressor compressors filters shards preferred_chunks contiguous zlib shuffle fletcher32".split()
)
"""Attributes by which xarray, netCDF, its conventions (CF) or Zarr change what a reader is shown."""

RENAMED = "attr_"
"""Put in front of the names of such attributes, where they are those of a message."""


def plain_attributes(attrs: Mapping[str, object]) -> dict[str, object]:
    """Of *attrs*, what JSON holds, under names by which no reader changes values."""
    found: dict[str, object] = {}
    for key, value in attrs.items():
        with contextlib.suppress(TypeError):
            name = str(key)
            while name in MEANS_SOMETHING or name in found:
                name = RENAMED + name
            found[name] = _json(value)
    return found


def _json(value: object) -> object:
    """*value* as JSON holds it, else TypeError; what is not finite becomes text, since JSON has no number for it."""
    if is_mlx_array(value):
        value = mlx_to_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype.names is None:
        value = value.astype(str).tolist() if value.dtype.kind in "mM" else value.tolist()
    elif isinstance(value, (np.datetime64, np.timedelta64)):
        value = str(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json(each) for each in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, os.PathLike)):
        return os.fsdecode(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"JSON holds no {type(value).__name__}")


def _units(unit: object) -> dict[str, object]:
    """A unit as the attribute ``units`` that plots are labelled by, unless readers would take values for dates."""
    if not isinstance(unit, str) or not unit or " since " in unit or unit.lower() in _DURATIONS:
        return {}
    return {"units": unit}


_DURATIONS = {f"{name}{s}" for name in ("day", "hour", "minute", "second") for s in ("", "s")} | {
    f"{part}second{s}" for part in ("milli", "micro", "nano") for s in ("", "s")
}


_BLOCK = 4096
"""Bytes of which only the sum enters a checksum."""

Rows = tuple[npt.NDArray, npt.NDArray]
"""Times, and as many rows."""


class RowBuffer:
    """Collects rows until they fill a chunk of *size* rows."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._times = np.empty((0,))
        self._rows = np.empty((0,))
        self.n = 0
        """How many there are."""

    def take(self, times: npt.NDArray, rows: npt.NDArray) -> Iterator[Rows]:
        """Add rows, which are copied; the chunks that they fill, each valid until the next one is asked for."""
        while len(rows):
            n = min(self._size - self.n, len(rows))
            if n == self._size:
                yield times[:n], rows[:n]
            else:
                if len(self._rows) != self._size:
                    self._times = np.empty((self._size,), times.dtype)
                    self._rows = np.empty((self._size, *rows.shape[1:]), rows.dtype)
                self._times[self.n : self.n + n], self._rows[self.n : self.n + n] = times[:n], rows[:n]
                self.n = (self.n + n) % self._size
                if not self.n:
                    yield self._times, self._rows
            times, rows = times[n:], rows[n:]

    @property
    def rest(self) -> Rows:
        """The rows that fill no chunk yet."""
        return self._times[: self.n], self._rows[: self.n]


class RowWriter:
    """Writes rows of an array of the group in the folder *group*."""

    def __init__(self, array: zarr.Array, group: Path) -> None:
        self.array, self._folder = array, group / array.basename
        self._stored: typing.Any = None
        """The array of tensorstore, or that of Zarr where tensorstore cannot open it."""

    def write(self, begin: int, rows: npt.NDArray) -> None:
        """Write the rows from number *begin* on.

        The array is then as long as they need, or up to twice as long, since its description is written anew each time
        that it grows.
        """
        end = begin + len(rows)
        if self.array.shape[0] < end:
            self.array.resize((max(end, 2 * self.array.shape[0]), *self.array.shape[1:]))
            self._stored = None
        if self._stored is None:
            self._stored = self._opened()
        try:
            self._stored[begin:end] = rows
        except ValueError as error:
            # As the newest versions and older ones put it.
            if (code := re.search(r"(?:os_error_code='|OS error )(\d+)", str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(self._folder)) from error

    def _opened(self) -> typing.Any:
        tensorstore = import_extra("tensorstore")
        # The workers have the cores. Nothing has to be on the disk before all of it is.
        one = {"limit": 1}
        context = {"data_copy_concurrency": one, "file_io_concurrency": one, "file_io_sync": False}
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{self._folder}/"}, "context": context}
        try:
            return tensorstore.open(spec).result()
        except (ValueError, RuntimeError):  # a codec that it does not have, a path that is not UTF-8
            return self.array


def checksum(values: npt.NDArray, start: int = 0) -> int:
    """The CRC-32 of sums over blocks, going on from *start*.

    A CRC-32 of all bytes takes as long as half of a band-pass. This one finds whatever is missing.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    n = len(data) - len(data) % _BLOCK
    sums = data[:n].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[n:].data, zlib.crc32(sums.data, start))


DIMENSIONS = "_ARRAY_DIMENSIONS"
"""Where xarray looks for the names of dimensions."""


def new_group(path: Path) -> zarr.Group:
    """An empty group in place of whatever is there."""
    # The same format from both major versions, which call the argument differently.
    return import_extra("zarr").open_group(str(path), mode="w", **{"zarr_format" if is_zarr_3() else "zarr_version": 2})


def is_zarr_3() -> bool:
    """Whether the version of zarr-python that is installed is 3 or later."""
    return int(import_extra("zarr").__version__.split(".")[0]) > 2


def add_array(
    group: typing.Any,
    name: str,
    dims: list[str],
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: np.dtype,
    attributes: Mapping[str, object],
    compressor: Compressor = "default",
) -> zarr.Array:
    """A new array with named dimensions."""
    create = group.create_array if is_zarr_3() else group.create_dataset
    # Both versions call it differently, and have their own default.
    options = {} if compressor == "default" else {"compressors" if is_zarr_3() else "compressor": compressor}
    chunks = tuple(max(length, 1) for length in chunks)
    array = create(name, shape=shape, chunks=chunks, dtype=dtype, fill_value=None, **options)
    # All at once, since each time the file of the attributes is written anew.
    array.attrs.put({DIMENSIONS: dims, **attributes})
    return array


def add_labels(group: typing.Any, message: AxisArray, labels: list[tuple[str, str, npt.NDArray]]) -> None:
    """Arrays of labels: for each its name, its dimension and its values."""
    for name, dim, values in labels:
        about = attributes_of_axis(message, dim)
        add_array(group, name, [dim], values.shape, values.shape, values.dtype, about)[:] = values


def attributes_of_data(message: AxisArray, dims: list[str], labels: list[str]) -> dict[str, object]:
    """Attributes of the results: those of the first message, and the names of all arrays of *labels*."""
    about = plain_attributes(message.attrs) | _units(message.attrs.get("unit"))
    # Those with the name of a dimension are known to be coordinates; a space would make two names of one.
    others = [name for name in labels if name not in dims and " " not in name]
    if others:
        about["coordinates"] = " ".join(others)
    return about


def attributes_of_axis(message: AxisArray, dim: str) -> dict[str, object]:
    """Attributes of the times of rows, or of labels."""
    axis = message.axes.get(dim)
    unit = getattr(axis, "unit", "s")
    about: dict[str, object] = {"unit": unit} | _units(unit)
    if isinstance(axis, LinearAxis) and axis.unit == "s" and axis.gain > 0:
        about["sampling_rate"] = 1 / float(axis.gain)
    return about


def consolidate(path: Path) -> None:
    """Put what is known of all arrays into one file, which xarray asks for."""
    import_extra("zarr").consolidate_metadata(str(path), **({"zarr_format": 2} if is_zarr_3() else {}))
