"""Results in Zarr groups that appear under their final name when they are complete."""

import math
import os
import pickle
import shutil
import typing
import zlib
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis

from ..stream.checks import check_number, check_path
from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.sampling import value_at
from .contracts import Opened
from .durable import lock_folder, sync_folder, sync_tree
from .extra import import_extra

if typing.TYPE_CHECKING:
    import zarr

_DIMS = "_ARRAY_DIMENSIONS"  # where xarray looks for the names of dimensions


class ZarrSink:
    """A Zarr group as a sink for :func:`ezmsg.mlx.process_recording`.

    The group (Zarr format 2, which every version reads) holds ``data`` of shape (time, ...), ``time`` in seconds, one
    entry for each row of ``data``, and the coordinates of the other axes under their names; the attribute ``recipe``
    tells recording, chain and settings. ``xarray.open_zarr(path, consolidated=False)`` shows it with its labels.

    Until it is complete, everything is in ``<name>.partial`` beside it: the group, the last checkpoint and a lock. It
    is then renamed, which is atomic. What a run needs to go on is never written again: chunks of the group are
    written once, when they are full, and rows that fill none yet are kept in the checkpoint.

    A checkpoint is a pickle: go on only in folders whose files you would run.

    Args:
        path: Folder of the group. ``path.parent`` is made if need be.
        chunk_mb: Size of a chunk of ``data`` in MiB, uncompressed. So much is kept in memory.
        wait: Seconds to wait for another process that is writing the same results.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        ValueError: *chunk_mb* is not finite and above 0, or *wait* is below 0.
        TypeError: *path* is no path; *chunk_mb* or *wait* is no number (bool is none).
    """

    def __init__(self, path: str | os.PathLike, *, chunk_mb: float = 4.0, wait: float = 0.0) -> None:
        check_path("path", path)
        check_number("chunk_mb", chunk_mb)
        check_number("wait", wait, zero=True, infinite=True)
        import_extra("zarr")
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._chunk_bytes = chunk_mb * 2**20
        self._wait = wait
        self._lock: int | None = None
        self._fingerprint = self._recipe = ""
        self._forget()

    def _forget(self) -> None:
        self._group: zarr.Group | None = None
        self._arrays: dict[str, zarr.Array] = {}
        """``data`` and ``time``; a group opens an array anew whenever it is asked for it."""
        self._waiting: list[tuple[npt.NDArray, npt.NDArray]] = []
        """Times and rows that fill no chunk yet."""
        self._n_waiting = 0
        self._n_written = 0
        self._checksum = 0
        """CRC-32 of all rows and times in the group, chunk by chunk."""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """See :obj:`ezmsg.mlx.ResultSink`.

        Raises:
            BlockingIOError: Another process is writing these results, and still is after *wait* seconds.
            FileExistsError: There are complete results of another recipe.
        """
        self._recipe, self._fingerprint = recipe, fingerprint
        # Before anything is made, and again after waiting for another process that may have finished them.
        self._check_recipe()
        self._lock = lock_folder(self.partial, self._wait, self.path)
        if self._check_recipe():
            self._remove_partial()
            return Opened(True, None)
        return Opened(False, self._resume())

    def _check_recipe(self) -> bool:
        """Whether the results are there; FileExistsError if they, or whatever is there, are of another recipe."""
        if not self.path.exists():
            return False
        zarr = import_extra("zarr")
        try:
            recipe = zarr.open_group(str(self.path), mode="r").attrs.get("recipe")
        except Exception as error:  # each version of Zarr has its own
            raise FileExistsError(f"{self.path} is there already, and no results of this kind ({error}).") from error
        if recipe != self._recipe:
            raise FileExistsError(
                f"{self.path} has results of another recording, or with other settings; remove it or choose another "
                f"name. Its recipe: {recipe!r}. This one: {self._recipe!r}."
            )
        return True

    def _resume(self) -> bytes | None:
        zarr = import_extra("zarr")
        reason = ""
        checkpoint = self.partial / "checkpoint"
        try:
            saved = pickle.loads(checkpoint.read_bytes()) if checkpoint.exists() else None
            if saved is None:
                if (self.partial / "results").exists():
                    reason = "was interrupted without a checkpoint"
            elif saved["fingerprint"] != self._fingerprint:
                reason = "has a checkpoint of another recording, of other settings or from another environment"
            elif saved["n_written"] is None:
                return saved["state"]
            else:
                self._group = zarr.open_group(str(self.partial / "results"), mode="r+")
                self._arrays = {name: self._group[name] for name in ("data", "time")}
                self._truncate(saved["n_written"])
                if self._checksum == saved["checksum"]:
                    self._waiting = saved["waiting"]
                    self._n_waiting = sum(len(rows) for _, rows in self._waiting)
                    return saved["state"]
                reason = "lacks results that its checkpoint counts on"
        except Exception as error:  # whatever a damaged file leads to
            reason = f"cannot be read ({error!r})"
        if reason:
            recording = self._recipe.partition("\n")[0]
            ez.logger.info(f"{self.partial} {reason}; starting over with {recording}.")
        self._forget()
        for entry in self.partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
        return None

    def _truncate(self, n: int) -> None:
        """Drop rows from number *n* on, and take the checksum of those before."""
        self._n_written, self._checksum = n, 0
        for array in self._arrays.values():
            array.resize((n, *array.shape[1:]))
        size = self._rows_per_chunk
        for begin in range(0, n, size):
            for array in self._arrays.values():
                self._checksum = zlib.crc32(array[begin : begin + size].tobytes(), self._checksum)

    @property
    def _rows_per_chunk(self) -> int:
        return self._arrays["data"].chunks[0]

    def append(self, message: AxisArray) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`. MLX data is converted.

        Raises:
            ValueError: Shape, dtype or dimensions are not those of the first results; the stream dimension has no axis;
                there is no dimension.
        """
        if not message.dims:
            raise ValueError("Results have data of shape (), without a dimension; rows of them need one.")
        dim = resolve_stream_dim(message)
        data = mlx_to_numpy(message.data) if is_mlx_array(message.data) else np.asarray(message.data)
        data = np.moveaxis(data, message.get_axis_idx(dim), 0)
        dims = [dim, *(name for name in message.dims if name != dim)]
        if self._group is None:
            self._create(message, dims, data)
        array = self._arrays["data"]
        given, expected = (data.shape[1:], data.dtype, dims), (array.shape[1:], array.dtype, list(array.attrs[_DIMS]))
        if given != expected:
            raise ValueError(
                f"Results have (shape, dtype, dims) {given}, those before had {expected}: they do not fit together."
            )
        if not len(data):
            return
        axis = message.axes.get(dim)
        if isinstance(axis, LinearAxis):
            times = value_at(axis, np.arange(len(data)))
        elif isinstance(axis, CoordinateAxis):
            times = axis.data
        else:
            raise ValueError(f"Results need an axis {dim!r} that says when they are.")
        # Copies, since whoever gave the message may use its memory again.
        self._waiting.append((np.array(times, np.float64), np.array(data)))
        self._n_waiting += len(data)
        if self._n_waiting >= self._rows_per_chunk:
            self._write_full_chunks()

    def _create(self, message: AxisArray, dims: list[str], data: npt.NDArray) -> None:
        zarr = import_extra("zarr")
        # The same format from both major versions, which call the argument differently.
        version = {"zarr_format" if int(zarr.__version__.split(".")[0]) > 2 else "zarr_version": 2}
        self._group = zarr.open_group(str(self.partial / "results"), mode="w", **version)
        row = data.dtype.itemsize * math.prod(data.shape[1:])
        rows = max(int(self._chunk_bytes / max(row, 1)), 1)
        self._arrays = {
            "data": self._add("data", dims, (0, *data.shape[1:]), (rows, *data.shape[1:]), data.dtype),
            "time": self._add("time", dims[:1], (0,), (rows,), np.dtype(np.float64)),
        }
        self._arrays["time"].attrs["unit"] = getattr(message.axes.get(dims[0]), "unit", "s")
        for name, length in zip(dims[1:], data.shape[1:], strict=True):
            values = _coordinates(message.axes.get(name), length)
            if values is not None and values.shape == (length,) and name not in ("data", "time"):
                self._add(name, [name], values.shape, values.shape, values.dtype)[:] = values
        self._group.attrs["key"] = message.key

    def _add(
        self, name: str, dims: list[str], shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype
    ) -> "zarr.Array":
        create = getattr(self._group, "create_array", None) or self._group.create_dataset  # Zarr 3, Zarr 2
        array = create(name, shape=shape, chunks=chunks, dtype=dtype, fill_value=None)
        array.attrs[_DIMS] = dims
        return array

    def _write_full_chunks(self) -> None:
        times, rows = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        n = len(rows) - len(rows) % self._rows_per_chunk
        self._write(times[:n], rows[:n])
        self._waiting, self._n_waiting = [(times[n:].copy(), rows[n:].copy())], len(rows) - n

    def _write(self, times: npt.NDArray, rows: npt.NDArray) -> None:
        begin, end = self._n_written, self._n_written + len(rows)
        size = self._rows_per_chunk
        for name, values in (("data", rows), ("time", times)):
            array = self._arrays[name]
            array.resize((end, *array.shape[1:]))
            array[begin:end] = values
        for first in range(0, len(rows), size):
            for values in (rows, times):
                self._checksum = zlib.crc32(values[first : first + size].tobytes(), self._checksum)
        self._n_written = end

    def checkpoint(self, state: bytes) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`."""
        saved: dict[str, object] = {"fingerprint": self._fingerprint, "state": state, "n_written": None}
        if self._group is not None:
            saved |= {"n_written": self._n_written, "checksum": self._checksum, "waiting": self._waiting}
        new = self.partial / "checkpoint.new"
        with open(new, "wb") as file:
            pickle.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.partial / "checkpoint")

    def commit(self) -> None:
        """See :obj:`ezmsg.mlx.ResultSink`.

        Raises:
            ValueError: There were no results at all.
            FileExistsError: Something has taken the final name meanwhile.
        """
        if self._group is None:
            raise ValueError("There are no results: the recording may be shorter than what the chain needs for one.")
        if self._n_waiting:
            self._write(*(np.concatenate(parts) for parts in zip(*self._waiting, strict=True)))
        self._group.attrs["recipe"] = self._recipe
        results = self.partial / "results"
        sync_tree(results)
        if self.path.exists():
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
            os.close(self._lock)
            self._lock = None


def _coordinates(axis: object, length: int) -> npt.NDArray | None:
    if isinstance(axis, LinearAxis):
        return value_at(axis, np.arange(length))
    values = getattr(axis, "data", None)
    if values is not None and values.dtype.names:
        values = values["label"] if "label" in values.dtype.names else None
    return values if values is not None and values.dtype.kind in "biufU" else None
