"""Zarr groups of format 2, which both major versions of Zarr read, with what xarray needs to show their labels."""

import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis

from .extra import import_extra
from .zarraxes import plain_attributes

if typing.TYPE_CHECKING:
    import zarr

    from .resultlayout import Compressor

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""Where xarray looks for the names of dimensions."""


def new_group(path: Path) -> "zarr.Group":
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
    compressor: "Compressor" = "default",
    attributes: Mapping[str, object] | None = None,
) -> "zarr.Array":
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
