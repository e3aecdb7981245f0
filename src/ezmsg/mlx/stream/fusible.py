"""What a transformer has to say so that a chain can run it together with its neighbours, as one function of arrays.

A chain (:mod:`ezmsg.mlx.chain`) takes the stages that say it out of their messages: between AsArray and AsArray only
arrays go from one to the next. A transformer says it in one of two ways. Its class has a method
``fuse(message) -> FusedStage | None``; or somebody registers a function for it, so that nothing of it need be changed:

    >>> from ezmsg.sigproc.activation import ActivationTransformer
    >>> from ezmsg.mlx.stream.fusible import FusedStage, fusion_of
    >>> class FusedReLU(FusedStage):
    ...     def apply(self, x, arrays, variant):
    ...         return x * (x > 0), arrays
    >>> @fusion_of(ActivationTransformer)
    ... def fuse_activation(transformer, message):
    ...     return FusedReLU(transformer, message) if transformer.settings.function == "relu" else None

What is registered counts for exactly that class: a subclass may compute something else. A class whose base has a method
``fuse`` inherits it, and overrides it where it computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

if TYPE_CHECKING:
    import mlx.core as mx

Array: TypeAlias = "mx.array | npt.NDArray"
"""MLX's on a GPU and while ``mx.compile`` traces, NumPy's on the CPU."""

Axes: TypeAlias = dict[str, AxisBase]
"""The axes of a message, by the name of their dimension."""

Counts: TypeAlias = Any
"""What a stage counts: one immutable, hashable value, of a type that each stage chooses."""

Variant: TypeAlias = Any
"""What tells apart the functions that a stage is: a hashable value, of a type that each stage chooses."""

TransformerT = TypeVar("TransformerT")


class Step(NamedTuple):
    """What a message of some length means for a stage, before its samples are looked at."""

    variant: Hashable
    """What tells apart the functions that :meth:`FusedStage.apply` is: each is compiled by itself."""

    n_samples: int
    """Samples of the result along its stream dimension."""

    counts: Hashable
    """The counts after the message."""


class FusedStage(Generic[TransformerT]):
    """One transformer as a function of float32 arrays and state, for messages that are like a given one.

    Alike are messages with the same dimensions, key, sampling rate, axes and channels; their length and offset differ.
    The state has two parts. *Arrays* go in and out of :meth:`apply`. *Counts* are whatever the transformer counts,
    as one immutable value: :meth:`advance` works out from them, without data, what a message does. It is asked ahead of
    the message, while the device computes the one before.

    While a chain runs fused, it keeps both, and what :meth:`apply` returns becomes the state once the whole message has
    gone through. Before anything else is done with the transformer, :meth:`store` gives them back.

    Args:
        transformer: It has run *message* already, so that its state is set up.
        message: As it came into the transformer.
    """

    def __init__(self, transformer: TransformerT, message: AxisArray) -> None:
        self.transformer = transformer
        self.dim = resolve_stream_dim(message)
        self.axis = message.get_axis_idx(self.dim)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Variant) -> tuple[Array, tuple[Array, ...]]:
        """The data of the result, and the arrays of the state after it; without side effects.

        Args:
            x: float32. Of MLX while a compiled function is traced, when nothing may be evaluated. Of NumPy on the CPU:
                contiguous, in memory of the chain, so that the result may be written to it, or be a view of it.
            arrays: The state, which must not be written to, in the library of *x*.
            variant: That of :meth:`advance`.
        """
        raise NotImplementedError

    def advance(self, n_samples: int, counts: Counts) -> Step | None:
        """What a message of *n_samples* does at these *counts*; without side effects.

        None leaves the message to the stages one by one, and the transformer to whatever it does with it.
        """
        return Step(None, n_samples, counts)

    def relabel(self, axes: Axes, n_samples: int, counts: Counts) -> Axes:
        """The axes of the result of a message with these *axes*, which are not changed.

        Args:
            axes: Those of the message, by their dimension.
            n_samples: Its length.
            counts: Those before it.
        """
        return axes

    def load(self) -> tuple[tuple[mx.array, ...], Counts] | None:
        """The state of the transformer, as arrays and counts; None where it is in one that cannot be fused."""
        return (), None

    def store(self, arrays: tuple[mx.array, ...], counts: Counts) -> None:
        """Make *arrays* and *counts* the state of the transformer."""


Fuse: TypeAlias = Callable[[TransformerT, AxisArray], "FusedStage | None"]

_registered: dict[type, Fuse] = {}


def fusion_of(kind: type[TransformerT]) -> Callable[[Fuse], Fuse]:
    """Register the decorated function for transformers of exactly the class *kind*.

    It takes a transformer and a message as it comes into it, MLX data of float32, and returns a :class:`FusedStage`, or
    None for settings or messages that are not to be fused.
    """

    def register(fuse: Fuse) -> Fuse:
        _registered[kind] = fuse
        return fuse

    return register


def fused_stage(transformer: object, message: AxisArray) -> FusedStage | None:
    """*transformer* as a function of arrays, for messages like *message*; None if it is not one."""
    if (registered := _registered.get(type(transformer))) is not None:
        return registered(transformer, message)
    fuse = getattr(transformer, "fuse", None)
    return fuse(message) if callable(fuse) else None
