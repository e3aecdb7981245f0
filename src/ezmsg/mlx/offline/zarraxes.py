"""The axes of a message as arrays of a Zarr group."""

import json
import typing

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis, LinearAxis

from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.sampling import value_at
from ..stream.segments import same_axis

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
