"""Results in Zarr groups that appear under their final name when they are complete.

Pieces of a recording write rows of the same arrays. Their borders are borders of chunks, so that no two of them write
to the same file, whichever process they run in.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import time
import typing
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

from ..stream.unit import check_number, check_path
from . import zarrlayout
from .checkpoint import differing_settings, pack, unpack
from .contracts import Opened
from .reading import import_extra
from .zarrlayout import ResultLayout, RowBuffer, RowWriter

if typing.TYPE_CHECKING:
    import zarr

    from .zarrlayout import Compressor

_SECONDS_BETWEEN_TRIES = 0.2

_held: set[FolderLock] = set()
"""The locks that this process holds."""


class FolderLock:
    """The lock of a folder, held by this process from its making to :meth:`release`.

    The folder is made if need be, and the file ``lock`` in it is locked. Whoever has the lock may remove the folder.
    The system unlocks it when the process ends, in whatever way. A child that is forked meanwhile does not have it.
    BlockingIOError if another process is writing *what*, and still is after *wait* seconds.
    """

    def __init__(self, folder: Path, wait: float, what: Path) -> None:
        self._descriptor: int | None = _locked(folder, wait, what)
        _held.add(self)

    def release(self) -> None:
        """Let others have it. In a forked child this does nothing, since the lock is its parent's."""
        if self._descriptor is not None:
            # Closing alone would leave it locked as long as a copy of the descriptor is open elsewhere.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close what this process has of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)


def _forget_inherited() -> None:
    # The lock belongs to the open file, which a child shares: it would stay locked until both have ended.
    for lock in [*_held]:
        lock.forget()


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
    """Whether *path* exists; unlike ``Path.exists``, an error of the system is raised, not taken for a no."""
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
    sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Wait until everything in *folder* is on the disk, so that a new name never stands for less than all of it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Results:
    """Rows from number *first* on, on their way into a group: ``data``, their times, and the labels of the other axes.

    The group is made with the first results; several processes may do that at a time, which begin to write at
    *borders*. The last one is the number of all rows; there are none for one process.
    """

    def __init__(self, folder: Path, layout: ResultLayout, first: int = 0, borders: Sequence[int] = ()) -> None:
        self.n_written = first
        """Number of the row behind the last that was written."""
        self.checksum = 0
        """Of all rows and times that were written, chunk by chunk."""
        self.times = "time"
        """Name of the times of the rows."""
        self.writers: dict[str, RowWriter] = {}
        """Of ``data`` and the times."""
        self._folder, self._layout = folder, layout
        self._borders = borders
        self._axes: dict[str, AxisBase | None] = {}
        """Of the first results, but for the stream axis."""
        self.waiting = RowBuffer(0)
        """Times and rows that fill no chunk yet."""

    @property
    def rows_per_chunk(self) -> int:
        """Length of a chunk."""
        return self.writers["data"].array.chunks[0]

    def open(self, times: str) -> None:
        """Go on with the group that is there, in which the times of the rows are called *times*."""
        group = import_extra("zarr").open_group(str(self._folder), mode="r+")
        self.times = times
        self.writers = {name: RowWriter(group[name], self._folder) for name in ("data", times)}
        self.waiting = RowBuffer(self.rows_per_chunk)

    def append(self, message: AxisArray) -> None:
        """Add the rows of a message, see :meth:`ZarrSink.append`."""
        if not message.dims:
            raise ValueError("Results have data of shape (), without a dimension; rows of them need one.")
        dim = resolve_stream_dim(message)
        data = self._layout.converted(message.data)
        data = np.moveaxis(data, message.get_axis_idx(dim), 0)
        dims = [dim, *(name for name in message.dims if name != dim)]
        if not self.writers:
            self._begin(message, dims, data)
        array = self.writers["data"].array
        names = [zarrlayout.name_of_array(name) for name in dims]
        given = data.shape[1:], data.dtype, names
        expected = array.shape[1:], array.dtype, list(typing.cast("list[str]", array.attrs[zarrlayout.DIMENSIONS]))
        if given != expected:
            raise ValueError(
                f"Results have (shape, dtype, dims) {given}, those before had {expected}: they do not fit together."
            )
        if len(data):
            zarrlayout.check_axes(self._axes, message, dims[1:])
            self.take(zarrlayout.times(message.axes.get(dim), dim, len(data)), data)

    def _begin(self, message: AxisArray, dims: list[str], data: npt.NDArray) -> None:
        """Make the group, or see whether the one that another process has made is for such messages."""
        self.times = "time" if "time" not in dims[1:] else zarrlayout.name_of_array(dims[0])
        labels = zarrlayout.labels_of(message, dims[1:], {"data", self.times})
        dims = [zarrlayout.name_of_array(name) for name in dims]
        about = zarrlayout.attributes_of_data(message, dims, [name for name, _, _ in labels])
        if not is_there(self._folder):
            new = self._folder.with_name(f"{self._folder.name}.{uuid.uuid4().hex}")
            group = zarrlayout.new_group(new)
            n_rows, length = (self._borders[-1], self._borders[1]) if self._borders else (0, 0)
            chunks = self._layout.chunks(data.shape[1:], data.dtype, length)
            shape, compressor = (n_rows, *data.shape[1:]), self._layout.compressor
            zarrlayout.add_array(group, "data", dims, shape, chunks, data.dtype, about, compressor)
            of_times = zarrlayout.attributes_of_axis(message, resolve_stream_dim(message))
            zarrlayout.add_array(group, self.times, dims[:1], shape[:1], chunks[:1], np.dtype(np.float64), of_times)
            zarrlayout.add_labels(group, message, labels)
            group.attrs["key"] = message.key
            try:
                os.rename(new, self._folder)
            except OSError:
                if not is_there(self._folder):
                    raise
                shutil.rmtree(new)  # another process was faster
        self.open(self.times)
        group = import_extra("zarr").open_group(str(self._folder), mode="r")
        known = dict(group["data"].attrs), {name: repr(np.asarray(group[name][:]).tolist()) for name, _, _ in labels}
        given = {zarrlayout.DIMENSIONS: dims, **about}, {name: repr(values.tolist()) for name, _, values in labels}
        if known != given:
            raise ValueError(f"Results have attributes and labels {given}, those of other pieces have {known}.")

    def take(self, when: npt.NDArray, rows: npt.NDArray) -> None:
        """Add rows with their times, and write the chunks that they fill."""
        for chunk in self.waiting.take(when, rows):
            self._write(*chunk)

    def _write(self, when: npt.NDArray, rows: npt.NDArray) -> None:
        """Write a chunk, or what is left at the end."""
        for name, values in (("data", rows), (self.times, when)):
            self.writers[name].write(self.n_written, values)
            if not self._borders:
                self.checksum = zarrlayout.checksum(values, self.checksum)
        self.n_written += len(rows)

    def write_rest(self) -> None:
        """Write the rows that fill no chunk."""
        if self.waiting.n:
            self._write(*self.waiting.rest)

    def sync(self, first: int) -> None:
        """Wait until the rows from number *first* on are on the disk."""
        for name, writer in self.writers.items():
            sides = zip(writer.array.shape[1:], writer.array.chunks[1:], strict=True)
            chunks = range(first // self.rows_per_chunk, -(-self.n_written // self.rows_per_chunk))
            for place in itertools.product(chunks, *(range(-(-length // chunk)) for length, chunk in sides)):
                # A chunk of nothing but zeros has no file.
                with contextlib.suppress(FileNotFoundError):
                    sync(self._folder / name / ".".join(map(str, place)))
            sync(self._folder / name)

    def checksum_of(self, n: int) -> int:
        """Of the first *n* rows that are in the group."""
        found, size = 0, self.rows_per_chunk
        for begin in range(0, n, size):
            for writer in self.writers.values():
                found = zarrlayout.checksum(np.asarray(writer.array[begin : min(begin + size, n)]), found)
        return found

    def truncate(self, n: int) -> None:
        """Drop rows from number *n* on."""
        for writer in self.writers.values():
            writer.array.resize((n, *writer.array.shape[1:]))


class ZarrPiece:
    """The results of one piece: rows of the group that :class:`ZarrSink` is for, which begin and end with a chunk.

    Beside the *folder* of the group are notes of the pieces that are complete.
    """

    def __init__(self, folder: Path, layout: ResultLayout, number: int, borders: Sequence[int]) -> None:
        self._folder, self._layout = folder, layout
        self._number, self._borders = number, borders
        self._note = folder.with_name(f"{folder.name}.pieces") / str(number)
        self.restart()

    def restart(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._results = _Results(self._folder, self._layout, self._borders[self._number], self._borders)
        self._state = b""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """See :obj:`ezmsg.mlx.ResultSink`. Recipe and fingerprint are those of the whole."""
        self.restart()
        is_complete = is_there(self._note)
        return Opened(is_complete, self._note.read_bytes() if is_complete else None)

    def append(self, message: AxisArray) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._results.append(message)

    def checkpoint(self, state: bytes) -> None:
        """See :obj:`ezmsg.mlx.PiecewiseSink`."""
        self._state = state

    def commit(self) -> None:
        """See :obj:`ezmsg.mlx.PiecewiseSink`."""
        self._results.write_rest()
        self._results.sync(self._borders[self._number])
        self._note.parent.mkdir(exist_ok=True)
        write_durably(self._note, self._state)

    close = restart


class ZarrSink:
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
        TypeError: *path* is not a path; a number is none (a bool is not one); *compressor* is none; *dtype*
            is not the name of one of the dtypes.
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
        self._results = self._no_results()

    @property
    def _folder(self) -> Path:
        """The group until it is complete; that of other settings is elsewhere, whichever worker still writes to it."""
        return self.partial / f"results-{zlib.crc32(os.fsencode(self._fingerprint)):08x}"

    def _no_results(self) -> _Results:
        return _Results(self._folder, self._layout)

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
                f"name. Here {'; '.join(differing_settings(str(recipe), self._recipe))}."
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
        self._results = results = self._no_results()
        try:
            packed = (self.partial / "checkpoint").read_bytes()
        except FileNotFoundError:
            begun = any(name.startswith("results") for name in os.listdir(self.partial))
            return None, "was interrupted without a checkpoint" if begun else ""
        saved = typing.cast(dict[str, typing.Any], unpack(packed, ()))
        if saved["fingerprint"] != self._fingerprint:
            return None, "has a checkpoint of another recording, of other settings or from another environment"
        if saved["n_written"] is not None:
            results.open(saved["times"])
            if results.checksum_of(saved["n_written"]) != saved["checksum"]:
                return None, "lacks results that its checkpoint counts on"
            results.n_written, results.checksum = saved["n_written"], saved["checksum"]
            results.truncate(results.n_written)
            results.take(*saved["waiting"])
        return saved["state"], ""

    def restart(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._results = self._no_results()
        for entry in self.partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def append(self, message: AxisArray) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`. MLX data is converted.

        Raises:
            ValueError: Shape, dtype, dimensions or axes are not those of the first results; the stream dimension has no
                axis, or there is no dimension; an axis has another length than the data, or a name that is taken.
            TypeError: An axis has values that are neither numbers nor text.
        """
        self._results.append(message)

    def checkpoint(self, state: bytes) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        saved: dict[str, object] = {"fingerprint": self._fingerprint, "state": state, "n_written": None}
        results = self._results
        if results.writers:
            saved |= {"n_written": results.n_written, "checksum": results.checksum}
            saved |= {"times": results.times, "waiting": results.waiting.rest}
        write_durably(self.partial / "checkpoint", pack(saved, ()))

    def piece(self, number: int, borders: Sequence[int]) -> ZarrPiece:
        """See :obj:`ezmsg.mlx.PiecewiseSink`."""
        return ZarrPiece(self._folder, self._layout, number, borders)

    def about_pieces(self, about: Mapping[str, object]) -> None:
        """See :obj:`ezmsg.mlx.PiecewiseSink`."""
        if is_there(self._folder):
            self._opened_group().attrs["pieces"] = typing.cast("dict[str, typing.Any]", about)

    def _opened_group(self) -> zarr.Group:
        return import_extra("zarr").open_group(str(self._folder), mode="r+")

    def commit(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`.

        Raises:
            ValueError: There were no results at all.
            FileExistsError: Something has taken the final name meanwhile.
        """
        folder = self._folder
        if not is_there(folder):
            raise ValueError("There are no results: the recording may be shorter than what the chain needs for one.")
        if self._results.writers:
            self._results.write_rest()
            self._results.truncate(self._results.n_written)
        self._opened_group().attrs["recipe"] = self._recipe
        zarrlayout.consolidate(folder)
        sync_tree(folder)
        if is_there(self.path):
            raise FileExistsError(f"{self.path} is there already; the new results are in {folder}.")
        os.rename(folder, self.path)
        sync(self.path.parent)
        self._remove_partial()

    def _remove_partial(self) -> None:
        # Another process that has waited for the lock may be about to do the same.
        shutil.rmtree(self.partial, ignore_errors=True)

    def close(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        self._results = self._no_results()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
