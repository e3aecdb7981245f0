"""Values as bytes: what states of transformers consist of, in a format that cannot run code.

A pickle may call anything when it is read. Here, bytes are a zip archive of arrays (``numpy.savez``) and one text in
JSON, which says how to put them together: containers, arrays and scalars of NumPy and MLX, members of enumerations, and
instances of plain classes. :func:`~ezmsg.mlx.offline.unpacking.unpack` builds them again.
"""

import collections
import enum
import io
import json
import types
import typing
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor
from ezmsg.baseproc.stateful import Stateful

from ..stream.convert import is_mlx_array
from .packformat import FORMAT, MODULES, SEQUENCES, TREE, Node, Value, plain_class

_PLAIN = (type(None), bool, int, float, str)
"""What JSON holds as it is; NaN and infinity included, as Python writes it."""


class CannotPack(TypeError):
    """There is something that this format does not hold; the message says what."""


def pack(value: Value, packages: Iterable[str] = ("ezmsg",)) -> bytes:
    """*value* as bytes.

    What is referred to from several places is one object again afterwards.

    Args:
        value: Anything that :func:`unpack` can build.
        packages: Names of the packages whose classes may be among it.

    Raises:
        CannotPack: There is something else in it, or something that contains itself.
    """
    writer = _Writer(frozenset(packages))
    tree = {"format": FORMAT, "value": writer.value(value), "nodes": writer.nodes}
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    file = io.BytesIO()
    arrays: dict[str, typing.Any] = {TREE: text, **writer.arrays}  # NumPy types its flags, too, as values of names
    np.savez(file, **arrays)
    return file.getvalue()


class _Writer:
    def __init__(self, packages: frozenset[str]) -> None:
        self.nodes: list[Node] = []
        self.arrays: dict[str, npt.NDArray] = {}
        self._packages = packages
        self._numbers: dict[int, int] = {}
        self._kept: list[Value] = []
        """So that no two values have the same ``id``."""
        self._open: set[int] = set()

    def value(self, value: Value) -> Value:
        if type(value) in _PLAIN:
            return value
        key = id(value)
        if key in self._open:
            raise CannotPack(f"a {type(value).__name__} contains itself")
        if key not in self._numbers:
            self._open.add(key)
            node = self._node(value)
            self._open.remove(key)
            self._kept.append(value)
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return [self._numbers[key]]

    def values(self, values: Iterable[Value]) -> list[Value]:
        return [self.value(value) for value in values]

    def _array(self, values: npt.NDArray) -> str:
        if values.dtype.hasobject:
            raise CannotPack(f"it holds an array of dtype {values.dtype}")
        name = f"a{len(self.arrays)}"
        self.arrays[name] = values
        return name

    def _node(self, value: Value) -> Node:
        kind = type(value)
        if kind.__name__ in SEQUENCES and kind is SEQUENCES[kind.__name__]:
            return [kind.__name__, self.values(value)]
        if kind is dict:
            return ["dict", self.values(value.keys()), self.values(value.values())]
        if kind is collections.deque:
            return ["deque", self.values(value), value.maxlen]
        if kind in (bytes, bytearray):
            return [kind.__name__, self._array(np.frombuffer(bytes(value), np.uint8))]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (slice, range):
            return [kind.__name__, self.values([value.start, value.stop, value.step])]
        if kind in (np.ndarray, np.memmap):
            return self._ndarray(np.asarray(value))
        if kind is np.ma.MaskedArray:
            return ["masked", *self.values([value.data, np.ma.getmaskarray(value), value.fill_value])]
        if isinstance(value, np.generic):
            return ["scalar", self._array(np.asarray(value))]
        if isinstance(value, np.dtype):
            return ["dtype", self._array(np.empty(0, value))]
        if isinstance(value, type) and issubclass(value, np.generic):
            return ["scalar type", self._array(np.empty(0, value))]
        if is_mlx_array(value):
            return self._mlx(value)
        if kind.__module__ == "mlx.core" and kind.__name__ == "Dtype":
            return ["mlx dtype", str(value).rpartition(".")[2]]
        if isinstance(value, types.ModuleType) and value.__name__ in MODULES:
            return ["module", value.__name__]
        return self._instance(value)

    def _ndarray(self, values: npt.NDArray) -> Node:
        if values.dtype.kind not in "OT":
            return ["array", self._array(values)]
        # Values of their own, in the order of rows.
        return ["objects" if values.dtype.kind == "O" else "texts", list(values.shape), self.values(values.ravel())]

    def _mlx(self, value: Value) -> Node:
        import mlx.core as mx

        # NumPy has no bfloat16; every one is a float32.
        values = np.array(value.astype(mx.float32) if value.dtype == mx.bfloat16 else value)
        return ["mlx", str(value.dtype).rpartition(".")[2], self._array(values)]

    def _instance(self, value: Value) -> Node:
        kind = type(value)
        named = [kind.__module__, kind.__qualname__]
        if isinstance(value, (Stateful, BaseProcessor)):
            raise CannotPack(f"it holds a {kind.__name__}")
        try:
            plain_class(kind.__module__, kind.__qualname__, self._packages)
        except ValueError as error:
            raise CannotPack(f"it holds a {kind.__module__}.{kind.__qualname__}") from error
        if isinstance(value, enum.Enum):
            return ["enum", *named, value.name]
        if isinstance(value, tuple):
            return ["named", *named, self.values(value)]
        # As pickle would, without the calls of constructors that it may ask for.
        function, args, state, *items = (*value.__reduce_ex__(2), None, None)[:5]
        if getattr(function, "__name__", "") != "__newobj__" or args != (kind,) or any(i is not None for i in items):
            raise CannotPack(f"it holds a {kind.__module__}.{kind.__qualname__}")
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if not all(isinstance(part, (dict, type(None))) for part in (attributes, slots)):
            raise CannotPack(f"it holds a {kind.__module__}.{kind.__qualname__}")
        return ["object", *named, self.value(attributes or {}), self.value(slots or {})]
