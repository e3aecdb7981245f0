"""How a transformer brings what a chain and a run in pieces need of it.

A chain (:mod:`ezmsg.mlx.chain`) takes the stages that can be fused out of their messages: between AsArray and AsArray
only arrays go from one to the next. A run in pieces begins each piece a margin earlier than its results, so that by
then each stage has forgotten that it began in the middle. A transformer brings three methods for these, all optional:

- ``fuse(message) -> FusedStage | None``: the transformer as a function of arrays, for messages like *message*.
- ``settling_time(tolerance, gain) -> float``: how long it remembers (:class:`Settles`).
- ``result_grid(gain) -> ResultGrid``: where its results lie on its input, if not one for each sample.

    >>> from ezmsg.baseproc import BaseTransformer
    >>> from ezmsg.mlx.stream.fusible import FusedStage
    >>> class HalfWave(BaseTransformer):
    ...     def _process(self, message):
    ...         return replace(message, data=message.data * (message.data > 0))
    ...     def fuse(self, message):
    ...         return FusedHalfWave(self, message)
    ...     def settling_time(self, tolerance, gain):
    ...         return 0.0
    >>> class FusedHalfWave(FusedStage[HalfWave]):
    ...     def apply(self, x, arrays, variant):
    ...         return x * (x > 0), arrays

A subclass inherits them as long as it overrides no other method of the class that has them. One that does may compute
something else, so it is run as it is, unless it brings them itself.

For a class that cannot be changed, :func:`fusion_of` and :func:`settling_of` register functions in place of the
methods. They count for exactly that class:

    >>> from ezmsg.sigproc.activation import ActivationTransformer
    >>> from ezmsg.mlx.stream.fusible import fusion_of
    >>> class FusedReLU(FusedStage):
    ...     def apply(self, x, arrays, variant):
    ...         return x * (x > 0), arrays
    >>> @fusion_of(ActivationTransformer)
    ... def fuse_activation(transformer, message):
    ...     return FusedReLU(transformer, message) if transformer.settings.function == "relu" else None
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseProcessor, CompositeProcessor, Stateful, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

if TYPE_CHECKING:
    import mlx.core as mx

Array: TypeAlias = "mx.array | npt.NDArray"
"""MLX's on a GPU and while ``mx.compile`` traces, NumPy's on the CPU."""

Axes: TypeAlias = dict[str, AxisBase]
"""The axes of a message, by the name of their dimension."""

Counts: TypeAlias = Any
"""Counts of a stage: one immutable, hashable value, of a type that each stage chooses."""

Variant: TypeAlias = Any
"""Key of the functions of a stage: a hashable value, of a type that each stage chooses."""

TransformerT = TypeVar("TransformerT")


class Advance(NamedTuple):
    """The effect of a message of some length on a stage, known before its samples are read."""

    variant: Hashable
    """Key of the function of :meth:`FusedStage.apply`; each key is compiled separately."""

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

    takes: frozenset[str] = frozenset({"float32"})
    """Dtypes of the data that it takes: ``"float32"``, ``"bool"``, or both. It may give either."""

    def __init__(self, transformer: TransformerT, message: AxisArray) -> None:
        self.transformer = transformer
        self.dim = resolve_stream_dim(message)
        self.axis = message.get_axis_idx(self.dim)
        self._stream_gain = getattr(message.axes.get(self.dim), "gain", None)

    def allows_rate(self, gain: float) -> bool:
        """Whether a message whose samples are *gain* seconds apart goes on with the state, as far as the stage minds.

        By default only one of the rate that the stage was made for.
        """
        return gain == self._stream_gain

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Variant) -> tuple[Array, tuple[Array, ...]]:
        """The data of the result, and the arrays of the state after it; without side effects.

        Args:
            x: Of a dtype that it takes. Of MLX while a compiled function is traced, when nothing may be evaluated. Of
                NumPy on the CPU: contiguous, in memory of the chain, so that the result may be written to it, or be a
                view of it. A result that is neither has memory of its own: the stages behind write to it.
            arrays: The state, which must not be written to, in the library of *x*.
            variant: That of :meth:`advance`.
        """
        raise NotImplementedError

    def advance(self, n_samples: int, counts: Counts) -> Advance | None:
        """The effect of a message of *n_samples* at these *counts*; without side effects.

        None leaves the message to the stages one by one, and the transformer to whatever it does with it.
        """
        return Advance(None, n_samples, counts)

    def relabel(self, axes: Axes, n_samples: int, counts: Counts) -> Axes:
        """The axes of the result of a message with these *axes*, which are not changed.

        Args:
            axes: Those of the message, by their dimension.
            n_samples: Its length.
            counts: Those before it.
        """
        return axes

    def parts(self) -> Sequence[Any]:
        """The transformers that it computes besides its own; they have settings, which may change at any time."""
        return ()

    def load(self) -> tuple[tuple[mx.array, ...], Counts] | None:
        """The state of the transformer, as arrays and counts; None where it is in one that cannot be fused."""
        return (), None

    def has_changed(self) -> bool:
        """Whether the transformer has been given other state than :meth:`load` gave last; it is loaded anew then."""
        return False

    def store(self, arrays: tuple[mx.array, ...], counts: Counts) -> None:
        """Make *arrays* and *counts* the state of the transformer."""


def for_next_stage(x: Array) -> Array:
    """The result of a stage as the next one takes it: a view that it could not write to becomes a copy."""
    if type(x) is np.ndarray and not (x.flags.carray and x.itemsize <= 4):
        return np.require(x, None if x.itemsize <= 4 else np.float32, ["C", "W", "A"])
    return x


class PassesThrough(FusedStage[object]):
    """Any transformer that gives its messages back as they are, by its settings."""

    takes = frozenset({"float32", "bool"})

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        return x, arrays

    def allows_rate(self, gain: float) -> bool:
        return True


class OfEachSample(FusedStage[TransformerT]):
    """A transformer whose result of a sample depends on that sample alone, so that it minds no rate."""

    def allows_rate(self, gain: float) -> bool:
        return True


class FusedSequence(FusedStage[TransformerT]):
    """A composite as its stages, one after the other.

    Arrays: those of all stages in a row. Counts: those of each. Variant: those of the stages, and how many samples come
    out of each.

    Args:
        transformer: The composite.
        message: As it came into it.
        stages: What it consists of, each for the message that comes into it.
    """

    def __init__(self, transformer: TransformerT, message: AxisArray, stages: Sequence[FusedStage]) -> None:
        super().__init__(transformer, message)
        self._stages, self._sizes = tuple(stages), (0,) * len(stages)
        self._watched = [stage for stage in stages if type(stage).has_changed is not FusedStage.has_changed]
        self.takes = stages[0].takes

    def parts(self) -> Sequence[Any]:
        return [part for stage in self._stages for part in (stage.transformer, *stage.parts())]

    def load(self) -> tuple[tuple[mx.array, ...], Counts] | None:
        arrays: list[mx.array] = []
        sizes, counts = [], []
        for stage in self._stages:
            if (state := stage.load()) is None:
                return None
            arrays += state[0]
            sizes.append(len(state[0]))
            counts.append(state[1])
        self._sizes = tuple(sizes)
        return tuple(arrays), tuple(counts)

    def has_changed(self) -> bool:
        return any(stage.has_changed() for stage in self._watched)

    def store(self, arrays: tuple[mx.array, ...], counts: Counts) -> None:
        for stage, held, count in zip(self._stages, self._grouped(arrays), counts, strict=True):
            stage.store(held, count)

    def advance(self, n_samples: int, counts: Counts) -> Advance | None:
        steps: list[Advance] = []
        for stage, count in zip(self._stages, counts, strict=True):
            step = stage.advance(n_samples, count) if n_samples else Advance(None, 0, count)
            if step is None:
                return None
            n_samples = step.n_samples
            steps.append(step)
        variant = tuple((step.variant, step.n_samples) for step in steps)
        return Advance(variant, n_samples, tuple(step.counts for step in steps))

    def relabel(self, axes: Axes, n_samples: int, counts: Counts) -> Axes:
        for stage, count in zip(self._stages, counts, strict=True):
            axes = stage.relabel(axes, n_samples, count)
            step = stage.advance(n_samples, count) if n_samples else None
            n_samples = step.n_samples if step is not None else 0
        return axes

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Variant) -> tuple[Array, tuple[Array, ...]]:
        after: list[Array] = []
        is_empty = False
        for stage, held, (how, n_samples) in zip(self._stages, self._grouped(arrays), variant, strict=True):
            if not is_empty:
                x, held = stage.apply(x, held, how)
                is_empty = n_samples == 0
                x = x if is_empty else for_next_stage(x)
            after += held
        return x, tuple(after)

    def _grouped(self, arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
        given = iter(arrays)
        return [tuple(itertools.islice(given, size)) for size in self._sizes]


Fuse: TypeAlias = Callable[[TransformerT, AxisArray], "FusedStage | None"]

Empty: TypeAlias = Callable[[TransformerT, AxisArray], "AxisArray | None"]

ResultT = TypeVar("ResultT")

_registered: dict[tuple[type, str], Callable] = {}
"""Functions in place of methods of classes that cannot be changed, by the class and the name of the method."""


def fusion_of(kind: type[TransformerT]) -> Callable[[Fuse], Fuse]:
    """Register the decorated function for transformers of exactly the class *kind*.

    It takes a transformer and a message as it comes into it, MLX data of float32, and returns a :class:`FusedStage`, or
    None for settings or messages that are not to be fused.
    """

    def register(fuse: Fuse) -> Fuse:
        _registered[kind, "fuse"] = fuse
        return fuse

    return register


def _counts(kind: type, name: str) -> bool:
    """Whether the method *name* of *kind* says what *kind* does: nothing below the class that has it overrides it."""
    for place, owner in enumerate(kind.__mro__):
        if name in vars(owner):
            below = [item for each in kind.__mro__[:place] for item in vars(each).items()]
            overrides = {each for each, value in below if hasattr(value, "__get__") and hasattr(owner, each)}
            return not any(map(_computes, overrides))
    return False


def _computes(name: str) -> bool:
    """Whether results may depend on the method of that name."""
    if name.startswith("__"):
        return name in ("__call__", "__acall__")
    return name not in ("fuse", "settling_time", "result_grid")


_unread: dict[str, Callable[[], object]] = {}
"""For a package, what registers functions for its classes, as long as none of them has been asked for."""


def register_when_asked(package: str, register: Callable[[], object]) -> None:
    """Have *register* called before the first class of *package* is looked up: it may import much."""
    _unread[package] = register


def _brought(transformer: object, name: str) -> Callable | None:
    """What is registered or defined as the method *name* of *transformer*; None if there is nothing that counts."""
    for package in [each for each in _unread if type(transformer).__module__.startswith(f"{each}.")]:
        _unread.pop(package)()
    if (registered := _registered.get((type(transformer), name))) is not None:
        return functools.partial(registered, transformer)
    method = getattr(transformer, name, None)
    return method if callable(method) and _counts(type(transformer), name) else None


def without_samples_of(kind: type[TransformerT]) -> Callable[[Empty], Empty]:
    """Register the decorated function for transformers of exactly the class *kind*, which fail without samples.

    It takes a transformer and a message without samples, and returns the result, or None to leave it to the
    transformer.
    """

    def register(result: Empty) -> Empty:
        _registered[kind, "without_samples"] = result
        return result

    return register


def called(stage: Callable[[AxisArray], ResultT], message: AxisArray) -> ResultT | AxisArray:
    """What *stage* gives for *message*; for one without samples, what is registered in its place."""
    if 0 in message.data.shape and (registered := _brought(stage, "without_samples")) is not None:
        result: AxisArray | None = registered(message)
        if result is not None:
            return result
    return stage(message)


def fused_stage(transformer: object, message: AxisArray) -> FusedStage | None:
    """*transformer* as a function of arrays, for messages like *message*; None if it is not one.

    A state that says along which dimension it goes (as ``stream_dim``, ``axis_idx`` or ``axis``) has to go along the
    stream dimension, whoever made the stage: fused stages know no other, and a kernel would take one for the other.
    """
    fuse = _brought(transformer, "fuse")
    stage: FusedStage | None = fuse(message) if fuse is not None else None
    if stage is None or isinstance(stage, PassesThrough) or _goes_along(transformer, stage):
        return stage
    return None


def _goes_along(transformer: object, stage: FusedStage) -> bool:
    state = getattr(transformer, "state", None)
    axes = (getattr(state, name, None) for name in ("stream_dim", "axis_idx", "axis"))
    return all(axis == (stage.dim if isinstance(axis, str) else stage.axis) for axis in axes if axis is not None)


SLACK = 1e3
"""Margin for the start of a filter: its response falls as the power of its slowest pole, but may begin so far above."""


class Settles(Protocol):
    """A stage that says how long it remembers."""

    def settling_time(self, tolerance: float, gain: float) -> float:
        """Seconds after which results depend on how the stage began by *tolerance* or less, as a share of the largest.

        Args:
            tolerance: For example 1e-6.
            gain: Seconds between the samples of its input.
        """


class ResultGrid(NamedTuple):
    """Where the results of a stage lie on its input, counted from the start of the stream."""

    gain: float
    """Seconds between results."""

    results_after: Callable[[int], int]
    """How many results a stage has given after that many samples."""

    start_of: Callable[[int], int]
    """The sample at which a fresh stage may begin, to give the result of that number first, and the others after it."""

    begin: Callable[[int], None] = lambda number: None
    """Called before the first sample, with the number of the result that the stage is to begin with."""


def one_for_each(gain: float) -> ResultGrid:
    """The grid of a stage that gives one result for each sample."""
    return ResultGrid(gain, lambda n_samples: n_samples, lambda number: number)


StageT = TypeVar("StageT")

Settling = Callable[[StageT, float, float], float]
"""``settling_time`` as a function of the stage, a tolerance and a gain."""

Gridding = Callable[[StageT, float], ResultGrid]
"""``result_grid`` as a function of the stage and a gain."""


def settling_of(kind: type[StageT], settling: Settling, grid: Gridding | None = None) -> None:
    """Register how long stages of exactly the class *kind* remember.

    Args:
        kind: The class.
        settling: Takes the stage, a tolerance and a gain, and gives seconds (see :class:`Settles`).
        grid: Takes the stage and a gain, and gives a :class:`ResultGrid`. None: one result for each sample.
    """
    _registered[kind, "settling_time"] = settling
    if grid is not None:
        _registered[kind, "result_grid"] = grid


def says_settling(stage: object) -> bool:
    """Whether somebody has said how long *stage* remembers."""
    return _brought(stage, "settling_time") is not None


def settling_time(stage: object, tolerance: float, gain: float) -> float | None:
    """How long *stage* remembers, in seconds; None if nobody has said it, of a composite or of what it consists of."""
    said = _brought(stage, "settling_time")
    if said is None:
        parts = _parts_of(stage)
        return settling_time_in_a_row(parts, tolerance, gain) if parts else None
    time = said(tolerance, gain)
    return None if time is None else float(time)


def settling_time_in_a_row(stages: Iterable[object], tolerance: float, gain: float) -> float | None:
    """How long *stages* remember, one behind the other: what one has not forgotten is the input of the next."""
    total = 0.0
    for stage in stages:
        time = settling_time(stage, tolerance, gain)
        if time is None:
            if not isinstance(stage, BaseProcessor) or isinstance(stage, (Stateful, CompositeProcessor)):
                return None
            time = 0.0
        total, gain = total + time, result_grid(stage, gain).gain
    return total


def result_grid(stage: object, gain: float) -> ResultGrid:
    """Where the results of *stage* lie on its input, whose samples are *gain* seconds apart."""
    if (said := _brought(stage, "result_grid")) is not None:
        grid: ResultGrid = said(gain)
        return grid
    parts = _parts_of(stage)
    return grid_in_a_row(parts, gain) if parts else one_for_each(gain)


def grid_in_a_row(stages: Iterable[object], gain: float) -> ResultGrid:
    """Where the results of *stages* lie on the input of the first, one behind the other."""
    grids = []
    for stage in stages:
        grids.append(result_grid(stage, gain))
        gain = grids[-1].gain

    def results_after(n_samples: int) -> int:
        for grid in grids:
            n_samples = grid.results_after(n_samples)
        return n_samples

    def start_of(number: int) -> int:
        for grid in reversed(grids):
            number = grid.start_of(number)
        return number

    def begin(number: int) -> None:
        for grid in reversed(grids):
            grid.begin(number)
            number = grid.start_of(number)

    return ResultGrid(gain, results_after, start_of, begin)


def _parts_of(stage: object) -> list[object]:
    # As in ezmsg-baseproc, which has no public way to them.
    return list(stage._procs.values()) if isinstance(stage, CompositeProcessor) else []


def averaging_time(time_constant: float, tolerance: float) -> float:
    """Seconds after which an average of this time constant has forgotten what came before.

    Its weight, ``exp(-t / time_constant)``, is then a tenth of *tolerance*: the rest is for what is computed from it, a
    difference or a standard deviation.
    """
    return time_constant * math.log(10.0 / tolerance)


def filter_time(coefs: object, coef_type: str, tolerance: float, gain: float) -> float:
    """Seconds after which a filter has forgotten how it began.

    Without feedback that is the length of its taps. With feedback its response to that falls as the power of the
    largest radius of its poles, from :data:`SLACK` times the input at most.

    Args:
        coefs: *b* and *a* (a tuple or ezmsg-sigproc's ``FilterCoefficients``), sections, or None for no filter.
        coef_type: ``"sos"`` for sections, ``"ba"`` for *b* and *a*.
        tolerance: Share of the input that is left.
        gain: Seconds between samples.

    Returns:
        The time; infinite for a filter that does not forget.
    """
    if coefs is None:
        return 0.0
    if coef_type == "sos":
        sections = np.atleast_2d(np.asarray(coefs, np.float64))
        radius = max(_radius(section[3:]) for section in sections)
        n_taps = 2 * len(sections) + 1
    else:
        # It loads scipy's filters, which takes longer than all else of this package.
        from .coefficients import check_ba

        b, a = check_ba(coefs)
        radius, n_taps = _radius(a), max(len(b), len(a))
    if radius >= 1.0:
        return math.inf
    n_feedback = math.log(SLACK / tolerance) / -math.log(radius) if radius > 0.0 else 0.0
    return (n_taps + math.ceil(n_feedback)) * gain


def _radius(denominator: npt.NDArray) -> float:
    """The largest distance of a pole from 0."""
    return float(np.abs(np.roots(denominator)).max(initial=0.0))
