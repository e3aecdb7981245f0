"""Take back what a stage has done, where a later stage refuses the message."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, type, np.ndarray, np.generic, np.dtype),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(ez.Settings, AxisArray, AxisBase),
)
_COLLECTIONS = (list, dict, set, collections.deque)


def snapshot(stage: object) -> Callable[[], None]:
    """A function that makes the state of *stage* what it is now.

    Everything that *stage* is made of counts: its attributes, those of the objects in them, and the items of lists,
    sets and dictionaries. Arrays, messages and settings count as values, so that one which a stage writes to in place
    stays written to.
    """
    saved: dict[int, tuple[Any, Any]] = {}
    _save(stage, saved)

    def restore() -> None:
        for held, content in saved.values():
            target = held if isinstance(held, _COLLECTIONS) else held.__dict__
            target.clear()
            if isinstance(target, (list, collections.deque)):
                target.extend(content)
            else:
                target.update(content)

    return restore


def _save(held: object, saved: dict[int, tuple[Any, Any]]) -> None:
    if isinstance(held, _VALUES) or id(held) in saved:
        return
    content: Any = held
    if not isinstance(held, (tuple, frozenset)):
        content = held.copy() if isinstance(held, _COLLECTIONS) else dict(getattr(held, "__dict__", ()))
        if isinstance(held, _COLLECTIONS) or hasattr(held, "__dict__"):
            saved[id(held)] = held, content
    for item in content.values() if isinstance(content, dict) else content:
        _save(item, saved)
