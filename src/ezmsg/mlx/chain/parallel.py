"""Several branches of stages on one message, whose results are joined."""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

import ezmsg.core as ez
import numpy as np
from array_api_compat import get_namespace
from ezmsg.baseproc import CompositeProcessor
from ezmsg.sigproc.concat import ConcatProcessor, ConcatSettings
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis
from ezmsg.util.messages.util import replace

from ..stream.convert import dtype_name, is_mlx_array
from ..stream.fusible import (
    Advance,
    Array,
    Axes,
    Counts,
    FusedSequence,
    FusedStage,
    ResultGrid,
    Variant,
    called,
    fused_stage,
    fusion_of,
    grid_in_a_row,
    settling_time_in_a_row,
)
from ..stream.unit import Stage, Stages, a_type, check_message
from .transformer import change_stage, named_stages


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
    """Raise TypeError for the name of a branch that is not text, and ValueError for one that holds the separator."""
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

    Its arguments are the fields of :class:`ParallelSettings`.

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
        stages: dict[str, typing.Any] = self._procs
        return stages

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
        times = [settling_time_in_a_row(stages, tolerance, gain) for stages in self.branches.values()]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    def result_grid(self, gain: float) -> ResultGrid:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        grids = [grid_in_a_row(stages, gain) for stages in self.branches.values()]

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
                given, result = output, called(stage, output)
                if not isinstance(result, AxisArray):
                    raise TypeError(
                        f"Stages of a branch must give one message for each, and {type(stage).__name__} of {name!r} "
                        f"gave {a_type(result)}"
                    )
                output = result
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


def _completed(coroutine: Coroutine[object, None, AxisArray]) -> AxisArray:
    """The result of *coroutine*, which has all that it waits for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: AxisArray = done.value
        return result
    raise RuntimeError("ezmsg-sigproc's Concat waits for something else than its two messages.")


def _with_dimension(result: AxisArray, axis: str, name: str) -> AxisArray:
    """*result* with a new last dimension of length 1."""
    label = CoordinateAxis(data=np.array([name]), dims=[axis])
    data, dims = result.data[..., None], [*result.dims, axis]
    return replace(result, data=data, dims=dims, axes={**result.axes, axis: label})


class FusedParallel(FusedSequence[Parallel]):
    """All stages of all branches.

    Arrays: those of all branches in a row. Counts: those of each branch. Variant: those of the branches, and how many
    samples come out of each.
    """

    def __init__(self, transformer: Parallel, message: AxisArray, branches: Sequence[FusedSequence]) -> None:
        super().__init__(transformer, message, branches)
        self.takes = frozenset.intersection(*(branch.takes for branch in branches))
        results = [branch[-1][2] for branch in transformer.passed]
        result = transformer._joined(results, message)
        # The dimension that all have, or a new one behind those of each.
        self._is_new = transformer.settings.axis not in results[0].dims
        self._joined = result.get_axis_idx(transformer.settings.axis)
        self._labels = result.axes.get(transformer.settings.axis)

    def parts(self) -> list[typing.Any]:
        return [part for branch in self._stages for part in branch.parts()]

    def advance(self, n_samples: int, counts: Counts) -> Advance | None:
        found = [branch.advance(n_samples, each) for branch, each in zip(self._stages, counts, strict=True)]
        steps = [step for step in found if step is not None]
        if len(steps) < len(found) or len({step.n_samples for step in steps}) > 1:
            return None
        n_samples = steps[0].n_samples
        return Advance((tuple(step.variant for step in steps), n_samples), n_samples, tuple(s.counts for s in steps))

    def relabel(self, axes: Axes, n_samples: int, counts: Counts) -> Axes:
        axes = self._stages[0].relabel(axes, n_samples, counts[0])
        return axes if self._labels is None else {**axes, self.transformer.settings.axis: self._labels}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Variant) -> tuple[Array, tuple[Array, ...]]:
        variants, n_results = variant
        results: list[Array] = []
        after: list[Array] = []
        last = len(self._stages) - 1
        for number, (branch, held, how) in enumerate(zip(self._stages, self._grouped(arrays), variants, strict=True)):
            # A stage may write to its input, which only the last branch has to itself.
            y, held = branch.apply(x.copy() if isinstance(x, np.ndarray) and number < last else x, held, how)
            results.append(y[..., None] if self._is_new else y)
            after += held
        if not n_results:
            return x[:0], tuple(after)
        joined: Array = get_namespace(x).concat(results, axis=self._joined)
        return joined, tuple(after)


@fusion_of(Parallel)
def fuse_parallel(transformer: Parallel, message: AxisArray) -> FusedStage | None:
    """All branches, if each of their stages can be fused."""
    branches = []
    for branch in transformer.passed:
        stages = []
        for stage, given, output in branch:
            found = fused_stage(stage, given)
            takes = found is not None and is_mlx_array(given.data) and dtype_name(given.data) in found.takes
            if found is None or not takes or output.attrs is not message.attrs or not is_mlx_array(output.data):
                return None
            stages.append(found)
        if dtype_name(branch[-1][2].data) != "float32" or branch[-1][2].dims != transformer.passed[0][-1][2].dims:
            return None
        branches.append(FusedSequence(transformer, message, stages))
    if not branches:
        return None
    all_of_them = FusedParallel(transformer, message, branches)
    # Not needed any more, and as large as the message.
    transformer.passed = []
    return all_of_them
