"""Run a list of stages, together where they can be fused and one by one where not, with the same results."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ..asarray import AsArrayTransformer
from ..rechunk import RechunkTransformer
from ..stream.convert import dtype_name, is_mlx_array
from ..stream.device import start_kernels_one_by_one, uses_gpu
from ..stream.fusible import FusedStage, PassesThrough, called, fused_stage
from ..stream.unit import Captured, Output, Stage, captured, put_back
from .fusedrun import ON_ENTRY, Configured, Ends, FusedRun, Likeness, give_back, holders


class Passed(NamedTuple):
    """One stage that a message has gone through."""

    number: int
    stage: Stage
    message: AxisArray
    output: Output
    stands_twice: bool
    """Whether the stage stands in the chain more than once: a fused run would keep its state from the other place."""


class Alone:
    """A stage that is run by itself, with messages like the one that it was found with."""

    def __init__(self, passed: Passed) -> None:
        self.first, self.stop = passed.number, passed.number + 1
        self._likeness = Likeness(passed.message, lambda gain: True)

    def is_like(self, message: AxisArray) -> bool:
        """Whether *message* is like the one that the stage was found with."""
        return self._likeness.n_samples(message) is not None


def plan(passed: Sequence[Passed], lengths: tuple[int, ...] | None) -> list[FusedRun | Alone]:
    """The runs, and the stages between them, for messages like those that have *passed*.

    Args:
        passed: Consecutive stages that a message has just gone through; the state of each is set up for it.
        lengths: Lengths of messages that are known to come, in samples, for the first of them.
    """
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
    entry, leaves = _entry(passed[0]), None
    n_taken = 0 if entry is None else 1
    stages: list[FusedStage] = []
    for step in passed[n_taken:]:
        if not ((dtype := _dtype_of(step.message)) and Likeness.has_regular_samples(step.message)):
            break
        if (leaves := _exit(step)) is not None:
            n_taken += 1
            break
        stage = _fused_stage(step)
        if stage is None or dtype not in stage.takes:
            break
        stages.append(stage)
        n_taken += 1
    if not stages or n_taken < 2:
        return None
    first, message, result = passed[0].number, passed[0].message, passed[n_taken - 1].output
    of_run: list[object] = [step.stage for step in passed[:n_taken]]
    transformers = [stage for stage in of_run if isinstance(stage, Configured)]
    if not isinstance(result, AxisArray) or len(transformers) != n_taken:
        return None
    ends = Ends(entry, leaves)
    if not uses_gpu():
        from ..kernels.cpu.loops import compile_ahead
        from .fusedrun import HostRun

        compile_ahead()
        return HostRun(first, transformers, stages, ends, message, result)
    from .compiledrun import CompiledRun

    run = CompiledRun(first, transformers, stages, ends, message, result, lengths=lengths)
    run.compile_ahead()
    return run


def _fused_stage(step: Passed) -> FusedStage | None:
    if step.stands_twice or not (isinstance(step.output, AxisArray) and _dtype_of(step.output)):
        return None
    try:
        stage = fused_stage(step.stage, step.message)
    except Exception:
        # Whoever made it fusible: without that the stage still works.
        ez.logger.exception(f"{type(step.stage).__name__} could not be fused and is run by itself.")
        return None
    # What has let this message through has worked nothing out for it, whatever its state is of.
    return stage if step.output is not step.message or isinstance(stage, PassesThrough) else None


def _dtype_of(message: AxisArray) -> str | None:
    """The dtype of MLX data, if stages can be fused that give it."""
    name = dtype_name(message.data) if is_mlx_array(message.data) else None
    return name if name in ("float32", "bool") else None


def _entry(step: Passed) -> AsArrayTransformer | None:
    """The stage, if it is the conversion to MLX that a run begins with."""
    stage, data = step.stage, step.message.data
    if not (type(stage) is AsArrayTransformer and type(data) is np.ndarray and data.dtype in ON_ENTRY):
        return None
    return stage if isinstance(step.output, AxisArray) and _dtype_of(step.output) == "float32" else None


def _exit(step: Passed) -> AsArrayTransformer | None:
    """The stage, if it is the conversion to NumPy that a run ends with."""
    stage = step.stage
    if type(stage) is AsArrayTransformer and stage.settings.backend == "numpy" and type(step.output) is AxisArray:
        return stage
    return None


MOST_KINDS = 4
"""Kinds of messages that fused runs are kept for, at each stage; the one that was found first makes room."""

MOST_PLANS = 64
"""How often a runner looks for stages to fuse. In a stream whose metadata change all the time it gives up."""


Undo: TypeAlias = "list[Callable[[], None] | tuple[Stage, Captured]]"
"""Entries that make the state of all stages what it was before a message, last in first out: functions, and stages with
their captured state."""

Asked: TypeAlias = "tuple[Stage, AxisArray] | tuple[None, Output]"
"""A stage that is to be called, and the message for it."""


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
        self._lengths, self._fuses = lengths, fuse
        self._found: list[list[FusedRun | Alone]] = [[] for _ in self._stages]
        # The run of all stages that took the last message, if there was one.
        self._usual: FusedRun | None = None
        self._n_plans_left = MOST_PLANS if fuse else 0
        self._told: set[str] = set()
        self._settings = self._present_settings()
        every = [(number, id(part)) for number, stage in enumerate(self._stages) for part in _with_parts(stage)]
        times = collections.Counter(part for _, part in every)
        self._stand_twice = {number for number, part in every if times[part] > 1}
        if fuse:
            start_kernels_one_by_one()

    def __reduce__(self) -> tuple[type[Runner], tuple[str, dict[str, Stage], bool, tuple[int, ...] | None]]:
        # A copy has the stages, whose state is theirs then, and finds out by itself how to run them.
        self.store()
        return Runner, (self._name, dict(zip(self._names, self._stages, strict=True)), self._fuses, self._lengths)

    def __call__(self, message: AxisArray) -> Output:
        """Run *message* through the stages; if one raises, the state of all is as before."""
        # Nothing comes after the usual run that could raise, so there is nothing to take back.
        if self._usual is not None and (result := self._usual(message)) is not None:
            return result
        return self._whole(0, message)

    async def acall(self, message: AxisArray) -> Output:
        """The same, where stages with coroutines of their own are awaited."""
        if self._usual is not None and (result := self._usual(message)) is not None:
            return result
        undo: Undo = []
        try:
            calls = self._calls(0, message, undo)
            call = next(calls)
            while call[0] is not None:
                coroutine = _coroutine_of(call[0])
                call = calls.send(called(*call) if coroutine is None else await coroutine(call[1]))
        except BaseException:
            _take_back(undo)
            raise
        return call[1]

    def flush(self) -> list[AxisArray]:
        """Flush the stages in order."""
        results: list[AxisArray] = []
        for number, stage in enumerate(self._stages):
            flush = getattr(stage, "flush", None)
            if callable(flush):
                give_back(stage)
                for piece in flush():
                    results += _as_list(self._whole(number + 1, piece))
        return results

    def store(self) -> None:
        """Give the state that fused runs keep back to the stages."""
        for run in self._runs():
            run.store()

    def capture(self) -> Callable[[], None]:
        """A function that makes the state of all stages what it is now; see :func:`.captured`."""
        held = [(run, run.resident) for run in self._runs()]
        saved = captured(*self._stages)

        def restore() -> None:
            self.store()
            put_back(saved)
            for run, resident in held:
                if resident is not None:
                    run.hold(resident)

        return restore

    def describe(self) -> str:
        """The stages, a line each, and which of them have been fused."""
        width = max(map(len, self._names))
        lines = []
        for number, (name, stage) in enumerate(zip(self._names, self._stages, strict=False)):
            run = next((run for run in self._runs() if run.first <= number < run.stop), None)
            how = "by itself" if run is None else f"fused with stages {run.first + 1} to {run.stop}, {run.how}"
            lines.append(f"{number + 1:3}  {name:{width}}  {type(stage).__name__}: {how}")
        return "\n".join(lines)

    def _runs(self) -> list[FusedRun]:
        return [run for found in self._found for run in found if isinstance(run, FusedRun)]

    def _whole(self, number: int, message: AxisArray) -> Output:
        """The output from stage *number* on; if one raises, the state of all is as before."""
        if not self._fuses:
            return self._unfused(number, message)
        undo: Undo = []
        try:
            calls = self._calls(number, message, undo)
            call = next(calls)
            while call[0] is not None:
                call = calls.send(called(*call))
        except BaseException:
            _take_back(undo)
            raise
        return call[1]

    def _unfused(self, number: int, message: AxisArray) -> Output:
        """The same where nothing is fused: all states are captured at once, which takes half of the time."""
        stages = self._stages[number:]
        if holders:
            for stage in stages:
                give_back(stage)
        before = captured(*stages)
        try:
            return _one_by_one(stages, message)
        except BaseException:
            for stage in stages:
                give_back(stage)
            put_back(before)
            raise

    def _calls(self, number: int, message: AxisArray, undo: Undo) -> Generator[Asked, Output, None]:
        """The calls of stages that are not fused, from stage *number* on, and at the end the output without a stage.

        Whoever drives it sends it the output of each call. That the end is no exception lets a stage raise any.
        """
        tried, self._usual = self._usual, None
        output = yield from self._output(number, message, undo, tried)
        yield None, output

    def _output(
        self, number: int, message: AxisArray, undo: Undo, tried: FusedRun | None
    ) -> Generator[Asked, Output, Output]:
        """The output from stage *number* on; asks for the call of each stage that is not fused."""
        n_stages, stages = len(self._stages), self._stages
        if self._fuses:
            self._notice_settings(undo)
        while number < n_stages:
            stop = n_stages
            passed: list[Passed] | None = None
            if self._fuses:
                taken = self._taken(number, message, undo, tried)
                if taken is not None:
                    message, number = taken
                    continue
                known = next((run for run in self._found[number] if run.is_like(message)), None)
                if known is not None:
                    stop = known.stop
                elif self._n_plans_left:
                    passed = []
                else:
                    stop = number + 1
            output: Output = message
            while number < stop and isinstance(output, AxisArray):
                message, stage = output, stages[number]
                give_back(stage)
                undo.append((stage, captured(stage)))
                output = yield stage, message
                if passed is not None:
                    passed.append(Passed(number, stage, message, output, number in self._stand_twice))
                number += 1
            if passed is not None:
                self._plan(passed, undo)
            if output is None:
                return None
            if not isinstance(output, AxisArray):
                del message
                results: list[AxisArray] = []
                for piece in output:
                    results += _as_list((yield from self._output(number, piece, undo, tried)))
                return results
            message = output
        return message

    def _taken(
        self, number: int, message: AxisArray, undo: Undo, tried: FusedRun | None
    ) -> tuple[AxisArray, int] | None:
        """The result of a fused run from stage *number* on, and the stage after it."""
        for run in self._found[number]:
            if isinstance(run, FusedRun) and run is not tried:
                result = run(message, undo)
                if result is not None:
                    if number == 0 and run.stop == len(self._stages):
                        self._usual = run
                    return result, run.stop
        return None

    def _present_settings(self) -> list[object]:
        return [getattr(part, "settings", None) for stage in self._stages for part in _with_parts(stage)]

    def _notice_settings(self, undo: Undo) -> None:
        """Forget what was found with other settings than those that the stages have now.

        That is each run with such a stage, and each that ends before one, which may be fused with it from now on.
        """
        # Known by identity: settings are frozen, and changed by being replaced.
        now = self._present_settings()
        if len(now) == len(self._settings) and all(map(operator.is_, now, self._settings)):
            return
        before, self._settings = self._settings, now
        of_each = [number for number, stage in enumerate(self._stages) for _ in _with_parts(stage)]
        pairs = itertools.zip_longest(of_each, before, now)
        changed = {number for number, old, new in pairs if old is not new and number is not None}
        # They are a wish of somebody's, and no stream that changes all the time.
        self._n_plans_left = MOST_PLANS
        for number, found in enumerate(self._found):
            for run in tuple(found):
                if any(run.first <= each <= run.stop for each in changed):
                    self._forget(number, run, undo)

    def _forget(self, number: int, run: FusedRun | Alone, undo: Undo) -> None:
        if isinstance(run, FusedRun):
            run.store()
            # Where the message is taken back, what it had before is not to be kept here.
            undo.insert(0, run.store)
        if run is self._usual:
            self._usual = None
        self._found[number].remove(run)

    def _plan(self, passed: list[Passed], undo: Undo) -> None:
        # Without samples there was nothing to set the state of a stage up with.
        if any(0 in step.message.data.shape for step in passed):
            return
        self._n_plans_left -= 1
        if not self._n_plans_left:
            ez.logger.warning(f"{self._name} fuses no more stages: the metadata of its messages change all the time.")
        fused = []
        for run in plan(passed, self._known_lengths(passed[0].number)):
            found = self._found[run.first]
            for old in found[MOST_KINDS - 1 :]:
                self._forget(run.first, old, undo)
            found.insert(0, run)
            if isinstance(run, FusedRun):
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


def _with_parts(stage: object) -> list[object]:
    """*stage*, and what it consists of if it is a composite of ezmsg-baseproc's kind."""
    parts = getattr(stage, "_procs", None)
    return [stage, *(each for part in parts.values() for each in _with_parts(part))] if parts else [stage]


def _take_back(undo: Undo) -> None:
    for each in reversed(undo):
        if callable(each):
            each()
        else:
            stage, before = each
            # A run that has taken the state over since then has no say any more.
            give_back(stage)
            put_back(before)


def _one_by_one(stages: Sequence[Stage], message: AxisArray) -> Output:
    """The output of *stages*; each piece of a list goes on by itself."""
    for number, stage in enumerate(stages):
        output = called(stage, message)
        if isinstance(output, AxisArray):
            message = output
        elif output is None:
            return None
        else:
            return [each for piece in output for each in _as_list(_one_by_one(stages[number + 1 :], piece))]
    return message


def _as_list(output: Output) -> list[AxisArray]:
    if output is None:
        return []
    return [output] if isinstance(output, AxisArray) else list(output)


def _coroutine_of(stage: object) -> Callable[[object], Awaitable[Output]] | None:
    """The coroutine that computes what *stage* does, if it brings one of its own."""
    own = getattr(type(stage), "_aprocess", None)
    # ezmsg-baseproc's call what is called here, and those of its composites fail with some stages.
    if own is None or own.__module__.startswith("ezmsg.baseproc."):
        return None
    coroutine: Callable[[object], Awaitable[Output]] | None = getattr(stage, "__acall__", None)
    return coroutine
