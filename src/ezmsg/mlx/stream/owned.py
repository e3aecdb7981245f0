"""Keep a message longer than its call: ezmsg reuses the memory that messages from other processes arrive in."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray, AxisBase
from ezmsg.util.messages.util import replace

T = TypeVar("T")


def owned(value: T) -> T:
    """*value*, copied if it is a NumPy array that is a view into memory of others."""
    if isinstance(value, np.ndarray) and not value.flags.owndata:
        # With its mask, if it has one.
        return np.array(value, subok=True)
    return value


def owned_axes(axes: Mapping[str, AxisBase]) -> dict[str, AxisBase]:
    """*axes* with coordinates in memory of their own; the same objects where they are already."""
    result = dict(axes)
    for name, axis in axes.items():
        values = getattr(axis, "data", None)
        if (copy := owned(values)) is not values:
            result[name] = replace(axis, data=copy)
    return result


def owned_attrs(attrs: Mapping[str, object]) -> dict[str, object]:
    """*attrs* with copies of all NumPy arrays, since nothing says who else may write to them."""
    return {
        name: np.array(value, subok=True) if isinstance(value, np.ndarray) else value for name, value in attrs.items()
    }


def owned_message(message: AxisArray) -> AxisArray:
    """*message* with NumPy data, coordinates and attrs in memory of their own."""
    data = message.data.copy() if isinstance(message.data, np.ndarray) else message.data
    return replace(message, data=data, axes=owned_axes(message.axes), attrs=owned_attrs(message.attrs))
