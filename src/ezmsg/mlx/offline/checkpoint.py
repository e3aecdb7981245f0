"""Save the state of a chain of transformers, and go on with it in another process.

This is more than packing a value: states may hold transformers of their own, whose states belong to them; and
a transformer begins anew when the hash of a message differs from that of the last one, which it does in every new
process, since Python salts the hashes of text.

A pickle may call anything when it is read. Here, bytes are a zip archive of arrays (``numpy.savez``) and one text in
JSON, which says how to put them together: containers, arrays and scalars of NumPy and MLX, members of enumerations, and
instances of plain classes. :func:`unpack` builds them again.

Reading calls no constructor and no method of what it builds: instances are of classes that are already imported, from
packages that the reader names, and are filled with their attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import io
import json
import operator
import platform
import re
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor, CompositeProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..chain import BaseChainTransformer
from ..stream.convert import MLX_DTYPES, is_mlx_array
from ..stream.unit import Captured, Output, Stage, a_type, captured, captured_attributes

FORMAT = "ezmsg-mlx values 3"

TREE = "tree"
"""Name of the text among the arrays."""

MODULES = frozenset({"numpy", "mlx.core", "array_api_compat.numpy"})
"""Array libraries, which states remember by their modules."""

Value: typing.TypeAlias = typing.Any
"""Whatever is packed."""

_PLAIN = (type(None), bool, int, float, str)
"""Types that JSON holds without a code; NaN and infinity included, as Python writes it."""


class CannotPack(TypeError):
    """There is something that this format does not hold; the message says what."""


def plain_class(module: str, name: str, packages: frozenset[str]) -> type:
    """A class that may be built, else ValueError: plain data, already imported, from one of the packages."""
    is_text = type(module) is str and type(name) is str  # anything else has methods of its own
    found: object = sys.modules.get(module) if is_text and module.partition(".")[0] in packages else None
    for part in name.split(".") if is_text else ():
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    if (
        isinstance(found, type)
        and (found.__module__, found.__qualname__) == (module, name)
        and (issubclass(found, (enum.Enum, tuple)) or found.__new__ is object.__new__)
        # Neither what would act once it is built, or dropped, nor what only its own code can put together.
        and not issubclass(found, (type, BaseException, BaseProcessor, Stateful))
        and not any(hasattr(found, method) for method in ("__del__", "__setstate__"))
    ):
        return found
    raise ValueError(f"class {module}.{name}")


class _Kind(typing.NamedTuple):
    """A kind of values: which they are, the parts that one consists of, and how it is built of them."""

    holds: Callable[[Value], bool]
    parts: Callable[[Value], Iterable[Value]]
    build: Callable[..., Value]
    types: tuple[type, ...] = ()
    """The only types of parts, where a part of another would be asked for something; empty for any."""


def _of(kind: type, parts: Callable[[Value], Iterable[Value]], build: Callable[..., Value], *types: type) -> _Kind:
    return _Kind(lambda value: type(value) is kind, parts, build, types)


def _is(kind: type) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, kind)


def _is_scalar_type(value: Value) -> bool:
    return isinstance(value, type) and issubclass(value, np.generic)


def _is_array(value: Value, kind: str) -> bool:
    return type(value) in (np.ndarray, np.memmap) and value.dtype.kind == kind


def _rows(value: npt.NDArray) -> list[Value]:
    return [value.shape, *value.ravel()]


def _objects(shape: Value, *parts: Value) -> npt.NDArray:
    if type(shape) is not tuple:
        raise ValueError(f"{a_type(shape)} in place of a shape")
    return np.fromiter(parts, object, len(parts)).reshape(shape)


def _texts(shape: tuple[int, ...], *parts: str) -> npt.NDArray:
    return np.array(parts, np.dtypes.StringDType()).reshape(shape)


def _from_mlx(array: Value) -> list[Value]:
    import mlx.core as mx

    # NumPy has no bfloat16; every one is a float32.
    return [_name_of(array.dtype), np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)]


def _to_mlx(dtype: str, values: npt.NDArray) -> Value:
    import mlx.core as mx

    array = mx.array(values, dtype=_mlx_dtype(dtype))
    mx.eval(array)
    return array


def _mlx_dtype(name: str) -> Value:
    import mlx.core as mx

    return getattr(mx, {each.rstrip("_"): each for each in MLX_DTYPES}[name])


def _is_mlx_dtype(value: Value) -> bool:
    return (type(value).__module__, type(value).__name__) == ("mlx.core", "Dtype")


def _name_of(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def _module(name: str) -> types.ModuleType:
    if name not in MODULES:
        raise ValueError(f"module {name!r}")
    return importlib.import_module(name)


def _is_library(value: Value) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ in MODULES


def _empty(dtype: npt.DTypeLike) -> list[Value]:
    return [np.empty(0, dtype)]


def _limits(value: Value) -> list[Value]:
    return [value.start, value.stop, value.step]


def _dict(*parts: Value) -> dict[Value, Value]:
    n = len(parts) // 2
    return dict(zip(parts[:n], parts[n:], strict=True))


_KINDS: dict[str, _Kind] = {
    "list": _of(list, list, lambda *parts: [*parts]),
    "tuple": _of(tuple, list, lambda *parts: parts),
    "set": _of(set, list, lambda *parts: {*parts}),
    "frozenset": _of(frozenset, list, lambda *parts: frozenset(parts)),
    "dict": _of(dict, lambda value: [*value.keys(), *value.values()], _dict),
    "deque": _of(deque, lambda value: [value.maxlen, *value], lambda maxlen, *parts: deque(parts, maxlen)),
    "complex": _of(complex, lambda value: [value.real, value.imag], complex, float),
    "slice": _of(slice, _limits, slice),
    "range": _of(range, _limits, range, int),
    "bytes": _of(bytes, lambda value: [np.frombuffer(value, np.uint8)], bytes, np.ndarray),
    "bytearray": _of(bytearray, lambda value: [np.array(value, np.uint8)], bytearray, np.ndarray),
    "scalar": _Kind(_is(np.generic), lambda value: [np.asarray(value)], lambda array: array[()], (np.ndarray,)),
    "dtype": _Kind(_is(np.dtype), _empty, lambda array: array.dtype, (np.ndarray,)),
    "scalar type": _Kind(_is_scalar_type, _empty, lambda array: array.dtype.type, (np.ndarray,)),
    # Values of their own, in the order of rows.
    "objects": _Kind(lambda value: _is_array(value, "O"), _rows, _objects),
    "texts": _Kind(lambda value: _is_array(value, "T"), _rows, _texts, (tuple, str)),
    "masked": _of(
        np.ma.MaskedArray,
        lambda value: [value.data, np.ma.getmaskarray(value), np.asarray(value.fill_value)],
        lambda values, mask, fill: np.ma.MaskedArray(values, mask, fill_value=fill),
        np.ndarray,
    ),
    "mlx": _Kind(is_mlx_array, _from_mlx, _to_mlx, (str, np.ndarray)),
    "mlx dtype": _Kind(_is_mlx_dtype, lambda value: [_name_of(value)], _mlx_dtype, (str,)),
    "module": _Kind(_is_library, lambda value: [value.__name__], _module, (str,)),
}
"""All kinds but arrays, and instances of classes: *enum*, *named* (tuples) and *object*."""


def pack(value: Value, packages: Iterable[str] = ("ezmsg",)) -> bytes:
    """*value*, with classes of *packages*, as bytes; :obj:`CannotPack` if :func:`unpack` could not build it again.

    What is referred to from several places is one object again afterwards.
    """
    writer = _Writer(frozenset(packages))
    tree = {"format": FORMAT, "value": writer.value(value), "nodes": writer.nodes}
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    file = io.BytesIO()
    arrays: dict[str, typing.Any] = {TREE: text, **writer.arrays}  # NumPy types its flags, too, as values of names
    np.savez(file, **arrays)
    return file.getvalue()


class _Writer:
    """Makes nodes of values: the kind, and the parts, each plain or a list with the number of an earlier node."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.nodes: list[list[Value]] = []
        self.arrays: dict[str, npt.NDArray] = {}
        self._packages = packages
        self._known: dict[int, tuple[Value, int | None]] = {}
        """By ``id``: the value, so that no other gets its ``id``, and the number of its node; None until it has one."""

    def value(self, value: Value) -> Value:
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, None
            self.nodes.append(self._node(value))
            self._known[id(value)] = value, len(self.nodes) - 1
        number = self._known[id(value)][1]
        if number is None:
            raise CannotPack(f"{a_type(value)} contains itself")
        return [number]

    def _node(self, value: Value) -> list[Value]:
        for name, kind in _KINDS.items():
            if kind.holds(value):
                return [name, *map(self.value, kind.parts(value))]
        if type(value) in (np.ndarray, np.memmap):
            if value.dtype.hasobject:
                raise CannotPack(f"it holds an array of dtype {value.dtype}")
            self.arrays[name := f"a{len(self.arrays)}"] = np.asarray(value)
            return ["array", name]
        node = self._instance(value)
        if node is None:
            raise CannotPack(f"it holds a {type(value).__module__}.{type(value).__qualname__}")
        return node

    def _instance(self, value: Value) -> list[Value] | None:
        """The node of an instance of a class; None for one that cannot be built again."""
        kind = type(value)
        named = kind.__module__, kind.__qualname__
        try:
            plain_class(*named, self._packages)
        except ValueError:
            return None
        if isinstance(value, enum.Enum):
            return ["enum", *named, value.name]
        if isinstance(value, tuple):
            return ["named", *named, *map(self.value, value)]
        # As pickle would, without the calls of constructors that it may ask for.
        function, args, state, *items = (*value.__reduce_ex__(2), None, None)[:5]
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if (
            getattr(function, "__name__", "") != "__newobj__"
            or args != (kind,)
            or any(each is not None for each in items)
            or not all(isinstance(each, (dict, type(None))) for each in (attributes, slots))
        ):
            return None
        return ["object", *named, self.value(attributes or {}), self.value(slots or {})]


def unpack(data: bytes, packages: Iterable[str] = ("ezmsg",)) -> Value:
    """The value that was packed, with classes of *packages* and no others, whoever made the bytes.

    ValueError for bytes that are something else, are damaged, or want something built that may not be.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            tree = json.loads(arrays[TREE].tobytes())
            if tree["format"] != FORMAT:
                raise ValueError(f"its format is {tree['format']!r}")
            built: list[Value] = []
            for kind, *parts in tree["nodes"]:
                # Only earlier ones are there, so nothing contains itself.
                values = [_built(part, built) for part in parts]
                built.append(arrays[values[0]] if kind == "array" else _build(kind, values, frozenset(packages)))
            return _built(tree["value"], built)
    except Exception as error:  # whatever damage leads to
        raise ValueError(f"not values of this version of ezmsg-mlx ({type(error).__name__}: {error})") from error


def _built(part: Value, built: list[Value]) -> Value:
    if not isinstance(part, list):
        return part
    (number,) = part
    return built[operator.index(number)]


def _build(name: str, parts: list[Value], packages: frozenset[str]) -> Value:
    if name in _KINDS:
        _, _, build, types_of_parts = _KINDS[name]
        if types_of_parts and not {*map(type, parts)} <= {*types_of_parts}:
            raise ValueError(f"other parts than {name} consists of")
        return build(*parts)
    module, qualified, *rest = parts
    kind = plain_class(module, qualified, packages)
    is_kind = issubclass(kind, enum.Enum), issubclass(kind, tuple)
    if is_kind != (name == "enum", name == "named"):
        raise ValueError(f"{qualified} is not of the kind {name}")
    if issubclass(kind, enum.Enum):
        return kind.__members__[rest[0]]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, rest)
    attributes, slots = rest
    made: typing.Any = object.__new__(kind)
    for attribute, value in dict.items(attributes):
        # Not setattr, which a class may answer with code of its own.
        made.__dict__[attribute] = value
    for slot, value in dict.items(slots):
        member = getattr(kind, slot)
        if not isinstance(member, types.MemberDescriptorType):
            raise ValueError(f"{qualified} has no slot {slot!r}")
        member.__set__(made, value)
    return made


_PACKAGES = ("ezmsg", "ezmsg-baseproc", "ezmsg-mlx", "ezmsg-sigproc", "mlx", "numba", "numpy", "scipy")

_WITHOUT_EFFECT = frozenset({"mlx_cache_limit_mb"})
"""Settings that results do not depend on."""


def description(step: Stage) -> str:
    """The class of a step and its settings, in full: two steps with the same text give the same results."""
    kind = step if hasattr(step, "__qualname__") else type(step)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(step, BaseProcessor):
        return name
    settings = step.settings
    # In full: NumPy abbreviates arrays of more than 1000 entries, for example the coefficients of a long filter.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        if not dataclasses.is_dataclass(settings):
            return f"{name} {settings!r}"
        fields = [field.name for field in dataclasses.fields(settings) if field.name not in _WITHOUT_EFFECT]
        text = f"{name}({', '.join(f'{field}={_shown(getattr(settings, field))}' for field in fields)})"
    parts = parts_of(step)
    return f"{text} of [{', '.join(map(description, parts.values()))}]" if parts else text


def _shown(value: object) -> str:
    """*value* as text that does not change from process to process, as the addresses of functions do."""
    if isinstance(value, functools.partial):
        return f"partial({_shown(value.func)}, {value.args!r}, {value.keywords!r})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def differing_settings(there: str, wanted: str) -> list[str]:
    """Differences of two recipes, each in a few words: the recording, the stages, or their settings one by one."""
    recordings = [recipe.partition("\n")[0].split(", ") for recipe in (there, wanted)]
    if len(recordings[0]) == len(recordings[1]):
        # Of an identity, only what differs: its times, its labels, its first and last samples.
        pairs = [pair for pair in zip(*recordings, strict=True) if pair[0] != pair[1]]
        recordings = [[pair[number] for pair in pairs] for number in (0, 1)]
    found = []
    if recordings[0] != recordings[1]:
        found.append(f"the recording is {', '.join(recordings[1])}; there it is {', '.join(recordings[0])}")
    stages_there, stages = _stages_in(there), _stages_in(wanted)
    names_there, names = ([name for name, _ in each] for each in (stages_there, stages))
    if names_there != names:
        return [*found, f"the stages are {', '.join(names)}; there they are {', '.join(names_there)}"]
    for (name, before), (_, now) in zip(stages_there, stages, strict=True):
        found += [
            f"{field} of {name} is {now.get(field)}, there it is {before.get(field)}"
            for field in {**before, **now}
            if before.get(field) != now.get(field)
        ]
    kept = [f"one keeps {line}" for line in (wanted + "\n" + there).splitlines() if line.startswith("results as")]
    return found or kept or ["the text of the recipe is another"]


# In text there may be brackets that nothing closes.
_TEXT = "'[^']*'|" + '"[^"]*"'
_INSIDE = ""
for _ in range(5):
    _INSIDE = rf"(?:{_TEXT}|[^()\[\]{{}}'\"]|[(\[{{]{_INSIDE}[)\]}}])*"
_SETTING = re.compile(rf"\.(\w+)\((?=\w+=|\))|(\w+)=((?:{_TEXT}|[^,()\[\]{{}}'\"]|[(\[{{]{_INSIDE}[)\]}}])+)")
"""A stage, or a name and a value, in which there may be brackets within brackets, five deep."""


def _stages_in(recipe: str) -> list[tuple[str, dict[str, str]]]:
    """The names of all stages in a recipe, nested ones included, and their settings as text."""
    found: list[tuple[str, dict[str, str]]] = []
    for stage, field, value in _SETTING.findall(recipe.partition("\n")[2]):
        if stage:
            found.append((stage, {}))
        elif found:
            found[-1][1][field] = value
    return found


def parts_of(step: object) -> Mapping[str, typing.Any]:
    """The steps that a composite consists of, by their names; empty for any other step."""
    if isinstance(step, BaseChainTransformer):
        return step.stages
    # There is no public way to the parts of ezmsg-baseproc's composites; a test notices when this one goes.
    return step._procs if isinstance(step, CompositeProcessor) else {}


def environment() -> str:
    """Conditions besides recording and settings that the bits of a result depend on: versions, processor, device."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    device: object = "no MLX"
    with contextlib.suppress(ImportError):
        import mlx.core as mx

        device = mx.default_device()
    return f"{versions} {_processor()} {device}"


@functools.cache
def _processor() -> str:
    # Its kind, since sums in NumPy and in compiled kernels come out differently with wider vectors. Through numba's
    # compiler, which has to know it; the standard library does not tell it everywhere.
    from llvmlite import binding

    return f"{platform.machine()} {binding.get_host_cpu_name()}"


class CannotSave(TypeError):
    """The state of a step cannot be saved; the message says of which one and why."""


_BASE_ATTRIBUTES = frozenset({"_state", "_hash", "_hash_witness"})
"""Attributes of ezmsg-baseproc's classes that change while a step runs, and that are saved or follow from messages."""

Made: typing.TypeAlias = list[tuple[BaseProcessor, Captured]]
"""A step and the parts that it consists of, each with its attributes."""


def as_made(step: Stage) -> Made:
    """Attributes of a step when it is made, so that :func:`save` sees whether it keeps data in others."""
    found: Made = [(step, captured(step))] if isinstance(step, BaseProcessor) else []
    return [*found, *(each for part in parts_of(step).values() for each in as_made(part))]


def check_keeps_nothing(made: Made) -> None:
    """Raise :obj:`CannotSave` for a step that keeps something outside of its state, in attributes made since."""
    for part, found in made:
        # Of a step of this package, all that its results depend on is in its state.
        if any(kind.__module__.startswith("ezmsg.mlx.") for kind in type(part).__mro__):
            continue
        before = captured_attributes(found)
        changed = {name for name, value in vars(part).items() if name not in before or before[name] is not value}
        if kept := ", ".join(sorted(changed - _BASE_ATTRIBUTES)):
            raise CannotSave(f"{type(part).__name__} keeps {kept} outside of its state, which cannot be saved")


def check_savable(step: Stage) -> None:
    """Raise :obj:`CannotSave` for a step with state that cannot be seen, like a function or a generator."""
    for part in parts_of(step).values():
        check_savable(part)
    if not isinstance(step, BaseProcessor):
        raise CannotSave(f"{description(step)} is not a processor of ezmsg-baseproc, so its state is not known")


def save(step: Stage, made: Made | None = None) -> bytes | None:
    """The state of a step, None for one without; *made* is what :func:`as_made` gave before its first message.

    :obj:`CannotSave` for a state that :func:`pack` does not hold, and for a step that keeps something outside of its
    state (ezmsg-sigproc's ButterworthZeroPhase does).
    """
    check_savable(step)
    check_keeps_nothing(made or [])
    if not isinstance(step, Stateful):
        return None
    try:
        return pack(_kept(step), _packages(step))
    except CannotPack as error:
        raise CannotSave(f"the state of {type(step).__name__} cannot be saved ({error})") from error


def _packages(step: Stage) -> set[str]:
    """The packages whose classes a state may consist of."""
    return {"ezmsg", type(step).__module__.partition(".")[0]}


def check(step: Stage, saved: bytes) -> None:
    """Raise ValueError if a saved state cannot be read or is not one of *step*, which has not been called yet."""
    _check(step, unpack(saved, _packages(step)))


def call_restored(step: Stage, saved: bytes, message: AxisArray) -> Output:
    """Call a fresh step as if it had the saved state, else ValueError; *message* is the first one since."""
    # The first call makes the step's own transformers and its state, and the second lets it take the hash of this
    # message with the saved state (some hash what they know of the rate): after it, the third resets nothing.
    for _ in range(2):
        step(message)
        restore(step, saved)
    return step(message)


def restore(step: Stage, saved: bytes) -> None:
    """Put a saved state into a step that has seen a message of its stream, or keeps its state whatever comes."""
    # From bytes each time, since the step may change in place what it gets.
    _restore(step, unpack(saved, _packages(step)))


class _Nested(typing.NamedTuple):
    """The state of a transformer inside the state of another."""

    kept: object


def _kept(step: Stateful) -> object:
    if parts := parts_of(step):
        return {name: _Nested(_kept(part)) for name, part in parts.items() if isinstance(part, Stateful)}
    values = getattr(step.state, "__dict__", None)
    if values is None:
        return step.state
    return {name: _Nested(_kept(value)) if isinstance(value, Stateful) else value for name, value in values.items()}


def _check(step: object, kept: object) -> None:
    """Raise ValueError unless *kept* may be a state of *step*."""
    if isinstance(step, Stateful):
        has_names = bool(parts_of(step)) or hasattr(step.state, "__dict__")
        # ezmsg-baseproc would take bytes for a pickle.
        if has_names == isinstance(kept, dict) and not isinstance(kept, (bytes, bytearray)):
            return
    raise ValueError(f"a saved state is not one of {type(step).__name__}")


def _restore(step: typing.Any, kept: typing.Any) -> None:
    _check(step, kept)
    parts, state = parts_of(step), kept
    if isinstance(kept, dict):
        state = None if parts else step.state
        for name, value in kept.items():
            if isinstance(value, _Nested):
                _restore(parts.get(name) if parts else getattr(state, name, None), value.kept)
            else:
                setattr(state, name, value)
    if not parts:
        # Of the same object too, so that the step forgets which message it has last taken the hash of.
        step.state = state
