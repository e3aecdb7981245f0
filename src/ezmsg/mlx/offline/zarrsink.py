"""Results in Zarr groups that appear under their final name when they are complete.

Chunks that lie in the whole as they lie in a piece are not compressed anew: the same file gets a second name (a hard
link). A piece has such chunks where the length of its results is a multiple of the length of a chunk, which is chosen
for that. Until the whole is committed, no file of a piece that is complete is written to or removed.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import itertools
import os
import shutil
import time
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

from ..stream.unit import check_number, check_path
from .checkpoint import differences, pack, unpack
from .contracts import Opened, ResultSink
from .reading import import_extra
from .zarrlayout import (
    DIMENSIONS,
    ChunkFiles,
    ResultLayout,
    RowBuffer,
    add_array,
    add_labels,
    attributes_of_axis,
    attributes_of_data,
    check_axes,
    checksum,
    consolidate,
    labels_of,
    new_group,
    times,
)

if typing.TYPE_CHECKING:
    import zarr

    from .zarrlayout import Compressor

_SECONDS_BETWEEN_TRIES = 0.2

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


class FolderLock:
    """The lock of a folder, held by this process from its making to :meth:`release`.

    The folder is made if need be, and the file ``lock`` in it is locked. Whoever has the lock may remove the folder.
    The system unlocks it when the process ends, in whatever way. A child that is forked meanwhile does not have it.

    Args:
        folder: Of what one process at a time may write.
        wait: Seconds to wait for another process.
        what: What is being written, for the error.

    Raises:
        BlockingIOError: Another process has the lock, and still has it after *wait* seconds.
        OSError: The file system has no locks.
    """

    def __init__(self, folder: Path, wait: float, what: Path) -> None:
        self._descriptor: int | None = _locked(folder, wait, what)
        self._process = os.getpid()
        _held.add(self._descriptor)

    def release(self) -> None:
        """Let others have it. In a forked child this does nothing, since the lock is its parent's."""
        if self._descriptor is None or self._process != os.getpid():
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(descriptor)
        # Closing alone would leave it locked as long as a copy of the descriptor is open elsewhere.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _forget_inherited() -> None:
    # The lock belongs to the open file, which a child shares: it would stay locked until both have ended.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_inherited)


def _locked(folder: Path, wait: float, what: Path) -> int:
    deadline = time.monotonic() + wait
    path = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed it together with the folder.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise BlockingIOError(f"{what} is being written by another process.") from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
        except OSError as error:
            os.close(lock)
            raise OSError(error.errno, f"{path} cannot be locked: {error.strerror}") from error
        os.close(lock)


def is_there(path: Path) -> bool:
    """Whether *path* exists; unlike ``Path.exists``, an error of the system is not taken for a no.

    Raises:
        OSError: It cannot be found out.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_of_the_system(error: Exception) -> bool:
    """Whether *error* says that something could not be read, and not that it is missing or damaged."""
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, missing)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there with all of *content*, or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Wait until everything in *folder* is on the disk, so that a new name never stands for less than all of it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Wait until the names in *folder* are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


class ZarrSink(JoinsPieces):
    """A Zarr group as a sink for :func:`ezmsg.mlx.process_recording`.

    The group (Zarr format 2, which every version reads) holds ``data`` of shape (time, ...), ``time`` in seconds, one
    entry for each row of ``data``, and the coordinates of the other axes under their names; the attribute ``recipe``
    tells recording, chain and settings. ``xarray.open_zarr(path)`` shows it with its labels. The times say the
    ``sampling_rate`` of the results, where they have one.

    The attributes of ``data`` are the attrs of the first message: of an NWB recording, those that say how to get from
    counts to volts (``nwb_scaling_gain``, ``nwb_scaling_unit``, and whether that was applied). Labels that are records
    give an array for each field, ``<dimension>_<field>``. Where the stream dimension is not time but another dimension
    is (windows), the times of the rows go by the name of the stream dimension.

    Until it is complete, everything is in ``<name>.partial`` beside it: the group, the last checkpoint and a lock. It
    is then renamed, which is atomic. What a run needs to go on is never written again: chunks of the group are
    written once, when they are full, and rows that fill none yet are kept in the checkpoint.

    Args:
        path: Folder of the group. ``path.parent`` is made if need be.
        chunk_mb: Size of the rows in a chunk of ``data`` in MiB, uncompressed. So much is kept in memory.
        chunk_samples: Length of a chunk in rows instead. A piece of a recording is made of whole chunks, so that those
            of its results may be shorter.
        chunk_channels: Entries of the dimension after the stream's in a chunk, for who reads few channels over a long
            time. None: all.
        compressor: Of ``data``: a codec of numcodecs, for example ``numcodecs.Blosc("zstd", 5, 2)``; None for none;
            ``"default"`` for that of the installed Zarr. Results that were begun keep theirs, and their chunks.
        dtype: What results are kept as, for example ``"int16"``, which is part of the recipe. Integers are rounded to
            the nearest one and saturate, and NaN becomes 0. None: as the chain gives them.
        wait: Seconds to wait for another process that is writing the same results.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        ValueError: An argument is not in its range.
        TypeError: *path* is not a path; a number is none (a bool is not one); *compressor* is none.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        chunk_mb: float = 4.0,
        chunk_samples: int | None = None,
        chunk_channels: int | None = None,
        compressor: Compressor = "default",
        dtype: str | None = None,
        wait: float = 0.0,
    ) -> None:
        check_path("path", path)
        check_number("wait", wait, zero=True, infinite=True)
        import_extra("zarr")
        self._layout = ResultLayout(chunk_mb, chunk_samples, chunk_channels, compressor, dtype)
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._wait = wait
        self._lock: FolderLock | None = None
        self._fingerprint = self._recipe = ""
        self._forget()

    def _forget(self) -> None:
        self._group: zarr.Group | None = None
        self._arrays: dict[str, zarr.Array] = {}
        """``data`` and the times of its rows; a group opens an array anew whenever it is asked for it."""
        self._times = "time"
        """What the times of rows are called."""
        self._axes: dict[str, AxisBase | None] = {}
        """Of the first results, but for the stream axis."""
        self._files: dict[str, ChunkFiles] = {}
        self._waiting: RowBuffer | None = None
        """Times and rows that fill no chunk yet."""
        self._n_written = 0
        self._checksum = 0
        """Of all rows and times in the group, chunk by chunk, but in a piece, which has no checkpoints."""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """See :obj:`ezmsg.mlx.ResultSink`.

        Raises:
            BlockingIOError: Another process is writing these results, and still is after *wait* seconds.
            FileExistsError: There are complete results of another recipe.
            OSError: What is there cannot be looked at. Nothing is removed.
        """
        own = f"\n{self._layout}" if str(self._layout) else ""
        self._recipe, self._fingerprint = recipe + own, fingerprint + own
        # Before anything is made, and again after waiting for another process that may have finished them.
        self._check_recipe()
        self._lock = FolderLock(self.partial, self._wait, self.path)
        if self._check_recipe():
            self._remove_partial()
            return Opened(True, None)
        return Opened(False, self._resume())

    def _check_recipe(self) -> bool:
        """Whether the results are there; FileExistsError if they, or whatever is there, are of another recipe."""
        if not is_there(self.path):
            return False
        zarr = import_extra("zarr")
        try:
            recipe = zarr.open_group(str(self.path), mode="r").attrs.get("recipe")
        except Exception as error:  # each version of Zarr has its own
            if is_of_the_system(error):
                raise
            raise FileExistsError(f"{self.path} is there already, and no results of this kind ({error}).") from error
        if recipe != self._recipe:
            raise FileExistsError(
                f"{self.path} has results of another recording, or with other settings; remove it or choose another "
                f"name. Here {'; '.join(differences(str(recipe), self._recipe))}."
            )
        return True

    def _resume(self) -> bytes | None:
        try:
            saved, reason = self._last_checkpoint()
        except Exception as error:  # whatever a damaged file leads to
            if is_of_the_system(error):
                raise
            saved, reason = None, f"cannot be read ({error})"
        if saved is None:
            if reason:
                recording = self._recipe.partition("\n")[0]
                ez.logger.info(f"{self.partial} {reason}; starting over with {recording}.")
            self.restart()
        return saved

    def _last_checkpoint(self) -> tuple[bytes | None, str]:
        """The state to go on from, or why there is none; empty: nothing has begun yet."""
        results = self.partial / "results"
        try:
            packed = (self.partial / "checkpoint").read_bytes()
        except FileNotFoundError:
            return None, "was interrupted without a checkpoint" if is_there(results) else ""
        saved = typing.cast(dict[str, typing.Any], unpack(packed, ()))
        if saved["fingerprint"] != self._fingerprint:
            return None, "has a checkpoint of another recording, of other settings or from another environment"
        if saved["n_written"] is not None:
            self._group = import_extra("zarr").open_group(str(results), mode="r+")
            self._times = saved["times"]
            self._arrays = {name: typing.cast("zarr.Array", self._group[name]) for name in ("data", self._times)}
            if self._checksum_of(saved["n_written"]) != saved["checksum"]:
                return None, "lacks results that its checkpoint counts on"
            self._truncate(saved["n_written"], saved["checksum"])
            self._set_up()
            for when, rows in saved["waiting"]:
                self._take(when, rows)
        return saved["state"], ""

    def restart(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._forget()
        for entry in self.partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def _checksum_of(self, n: int) -> int:
        """Of the first *n* rows."""
        found, size = 0, self._rows_per_chunk
        for begin in range(0, n, size):
            for array in self._arrays.values():
                found = checksum(np.asarray(array[begin : min(begin + size, n)]), found)
        return found

    def _truncate(self, n: int, checksum: int) -> None:
        """Drop rows from number *n* on."""
        self._n_written, self._checksum = n, checksum
        for array in self._arrays.values():
            array.resize((n, *array.shape[1:]))

    @property
    def _rows_per_chunk(self) -> int:
        return self._arrays["data"].chunks[0]

    def append(self, message: AxisArray) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`. MLX data is converted.

        Raises:
            ValueError: Shape, dtype, dimensions or axes are not those of the first results; the stream dimension has no
                axis, or there is no dimension; an axis has another length than the data, or a name that is taken.
            TypeError: An axis has values that are neither numbers nor text.
        """
        if not message.dims:
            raise ValueError("Results have data of shape (), without a dimension; rows of them need one.")
        dim = resolve_stream_dim(message)
        data = self._layout.converted(message.data)
        data = np.moveaxis(data, message.get_axis_idx(dim), 0)
        dims = [dim, *(name for name in message.dims if name != dim)]
        if self._group is None:
            self._create(message, dims, data)
        array = self._arrays["data"]
        known_dims = list(typing.cast(list[str], array.attrs[DIMENSIONS]))
        given, expected = (data.shape[1:], data.dtype, dims), (array.shape[1:], array.dtype, known_dims)
        if given != expected:
            raise ValueError(
                f"Results have (shape, dtype, dims) {given}, those before had {expected}: they do not fit together."
            )
        if not len(data):
            return
        check_axes(self._axes, message, dims[1:])
        when = times(message.axes.get(dim), dim, len(data))
        self._take(when, data)

    def _set_up(self) -> None:
        """Get ready to write rows."""
        self._waiting = RowBuffer(self._rows_per_chunk)
        self._files = {name: ChunkFiles(each, self.partial / "results") for name, each in self._arrays.items()}

    def _take(self, when: npt.NDArray, rows: npt.NDArray) -> None:
        """Add rows, and write the chunks that they fill."""
        for chunk in typing.cast(RowBuffer, self._waiting).take(when, rows):
            self._write(*chunk)

    def _create(self, message: AxisArray, dims: list[str], data: npt.NDArray) -> None:
        self._group = group = new_group(self.partial / "results")
        rest = data.shape[1:]
        chunks = self._layout.chunks(rest, data.dtype, self._n_rows)
        self._times = "time" if "time" not in dims[1:] else dims[0]
        labels = labels_of(message, dims[1:], {"data", self._times})
        about = attributes_of_data(message, dims, [name for name, _, _ in labels])
        of_times = attributes_of_axis(message, dim := dims[0])
        kind, compressor = np.dtype(np.float64), self._layout.compressor
        self._arrays = {
            "data": add_array(group, "data", dims, (0, *rest), chunks, data.dtype, compressor, about),
            self._times: add_array(group, self._times, [dim], (0,), chunks[:1], kind, attributes=of_times),
        }
        add_labels(group, message, labels)
        group.attrs["key"] = message.key
        self._set_up()

    def _write(self, when: npt.NDArray, rows: npt.NDArray) -> None:
        """Write a chunk, or what is left at the end."""
        begin, end = self._n_written, self._n_written + len(rows)
        for name, values in (("data", rows), (self._times, when)):
            self._files[name].write(begin, values)
            if self._n_rows is None:
                self._checksum = checksum(values, self._checksum)
        self._n_written = end

    def checkpoint(self, state: bytes) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        saved: dict[str, object] = {"fingerprint": self._fingerprint, "state": state, "n_written": None}
        if self._group is not None:
            waiting = [typing.cast(RowBuffer, self._waiting).rest]
            saved |= {"n_written": self._n_written, "checksum": self._checksum, "waiting": waiting}
            saved["times"] = self._times
        write_durably(self.partial / "checkpoint", pack(saved, ()))

    def commit(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`.

        Raises:
            ValueError: There were no results at all.
            FileExistsError: Something has taken the final name meanwhile.
        """
        if self._group is None:
            raise ValueError("There are no results: the recording may be shorter than what the chain needs for one.")
        if self._waiting is not None and self._waiting.n:
            self._write(*self._waiting.rest)
        for array in self._arrays.values():
            array.resize((self._n_written, *array.shape[1:]))
        self._group.attrs["recipe"] = self._recipe
        results = self.partial / "results"
        if self._n_rows is None:
            consolidate(results)
        sync_tree(results)
        if is_there(self.path):
            raise FileExistsError(f"{self.path} is there already; the new results are in {results}.")
        os.rename(results, self.path)
        sync_folder(self.path.parent)
        self._remove_partial()

    def _remove_partial(self) -> None:
        # Another process that has waited for the lock may be about to do the same.
        shutil.rmtree(self.partial, ignore_errors=True)

    def close(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._forget()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
