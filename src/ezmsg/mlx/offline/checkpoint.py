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
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor, CompositeProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..chain import BaseChainTransformer
from ..stream.convert import MLX_DTYPES, is_mlx_array
from ..stream.unit import Captured, Output, Stage, a_type, captured, captured_attributes

if typing.TYPE_CHECKING:
    import mlx.core as mx

FORMAT = "ezmsg-mlx values 2"

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
        # Neither what would act once it is built, or dropped, nor what only its own code can put together.
        and not issubclass(found, (type, BaseException, BaseProcessor, Stateful))
        and not any(hasattr(found, method) for method in ("__del__", "__setstate__"))
    )
    if not allowed:
        raise ValueError(f"class {module}.{name}")
    return typing.cast(type, found)


class _Kind(typing.NamedTuple):
    """A kind of values: which they are, the parts that one consists of, and how it is built of them."""

    holds: Callable[[Value], bool]
    parts: Callable[[Value], Iterable[Value]]
    build: Callable[[list[Value]], Value]


def _of(kind: type, parts: Callable[[Value], Iterable[Value]], build: Callable[[list[Value]], Value]) -> _Kind:
    return _Kind(lambda value: type(value) is kind, parts, build)


def _only(kind: type, value: Value) -> Value:
    """*value*, of exactly this class: what else was packed is not to be asked for anything."""
    if type(value) is not kind:
        raise ValueError(f"{a_type(value)} in place of a {kind.__name__}")
    return value


def _halves(parts: list[Value]) -> Iterator[tuple[Value, Value]]:
    return zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)


def _objects(parts: list[Value]) -> npt.NDArray:
    filled = np.empty(len(parts) - 1, object)
    for place, value in enumerate(parts[1:]):
        filled[place] = value
    return filled.reshape(_only(tuple, parts[0]))


def _from_mlx(array: Value) -> list[Value]:
    import mlx.core as mx

    # NumPy has no bfloat16; every one is a float32.
    return [_name_of(array.dtype), np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)]


def _to_mlx(parts: list[Value]) -> Value:
    import mlx.core as mx

    array = mx.array(_only(np.ndarray, parts[1]), dtype=_mlx_dtype(parts[0]))
    mx.eval(array)
    return array


_MLX_DTYPES = {name.rstrip("_"): name for name in MLX_DTYPES}


def _mlx_dtype(name: str) -> mx.Dtype:
    import mlx.core as mx

    return getattr(mx, _MLX_DTYPES[name])


def _name_of(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def _is_mlx_dtype(value: Value) -> bool:
    return type(value).__module__ == "mlx.core" and type(value).__name__ == "Dtype"


def _module(parts: list[Value]) -> types.ModuleType:
    if parts[0] not in MODULES:
        raise ValueError(f"module {parts[0]!r}")
    return importlib.import_module(parts[0])


def _is_array(value: Value, kinds: str) -> bool:
    return type(value) in (np.ndarray, np.memmap) and value.dtype.kind in kinds


def _is_library(value: Value) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ in MODULES


def _empty(dtype: Value) -> list[Value]:
    return [np.empty(0, dtype)]


def _scalar(parts: list[Value]) -> Value:
    return _array(parts)[()]


def _texts(parts: list[Value]) -> npt.NDArray:
    return np.array(parts[1:], np.dtypes.StringDType()).reshape(_only(tuple, parts[0]))


def _all(kind: type, parts: list[Value]) -> list[Value]:
    return [_only(kind, part) for part in parts]


def _array(parts: list[Value]) -> npt.NDArray:
    return _only(np.ndarray, *parts)


def _masked(parts: list[Value]) -> Value:
    return np.ma.MaskedArray(_array(parts[:1]), _array(parts[1:2]), fill_value=parts[2])


def _limits(value: Value) -> list[Value]:
    return [value.start, value.stop, value.step]


def _is_scalar_type(value: Value) -> bool:
    return isinstance(value, type) and issubclass(value, np.generic)


_KINDS: dict[str, _Kind] = {
    **{kind.__name__: _of(kind, list, kind) for kind in (list, tuple, set, frozenset)},
    "dict": _of(dict, lambda value: [*value.keys(), *value.values()], lambda parts: dict(_halves(parts))),
    "deque": _of(deque, lambda value: [value.maxlen, *value], lambda parts: deque(parts[1:], parts[0])),
    "complex": _of(complex, lambda value: [value.real, value.imag], lambda parts: complex(*_all(float, parts))),
    "slice": _of(slice, _limits, lambda parts: slice(*parts)),
    "range": _of(range, _limits, lambda parts: range(*_all(int, parts))),
    "bytes": _of(bytes, lambda value: [np.frombuffer(value, np.uint8)], lambda parts: bytes(_array(parts))),
    "bytearray": _of(bytearray, lambda value: [np.array(value, np.uint8)], lambda parts: bytearray(_array(parts))),
    "scalar": _Kind(lambda value: isinstance(value, np.generic), lambda value: [np.asarray(value)], _scalar),
    "dtype": _Kind(lambda value: isinstance(value, np.dtype), _empty, lambda parts: _array(parts).dtype),
    "scalar type": _Kind(_is_scalar_type, _empty, lambda parts: _array(parts).dtype.type),
    # Values of their own, in the order of rows.
    "objects": _Kind(lambda value: _is_array(value, "O"), lambda value: [value.shape, *value.ravel()], _objects),
    "texts": _Kind(lambda value: _is_array(value, "T"), lambda value: [value.shape, *value.ravel()], _texts),
    "masked": _of(np.ma.MaskedArray, lambda value: [value.data, np.ma.getmaskarray(value), value.fill_value], _masked),
    "mlx": _Kind(is_mlx_array, _from_mlx, _to_mlx),
    "mlx dtype": _Kind(_is_mlx_dtype, lambda value: [_name_of(value)], lambda parts: _mlx_dtype(*parts)),
    "module": _Kind(_is_library, lambda value: [value.__name__], _module),
}
"""All kinds but arrays, and instances of classes: *enum*, *named* (tuples) and *object*."""


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
    """Makes nodes of values: the kind, and the parts, each plain or a list with the number of an earlier node."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.nodes: list[list[Value]] = []
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
            raise CannotPack(f"{a_type(value)} contains itself")
        if key not in self._numbers:
            self._open.add(key)
            node = self._node(value)
            self._open.remove(key)
            self._kept.append(value)
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return [self._numbers[key]]

    def _node(self, value: Value) -> list[Value]:
        name, parts = next(
            ((name, kind.parts(value)) for name, kind in _KINDS.items() if kind.holds(value)), ("", None)
        )
        if parts is not None:
            return [name, *map(self.value, parts)]
        if type(value) in (np.ndarray, np.memmap):
            if value.dtype.hasobject:
                raise CannotPack(f"it holds an array of dtype {value.dtype}")
            self.arrays[name := f"a{len(self.arrays)}"] = np.asarray(value)
            return ["array", name]
        return self._instance(value)

    def _instance(self, value: Value) -> list[Value]:
        kind = type(value)
        named = kind.__module__, kind.__qualname__
        if isinstance(value, (Stateful, BaseProcessor)):
            raise CannotPack(f"it holds a {kind.__name__}")
        try:
            plain_class(*named, self._packages)
        except ValueError as error:
            raise CannotPack(f"it holds a {'.'.join(named)}") from error
        if isinstance(value, enum.Enum):
            return ["enum", *named, value.name]
        if isinstance(value, tuple):
            return ["named", *named, *map(self.value, value)]
        # As pickle would, without the calls of constructors that it may ask for.
        function, args, state, *items = (*value.__reduce_ex__(2), None, None)[:5]
        if getattr(function, "__name__", "") != "__newobj__" or args != (kind,) or any(i is not None for i in items):
            raise CannotPack(f"it holds a {'.'.join(named)}")
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if not all(isinstance(part, (dict, type(None))) for part in (attributes, slots)):
            raise CannotPack(f"it holds a {'.'.join(named)}")
        return ["object", *named, self.value(attributes or {}), self.value(slots or {})]


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
    if name not in ("enum", "named", "object"):
        return _KINDS[name].build(parts)
    kind = plain_class(_only(str, parts[0]), _only(str, parts[1]), packages)
    is_kind = issubclass(kind, enum.Enum), issubclass(kind, tuple)
    if is_kind != (name == "enum", name == "named"):
        raise ValueError(f"{parts[1]} is not of the kind {name}")
    if name == "enum":
        return typing.cast("type[enum.Enum]", kind).__members__[parts[2]]
    if name == "named":
        return tuple.__new__(kind, parts[2:])
    attributes, slots = (_only(dict, part) for part in parts[2:])
    made: typing.Any = object.__new__(kind)
    for attribute, value in attributes.items():
        # Not setattr, which a class may answer with code of its own.
        made.__dict__[attribute] = value
    for slot, value in slots.items():
        member = getattr(kind, slot)
        if not isinstance(member, types.MemberDescriptorType):
            raise ValueError(f"{parts[1]} has no slot {slot!r}")
        member.__set__(made, value)
    return made


_PACKAGES = ("ezmsg", "ezmsg-baseproc", "ezmsg-mlx", "ezmsg-sigproc", "mlx", "numba", "numpy", "scipy")

_WITHOUT_EFFECT = frozenset({"mlx_cache_limit_mb"})
"""Settings that results do not depend on."""


class CannotSave(TypeError):
    """The state of a step cannot be saved; the message says of which one and why."""


_BASE_ATTRIBUTES = frozenset({"_state", "_hash", "_hash_witness"})
"""Attributes of ezmsg-baseproc's classes that change while a step runs, and that are saved or follow from messages."""

Made: typing.TypeAlias = list[tuple[BaseProcessor, Captured]]
"""A step and the parts that it consists of, each with its attributes."""


class _Nested(typing.NamedTuple):
    """The state of a transformer inside the state of another."""

    kept: object


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
    recordings, stages = zip(*((text.partition("\n")[0], _stages_in(text)) for text in (there, wanted)), strict=True)
    parts = [recording.split(", ") for recording in recordings]
    if len(parts[0]) == len(parts[1]):
        # Of an identity, only what differs: its times, its labels, its first and last samples.
        parts = [[part for part, other in zip(*pair, strict=True) if part != other] for pair in (parts, parts[::-1])]
    found = (
        [f"the recording is {', '.join(parts[1])}; there it is {', '.join(parts[0])}"] if parts[0] != parts[1] else []
    )
    names = [[name for name, _ in each] for each in stages]
    if names[0] != names[1]:
        return [*found, f"the stages are {', '.join(names[1])}; there they are {', '.join(names[0])}"]
    for (name, before), (_, now) in zip(*stages, strict=True):
        for field in {**before, **now}:
            if before.get(field) != now.get(field):
                found.append(f"{field} of {name} is {now.get(field)}, there it is {before.get(field)}")
    rest = [each for each in wanted.splitlines() + there.splitlines() if each.startswith("results as")]
    if not found:
        found = [f"one keeps {each}" for each in rest] or ["the text of the recipe is another"]
    return found


_STAGE = re.compile(r"[\w.<>]*\.(\w+)\(")


def _stages_in(recipe: str) -> list[tuple[str, dict[str, str]]]:
    """The names of all stages in a recipe, nested ones included, and their settings as text."""
    found = []
    for match in _STAGE.finditer(recipe):
        parts = _split(recipe[match.end() :])
        # A value may be a call as well, which has no names of settings.
        if all("=" in part for part in parts):
            found.append(
                (match[1], {name.strip(): value for name, _, value in (part.partition("=") for part in parts)})
            )
    return found


def _split(text: str) -> list[str]:
    """The parts between commas up to the parenthesis that closes the text, brackets and quotes left whole."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                break
        elif character == "," and not depth:
            parts.append("")
            continue
        parts[-1] += character
    return [part for part in parts if part.strip()]


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
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        import mlx.core as mx
    except ImportError:
        device = "no MLX"
    else:
        device = str(mx.default_device())
    return f"{versions} {_processor()} {device}"


@functools.cache
def _processor() -> str:
    # Its kind, since sums in NumPy and in compiled kernels come out differently with wider vectors. Through numba's
    # compiler, which has to know it; the standard library does not tell it everywhere.
    from llvmlite import binding

    return f"{platform.machine()} {binding.get_host_cpu_name()}"


def check_savable(step: Stage) -> None:
    """Raise :obj:`CannotSave` for a step with state that cannot be seen, like a function or a generator."""
    for part in parts_of(step).values():
        check_savable(part)
    if not isinstance(step, BaseProcessor):
        raise CannotSave(f"{description(step)} is not a processor of ezmsg-baseproc, so its state is not known")


def as_made(step: Stage) -> Made:
    """Attributes of a step when it is made, so that :func:`save` sees whether it keeps data in others."""
    found: Made = [(step, captured(step))] if isinstance(step, BaseProcessor) else []
    return [*found, *(each for part in parts_of(step).values() for each in as_made(part))]


def check_keeps_nothing(made: Iterable[tuple[BaseProcessor, Captured]]) -> None:
    """Raise :obj:`CannotSave` for a step that keeps something outside of its state.

    Args:
        made: What :func:`as_made` gave before its first message.
    """
    for part, found in made:
        before = captured_attributes(found)
        changed = {name for name, value in vars(part).items() if name not in before or before[name] is not value}
        if (kept := sorted(changed - _BASE_ATTRIBUTES)) and not _is_ours(part):
            raise CannotSave(
                f"{type(part).__name__} keeps {', '.join(kept)} outside of its state, which cannot be saved"
            )


def save(step: Stage, made: Made | None = None) -> bytes | None:
    """The state of a step; None for one without.

    Args:
        step: The step.
        made: What :func:`as_made` gave before its first message.

    Raises:
        CannotSave: There is something in the state that :func:`pack` does not hold; or the
            step keeps something outside of its state (ezmsg-sigproc's ButterworthZeroPhase does).
    """
    check_savable(step)
    check_keeps_nothing(made or ())
    if not isinstance(step, Stateful):
        return None
    try:
        return pack(_kept(step), _packages(step))
    except CannotPack as error:
        raise CannotSave(f"the state of {type(step).__name__} cannot be saved ({error})") from error


def _is_ours(step: object) -> bool:
    """Whether a step is of this package, or derived from it: all that its results depend on is in its state."""
    return any(kind.__module__.startswith("ezmsg.mlx.") for kind in type(step).__mro__)


def _packages(step: Stage) -> set[str]:
    """The packages whose classes a state may consist of."""
    return {"ezmsg", type(step).__module__.partition(".")[0]}


def check(step: Stage, saved: bytes) -> None:
    """See whether a saved state can be read, before the step is called.

    Raises:
        ValueError: It cannot.
    """
    kept = unpack(saved, _packages(step))
    by_name = bool(parts_of(step)) or (isinstance(step, Stateful) and hasattr(step.state, "__dict__"))
    if not isinstance(step, Stateful) or by_name != isinstance(kept, dict):
        raise ValueError(f"a saved state is not one of {type(step).__name__}")


def call_restored(step: Stage, saved: bytes, message: AxisArray) -> Output:
    """Call a fresh step as if it had the saved state; *message* is the first one since.

    Raises:
        ValueError: The state is not one of this step.
    """
    # The first call makes the step's own transformers and its state, and the second lets it take the hash of this
    # message with the saved state (some hash what they know of the rate): after it, the third resets nothing.
    for _ in range(2):
        step(message)
        restore(step, saved)
    return step(message)


def restore(step: Stage, saved: bytes) -> None:
    """Put a saved state into a step that has seen a message of its stream, or that keeps its state whatever comes.

    Raises:
        ValueError: The state is not one of this step.
    """
    # From bytes each time, since the step may change in place what it gets.
    _restore(step, unpack(saved, _packages(step)))


def _kept(step: Stateful) -> object:
    if parts := parts_of(step):
        return {name: _Nested(_kept(part)) for name, part in parts.items() if isinstance(part, Stateful)}
    state = step.state
    if not hasattr(state, "__dict__"):
        return state
    return {
        name: _Nested(_kept(value)) if isinstance(value, Stateful) else value for name, value in vars(state).items()
    }


def _restore(step: object, kept: object) -> None:
    if not isinstance(step, Stateful):
        raise ValueError(f"A saved state is not one of {type(step).__name__}.")
    if parts := parts_of(step):
        for name, value in typing.cast(dict[str, _Nested], kept).items():
            _restore(parts.get(name), value.kept)
        return
    state = step.state
    if not hasattr(state, "__dict__"):
        if isinstance(kept, (bytes, bytearray)):
            # ezmsg-baseproc would take them for a pickle.
            raise ValueError(f"A saved state is not one of {type(step).__name__}.")
        step.state = kept
        return
    if not isinstance(kept, dict):
        raise ValueError(f"A saved state is not one of {type(step).__name__}.")
    for name, value in kept.items():
        if isinstance(value, _Nested):
            _restore(getattr(state, name, None), value.kept)
        else:
            setattr(state, name, value)
    # So that the step forgets which message it has last taken the hash of.
    step.state = state
