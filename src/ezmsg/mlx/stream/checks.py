"""Checks of what the package is given, and the sentences that say what is wrong."""

from __future__ import annotations

import math
import numbers
import os
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

if TYPE_CHECKING:
    import mlx.core as mx


def is_real(value: object) -> TypeGuard[float]:
    """Whether *value* is a real number; bool does not count as one."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def as_float(value: float) -> float:
    """A real number as a float; infinity for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_number(name: str, value: float, *, zero: bool = False, infinite: bool = False) -> float:
    """A number in any unit as a Python float.

    Args:
        name: What the caller calls *value*, for the error.
        value: A number greater than 0.
        zero: Whether 0 is allowed, too.
        infinite: Whether infinity is allowed, too.

    Returns:
        *value*, so that arithmetic with it is that of float64, whatever scalar was given.

    Raises:
        TypeError: *value* is not a real number; bool does not count as one.
        ValueError: It is NaN, or not in the range.
    """
    error = f"{name} is {value!r}; allowed is a {'' if infinite else 'finite '}number {'>=' if zero else '>'} 0."
    if not is_real(value):
        raise TypeError(error)
    number = as_float(value)
    if not (number > 0 or (zero and number == 0)) or (number == math.inf and not infinite):
        raise ValueError(error)
    return number


def check_count(name: str, value: int, smallest: int = 1) -> int:
    """A count as a Python integer.

    Args:
        name: What the caller calls *value*, for the error.
        value: An integer of *smallest* or more.
        smallest: The smallest one that is allowed.

    Raises:
        TypeError: *value* is not an integer; bool does not count as one.
        ValueError: It is smaller than *smallest*.
    """
    error = f"{name} is {value!r}; allowed is an integer >= {smallest}."
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(error)
    if value < smallest:
        raise ValueError(error)
    return int(value)


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Check the path of a file or folder.

    Raises:
        TypeError: *value* is neither text nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {value!r}; allowed is a path.")


def check_fields(settings: object, *, flags: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> None:
    """Check the fields of settings that are switches or names.

    Args:
        settings: Settings that are being built.
        flags: Fields that are True or False.
        names: Fields that are None or text.

    Raises:
        TypeError: A field is something else.
    """
    for field in flags:
        if not isinstance(value := getattr(settings, field), (bool, np.bool_)):
            raise TypeError(f"{field} is {value!r}; allowed are True and False.")
    for field in names:
        if not isinstance(value := getattr(settings, field), (str, type(None))):
            raise TypeError(f"{field} is {value!r}; allowed are None and a name.")


def check_message(message: AxisArray, taker: object) -> None:
    """Refuse what is not a message.

    To be called only if the type of *message* is not exactly AxisArray, so that the usual one costs a comparison.

    Raises:
        TypeError: *message* is not an AxisArray; the error names the class of *taker*.
    """
    if not isinstance(message, AxisArray):
        raise TypeError(f"{type(taker).__name__} takes an AxisArray as its message, got a {type(message).__name__}.")


def check_mlx(x: mx.array, zi: mx.array | None) -> None:
    """Check the arrays that a function of MLX arrays is given.

    Raises:
        TypeError: *x* or *zi* is not an MLX array; *zi* may be None.
    """
    import mlx.core as mx

    if not isinstance(x, mx.array):
        raise TypeError(f"x is a {type(x).__name__}; allowed is an MLX array.")
    if zi is not None and not isinstance(zi, mx.array):
        raise TypeError(f"zi is a {type(zi).__name__}; allowed are an MLX array and None.")
