"""Save the state of a chain of transformers, and go on with it in another process.

What makes this more than ``pickle``: transformers cannot be pickled but their states can; states may hold MLX arrays,
and transformers of their own; and a transformer begins anew when the hash of a message differs from that of the last
one, which it does in every new process, since Python salts the hashes of text.
"""

import dataclasses
import functools
import importlib
import io
import pickle
import platform
import sys
import typing
from importlib import metadata
from types import ModuleType

import numpy as np
from ezmsg.baseproc import BaseProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.util.messages.axisarray import AxisArray

from ..stream.convert import is_mlx_array
from ..stream.steps import Output, Step

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
        CannotSave: The state, or something in it, cannot be pickled.
    """
    check_savable(step)
    if not isinstance(step, Stateful):
        return None
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(_kept(step))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CannotSave(f"the state of {type(step).__name__} cannot be saved ({error})") from error
    return buffer.getvalue()


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
    _restore(step, pickle.loads(saved))


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
        step.state = kept
        return
    for name, value in kept.items():
        if isinstance(value, _Nested):
            _restore(getattr(state, name, None), value.kept)
        else:
            setattr(state, name, value)
    # So that the step forgets which message it has last taken the hash of.
    step.state = state


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> object:
        if is_mlx_array(value):
            return _to_mlx, _from_mlx(value)
        if type(value).__module__ == "mlx.core" and type(value).__name__ == "Dtype":
            return _mlx_dtype, (_name(value),)
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, Stateful):
            # Deeper than _kept looks, in a list, say: restoring it as it is would lose it to the hash.
            raise pickle.PicklingError(f"it holds a {type(value).__name__}")
        return NotImplemented


def _name(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def _from_mlx(array: object) -> tuple[np.ndarray, str]:
    import mlx.core as mx

    name = _name(array.dtype)
    # NumPy has no bfloat16; every one is a float32.
    return np.array(array.astype(mx.float32) if name == "bfloat16" else array), name


def _to_mlx(values: np.ndarray, name: str) -> object:
    import mlx.core as mx

    array = mx.array(values, dtype=_mlx_dtype(name))
    mx.eval(array)
    return array


@functools.cache
def _mlx_dtype(name: str) -> object:
    import mlx.core as mx

    return getattr(mx, name)
