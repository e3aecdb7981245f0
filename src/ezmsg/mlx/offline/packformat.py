"""The format that states of transformers are kept in: what it is made of, and which classes may be in it."""

import enum
import sys
import types
import typing
from collections.abc import Callable

from ezmsg.baseproc import BaseProcessor
from ezmsg.baseproc.stateful import Stateful

FORMAT = "ezmsg-mlx values 1"

TREE = "tree"
"""Name of the text among the arrays."""

MODULES = frozenset({"numpy", "mlx.core", "array_api_compat.numpy"})
"""Array libraries, which states remember by their modules."""

SEQUENCES: dict[str, Callable[[list], object]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

Value: typing.TypeAlias = typing.Any
"""Whatever is packed."""

Node: typing.TypeAlias = "list[typing.Any]"
"""A kind and what belongs to it. A value in a node is plain, or a list with the number of an earlier node."""


def plain_class(module: str, name: str, packages: frozenset[str]) -> type:
    """A class that may be built: plain data, already imported, from one of the packages.

    Raises:
        ValueError: It may not.
    """
    if module.partition(".")[0] not in packages:
        raise ValueError(f"class {module}.{name}")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    allowed = (
        isinstance(found, type)
        and (found.__module__, found.__qualname__) == (module, name)
        and (issubclass(found, (enum.Enum, tuple)) or found.__new__ is object.__new__)
        # Neither what would act by itself once it is built, or dropped, nor what only its own code can put together.
        and not issubclass(found, (type, BaseException, BaseProcessor, Stateful))
        and not any(hasattr(found, method) for method in ("__del__", "__setstate__"))
    )
    if not allowed:
        raise ValueError(f"class {module}.{name}")
    return typing.cast(type, found)
