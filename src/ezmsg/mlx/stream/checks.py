"""Checks of what the package is given, and the sentences that say what is wrong."""

from __future__ import annotations

import math
import numbers
import os
from typing import TYPE_CHECKING

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

if TYPE_CHECKING:
    import mlx.core as mx


def is_real(value: object) -> bool:
    """Whether *value* is a real number; bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def as_float(value: float) -> float:
    """A real number as a float; infinity for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_number(name: str, value: float, *, zero: bool = False, infinite: bool = False) -> None:
    """
    Args:
        name: What the caller calls *value*, for the error.
        value: A number above 0, in any unit.
        zero: Whether 0 is allowed, too.
        infinite: Whether infinity is allowed, too.

    Raises:
        TypeError: *value* is no number (bool is none).
        ValueError: It is NaN, or not in the range.
    """
    allowed = f"a {'' if infinite else 'finite '}number {'of at least' if zero else 'above'} 0"
    if not is_real(value):
        raise TypeError(f"{name} must be {allowed}, got {value!r}.")
    number = as_float(value)
    if not (number > 0 or (zero and number == 0)) or (number == math.inf and not infinite):
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def check_path(name: str, value: str | os.PathLike) -> None:
    """
    Raises:
        TypeError: *value* is no path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}.")


def check_fields(settings: object, *, flags: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> None:
    """
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
    """
    Called only if *message* is not exactly an AxisArray, so that the usual one costs no more than that comparison.

    Raises:
        TypeError: *message* is none at all; the error names the class of *taker*.
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
