"""Results in Zarr groups that appear under their final name when they are complete."""

import os
import shutil
import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

from ..stream.checks import check_number, check_path
from .contracts import Opened
from .durable import FolderLock, is_of_the_system, is_there, sync_folder, sync_tree, write_durably
from .extra import import_extra
from .packing import pack
from .resultlayout import ResultLayout
from .unpacking import unpack
from .zarraxes import check_axes, labels_of, times
from .zarrchunks import ChunkFiles, RowBuffer, checksum
from .zarrgroup import (
    DIMENSIONS,
    add_array,
    add_labels,
    attributes_of_axis,
    attributes_of_data,
    consolidate,
    new_group,
)
from .zarrpieces import JoinsPieces

if typing.TYPE_CHECKING:
    import zarr

    from .resultlayout import Compressor


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
        compressor: "Compressor" = "default",
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
                f"name. Its recipe: {recipe!r}. This one: {self._recipe!r}."
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
