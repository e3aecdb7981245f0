"""Messages as arrays of a Zarr group: axes, dtypes, chunks and compression.

A whole chunk is written as Zarr's format 2 says, which is a file of its values in C order, compressed. Zarr would
compare it with the fill value, copy it, and hand it through an event loop to other threads: two to three times the
work of the file itself. Whatever is not as simple goes through Zarr.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis

from ..stream.convert import is_integer, is_mlx_array, mlx_to_numpy, numpy_to_integers
from ..stream.segments import same_axis, value_at
from ..stream.unit import check_count, check_number
from .reading import import_extra

if typing.TYPE_CHECKING:
    import zarr

if typing.TYPE_CHECKING:
    from numcodecs.abc import Codec

    Compressor: typing.TypeAlias = Codec | typing.Literal["default"] | None

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32")
"""What results can be kept as."""


@dataclass(frozen=True)
class ResultLayout:
    """See the arguments of :class:`ezmsg.mlx.ZarrSink`, which these are.

    Raises:
        ValueError: An argument is not in its range.
        TypeError: An argument is not of its type.
    """

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
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"'dtype' must be None or one of {', '.join(map(repr, DTYPES))}, got {self.dtype!r}")
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

    def chunks(self, row: Sequence[int], dtype: np.dtype, n_rows: int | None) -> tuple[int, ...]:
        """The lengths of a chunk.

        Args:
            row: Shape of the results at one time.
            dtype: Of the results.
            n_rows: Rows that a chunk is to divide, if it can; None for no such number.
        """
        n_bytes = max(dtype.itemsize * math.prod(row), 1)
        most = self.chunk_samples or max(int(self.chunk_mb * 2**20 / n_bytes), 1)
        rest = list(row)
        if rest and self.chunk_channels is not None:
            rest[0] = min(self.chunk_channels, rest[0])
        return (rows_of_chunk(most, n_rows), *rest)

    def __str__(self) -> str:
        """What values depend on; empty where they are as the chain gives them."""
        return "" if self.dtype is None else f"results as {self.dtype}"


def rows_of_chunk(most: int, n_rows: int | None) -> int:
    """Length of a chunk: *most* at most, and a divisor of *n_rows* if one is not much shorter."""
    if not n_rows or n_rows <= most:
        return n_rows or most
    fewest = -(-n_rows // most)
    return next((n_rows // n for n in range(fewest, 2 * fewest + 1) if n_rows % n == 0), most)


LABEL = "label"
"""The field of records that gives the dimension its name."""


def times(axis: AxisBase | None, dim: str, n_samples: int) -> npt.NDArray[np.float64]:
    """When *n_samples* rows are.

    Raises:
        ValueError: There is no axis, or one of another length.
        TypeError: Its values are not real numbers.
    """
    if isinstance(axis, LinearAxis):
        return value_at(axis, np.arange(n_samples))
    if not isinstance(axis, CoordinateAxis):
        raise ValueError(f"Results need an axis {dim!r} that says when they are.")
    values = _values(axis, dim, n_samples)
    if values.dtype.kind not in "iuf":
        raise TypeError(f"The axis {dim!r} has values of dtype {values.dtype}; allowed are real numbers.")
    return values.astype(np.float64)


def check_axes(known: dict[str, AxisBase | None], message: AxisArray, dims: list[str]) -> None:
    """Compare the axes of a message along *dims* with *known* ones, which those of the first message become.

    Raises:
        ValueError: One is another.
    """
    for dim in dims:
        axis = message.axes.get(dim)
        first = known.setdefault(dim, axis)
        if first is not axis and (first is None or axis is None or not same_axis(first, axis)):
            raise ValueError(f"Results have another axis {dim!r} than those before: they do not fit together.")


def labels_of(message: AxisArray, dims: list[str], taken: set[str]) -> list[tuple[str, str, npt.NDArray]]:
    """For each array of values along *dims* its name, its dimension, and its values.

    Raises:
        ValueError: An axis has another length than the data, or a name among *taken* or that of another.
        TypeError: Its values are neither numbers nor text.
    """
    found = [
        (name, dim, values)
        for dim in dims
        for name, values in _coordinates(
            message.axes.get(dim), dim, message.data.shape[message.dims.index(dim)]
        ).items()
    ]
    names = [*taken, *(name for name, _, _ in found)]
    for name in (*dims, *names):
        if name in taken & set(dims) or names.count(name) > 1:
            raise ValueError(f"An axis or a field of its labels is named {name!r}, which the group has already.")
    return found


def _coordinates(axis: AxisBase | None, dim: str, length: int) -> dict[str, npt.NDArray]:
    """The values of an axis under the names of their arrays; of records, each field as ``<dim>_<field>``.

    Raises:
        ValueError: It has another length than the data.
        TypeError: Its values are neither numbers nor text.
    """
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


def plain_attributes(attrs: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Of *attrs*, what JSON can hold."""
    found: dict[str, typing.Any] = {}
    for name, value in attrs.items():
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        found[str(name)] = value
    return found


_BLOCK = 4096
"""Bytes of which only the sum enters a checksum."""

Rows = tuple[npt.NDArray, npt.NDArray]
"""Times, and as many rows."""


class RowBuffer:
    """Collects rows until they fill a chunk.

    Args:
        size: Rows of a chunk.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._times = np.empty((0,))
        self._rows = np.empty((0,))
        self.n = 0
        """How many there are."""

    def take(self, times: npt.NDArray, rows: npt.NDArray) -> Iterator[Rows]:
        """Add rows, which are copied; the chunks that they fill, each valid until the next one is asked for."""
        first = 0
        while first < len(rows):
            if not self.n and len(rows) - first >= self._size:
                yield times[first : first + self._size], rows[first : first + self._size]
                first += self._size
                continue
            if len(self._rows) != self._size:
                self._times = np.empty((self._size,), times.dtype)
                self._rows = np.empty((self._size, *rows.shape[1:]), rows.dtype)
            n = min(self._size - self.n, len(rows) - first)
            self._times[self.n : self.n + n] = times[first : first + n]
            self._rows[self.n : self.n + n] = rows[first : first + n]
            self.n, first = self.n + n, first + n
            if self.n == self._size:
                self.n = 0
                yield self._times, self._rows

    @property
    def rest(self) -> Rows:
        """The rows that fill no chunk yet."""
        return self._times[: self.n], self._rows[: self.n]


class ChunkFiles:
    """Writes whole chunks of an array to their files.

    Args:
        array: The array.
        group: The folder of the group that it is in.
    """

    def __init__(self, array: zarr.Array, group: Path) -> None:
        self._array, self._folder = array, group / array.basename
        about = json.loads((self._folder / ".zarray").read_text())
        self._chunks = tuple(about["chunks"])
        self._is_simple = (
            array.dtype.kind in "biufc"
            and not about["filters"]
            and about["order"] == "C"
            and about.get("dimension_separator", ".") == "."
            and math.prod(about["chunks"]) * math.prod(about["shape"][1:]) > 0
        )
        compressor = about["compressor"]
        self._encode: Callable[[npt.NDArray], bytes] | None = None
        if compressor is not None and self._is_simple:
            self._encode = import_extra("numcodecs").get_codec(compressor).encode
        sides = zip(about["shape"][1:], self._chunks[1:], strict=True)
        self._places = list(itertools.product(*(range(-(-length // chunk)) for length, chunk in sides)))

    def write(self, begin: int, rows: npt.NDArray) -> None:
        """Write the rows from number *begin* on, which is the first of a chunk.

        The array is then as long as they need, or longer: up to twice as long, since its description is written anew
        each time that it grows.
        """
        if self._array.shape[0] < begin + len(rows):
            self._array.resize((max(begin + len(rows), 2 * self._array.shape[0]), *self._array.shape[1:]))
        if not self._is_simple or len(rows) != self._chunks[0]:
            self._array[begin : begin + len(rows)] = rows
            return
        for place in self._places:
            self._write_chunk((begin // self._chunks[0], *place), rows)

    def _write_chunk(self, place: tuple[int, ...], rows: npt.NDArray) -> None:
        """Write what lies at *place* along the dimensions behind the first."""
        sides = zip(place[1:], self._chunks[1:], strict=True)
        part = rows[(slice(None), *(slice(number * size, (number + 1) * size) for number, size in sides))]
        values = np.ascontiguousarray(part, self._array.dtype)
        if values.shape != self._chunks:
            # A chunk at the end is as large as the others.
            values = np.zeros(self._chunks, self._array.dtype)
            values[tuple(map(slice, part.shape))] = part
        content = values.reshape(-1).view(np.uint8).data if self._encode is None else _elsewhere(self._encode, values)
        path = self._folder / ".".join(map(str, place))
        # A new file, since one that is there may have a second name, under which it is to stay.
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            file.write(content)


def _elsewhere(encode: Callable[[npt.NDArray], bytes], rows: npt.NDArray) -> bytes:
    """What *encode* makes of *rows*, in a thread other than the main one.

    There Blosc starts no threads, as it does not where Zarr calls it: workers have the cores, and bytes depend on it.
    """
    if threading.current_thread() is not threading.main_thread():
        return encode(rows)
    found: list[bytes] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(encode(rows))
        except BaseException as error:  # to be raised in the other thread
            errors.append(error)

    thread = threading.Thread(target=run, name="compressing")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


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
    zarr = import_extra("zarr")
    # The same format from both major versions, which call the argument differently.
    version = {"zarr_format" if int(zarr.__version__.split(".")[0]) > 2 else "zarr_version": 2}
    return zarr.open_group(str(path), mode="w", **version)


def add_array(
    group: typing.Any,
    name: str,
    dims: list[str],
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: np.dtype,
    compressor: Compressor = "default",
    attributes: Mapping[str, object] | None = None,
) -> zarr.Array:
    """A new array with named dimensions."""
    is_new = hasattr(group, "create_array")  # in Zarr 3
    create = group.create_array if is_new else group.create_dataset
    # Both versions call it differently, and have their own default.
    options = {} if compressor == "default" else {"compressors" if is_new else "compressor": compressor}
    chunks = tuple(max(length, 1) for length in chunks)
    array = create(name, shape=shape, chunks=chunks, dtype=dtype, fill_value=None, **options)
    # All at once, since each time the file of the attributes is written anew.
    array.attrs.put({DIMENSIONS: dims, **(attributes or {})})
    return array


def add_labels(group: typing.Any, message: AxisArray, labels: list[tuple[str, str, npt.NDArray]]) -> None:
    """Arrays of labels: for each its name, its dimension and its values."""
    for name, dim, values in labels:
        about = attributes_of_axis(message, dim)
        array = add_array(group, name, [dim], values.shape, values.shape, values.dtype, attributes=about)
        array[:] = values


def attributes_of_data(message: AxisArray, dims: list[str], labels: list[str]) -> dict[str, object]:
    """What is said of the results.

    Args:
        message: The first ones.
        dims: Their dimensions.
        labels: Names of all arrays of labels.
    """
    about = dict(plain_attributes(message.attrs))
    if isinstance(message.attrs.get("unit"), str):
        about["units"] = message.attrs["unit"]
    # Those with the name of a dimension are known to be coordinates; a space would make two names of one.
    others = [name for name in labels if name not in dims and " " not in name]
    if others:
        about["coordinates"] = " ".join(others)
    return about


def attributes_of_axis(message: AxisArray, dim: str) -> dict[str, object]:
    """What is said of the times of rows, or of labels."""
    axis = message.axes.get(dim)
    unit = getattr(axis, "unit", "s")
    about: dict[str, object] = {"unit": unit} | ({"units": unit} if unit else {})
    if isinstance(axis, LinearAxis) and axis.unit == "s" and axis.gain > 0:
        about["sampling_rate"] = 1 / float(axis.gain)
    return about


def consolidate(path: Path) -> None:
    """Put what is known of all arrays into one file, which xarray asks for."""
    zarr = import_extra("zarr")
    version = {"zarr_format": 2} if int(zarr.__version__.split(".")[0]) > 2 else {}
    zarr.consolidate_metadata(str(path), **version)
