"""Run a list of stages, together where they can be fused and one by one where not, with the same results."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import os
import types
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray, AxisBase

from ..asarray import AsArrayTransformer
from ..rechunk import RechunkTransformer
from ..stream.convert import dtype_name, is_mlx_array
from ..stream.device import uses_gpu
from ..stream.fusible import FusedStage, fused_stage
from ..stream.unit import Output, Stage
from .fusedrun import ON_ENTRY, Configured, Ends, FusedRun, Likeness

CUDA_GRAPHS = "MLX_USE_CUDA_GRAPHS"


def start_kernels_one_by_one(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX start kernels one by one in this process and those that it starts, unless the user has said otherwise.

    Else MLX makes a CUDA graph for each evaluation. A message of a fused chain is one evaluation of a few kernels, for
    which the graph takes longer than the kernels do. MLX reads the variable once in a process, when it first
    computes on the GPU, so whoever has used it there before keeps the graphs.
    """
    environ.setdefault(CUDA_GRAPHS, "0")


_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, type, np.ndarray, np.generic, np.dtype),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(ez.Settings, AxisArray, AxisBase),
)
_COLLECTIONS = (list, dict, set, collections.deque)


def snapshot(stage: object) -> Callable[[], None]:
    """A function that makes the state of *stage* what it is now.

    Everything that *stage* is made of counts: its attributes, those of the objects in them, and the items of lists,
    sets and dictionaries. Arrays, messages and settings count as values, so that one which a stage writes to in place
    stays written to.
    """
    saved: dict[int, tuple[Any, Any]] = {}
    _save(stage, saved)

    def restore() -> None:
        for held, content in saved.values():
            target = held if isinstance(held, _COLLECTIONS) else held.__dict__
            target.clear()
            if isinstance(target, (list, collections.deque)):
                target.extend(content)
            else:
                target.update(content)

    return restore


def _save(held: object, saved: dict[int, tuple[Any, Any]]) -> None:
    if isinstance(held, _VALUES) or id(held) in saved:
        return
    content: Any = held
    if not isinstance(held, (tuple, frozenset)):
        content = held.copy() if isinstance(held, _COLLECTIONS) else dict(getattr(held, "__dict__", ()))
        if isinstance(held, _COLLECTIONS) or hasattr(held, "__dict__"):
            saved[id(held)] = held, content
    for item in content.values() if isinstance(content, dict) else content:
        _save(item, saved)


class Passed(NamedTuple):
    """One stage that a message has gone through."""

    number: int
    stage: Stage
    message: AxisArray
    output: Output

    def has_samples(self) -> bool:
        """Whether there were samples to set the state of the stage up with."""
        return 0 not in self.message.data.shape


class Alone:
    """A stage that is run by itself, with messages like the one that it was found with."""

    def __init__(self, passed: Passed) -> None:
        self.first, self.stop = passed.number, passed.number + 1
        self._stage, self._settings = passed.stage, getattr(passed.stage, "settings", None)
        self._likeness = Likeness(passed.message)

    def is_like(self, message: AxisArray) -> bool:
        """Whether *message* is like the one that the stage was found with."""
        return self._likeness.n_samples(message) is not None

    def has_settings_of(self, stages: Sequence[Stage]) -> bool:
        """Whether the first of *stages* is this one, with the settings that it had."""
        return stages[0] is self._stage and getattr(self._stage, "settings", None) is self._settings


@functools.cache
def _register_fusions() -> None:
    """Register what the package knows to fuse. At the first plan, for it takes numba and all of these transformers."""
    importlib.import_module(".fusions", __package__)


def plan(passed: Sequence[Passed], lengths: tuple[int, ...] | None) -> list[FusedRun | Alone]:
    """The runs, and the stages between them, for messages like those that have *passed*.

    Args:
        passed: Consecutive stages that a message has just gone through; the state of each is set up for it.
        lengths: Lengths of messages that are known to come, in samples, for the first of them.
    """
    _register_fusions()
    found: list[FusedRun | Alone] = []
    start = 0
    while start < len(passed):
        if not Likeness.has_regular_samples(passed[start].message):
            start += 1
            continue
        run = _fused(passed[start:], lengths)
        found.append(run or Alone(passed[start]))
        start += found[-1].stop - found[-1].first
    return found


def _fused(passed: Sequence[Passed], lengths: tuple[int, ...] | None) -> FusedRun | None:
    """The longest run that begins with the first of *passed*, if it has two stages."""
    entry = cast(AsArrayTransformer, passed[0].stage) if _is_entry(passed[0]) else None
    n_taken = 0 if entry is None else 1
    leaves = None
    stages: list[FusedStage] = []
    for step in passed[n_taken:]:
        if not ((dtype := _dtype_of(step.message)) and Likeness.has_regular_samples(step.message)):
            break
        if _is_exit(step):
            leaves = cast(AsArrayTransformer, step.stage)
            n_taken += 1
            break
        stage = _fused_stage(step) if isinstance(step.output, AxisArray) and _dtype_of(step.output) else None
        if stage is None or dtype not in stage.takes:
            break
        stages.append(stage)
        n_taken += 1
    if not stages or n_taken < 2:
        return None
    first, message = passed[0].number, passed[0].message
    transformers = [cast(Configured, step.stage) for step in passed[:n_taken]]
    ends, result = Ends(entry, leaves), cast(AxisArray, passed[n_taken - 1].output)
    if not uses_gpu():
        from .fusedrun import HostRun
        from .fusions.loops import compile_ahead

        compile_ahead()
        return HostRun(first, transformers, stages, ends, message, result)
    from .compiledrun import CompiledRun

    run = CompiledRun(first, transformers, stages, ends, message, result, lengths=lengths)
    run.compile_ahead()
    return run


def _fused_stage(step: Passed) -> FusedStage | None:
    try:
        return fused_stage(step.stage, step.message)
    except Exception:
        # Whoever made it fusible: without that the stage still works.
        ez.logger.exception(f"{type(step.stage).__name__} could not be fused and is run by itself.")
        return None


def _dtype_of(message: AxisArray) -> str | None:
    """The dtype of MLX data, if stages can be fused that give it."""
    name = dtype_name(message.data) if is_mlx_array(message.data) else None
    return name if name in ("float32", "bool") else None


def _is_entry(step: Passed) -> bool:
    return (
        type(step.stage) is AsArrayTransformer
        and type(step.message.data) is np.ndarray
        and step.message.data.dtype in ON_ENTRY
        and isinstance(step.output, AxisArray)
        and _dtype_of(step.output) == "float32"
    )


def _is_exit(step: Passed) -> bool:
    stage = step.stage
    return type(stage) is AsArrayTransformer and stage.settings.backend == "numpy" and type(step.output) is AxisArray


MOST_KINDS = 4
"""Kinds of messages that fused runs are kept for, at each stage; the one that was found first makes room."""

MOST_PLANS = 64
"""How often a runner looks for stages to fuse. In a stream whose metadata change all the time it gives up."""


class Runner:
    """Stages in a row.

    Args:
        name: What the log calls it.
        stages: By their names, in order.
        fuse: Whether stages are fused at all.
        lengths: Lengths of messages, in samples, to compile ahead on a GPU; None to find out.
    """

    def __init__(self, name: str, stages: Mapping[str, Stage], fuse: bool, lengths: tuple[int, ...] | None) -> None:
        self._name, self._names, self._stages = name, list(stages), list(stages.values())
        self._lengths = lengths
        self._found: list[list[FusedRun | Alone]] = [[] for _ in self._stages]
        # The run of all stages that took the last message, if there was one.
        self._usual: FusedRun | None = None
        self._n_plans_left = MOST_PLANS if fuse else 0
        self._told: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        if fuse:
            start_kernels_one_by_one()

    def __call__(self, message: AxisArray) -> Output:
        """What the stages make of *message*."""
        usual = self._usual
        if usual is not None:
            # Nothing comes after it that could raise, so there is nothing to take back.
            result = usual(message)
            if result is not None:
                return result
            self._usual = None
        return self._whole(0, message, tried=usual)

    def flush(self) -> list[AxisArray]:
        """What the stages still hold, each one's ``flush`` in order."""
        results: list[AxisArray] = []
        for number, stage in enumerate(self._stages):
            flush = getattr(stage, "flush", None)
            if callable(flush):
                self.store(number)
                for piece in flush():
                    results += _as_list(self._whole(number + 1, piece))
        return results

    def store(self, number: int | None = None) -> None:
        """Give the state that fused runs keep back to stage *number*; None: to all."""
        for found in self._found:
            for run in found:
                if isinstance(run, FusedRun) and (number is None or run.first <= number < run.stop):
                    run.store()

    def store_others(self, run: FusedRun) -> None:
        """Give back the state that *run* is to take over, where a run for messages of another kind has it."""
        for other in itertools.chain.from_iterable(self._found):
            if isinstance(other, FusedRun) and other is not run and other.first < run.stop and run.first < other.stop:
                other.store()

    def describe(self) -> str:
        """The stages, a line each, and which of them have been fused."""
        width = max(map(len, self._names))
        runs = [run for found in self._found for run in found if isinstance(run, FusedRun)]
        lines = []
        for number, (name, stage) in enumerate(zip(self._names, self._stages, strict=False)):
            run = next((run for run in runs if run.first <= number < run.stop), None)
            how = "by itself" if run is None else f"fused with stages {run.first + 1} to {run.stop}, {run.how}"
            lines.append(f"{number + 1:3}  {name:{width}}  {type(stage).__name__}: {how}")
        return "\n".join(lines)

    def _whole(self, number: int, message: AxisArray, tried: FusedRun | None = None) -> Output:
        """The output from stage *number* on, without *tried*; if one raises, the state of all is as before."""
        try:
            return self._run(number, message, tried)
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        finally:
            self._undo.clear()

    def _run(self, number: int, message: AxisArray, tried: FusedRun | None = None) -> Output:
        n_stages = len(self._stages)
        while number < n_stages:
            stop = number + 1
            passed: list[Passed] | None = None
            for run in self._found[number]:
                if isinstance(run, FusedRun) and run is not tried:
                    undo = run.undo()
                    result = run(message)
                    if result is not None:
                        self._undo.append(undo)
                        if number == 0 and run.stop == n_stages:
                            self._usual = run
                        message, number = result, run.stop
                        break
            else:
                known = self._known(number, message)
                if known is not None:
                    stop = known.stop
                elif self._n_plans_left:
                    passed, stop = [], n_stages
                output: Output = message
                while number < stop and isinstance(output, AxisArray):
                    message = output
                    output = self._step(number, message)
                    if passed is not None:
                        passed.append(Passed(number, self._stages[number], message, output))
                    number += 1
                if passed is not None:
                    self._plan(passed)
                if output is None:
                    return None
                if not isinstance(output, AxisArray):
                    del message
                    return [result for piece in output for result in _as_list(self._run(number, piece))]
                message = output
        return message

    def _step(self, number: int, message: AxisArray) -> Output:
        self.store(number)
        stage = self._stages[number]
        self._undo.append(snapshot(stage))
        return stage(message)

    def _known(self, number: int, message: AxisArray) -> FusedRun | Alone | None:
        """What was found for messages like this one, with the settings that the stages have now."""
        found = self._found[number]
        for run in tuple(found):
            if run.is_like(message):
                if run.has_settings_of(self._stages[number : run.stop]):
                    return run
                self._forget(number, run)
        return None

    def _forget(self, number: int, run: FusedRun | Alone) -> None:
        if isinstance(run, FusedRun):
            run.store()
        if run is self._usual:
            self._usual = None
        self._found[number].remove(run)

    def _plan(self, passed: list[Passed]) -> None:
        if not all(step.has_samples() for step in passed):
            return
        self._n_plans_left -= 1
        if not self._n_plans_left:
            ez.logger.warning(f"{self._name} fuses no more stages: the metadata of its messages change all the time.")
        fused = []
        for run in plan(passed, self._known_lengths(passed[0].number)):
            found = self._found[run.first]
            for old in found[MOST_KINDS - 1 :]:
                self._forget(run.first, old)
            found.insert(0, run)
            if isinstance(run, FusedRun):
                # Weak, so that a chain and its stages are gone as soon as nobody uses them.
                run.before_load = functools.partial(_store_others, weakref.ref(self))
                fused.append(" -> ".join(self._names[run.first : run.stop]))
        for names in fused:
            if names not in self._told:
                self._told.add(names)
                ez.logger.info(f"{self._name} runs as one function: {names}.")

    def _known_lengths(self, number: int) -> tuple[int, ...] | None:
        if self._lengths is not None:
            return self._lengths
        for stage in reversed(self._stages[:number]):
            if isinstance(stage, RechunkTransformer):
                return stage.settings.sizes
        return None


def _store_others(runner: weakref.ref[Runner], run: FusedRun) -> None:
    if (found := runner()) is not None:
        found.store_others(run)


def _as_list(output: Output) -> list[AxisArray]:
    if output is None:
        return []
    return list(output) if isinstance(output, (list, tuple)) else [cast(AxisArray, output)]
