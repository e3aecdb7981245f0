"""Results of pieces of a recording in Zarr groups of their own, and one group made of them.

Chunks that lie in the whole as they lie in a piece are not compressed anew: the same file gets a second name (a hard
link). A piece has such chunks where the length of its results is a multiple of the length of a chunk, which is chosen
for that. Until the whole is committed, no file of a piece that is complete is written to or removed.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray

from .contracts import ResultSink
from .durable import FolderLock, is_there, write_durably
from .extra import import_extra
from .zarrchunks import RowBuffer

if typing.TYPE_CHECKING:
    import zarr

_SECONDS_TO_WAIT = 600.0
"""For a worker that somebody has given up, while it was still alive."""


class JoinsPieces:
    """What lets :class:`~.zarrsink.ZarrSink`, which is derived from it, be written in pieces."""

    path: Path
    partial: Path
    _wait: float
    _lock: FolderLock | None
    _fingerprint: str
    _group: zarr.Group | None
    _arrays: dict[str, zarr.Array]
    _times: str
    _waiting: RowBuffer | None
    _n_written: int

    _n_rows: int | None = None
    """Rows of a piece, of which a chunk is to be a divisor; None for results that are not a piece."""

    def piece(self, number: int, n_results: int) -> ZarrPiece:
        """See :obj:`ezmsg.mlx.PiecewiseSink`."""
        inner = copy.copy(self)
        inner.path = self._folder() / f"{number}.zarr"
        inner.partial = inner.path.with_name(inner.path.name + ".partial")
        inner._wait, inner._lock, inner._n_rows = _SECONDS_TO_WAIT, None, n_results
        inner._forget()
        return ZarrPiece(typing.cast(ResultSink, inner), inner.path)

    def _folder(self) -> Path:
        """Where the pieces are; those of other settings are elsewhere, whoever still writes them."""
        return self.partial / f"pieces-{zlib.crc32(self._fingerprint.encode()):08x}"

    def join(self, n_pieces: int, about: Mapping[str, float]) -> None:
        """See :obj:`ezmsg.mlx.PiecewiseSink`.

        Raises:
            ValueError: Results of two pieces do not fit together.
        """
        open_group = import_extra("zarr").open_group
        results = self.partial / "results"
        shutil.rmtree(results, ignore_errors=True)
        paths = [self._folder() / f"{number}.zarr" for number in range(n_pieces)]
        with_rows = [path for path in paths if is_there(path / ".zgroup")]
        if not with_rows:
            return
        streamed = _streamed(open_group(str(with_rows[0]), mode="r"))
        _copy_without_rows(with_rows[0], results, streamed)
        self._group = group = open_group(str(results), mode="r+")
        self._times = streamed[1]
        self._arrays = {name: typing.cast("zarr.Array", group[name]) for name in streamed}
        self._n_written = 0
        self._set_up()
        for array in self._arrays.values():
            array.resize((0, *array.shape[1:]))
        # For pictures: where pieces meet.
        first_rows = []
        for path in with_rows:
            first_rows.append(self._n_written + self._n_waiting)
            piece = open_group(str(path), mode="r")
            _check_alike(typing.cast("zarr.Array", piece["data"]), self._arrays["data"])
            self._extend({name: typing.cast("zarr.Array", piece[name]) for name in streamed}, path)
        group.attrs["pieces"] = {**about, "first_rows": first_rows}

    def _extend(self, rows: dict[str, zarr.Array], path: Path) -> None:
        """Add the rows of a piece, by links where its chunks lie as they are to lie."""
        size, n = self._arrays["data"].chunks[0], rows["data"].shape[0]
        linked = 0
        if not self._n_waiting and all(array.chunks[0] == size for array in rows.values()):
            while linked + size <= n and all(self._link(rows[name], path / name, linked // size) for name in rows):
                linked += size
                self._n_written += size
            for array in self._arrays.values():
                array.resize((self._n_written, *array.shape[1:]))
        for begin in range(linked, n, size):
            end = min(begin + size, n)
            when, data = (np.asarray(rows[name][begin:end]) for name in (self._times, "data"))
            self._take(when, data)

    def _link(self, array: zarr.Array, folder: Path, chunk: int) -> bool:
        """Give the chunks of a piece at one time, as files, their names in the whole as well; whether that was done."""
        new = self._n_written // array.chunks[0]
        grid = [range(-(-n // size)) for n, size in zip(array.shape[1:], array.chunks[1:], strict=True)]
        linked: list[Path] = []
        for rest in itertools.product(*grid):
            name, new_name = (".".join(map(str, (number, *rest))) for number in (chunk, new))
            target = self.partial / "results" / folder.name / new_name
            try:
                os.link(folder / name, target)
            except OSError:  # a file system without links, or chunks that are not files of these names
                for path in linked:
                    path.unlink()
                return False
            linked.append(target)
        return True

    def _forget(self) -> None:
        raise NotImplementedError

    def _set_up(self) -> None:
        raise NotImplementedError

    def _take(self, when: npt.NDArray, rows: npt.NDArray) -> None:
        raise NotImplementedError

    @property
    def _n_waiting(self) -> int:
        return 0 if self._waiting is None else self._waiting.n


class ZarrPiece:
    """The results of one piece, see :obj:`ezmsg.mlx.PieceSink`.

    Args:
        inner: A sink for them.
        path: Its group. Beside it is the note, which is written last: a piece without one is not complete.
    """

    def __init__(self, inner: ResultSink, path: Path) -> None:
        self._inner = inner
        self._path = path
        self._name = f"piece {path.stem}"
        self._note = path.with_suffix(".note")
        self._has_rows = False

    def open(self) -> bytes | None:
        """See :obj:`ezmsg.mlx.PieceSink`."""
        note = self._read_note()
        if note is None and self._inner.open(self._name, self._name).is_complete:
            # Another worker has just finished it, or one has died before it wrote the note.
            note = self._read_note()
            if note is None:
                shutil.rmtree(self._path)
                self._inner.close()
                self._inner.open(self._name, self._name)
        self._has_rows = False
        return note

    def _read_note(self) -> bytes | None:
        return self._note.read_bytes() if is_there(self._note) else None

    def append(self, message: AxisArray) -> None:
        """See :obj:`ezmsg.mlx.PieceSink`."""
        self._inner.append(message)
        self._has_rows = True

    def commit(self, note: bytes) -> None:
        """See :obj:`ezmsg.mlx.PieceSink`."""
        if self._has_rows:
            self._inner.commit()
        write_durably(self._note, note)

    def close(self) -> None:
        """See :obj:`ezmsg.mlx.PieceSink`."""
        self._inner.close()


def _streamed(group: zarr.Group) -> tuple[str, str]:
    """Names of the arrays with a row for each result: the data, and the times of the rows."""
    dims = typing.cast("list[str]", group["data"].attrs["_ARRAY_DIMENSIONS"])
    return "data", "time" if "time" not in dims[1:] else dims[0]


def _copy_without_rows(piece: Path, results: Path, streamed: tuple[str, str]) -> None:
    """The group of a piece, with labels and attributes, but without the chunks of what is streamed."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        if Path(folder) == piece:
            return [".zmetadata"]
        return [name for name in names if not name.startswith(".")] if Path(folder).name in streamed else []

    shutil.copytree(piece, results, ignore=ignored)


def _check_alike(array: zarr.Array, whole: zarr.Array) -> None:
    one, other = ((each.shape[1:], each.dtype, dict(each.attrs)) for each in (array, whole))
    if one != other:
        raise ValueError(f"Results have (shape, dtype, attributes) {one}, those before had {other}: they do not fit.")
