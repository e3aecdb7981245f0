"""Consecutive stages that run as one function of arrays, from the message that goes in to the one that comes out."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..asarray import AsArrayTransformer
from ..stream.fusible import Array, FusedStage
from .likeness import Likeness

if TYPE_CHECKING:
    import mlx.core as mx

Arrays: TypeAlias = Sequence[tuple[Array, ...]]
"""The arrays of each stage."""

State: TypeAlias = Any
"""The arrays of all stages, in whatever form a run keeps them."""

Begun: TypeAlias = Any
"""What a run needs to know of the computation that it has begun."""

Key: TypeAlias = tuple[int, tuple[Hashable, ...]]
"""What tells functions apart: the length of the message, and the variants of the stages."""


class Configured(Protocol):
    """A transformer, of which a run asks no more than its settings."""

    @property
    def settings(self) -> object:
        """Its settings, which are replaced to change them."""
        ...


class Steps(NamedTuple):
    """What a message does, before its samples are looked at."""

    key: Key
    lengths: tuple[int, ...]
    """Samples that come out of each stage."""
    counts: tuple[Hashable, ...]
    """Those after the message."""
    relabellings: list[tuple[FusedStage, int, Hashable]]
    """Stages that change the axes, with the length and the counts before the message."""


class Resident(NamedTuple):
    """The state of all stages, while it is here and not in the transformers."""

    arrays: State
    counts: tuple[Hashable, ...]
    ahead: Steps | None
    """What another message as long as the last one does; None if that is not known."""


class Ends(NamedTuple):
    """The conversions at the two ends of a run, which are not functions of state."""

    entry: AsArrayTransformer | None
    """Takes NumPy data; None where the data is MLX's already."""
    exit: AsArrayTransformer | None
    """Gives NumPy data; None where it stays MLX's."""


class FusedRun(abc.ABC):
    """A run of stages.

    ``how`` says how it computes, for those who ask.

    Args:
        first: Number of the first stage.
        transformers: All of the run, the conversions included.
        stages: Those between the conversions, as functions.
        ends: The conversions.
        message: As it came into the first stage.
        result: What the stages made of it, one by one.
    """

    how: ClassVar[str]

    def __init__(
        self,
        first: int,
        transformers: Sequence[Configured],
        stages: Sequence[FusedStage],
        ends: Ends,
        message: AxisArray,
        result: AxisArray,
    ) -> None:
        self.first, self.stop = first, first + len(transformers)
        self.stages, self.ends = tuple(stages), ends
        self._likeness = Likeness(message)
        # Settings are known by identity: they are frozen, and changed by being replaced. The hash is the one that
        # ezmsg-baseproc's stateful transformers keep of the messages that their state is for. It is private, and there
        # is no public way to ask; test_chain_fused.py notices when it goes.
        self._known = [(stage, stage.settings) for stage in transformers]
        self._hashes = [(stage, stage._hash) for stage in transformers if hasattr(stage, "_hash")]
        # Those that there is something to work out for, with their number: whether they count, and change axes.
        self._active = [
            (number, stage, *does)
            for number, stage in enumerate(self.stages)
            if any(does := (type(stage).advance is not FusedStage.advance, _relabels(stage)))
        ]
        self._dims, self._stream_dim = list(result.dims), result.stream_dim
        self._renames = self._dims != list(message.dims) or self._stream_dim != message.stream_dim
        self._shape, self._result_axis = tuple(result.data.shape), result.get_axis_idx(self._likeness.dim)
        self._dtype = ends.exit.settings.dtype if ends.exit is not None else None
        self._rounds = ends.exit is not None and ends.exit.settings.rounding == "nearest"
        self._resident: Resident | None = None
        self.before_load: Callable[[FusedRun], None] = lambda run: None
        """Called with this run before the state is taken over, for others that may have it."""

    def __call__(self, message: AxisArray) -> AxisArray | None:
        """The result of *message*, or None where the stages have to run it one by one.

        The state changes when nothing can go wrong any more.
        """
        n_samples = self._likeness.n_samples(message)
        if not n_samples or not self._is_set_up() or not self._takes(n_samples):
            return None
        resident = self._resident or self._load()
        if resident is None:
            return None
        steps = resident.ahead
        if steps is None or steps.key[0] != n_samples:
            steps = self._steps(n_samples, resident.counts)
        if steps is None or not self._is_ready(steps.key):
            return None
        begun = self._begin(message.data, resident.arrays, steps)
        # While a device computes, all that the data are not needed for.
        if (entry := self.ends.entry) is not None:
            entry.bound_cache(message)
        axes = message.axes
        for stage, length, counts in steps.relabellings:
            axes = stage.relabel(axes, length, counts)
        ahead = self._steps_ahead(n_samples, steps.counts)
        data, arrays = self._finish(begun)
        if self._renames:
            result = replace(message, data=data, axes=axes, dims=list(self._dims), stream_dim=self._stream_dim)
        else:
            result = replace(message, data=data, axes=axes)
        self._resident = Resident(arrays, steps.counts, ahead)
        return result

    def is_like(self, message: AxisArray) -> bool:
        """Whether the run is for messages like *message*."""
        return self._likeness.n_samples(message) is not None

    def has_settings_of(self, transformers: Sequence[object]) -> bool:
        """Whether the run was made for these transformers with the settings that they have now."""
        return len(transformers) == len(self._known) and all(
            transformer is known and known.settings is settings
            for transformer, (known, settings) in zip(transformers, self._known, strict=False)
        )

    def store(self) -> None:
        """Give the state back to the transformers."""
        if self._resident is not None:
            arrays, counts, _ = self._resident
            self._resident = None
            for stage, held, count in zip(self.stages, self._for_transformers(arrays), counts, strict=False):
                stage.store(held, count)

    def undo(self) -> Callable[[], None]:
        """A function that makes the state what it is now."""
        before = self._resident

        def restore() -> None:
            self._resident = before

        return restore

    def _is_set_up(self) -> bool:
        for transformer, settings in self._known:
            if transformer.settings is not settings:
                return False
        for stateful, hash_ in self._hashes:
            if stateful._hash != hash_:
                return False
        return True

    def _load(self) -> Resident | None:
        """Take the state over from the transformers, if it can be."""
        self.before_load(self)
        loaded = []
        for stage in self.stages:
            if (state := stage.load()) is None:
                return None
            loaded.append(state)
        arrays = self._from_transformers([a for a, _ in loaded])
        self._resident = Resident(arrays, tuple(c for _, c in loaded), None)
        return self._resident

    def _steps(self, n_samples: int, counts: tuple[Hashable, ...]) -> Steps | None:
        length, n_stages = n_samples, len(counts)
        lengths, after = [n_samples] * n_stages, list(counts)
        variants: list[Hashable] = [None] * n_stages
        relabellings = []
        for number, stage, is_counting, relabels in self._active:
            if relabels:
                relabellings.append((stage, length, counts[number]))
            if is_counting:
                step = stage.advance(length, counts[number])
                if step is None:
                    return None
                variants[number], n_after, after[number] = step
                if n_after != length:
                    length = n_after
                    lengths[number:] = [length] * (n_stages - number)
        return Steps((n_samples, tuple(variants)), tuple(lengths), tuple(after), relabellings)

    def _steps_ahead(self, n_samples: int, counts: tuple[Hashable, ...]) -> Steps | None:
        try:
            return self._steps(n_samples, counts)
        except Exception:
            # This message is not lost for what the next one may meet.
            return None

    def _result_shape(self, n_samples: int) -> tuple[int, ...]:
        axis = self._result_axis
        return (*self._shape[:axis], n_samples, *self._shape[axis + 1 :])

    def _apply(
        self, x: Array | None, arrays: Arrays, variants: Sequence[Hashable], lengths: Sequence[int]
    ) -> tuple[Array | None, Arrays]:
        """The data that comes out, None where it has no samples, and the arrays after it."""
        after = []
        for stage, held, variant, length in zip(self.stages, arrays, variants, lengths, strict=False):
            if x is not None:
                x, held = stage.apply(x, held, variant)
                if length == 0:
                    # The stages behind have nothing to do: no samples change no state.
                    x = None
            after.append(held)
        return x, tuple(after)

    @abc.abstractmethod
    def _takes(self, n_samples: int) -> bool:
        """Whether messages of this length are run at all."""

    @abc.abstractmethod
    def _is_ready(self, key: Key) -> bool:
        """Whether the function for *key* is there."""

    @abc.abstractmethod
    def _begin(self, data: Array, state: State, steps: Steps) -> Begun:
        """Begin to compute, for a message with this *data*."""

    @abc.abstractmethod
    def _finish(self, begun: Begun) -> tuple[Array, State]:
        """The data of the result, and the state after it."""

    @abc.abstractmethod
    def _from_transformers(self, arrays: Arrays) -> State:
        """The state, from what the stages have loaded."""

    @abc.abstractmethod
    def _for_transformers(self, state: State) -> Sequence[tuple[mx.array, ...]]:
        """What the stages store."""


def _relabels(stage: FusedStage) -> bool:
    return type(stage).relabel is not FusedStage.relabel


ON_ENTRY = frozenset(map(np.dtype, "? i1 u1 i2 u2 i4 u4 f2 f4 f8".split()))
"""Dtypes of NumPy data that a run begins with; all others are left to AsArray, which knows or refuses them."""
