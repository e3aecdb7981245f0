"""Bytes as values again, without running code.

Reading calls no constructor and no method of what it builds: instances are of classes that are already imported, from
packages that the reader names, and are filled with their attributes.
"""

import collections
import enum
import importlib
import io
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ..stream.convert import MLX_DTYPES
from .packformat import FORMAT, MODULES, SEQUENCES, TREE, Value, plain_class

if typing.TYPE_CHECKING:
    import mlx.core as mx

_MLX_DTYPES = {name.rstrip("_"): name for name in MLX_DTYPES}


def unpack(data: bytes, packages: Iterable[str] = ("ezmsg",)) -> Value:
    """The value that was packed.

    Args:
        data: From :func:`pack`, or from anybody.
        packages: Names of the packages whose classes may be built.

    Raises:
        ValueError: *data* is something else, is damaged, or wants something built that may not be.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            tree = json.loads(arrays[TREE].tobytes())
            if tree["format"] != FORMAT:
                raise ValueError(f"its format is {tree['format']!r}")
            reader = _Reader(arrays, frozenset(packages))
            for node in tree["nodes"]:
                reader.built.append(reader.node(*node))
            return reader.value(tree["value"])
    except Exception as error:  # whatever damage leads to
        raise ValueError(f"not values of this version of ezmsg-mlx ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, arrays: typing.Mapping[str, npt.NDArray], packages: frozenset[str]) -> None:
        self.built: list[Value] = []
        self._arrays = arrays
        self._packages = packages

    def value(self, value: Value) -> Value:
        if isinstance(value, list):
            (number,) = value
            # Only earlier ones are there, so nothing contains itself.
            return self.built[operator.index(number)]
        return value

    def values(self, values: list[Value]) -> list[Value]:
        return [self.value(value) for value in values]

    def node(self, kind: str, *rest: typing.Any) -> Value:
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.values(*rest))
        return _BUILDERS[kind](self, *rest)

    def _dict(self, keys: list[Value], values: list[Value]) -> Value:
        return dict(zip(self.values(keys), self.values(values), strict=True))

    def _deque(self, values: list[Value], maxlen: int | None) -> Value:
        return collections.deque(self.values(values), maxlen)

    def _bytes(self, name: str) -> Value:
        return self._arrays[name].tobytes()

    def _bytearray(self, name: str) -> Value:
        return bytearray(self._arrays[name].tobytes())

    def _complex(self, real: float, imag: float) -> Value:
        return complex(real, imag)

    def _slice(self, values: list[Value]) -> Value:
        return slice(*self.values(values))

    def _range(self, values: list[Value]) -> Value:
        return range(*self.values(values))

    def _array(self, name: str) -> Value:
        return self._arrays[name]

    def _objects(self, shape: list[int], values: list[Value]) -> Value:
        filled = np.empty(math.prod(shape), object)
        for place, value in enumerate(values):
            filled[place] = self.value(value)
        return filled.reshape(shape)

    def _texts(self, shape: list[int], values: list[Value]) -> Value:
        return np.array(self.values(values), np.dtypes.StringDType()).reshape(shape)

    def _masked(self, *values: Value) -> Value:
        data, mask, fill = self.values(list(values))
        return np.ma.MaskedArray(data, mask, fill_value=fill)

    def _scalar(self, name: str) -> Value:
        return self._arrays[name][()]

    def _dtype(self, name: str) -> Value:
        return self._arrays[name].dtype

    def _scalar_type(self, name: str) -> Value:
        return self._arrays[name].dtype.type

    def _mlx(self, dtype: str, name: str) -> Value:
        import mlx.core as mx

        array = mx.array(self._arrays[name], dtype=_mlx_dtype(dtype))
        mx.eval(array)
        return array

    def _mlx_dtype(self, name: str) -> Value:
        return _mlx_dtype(name)

    def _module(self, name: str) -> Value:
        if name not in MODULES:
            raise ValueError(f"module {name!r}")
        return importlib.import_module(name)

    def _enum(self, module: str, name: str, member: str) -> Value:
        kind = plain_class(module, name, self._packages)
        if not issubclass(kind, enum.Enum):
            raise ValueError(f"{name} is not an enumeration")
        return kind.__members__[member]

    def _named(self, module: str, name: str, values: list[Value]) -> Value:
        kind = plain_class(module, name, self._packages)
        if not issubclass(kind, tuple):
            raise ValueError(f"{name} is not a named tuple")
        return tuple.__new__(kind, self.values(values))

    def _object(self, module: str, name: str, attributes: Value, slots: Value) -> Value:
        kind = plain_class(module, name, self._packages)
        if issubclass(kind, (enum.Enum, tuple)):
            raise ValueError(f"{name} has no attributes of its own")
        built = object.__new__(kind)
        for attribute, value in self.value(attributes).items():
            # Not setattr, which a class may answer with code of its own.
            built.__dict__[attribute] = value
        for slot, value in self.value(slots).items():
            member = getattr(kind, slot)
            if not isinstance(member, types.MemberDescriptorType):
                raise ValueError(f"{name} has no slot {slot!r}")
            member.__set__(built, value)
        return built


# By name, and none but these.
_BUILDERS: dict[str, Callable[..., Value]] = {
    "dict": _Reader._dict,
    "deque": _Reader._deque,
    "bytes": _Reader._bytes,
    "bytearray": _Reader._bytearray,
    "complex": _Reader._complex,
    "slice": _Reader._slice,
    "range": _Reader._range,
    "array": _Reader._array,
    "objects": _Reader._objects,
    "texts": _Reader._texts,
    "masked": _Reader._masked,
    "scalar": _Reader._scalar,
    "dtype": _Reader._dtype,
    "scalar type": _Reader._scalar_type,
    "mlx": _Reader._mlx,
    "mlx dtype": _Reader._mlx_dtype,
    "module": _Reader._module,
    "enum": _Reader._enum,
    "named": _Reader._named,
    "object": _Reader._object,
}


def _mlx_dtype(name: str) -> "mx.Dtype":
    import mlx.core as mx

    return getattr(mx, _MLX_DTYPES[name])
