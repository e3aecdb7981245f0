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
from importlib import metadata

import numpy as np
from ezmsg.baseproc import BaseProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..stream.steps import Output, Step
from .packing import CannotPack, pack
from .unpacking import unpack

_PACKAGES = ("ezmsg", "ezmsg-baseproc", "ezmsg-mlx", "ezmsg-sigproc", "mlx", "numba", "numpy", "scipy")

_WITHOUT_EFFECT = frozenset({"mlx_cache_limit_mb"})
"""Settings that results do not depend on."""


class CannotSave(TypeError):
    """The state of a step cannot be saved; the message says of which one and why."""


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
    # In full: NumPy abbreviates arrays of more than 1000 entries, such as the coefficients of a long filter.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        if not dataclasses.is_dataclass(settings):
            return f"{name} {settings!r}"
        fields = [field.name for field in dataclasses.fields(settings) if field.name not in _WITHOUT_EFFECT]
        return f"{name}({', '.join(f'{field}={getattr(settings, field)!r}' for field in fields)})"


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
    """Raise :obj:`CannotSave` for a step that may keep what nobody can see, such as a function or a generator."""
    if not isinstance(step, BaseProcessor):
        raise CannotSave(f"{description(step)} is no processor of ezmsg-baseproc, so its state is not known")


def save(step: Step) -> bytes | None:
    """The state of a step; None for one without.

    Raises:
        CannotSave: There is something in the state that :func:`~ezmsg.mlx.offline.packing.pack` does not hold.
    """
    check_savable(step)
    if not isinstance(step, Stateful):
        return None
    try:
        return pack(_kept(step), _packages(step))
    except CannotPack as error:
        raise CannotSave(f"the state of {type(step).__name__} cannot be saved ({error})") from error


def _packages(step: Step) -> set[str]:
    """The packages whose classes a state may consist of."""
    return {"ezmsg", type(step).__module__.partition(".")[0]}


def check(step: Step, saved: bytes) -> None:
    """See whether a saved state can be read, before the step is called.

    Raises:
        ValueError: It cannot.
    """
    kept = unpack(saved, _packages(step))
    if not isinstance(step, Stateful) or hasattr(step.state, "__dict__") != isinstance(kept, dict):
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
    state = step.state
    if not hasattr(state, "__dict__"):
        return state
    return {
        name: _Nested(_kept(value)) if isinstance(value, Stateful) else value for name, value in vars(state).items()
    }


def _restore(step: object, kept: object) -> None:
    if not isinstance(step, Stateful):
        raise ValueError(f"A saved state is not one of {type(step).__name__}.")
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
