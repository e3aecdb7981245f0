"""Chunks of rows, from messages of any length to files of a Zarr group.

A whole chunk is written as Zarr's format 2 says, which is a file of its values in C order, compressed. Zarr would
compare it with the fill value, copy it, and hand it through an event loop to other threads: two to three times the
work of the file itself. Whatever is not as simple goes through Zarr.
"""

import itertools
import json
import math
import threading
import typing
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .extra import import_extra

if typing.TYPE_CHECKING:
    import zarr

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

    def __init__(self, array: "zarr.Array", group: Path) -> None:
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
