"""Several branches of stages on one message, whose results are joined."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

import ezmsg.core as ez
import numpy as np
from ezmsg.baseproc import BaseProcessor, CompositeProcessor
from ezmsg.baseproc.stateful import Stateful
from ezmsg.sigproc.concat import ConcatProcessor, ConcatSettings
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis
from ezmsg.util.messages.util import replace

from ..stream.convert import dtype_name, is_mlx_array
from ..stream.fusible import (
    Advance,
    Array,
    Axes,
    FusedStage,
    ResultGrid,
    for_next_stage,
    fused_stage,
    fusion_of,
    result_grid,
    settling_time,
)
from ..stream.unit import Stage, Stages, check_message
from .transformer import change_stage, named_stages

if typing.TYPE_CHECKING:
    import mlx.core as mx


class ParallelSettings(ez.Settings):
    """Settings for :obj:`Parallel`."""

    branches: Mapping[str, Stages | Mapping[str, Stage]] | Callable[[], Mapping[str, Stages | Mapping[str, Stage]]]
    """The stages of each branch, by its name, or a function that makes them. Each stage gives one message for one."""

    axis: str = "ch"
    """The dimension along which results are joined; a new one, the last, if they do not have it."""

    relabel_axis: bool = True
    """Whether labels along it get the name of the branch, as in ``"ch1_counts"``."""

    def __post_init__(self) -> None:
        branches = self.branches
        if not callable(branches) and not (isinstance(branches, Mapping) and branches):
            raise TypeError(f"'branches' must be stages by the names of branches, got {branches!r}")
        if isinstance(branches, Mapping):
            check_names(branches)
        if not isinstance(self.axis, str):
            raise TypeError(f"'axis' must be the name of a dimension, got {self.axis!r}")
        if not isinstance(self.relabel_axis, bool):
            raise TypeError(f"'relabel_axis' must be True or False, got {self.relabel_axis!r}")


SEPARATOR = "/"
"""Between the name of a branch and that of its stage."""


def check_names(branches: Iterable[object]) -> None:
    """Check the names of branches.

    Raises:
        TypeError: One is not text.
        ValueError: One holds the separator, by which a stage is told its branch.
    """
    for name in branches:
        if not isinstance(name, str):
            raise TypeError(f"'branches' must have names that are text, got {name!r}")
        if SEPARATOR in name:
            raise ValueError(f"'branches' must have names without {SEPARATOR!r}, got {name!r}")


class Parallel(CompositeProcessor[ParallelSettings, AxisArray, AxisArray]):
    """Run branches of stages on one message, and join their results along a dimension.

    A stage of a chain like any other; with the stages before and after it, it is one function if all of its stages can
    be fused. Labels, attrs and the key of a result are what ezmsg-sigproc's
    :obj:`~ezmsg.sigproc.concat.Concat` makes of the results of the branches, with the names of the branches as suffixes
    of the labels. The time axis is that of the first branch; all must give as many samples for each message.

        >>> from ezmsg.mlx import EWMATransformer, Parallel, PowTransformer
        >>> features = Parallel({"power": [PowTransformer(), EWMATransformer()], "mean": EWMATransformer()}, axis="ch")
        >>> list(features.stages)
        ['power/Pow', 'power/EWMA', 'mean/EWMA']

    Args:
        branches: See :class:`ParallelSettings`.
        axis: See there.
        relabel_axis: See there.

    Raises:
        TypeError: A branch has no stage, or one that cannot be called, or a stage gives something else than a message.
        ValueError: Branches give different numbers of samples.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._joins: list[ConcatProcessor] = []
        self.passed: list[list[tuple[Stage, AxisArray, AxisArray]]] = []
        """The stages that the last message has gone through, branch by branch, with what went in and came out."""

    @staticmethod
    def _initialize_processors(settings: ParallelSettings) -> dict[str, typing.Any]:
        branches = settings.branches() if callable(settings.branches) else settings.branches
        check_names(branches)
        return {
            f"{name}{SEPARATOR}{stage}": step
            for name, stages in branches.items()
            for stage, step in named_stages(stages, f"The branch {name!r}").items()
        }

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages, by the name of the branch and their own."""
        return typing.cast("dict[str, Stage]", self._procs)

    @property
    def branches(self) -> dict[str, list[Stage]]:
        """The stages of each branch."""
        found: dict[str, list[Stage]] = {}
        for name, stage in self.stages.items():
            found.setdefault(name.partition(SEPARATOR)[0], []).append(stage)
        return found

    def update_stage(self, name: str, settings: ez.Settings | None = None, **changes: object) -> None:
        """Change the settings of one stage while it runs; see :meth:`BaseChainTransformer.update_stage`."""
        change_stage(self._procs, name, settings, changes)

    def update_settings(self, new_settings: ParallelSettings) -> None:
        """Take other settings: stages of the same name and class keep their state as far as their settings allow."""
        super().update_settings(new_settings)
        self._joins = []

    def settling_time(self, tolerance: float, gain: float) -> float | None:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`; None if nobody has said it of a stage."""
        longest = 0.0
        for stages in self.branches.values():
            total, gain_there = 0.0, gain
            for stage in stages:
                if (time := settling_time(stage, tolerance, gain_there)) is None:
                    if not isinstance(stage, BaseProcessor) or isinstance(stage, Stateful):
                        return None
                    time = 0.0
                total, gain_there = total + time, result_grid(stage, gain_there).gain
            longest = max(longest, total)
        return longest

    def result_grid(self, gain: float) -> ResultGrid:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        grids = [_grid_of(stages, gain) for stages in self.branches.values()]

        def begin(number: int) -> None:
            for grid in grids:
                grid.begin(number)

        return grids[0]._replace(begin=begin)

    def _validate_processor_chain(self) -> None:
        # ezmsg-baseproc compares what each stage gives with what the next takes.
        pass

    def stateful_op(  # type: ignore[override]
        self, state: dict[str, typing.Any] | None, message: AxisArray
    ) -> tuple[dict[str, typing.Any], AxisArray]:
        """Run *message* from the given state, as in ezmsg-baseproc."""
        if state is not None:
            self.state = state
        result = self._process(message)
        return self.state, result

    def _process(self, message: AxisArray) -> AxisArray:  # type: ignore[override]
        if type(message) is not AxisArray:
            check_message(message, self)
        self.passed = []
        results = []
        for name, stages in self.branches.items():
            passed, output = [], message
            for stage in stages:
                given, output = output, typing.cast(AxisArray, stage(output))
                if not isinstance(output, AxisArray):
                    raise TypeError(
                        f"Stages of a branch must give one message for each, and {type(stage).__name__} of {name!r} "
                        f"gave a {type(output).__name__}"
                    )
                passed.append((stage, given, output))
            self.passed.append(passed)
            results.append(output)
        return self._joined(results, message)

    async def _aprocess(self, message: AxisArray) -> AxisArray:  # type: ignore[override]
        return self._process(message)

    def _joined(self, results: list[AxisArray], message: AxisArray) -> AxisArray:
        axis, names = self.settings.axis, list(self.branches)
        others = {
            name: {dim: n for dim, n in zip(result.dims, result.data.shape, strict=True) if dim != axis}
            for name, result in zip(names, results, strict=True)
        }
        if any(other != others[names[0]] for other in others.values()):
            raise ValueError(f"Branches must give results that differ along {axis!r} only, got {others}")
        # All of it is that of the message, of which Concat would take text and numbers only.
        shares_attrs = all(result.attrs is message.attrs for result in results)
        attrs = message.attrs
        if shares_attrs:
            results = [replace(result, attrs={}) for result in results]
        relabel = self.settings.relabel_axis
        if axis not in results[0].dims:
            results = [_with_dimension(result, axis, name) for result, name in zip(results, names, strict=True)]
            relabel = False
        if not self._joins:
            suffixes = [f"_{name}" for name in names]
            self._joins = [
                ConcatProcessor(
                    ConcatSettings(axis, relabel_axis=relabel, label_a="" if number else suffixes[0], label_b=suffix)
                )
                for number, suffix in enumerate(suffixes[1:])
            ]
        joined = results[0]
        for join, result in zip(self._joins, results[1:], strict=True):
            join.push_a(joined)
            join.push_b(result)
            joined = _completed(join.__acall__())
        return replace(joined, attrs=attrs) if shares_attrs else joined


Returned = typing.TypeVar("Returned")


def _completed(coroutine: Coroutine[object, None, Returned]) -> Returned:
    """The result of *coroutine*, which has all that it waits for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return typing.cast(Returned, done.value)
    raise RuntimeError("ezmsg-sigproc's Concat waits for something else than its two messages.")


def _with_dimension(result: AxisArray, axis: str, name: str) -> AxisArray:
    """*result* with a new last dimension of length 1."""
    label = CoordinateAxis(data=np.array([name]), dims=[axis])
    data, dims = result.data[..., None], [*result.dims, axis]
    return replace(result, data=data, dims=dims, axes={**result.axes, axis: label})


def _grid_of(stages: Sequence[Stage], gain: float) -> ResultGrid:
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


class _Branch(typing.NamedTuple):
    """The effect of a message of some length in one branch."""

    variants: tuple[typing.Hashable, ...]
    lengths: tuple[int, ...]
    """Samples that come out of each stage."""


class FusedParallel(FusedStage[Parallel]):
    """All stages of all branches.

    Arrays: those of all stages in a row. Counts: those of each stage, by branch. Variant: what each branch does.
    """

    def __init__(self, transformer: Parallel, message: AxisArray, stages: list[list[FusedStage]]) -> None:
        super().__init__(transformer, message)
        self._stages = stages
        self.takes = frozenset.intersection(*(branch[0].takes for branch in stages))
        result = transformer._joined([branch[-1][2] for branch in transformer.passed], message)
        # The dimension that all have, or a new one behind those of each.
        first = transformer.passed[0][-1][2]
        self._is_new = transformer.settings.axis not in first.dims
        self._joined = result.get_axis_idx(transformer.settings.axis)
        self._labels = result.axes.get(transformer.settings.axis)
        self._sizes: list[list[int]] = []

    def parts(self) -> list[typing.Any]:
        """See :class:`FusedStage`."""
        return [stage.transformer for branch in self._stages for stage in branch]

    def load(self) -> tuple[tuple[mx.array, ...], tuple[tuple[typing.Hashable, ...], ...]] | None:
        """See :class:`FusedStage`."""
        loaded = [[stage.load() for stage in branch] for branch in self._stages]
        if any(state is None for branch in loaded for state in branch):
            return None
        states = typing.cast("list[list[tuple[tuple[mx.array, ...], typing.Hashable]]]", loaded)
        self._sizes = [[len(arrays) for arrays, _ in branch] for branch in states]
        arrays = tuple(itertools.chain.from_iterable(arrays for branch in states for arrays, _ in branch))
        return arrays, tuple(tuple(counts for _, counts in branch) for branch in states)

    def store(self, arrays: tuple[mx.array, ...], counts: tuple[tuple[typing.Hashable, ...], ...]) -> None:
        """See :class:`FusedStage`."""
        for branch, held, branch_counts in zip(self._stages, self._grouped(arrays), counts, strict=True):
            for stage, of_stage, count in zip(branch, held, branch_counts, strict=True):
                stage.store(typing.cast("tuple[mx.array, ...]", of_stage), count)

    def advance(self, n_samples: int, counts: tuple[tuple[typing.Hashable, ...], ...]) -> Advance | None:
        """See :class:`FusedStage`."""
        branches, after = [], []
        for stages, before in zip(self._stages, counts, strict=True):
            length, variants, lengths, counts_after = n_samples, [], [], []
            for stage, count in zip(stages, before, strict=True):
                step = stage.advance(length, count) if length else Advance(None, 0, count)
                if step is None:
                    return None
                length = step.n_samples
                variants.append(step.variant)
                lengths.append(length)
                counts_after.append(step.counts)
            branches.append(_Branch(tuple(variants), tuple(lengths)))
            after.append(tuple(counts_after))
        lengths_after = {branch.lengths[-1] for branch in branches}
        return Advance(tuple(branches), lengths_after.pop(), tuple(after)) if len(lengths_after) == 1 else None

    def relabel(self, axes: Axes, n_samples: int, counts: tuple[tuple[typing.Hashable, ...], ...]) -> Axes:
        """See :class:`FusedStage`."""
        for stage, count in zip(self._stages[0], counts[0], strict=True):
            axes = stage.relabel(axes, n_samples, count)
            step = stage.advance(n_samples, count)
            n_samples = 0 if step is None else step.n_samples
        return axes if self._labels is None else {**axes, self.transformer.settings.axis: self._labels}

    def apply(
        self, x: Array, arrays: tuple[Array, ...], variant: tuple[_Branch, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        results: list[Array] = []
        after: list[Array] = []
        last = len(self._stages) - 1
        for number, (stages, held, branch) in enumerate(zip(self._stages, self._grouped(arrays), variant, strict=True)):
            # What a stage is given it may write to, and the last branch has it to itself.
            y: Array | None = x.copy() if isinstance(x, np.ndarray) and number < last else x
            for stage, of_stage, how, length in zip(stages, held, branch.variants, branch.lengths, strict=True):
                if y is not None:
                    y, of_stage = stage.apply(y, of_stage, how)
                    y = for_next_stage(y) if length else None
                after += of_stage
            if y is not None:
                results.append(y[..., None] if self._is_new else y)
        if not results:
            return x[:0], tuple(after)
        if isinstance(results[0], np.ndarray):
            return np.concatenate(typing.cast("list[np.ndarray]", results), axis=self._joined), tuple(after)
        import mlx.core as mx

        return mx.concatenate(typing.cast("list[mx.array]", results), axis=self._joined), tuple(after)

    def _grouped(self, arrays: Sequence[Array]) -> list[list[tuple[Array, ...]]]:
        given = iter(arrays)
        return [[tuple(itertools.islice(given, size)) for size in branch] for branch in self._sizes]


@fusion_of(Parallel)
def fuse_parallel(transformer: Parallel, message: AxisArray) -> FusedStage | None:
    """All branches, if each of their stages can be fused."""
    stages: list[list[FusedStage]] = []
    for branch in transformer.passed:
        fused = []
        for stage, given, output in branch:
            found = fused_stage(stage, given)
            takes = found is not None and is_mlx_array(given.data) and dtype_name(given.data) in found.takes
            if found is None or not takes or output.attrs is not message.attrs or not is_mlx_array(output.data):
                return None
            fused.append(found)
        if dtype_name(branch[-1][2].data) != "float32" or branch[-1][2].dims != transformer.passed[0][-1][2].dims:
            return None
        stages.append(fused)
    if not stages:
        return None
    all_of_them = FusedParallel(transformer, message, stages)
    # Not needed any more, and as large as the message.
    transformer.passed = []
    return all_of_them
