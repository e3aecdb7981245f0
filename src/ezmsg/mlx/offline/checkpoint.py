"""Save the state of a chain of transformers, and go on with it in another process.

What makes this more than packing a value: states may hold transformers of their own, whose states belong to them; and
a transformer begins anew when the hash of a message differs from that of the last one, which it does in every new
process, since Python salts the hashes of text.
"""

import dataclasses
import functools
import platform
import sys
import typing
from collections.abc import Iterable, Mapping
from importlib import metadata

import numpy as np
from ezmsg.baseproc import BaseProcessor, CompositeProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..chain import BaseChainTransformer
from ..stream.steps import Output, Step
from .packing import CannotPack, pack
from .unpacking import unpack

_PACKAGES = ("ezmsg", "ezmsg-baseproc", "ezmsg-mlx", "ezmsg-sigproc", "mlx", "numba", "numpy", "scipy")

_WITHOUT_EFFECT = frozenset({"mlx_cache_limit_mb"})
"""Settings that results do not depend on."""


class CannotSave(TypeError):
    """The state of a step cannot be saved; the message says of which one and why."""


_BASE_ATTRIBUTES = frozenset({"_state", "_hash", "_hash_witness"})
"""Attributes of ezmsg-baseproc's classes that change while a step runs, and that are saved or follow from messages."""

Made: typing.TypeAlias = list[tuple[BaseProcessor, dict[str, object]]]
"""A step and the parts that it consists of, each with its attributes."""


class _Nested(typing.NamedTuple):
    """What is kept of a transformer inside the state of another."""

    kept: object


def description(step: Step) -> str:
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


def parts_of(step: object) -> Mapping[str, typing.Any]:
    """The steps that a composite consists of, by their names; empty for any other step."""
    if isinstance(step, BaseChainTransformer):
        return step.stages
    # There is no public way to the parts of ezmsg-baseproc's composites; a test notices when this one goes.
    return step._procs if isinstance(step, CompositeProcessor) else {}


def environment() -> str:
    """What else than recording and settings the bits of a result depend on: versions, processor, MLX's device."""
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


def check_savable(step: Step) -> None:
    """Raise :obj:`CannotSave` for a step with state that cannot be seen, like a function or a generator."""
    for part in parts_of(step).values():
        check_savable(part)
    if not isinstance(step, BaseProcessor):
        raise CannotSave(f"{description(step)} is not a processor of ezmsg-baseproc, so its state is not known")


def as_made(step: Step) -> Made:
    """What attributes a step has when it is made, so that :func:`save` sees whether it keeps data in others."""
    found: Made = [(step, dict(vars(step)))] if isinstance(step, BaseProcessor) else []
    return [*found, *(each for part in parts_of(step).values() for each in as_made(part))]


def check_keeps_nothing(made: Iterable[tuple[BaseProcessor, dict[str, object]]]) -> None:
    """Raise :obj:`CannotSave` for a step that keeps something outside of its state.

    Args:
        made: What :func:`as_made` gave before its first message.
    """
    for part, before in made:
        changed = {name for name, value in vars(part).items() if name not in before or before[name] is not value}
        if (kept := sorted(changed - _BASE_ATTRIBUTES)) and not _is_ours(part):
            raise CannotSave(
                f"{type(part).__name__} keeps {', '.join(kept)} outside of its state, which cannot be saved"
            )


def save(step: Step, made: Made | None = None) -> bytes | None:
    """The state of a step; None for one without.

    Args:
        step: The step.
        made: What :func:`as_made` gave before its first message.

    Raises:
        CannotSave: There is something in the state that :func:`~ezmsg.mlx.offline.packing.pack` does not hold; or the
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


def _packages(step: Step) -> set[str]:
    """The packages whose classes a state may consist of."""
    return {"ezmsg", type(step).__module__.partition(".")[0]}


def check(step: Step, saved: bytes) -> None:
    """See whether a saved state can be read, before the step is called.

    Raises:
        ValueError: It cannot.
    """
    kept = unpack(saved, _packages(step))
    by_name = bool(parts_of(step)) or (isinstance(step, Stateful) and hasattr(step.state, "__dict__"))
    if not isinstance(step, Stateful) or by_name != isinstance(kept, dict):
        raise ValueError(f"a saved state is not one of {type(step).__name__}")


def call_restored(step: Step, saved: bytes, message: AxisArray) -> Output:
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


def restore(step: Step, saved: bytes) -> None:
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
