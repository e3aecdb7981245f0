"""Consecutive stages that run as one function of arrays, and how that is done on the CPU."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from ..asarray import AsArrayTransformer
from ..stream.convert import copied, dtype_name
from ..stream.fusible import Array, FusedStage, for_next_stage
from ..stream.hostmemory import is_lent, used_again
from ..stream.segments import same_axis

if TYPE_CHECKING:
    import mlx.core as mx


class Likeness:
    """Properties that a message shares with others that are run by the same functions; its length and offset are free.

    Args:
        message: Of which :meth:`has_regular_samples` is true.
        allows_rate: Whether a message of another sampling period is alike.
    """

    def __init__(self, message: AxisArray, allows_rate: Callable[[float], bool]) -> None:
        self._allows_rate = allows_rate
        data, self.dim = message.data, resolve_stream_dim(message)
        self.axis = message.get_axis_idx(self.dim)
        self._array_type, self.dtype = type(data), data.dtype
        self._before, self._after = data.shape[: self.axis], data.shape[self.axis + 1 :]
        self._names = list(message.dims), message.key, message.stream_dim
        # Brought up to date with each message, so that the next one's axes are known by identity.
        self._axes = dict(message.axes)

    @staticmethod
    def has_regular_samples(message: AxisArray) -> bool:
        """Whether the stream dimension has samples, at a constant rate, and no coordinates that change with them."""
        if type(message) is not AxisArray or not message.dims or 0 in message.data.shape:
            return False
        dim = resolve_stream_dim(message)
        return (
            dim in message.dims
            and type(message.axes.get(dim)) is LinearAxis
            and not any(dim in getattr(axis, "dims", ()) for axis in message.axes.values())
        )

    def shape(self, n_samples: int) -> tuple[int, ...]:
        """The shape of an alike message of *n_samples*."""
        return (*self._before, n_samples, *self._after)

    def n_samples(self, message: AxisArray) -> int | None:
        """The length of *message*; None if it is not alike."""
        data = message.data
        if type(message) is not AxisArray or type(data) is not self._array_type or data.dtype != self.dtype:
            return None
        shape, axis = data.shape, self.axis
        if len(shape) <= axis or shape[:axis] != self._before or shape[axis + 1 :] != self._after:
            return None
        dims, key, stream_dim = self._names
        if message.key != key or message.stream_dim != stream_dim:
            return None
        if message.dims != dims and list(message.dims) != dims:
            return None
        return shape[axis] if self._has_same_axes(message) else None

    def _has_same_axes(self, message: AxisArray) -> bool:
        known = self._axes
        if message.axes.keys() != known.keys():
            return False
        for name, axis in message.axes.items():
            before = known[name]
            if axis is before:
                continue
            if name == self.dim:
                if (
                    not isinstance(before, LinearAxis)
                    or type(axis) is not LinearAxis
                    or axis.unit != before.unit
                    or (axis.gain != before.gain and not self._allows_rate(axis.gain))
                ):
                    return False
            elif not same_axis(before, axis):
                return False
            known[name] = axis
        return True


Arrays: TypeAlias = Sequence[tuple[Array, ...]]
"""The arrays of each stage."""

Loaded: TypeAlias = "Sequence[tuple[mx.array, ...]]"
"""The same, as transformers have them."""

StateT = TypeVar("StateT")
"""The arrays of all stages, in whatever form a run keeps them."""

BegunT = TypeVar("BegunT")
"""A computation that a run has begun."""

Key: TypeAlias = tuple[int, tuple[Hashable, ...]]
"""Key of a function: the length of the message, and the variants of the stages."""


@runtime_checkable
class Configured(Protocol):
    """A transformer, of which a run asks no more than its settings."""

    @property
    def settings(self) -> object:
        """Its settings, which are replaced to change them."""
        ...


class Plan(NamedTuple):
    """The effect of a message, known before its samples are read."""

    key: Key
    lengths: tuple[int, ...]
    """Samples that come out of each stage."""
    counts: tuple[Hashable, ...]
    """Those after the message."""
    relabellings: list[tuple[FusedStage, int, Hashable]]
    """Stages that change the axes, with the length and the counts before the message."""


class Resident(Generic[StateT]):
    """The state of all stages, while it is here and not in the transformers.

    Args:
        arrays: Those of all stages.
        counts: Those of each stage.
        ahead: What another message as long as the last one does; None if that is not known.
    """

    __slots__ = ("ahead", "arrays", "counts")

    def __init__(self, arrays: StateT, counts: tuple[Hashable, ...], ahead: Plan | None) -> None:
        self.arrays, self.counts, self.ahead = arrays, counts, ahead


class Ends(NamedTuple):
    """The conversions at the two ends of a run, which are not functions of state."""

    entry: AsArrayTransformer | None
    """Takes NumPy data; None where the data is MLX's already."""
    exit: AsArrayTransformer | None
    """Gives NumPy data; None where it stays MLX's."""


holders: dict[int, weakref.ref[FusedRun]] = {}
"""The runs that have the state of a transformer, by the identity of that. A transformer may stand in several runs, for
messages of different kinds, and in several chains."""


def give_back(transformer: object) -> None:
    """Have the run that has the state of *transformer*, in whichever chain, give it back."""
    held = holders.get(id(transformer))
    if held is not None and (run := held()) is not None:
        run.store()


def _forget(transformers: Sequence[int], gone: weakref.ref[FusedRun]) -> None:
    for each in transformers:
        if holders.get(each) is gone:
            del holders[each]


class FusedRun(abc.ABC, Generic[StateT, BegunT]):
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
        self._likeness = Likeness(message, lambda gain: all(stage.allows_rate(gain) for stage in stages))
        # Settings are known by identity: they are frozen, and changed by being replaced. The hash is the one that
        # ezmsg-baseproc's stateful transformers keep of the messages that their state is for. It is private, and there
        # is no public way to ask; test_chain_fused.py notices when it goes.
        all_of_them = [*transformers, *(part for stage in self.stages for part in stage.parts())]
        self._known = [(stage, stage.settings) for stage in all_of_them]
        self._watched = [stage for stage in self.stages if type(stage).has_changed is not FusedStage.has_changed]
        self._hashes = [(stage, stage._hash) for stage in all_of_them if hasattr(stage, "_hash")]
        # Those that there is something to work out for, with their number: whether they count, and change axes.
        self._active = [
            (number, stage, *does)
            for number, stage in enumerate(self.stages)
            if any(does := (type(stage).advance is not FusedStage.advance, _relabels(stage)))
        ]
        self._dims, self._names = list(result.dims), {"stream_dim": result.stream_dim, "key": result.key}
        self._renames = self._dims != list(message.dims) or self._names != {
            "stream_dim": message.stream_dim,
            "key": message.key,
        }
        self._shape, self._result_axis = tuple(result.data.shape), result.get_axis_idx(self._likeness.dim)
        self._dtype = ends.exit.settings.dtype if ends.exit is not None else None
        self._result_dtype = dtype_name(result.data)
        self._rounds = ends.exit is not None and ends.exit.settings.rounding == "nearest"
        self._resident: Resident[StateT] | None = None
        self._itself = weakref.ref(self, functools.partial(_forget, [id(stage) for stage in all_of_them]))

    def __call__(self, message: AxisArray, undo: list | None = None) -> AxisArray | None:
        """The result of *message*, or None where the stages have to run it one by one.

        The state changes when nothing can go wrong any more.

        Args:
            message: The message.
            undo: Given a function that makes the state what it was before the message.
        """
        n_samples = self._likeness.n_samples(message)
        if not n_samples or not self._is_set_up() or not self._takes(n_samples):
            return None
        if self._resident is not None and any(stage.has_changed() for stage in self._watched):
            self.store()
        resident = self._resident or self._load()
        if resident is None:
            return None
        if undo is not None:
            undo.append(functools.partial(self.hold, resident))
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
            result = replace(message, data=data, axes=axes, dims=list(self._dims), **self._names)
        else:
            result = replace(message, data=data, axes=axes)
        self._resident = Resident(arrays, steps.counts, ahead)
        return result

    def is_like(self, message: AxisArray) -> bool:
        """Whether the run is for messages like *message*."""
        return self._likeness.n_samples(message) is not None

    @property
    def resident(self) -> Resident[StateT] | None:
        """The state, while it is here; None while it is in the transformers."""
        return self._resident

    def store(self) -> None:
        """Give the state back to the transformers."""
        if self._resident is not None:
            arrays, counts = self._resident.arrays, self._resident.counts
            self._resident = None
            for transformer, _ in self._known:
                holders.pop(id(transformer), None)
            for stage, held, count in zip(self.stages, self._for_transformers(arrays), counts, strict=False):
                stage.store(held, count)

    def hold(self, resident: Resident[StateT]) -> None:
        """Have the state of all stages here from now on, whatever is in the transformers and in other runs."""
        for transformer, _ in self._known:
            if (held := holders.get(id(transformer))) is not self._itself:
                if held is not None:
                    give_back(transformer)
                holders[id(transformer)] = self._itself
        self._resident = resident

    def _is_set_up(self) -> bool:
        for transformer, settings in self._known:
            if transformer.settings is not settings:
                return False
        for stateful, hash_ in self._hashes:
            if stateful._hash != hash_:
                return False
        return True

    def _load(self) -> Resident[StateT] | None:
        """Take the state over from the transformers, if it can be."""
        for transformer, _ in self._known:
            give_back(transformer)
        loaded = []
        for stage in self.stages:
            if (state := stage.load()) is None:
                return None
            loaded.append(state)
        arrays = self._from_transformers([a for a, _ in loaded])
        resident = Resident(arrays, tuple(c for _, c in loaded), None)
        self.hold(resident)
        return resident

    def _steps(self, n_samples: int, counts: tuple[Hashable, ...]) -> Plan | None:
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
        return Plan((n_samples, tuple(variants)), tuple(lengths), tuple(after), relabellings)

    def _steps_ahead(self, n_samples: int, counts: tuple[Hashable, ...]) -> Plan | None:
        try:
            return self._steps(n_samples, counts)
        except Exception:
            # This message is not lost for what the next one may meet.
            return None

    def _no_samples(self) -> npt.NDArray:
        return np.empty(self._result_shape(0), self._result_dtype)

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
                y, held = stage.apply(x, held, variant)
                # What is computed in place is as the stage was given it.
                x = x if y is x else for_next_stage(y)
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
    def _begin(self, data: Array, state: StateT, steps: Plan) -> BegunT:
        """Begin to compute, for a message with this *data*."""

    @abc.abstractmethod
    def _finish(self, begun: BegunT) -> tuple[Array, StateT]:
        """The data of the result, and the state after it."""

    @abc.abstractmethod
    def _from_transformers(self, arrays: Loaded) -> StateT:
        """The state, from what the stages have loaded."""

    @abc.abstractmethod
    def _for_transformers(self, state: StateT) -> Loaded:
        """Arrays for the stages to store."""


def _relabels(stage: FusedStage) -> bool:
    return type(stage).relabel is not FusedStage.relabel


ON_ENTRY = frozenset(map(np.dtype, "? i1 u1 i2 u2 i4 u4 f2 f4 f8".split()))
"""Dtypes of NumPy data that a run begins with; all others are left to AsArray, which knows or refuses them."""


class HostRun(FusedRun[Arrays, tuple[Array, Arrays]]):
    """No MLX evaluation between the stages, each of which would wait for MLX's thread. Takes all lengths."""

    how = "with NumPy and numba"

    def _takes(self, n_samples: int) -> bool:
        return True

    def _is_ready(self, key: Key) -> bool:
        return True

    def _begin(self, data: Array, state: Arrays, steps: Plan) -> tuple[Array, Arrays]:
        x = used_again(data.shape, np.float32)
        if self.ends.entry is None:
            data = np.asarray(data)
        # MLX says nothing of what overflows, so neither does this.
        with np.errstate(all="ignore"):
            np.copyto(x, data, casting="unsafe")
            result, arrays = self._apply(x, state, steps.key[1], steps.lengths)
        y = self._no_samples() if result is None else result
        assert isinstance(y, np.ndarray)
        if self.ends.exit is None:
            import mlx.core as mx

            return mx.array(y), arrays
        if self._dtype is not None and y.dtype != self._dtype:
            return copied(y, self._dtype, self._rounds), arrays
        # A part of something else, which a stage may keep, is copied.
        return (y if y.base is None or is_lent(y) else copied(y, None, False)), arrays

    def _finish(self, begun: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        return begun

    def _from_transformers(self, arrays: Loaded) -> Arrays:
        # Copies, since MLX frees its own when the transformers take others.
        return tuple(tuple(np.array(array) for array in held) for held in arrays)

    def _for_transformers(self, state: Arrays) -> Loaded:
        import mlx.core as mx

        return [tuple(mx.array(array) for array in held) for held in state]
