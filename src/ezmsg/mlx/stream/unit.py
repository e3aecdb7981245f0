"""Parts that all units share: checks, settings, publishing, the state of stages, and running several in a row.

Whoever changes from ezmsg-sigproc to this package may go on building its settings, or classes derived from them, which
have the same fields. They are built anew as settings of this package, which checks them. Without that, ezmsg would take
a settings object of another class for the value of the first field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import (
    BaseProcessor,
    BaseStatefulProcessor,
    BaseStatefulTransformer,
    BaseTransformer,
    BaseTransformerUnit,
    CompositeProcessor,
    profile_subpub,
    suppress_axis_deprecation,
)
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

from .convert import let_states_be_copied

if TYPE_CHECKING:
    import mlx.core as mx


ValueT = TypeVar("ValueT")
SettingsT = TypeVar("SettingsT", bound=ez.Settings)
EnumT = TypeVar("EnumT", bound=enum.Enum)


def is_real(value: object) -> TypeGuard[float]:
    """Whether *value* is a real number; bool does not count as one."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def as_float(value: float) -> float:
    """A real number as a float; infinity for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def known(value: ValueT | None) -> ValueT:
    """*value*, which is None only before the first message."""
    assert value is not None
    return value


def check_number(name: str, value: float, *, zero: bool = False, infinite: bool = False) -> float:
    """*value*, a finite number greater than 0, as a Python float: arithmetic with it is that of float64.

    Args:
        name: Of the field or argument, for the error.
        value: The number.
        zero: Whether 0 is allowed, too.
        infinite: Whether infinity is allowed, too.

    Raises:
        TypeError: *value* is not a real number; bool does not count as one.
        ValueError: It is NaN, or not in the range.
    """
    error = f"{name!r} must be a {'' if infinite else 'finite '}number {'>=' if zero else '>'} 0, got {value!r}"
    if not is_real(value):
        raise TypeError(error)
    number = as_float(value)
    if not (number > 0 or (zero and number == 0)) or (number == math.inf and not infinite):
        raise ValueError(error)
    return number


def check_count(name: str, value: int, smallest: int = 1) -> int:
    """*value*, an integer of *smallest* or more, as one of Python; the error calls it *name*.

    Raises:
        TypeError: *value* is not an integer; bool does not count as one.
        ValueError: It is smaller than *smallest*.
    """
    error = f"{name!r} must be an integer of at least {smallest}, got {value!r}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(error)
    if value < smallest:
        raise ValueError(error)
    return int(value)


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Raise TypeError for what is neither text nor a path of a file or folder."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name!r} must be a path, got {value!r}")


def check_fields(settings: object, *, flags: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> None:
    """Raise TypeError for *flags* that are not True or False, and *names* that are not None or text."""
    for field in flags:
        if not isinstance(value := getattr(settings, field), (bool, np.bool_)):
            raise TypeError(f"{field!r} must be True or False, got {value!r}")
    for field in names:
        if not isinstance(value := getattr(settings, field), (str, type(None))):
            raise TypeError(f"{field!r} must be None or a name, got {value!r}")


def one_of(allowed: Iterable[object]) -> str:
    """How an error names the values that are allowed: ``one of 'a', 'b'``."""
    return f"one of {', '.join(map(repr, allowed))}"


def check_one_of(
    name: str, value: object, allowed: Iterable[object], *, none: bool = False, error: type[Exception] = ValueError
) -> None:
    """Raise *error* for a *value* that is not one of *allowed*; the error calls it *name*.

    Args:
        name: Of the field or argument.
        value: Of any type; bool is none of the values.
        allowed: The values.
        none: Whether None is allowed, too.
        error: TypeError for the name of a dtype, as NumPy has it.
    """
    allowed = tuple(allowed)
    # A dtype of NumPy equals its name, and True equals 1.
    is_plain = isinstance(value, (str, int)) and not isinstance(value, bool)
    if not ((is_plain and value in allowed) or (none and value is None)):
        raise error(f"{name!r} must be {'None or ' if none else ''}{one_of(allowed)}, got {value!r}")


def check_member(name: str, value: object, kind: type[EnumT]) -> EnumT:
    """The member of *kind* that *value* is, or is the value of; the error calls it *name*.

    Raises:
        ValueError: It is none.
    """
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name!r} must be {one_of(each.value for each in kind)}, got {value!r}") from None


def a_type(value: object) -> str:
    """How an error names the type of *value*: ``an int``, ``a list``."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" or name == "ndarray" else f"a {name}"


def check_message(message: AxisArray, taker: object) -> None:
    """Raise TypeError, with the name of the class of *taker*, for what is not a message.

    To be called only if the type of *message* is not exactly AxisArray, so that the usual one costs a comparison.
    """
    if not isinstance(message, AxisArray):
        raise TypeError(f"{type(taker).__name__} takes an AxisArray as its message, got {a_type(message)}.")


def check_mlx(x: mx.array, zi: mx.array | None) -> None:
    """Raise TypeError if *x*, or *zi* where it is given, is not an MLX array."""
    import mlx.core as mx

    if not isinstance(x, mx.array):
        raise TypeError(f"'x' must be an MLX array, got {a_type(x)}")
    if zi is not None and not isinstance(zi, mx.array):
        raise TypeError(f"'zi' must be an MLX array or None, got {a_type(zi)}")


TransformerClassT = TypeVar("TransformerClassT", bound="BaseProcessor")

if TYPE_CHECKING:

    class _Transformer:
        """The methods that the mixin for transformers calls of the classes behind it."""

        def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None: ...
        def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None: ...
        def __call__(self, message: AxisArray) -> AxisArray: ...
        async def __acall__(self, message: AxisArray) -> AxisArray: ...

    _Unit = ez.Unit
else:
    _Transformer = _Unit = object


def own_settings(kind: type[SettingsT], given: ez.Settings) -> SettingsT:
    """*given* as settings of class *kind*: itself if it is one, else one with the same values.

    Args:
        kind: A class of settings that extends one of ezmsg-sigproc.
        given: Settings of that class of ezmsg-sigproc or of one derived from it, whose further fields are left out, as
            there; or settings of a class of the same name, as another package has it, with fields that *kind* has; or
            settings with exactly the fields of *kind*.

    Raises:
        TypeError: *given* is none of these.
        As *kind*, if it does not allow a value.
    """
    if isinstance(given, kind):
        return given
    names = {field.name for field in dataclasses.fields(kind)}
    extended = next((base for base in kind.__mro__ if base.__module__.startswith("ezmsg.sigproc.")), kind)
    fields = {field.name for field in dataclasses.fields(given)} if isinstance(given, ez.Settings) else {""}
    is_namesake = type(given).__name__ == kind.__name__ and fields <= names
    if not (isinstance(given, extended) or is_namesake or fields == names):
        raise TypeError(f"'settings' must be {kind.__module__}.{kind.__name__}, got {given!r}")
    # Warned about when *given* was built.
    with suppress_axis_deprecation():
        return kind(**{name: getattr(given, name) for name in names if hasattr(given, name)})


def show_settings(transformer: type[TransformerClassT]) -> type[TransformerClassT]:
    """Give a class of transformers the signature of its settings, whose fields are its arguments; a decorator."""
    signature = inspect.signature(transformer.get_settings_type())
    transformer.__signature__ = signature.replace(return_annotation=inspect.Signature.empty)  # type: ignore[attr-defined]
    return transformer


def _taken(
    kind: type[ez.Settings], args: tuple[object, ...], settings: ez.Settings | None
) -> tuple[tuple[object, ...], ez.Settings | None]:
    if settings is None and args and isinstance(args[0], ez.Settings):
        settings, args = args[0], args[1:]
    return args, settings if settings is None else own_settings(kind, settings)


def attributes_to_copy(stage: BaseProcessor) -> dict[str, object]:
    """The attributes of *stage* that a copy of it is to have, ready for ``copy`` and ``pickle``.

    It forgets by what to recognize its last message, since there is a local function of ezmsg-baseproc in that, and so
    do the transformers that it consists of. The next message brings it back.
    """
    let_states_be_copied()
    _forget_messages(stage, set())
    return vars(stage).copy()


def _forget_messages(held: object, seen: set[int]) -> None:
    if isinstance(held, (dict, list, tuple)):
        for each in held.values() if isinstance(held, dict) else held:
            _forget_messages(each, seen)
    elif isinstance(held, BaseProcessor) and id(held) not in seen:
        seen.add(id(held))
        _forget_messages(vars(held), seen)
        if isinstance(held, BaseStatefulProcessor):
            # Since a state that is assigned may belong to another message.
            held.state = held.state
            _forget_messages(getattr(held.state, "__dict__", {}), seen)


class TransformerTakesSettings(_Transformer):
    """A transformer that takes ezmsg-sigproc's settings for its own; to be named first among the bases.

    The class has the signature of its settings, for ``help()`` and for editors.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A base for several transformers has no settings yet.
        with contextlib.suppress(TypeError):
            kind: type[typing.Any] = cls
            show_settings(kind)

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        args, settings = _taken(self._settings_class(), args, settings)
        super().__init__(*args, settings=settings, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        assert isinstance(self, BaseProcessor)
        return attributes_to_copy(self)

    def _settings_class(self) -> type[ez.Settings]:
        assert isinstance(self, BaseProcessor)
        return self.get_settings_type()

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, of this package or of ezmsg-sigproc's class for them."""
        if new_settings is not None:
            new_settings = own_settings(self._settings_class(), new_settings)
        super().update_settings(new_settings, **kwargs)


class TakesMessages(_Transformer):
    """A transformer that says what it was given where that is no message; to be named before that of ezmsg-sigproc."""

    def __call__(self, message: AxisArray) -> AxisArray:
        """The result of *message*."""
        if type(message) is not AxisArray:
            check_message(message, self)
        return super().__call__(message)

    async def __acall__(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        return await super().__acall__(message)


class UnitTakesSettings(_Unit):
    """A unit that takes ezmsg-sigproc's settings for its own; to be named first among the bases."""

    # Component declares the None that an instance begins with, and no class of settings.
    SETTINGS: type[ez.Settings]  # type: ignore[assignment]

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        args, settings = _taken(type(self).SETTINGS, args, settings)
        super().__init__(*args, settings=settings, **kwargs)

    def apply_settings(self, settings: ez.Settings) -> None:
        """Take other settings, of this package or of ezmsg-sigproc's class for them."""
        super().apply_settings(own_settings(type(self).SETTINGS, settings))


OutputT = TypeVar("OutputT")
TransformerT = TypeVar("TransformerT", bound=BaseTransformer | BaseStatefulTransformer | CompositeProcessor)


class PublishesEach(BaseTransformerUnit[SettingsT, AxisArray, OutputT, TransformerT]):
    """A unit that publishes what its transformer makes of a message one after the other."""

    @ez.subscriber(BaseTransformerUnit.INPUT_SIGNAL)
    @ez.publisher(BaseTransformerUnit.OUTPUT_SIGNAL)
    @profile_subpub(trace_oldest=False)
    async def on_signal(self, message: AxisArray) -> typing.AsyncGenerator:
        """Publish each result of *message*."""
        for result in self._results(message, await self.processor.__acall__(message)):
            yield self.OUTPUT_SIGNAL, result

    def _results(self, message: AxisArray, output: OutputT) -> Iterable[AxisArray]:
        """The messages to publish of what the transformer has returned, which is a list unless this is overridden."""
        results: typing.Any = output
        return results


Output: TypeAlias = AxisArray | Sequence[AxisArray] | None
"""Result of a stage: a message, several in a list or tuple, or None where it has none yet."""

Stage: TypeAlias = Callable[[AxisArray], Output]
"""A transformer that is called bare, or any other callable of this form."""

Stages: TypeAlias = Stage | Sequence[Stage]
"""One step, or several that are applied in order."""


Captured: TypeAlias = list[tuple[dict[str, object], dict[str, object]] | Callable[[], None]]
"""Attributes of stages and of what their state consists of, each with a copy; or what puts such back."""


def captured(*stages: object) -> Captured:
    """Values with which :func:`put_back` makes the state of *stages* what it is now.

    That is the state which ezmsg-baseproc's transformers have, and what this does not reach: their other attributes,
    which go with the state (the hash of the message that it is for), those of objects in the state, and the same of the
    transformers that one consists of. What is replaced comes back; arrays, lists and dictionaries that a stage writes
    to in place stay written to. It costs as many microseconds as there are objects, however much they hold.
    """
    found: Captured = []
    for stage in stages:
        if (attributes := getattr(stage, "__dict__", None)) is None:
            continue
        found.append((attributes, attributes.copy()))
        for held in attributes.values():
            if type(held) not in _plain_in_stages:
                _capture_held(held, found, _plain_in_stages)
        if (state := getattr(attributes.get("_state"), "__dict__", None)) is not None:
            found.append((state, state.copy()))
            for held in state.values():
                if type(held) not in _plain_in_states:
                    _capture_held(held, found, _plain_in_states)
        if "_procs" in attributes and "_runner" not in attributes:
            found += captured(*attributes["_procs"].values())
    return found


def captured_attributes(found: Captured) -> dict[str, object]:
    """The attributes of the first stage of which *found* was captured; empty for one that can have none."""
    first = found[0] if found else ({}, {})
    return {} if callable(first) else first[1]


def put_back(found: Captured) -> None:
    """Undo what has changed since *found* was :func:`captured`; settings stay as they are now."""
    for each in found:
        if callable(each):
            each()
            continue
        attributes, before = each
        settings = attributes.get("settings")
        attributes.clear()
        attributes.update(before)
        if settings is not None:
            attributes["settings"] = settings


_plain_in_stages: set[type] = set()
_plain_in_states: set[type] = set()
"""Types of which nothing but the reference is captured, as far as they have been seen: asking a class costs more."""

_VALUES = (ez.Settings, AxisArray, AxisBase, type, types.FunctionType, types.MethodType, types.ModuleType)


def _capture_held(held: object, found: Captured, plain: set[type]) -> None:
    if isinstance(held, BaseProcessor):
        if not any(not callable(each) and each[0] is held.__dict__ for each in found):
            found += captured(held)
    elif callable(capture := getattr(held, "capture", None)):
        found.append(capture())
    elif plain is _plain_in_stages or isinstance(held, _VALUES) or not hasattr(held, "__dict__"):
        plain.add(type(held))
    else:
        found.append((held.__dict__, held.__dict__.copy()))


def differing_fields(old: ez.Settings, new: ez.Settings) -> set[str]:
    """The fields of two settings objects of one class whose values differ; arrays differ where an item does."""
    pairs = ((field.name, getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(new))
    return {name for name, before, after in pairs if not _is_same(before, after)}


def _is_same(before: object, after: object) -> bool:
    if before is after:
        return True
    try:
        return bool(before == after)
    except ValueError:
        # Arrays, and what holds some, do not say whether they are the same as a whole.
        if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
            return len(before) == len(after) and all(map(_is_same, before, after))
        return np.array_equal(np.asarray(before), np.asarray(after))


def give_settings(stage: BaseProcessor[ez.Settings, AxisArray, object], settings: ez.Settings) -> None:
    """Have *stage* take other settings while it runs, also such with arrays.

    ezmsg-baseproc's ``update_settings`` asks whether a whole array differs from another one, which NumPy refuses.
    """
    before = stage.settings
    try:
        stage.update_settings(settings)
    except ValueError:
        kind = stage.get_settings_type()
        taken = own_settings(kind, settings) if isinstance(stage, TransformerTakesSettings) else settings
        try:
            {getattr(before, field.name) != getattr(taken, field.name) or None for field in dataclasses.fields(taken)}
        except ValueError:
            stage.settings = taken
            if differing_fields(before, taken) - stage.NONRESET_SETTINGS_FIELDS:
                # Private in ezmsg-baseproc, whose update_settings calls it; a test notices when it goes.
                stage._request_reset()
            return
        raise


def steps_of(chain: Stages, name: str = "'chain'") -> list[Stage]:
    """The steps of *chain* as a list; TypeError, with its *name*, if there is none or one that cannot be called."""
    steps = list(chain) if isinstance(chain, Sequence) else [chain]
    if not steps or not all(map(callable, steps)):
        raise TypeError(f"{name} must be a callable or a sequence of one or more callables, got {chain!r}")
    return steps


def run_steps(steps: Sequence[Stage], message: AxisArray, first: int = 0) -> Iterator[AxisArray]:
    """The results of a message that goes into step number *first*.

    A step that returns a list or tuple has its messages fed on one by one; None ends the message there.
    """
    for number in range(first, len(steps)):
        # Under the same name, so that nothing keeps the input alive: MLX then computes in place.
        output = message = steps[number](message)  # type: ignore[assignment]
        if output is None:
            return
        if isinstance(output, (list, tuple)):
            del message
            for piece in output:
                yield from run_steps(steps, piece, number + 1)
            return
        del output
    yield message


def flush_steps(steps: Sequence[Stage]) -> Iterator[AxisArray]:
    """The results of what the steps still hold, once there are no more messages: each one's ``flush``, in order."""
    for number, step in enumerate(steps):
        flush = getattr(step, "flush", None)
        if callable(flush):
            for piece in flush():
                yield from run_steps(steps, piece, number + 1)
