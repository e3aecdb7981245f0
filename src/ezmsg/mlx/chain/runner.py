"""Run a list of stages, together where they can be fused and one by one where not, with the same results."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import cast

import ezmsg.core as ez
from ezmsg.util.messages.axisarray import AxisArray

from ..rechunk import RechunkTransformer
from ..stream.steps import Output, Step
from .cudagraphs import start_kernels_one_by_one
from .fusedrun import FusedRun
from .planning import Alone, Passed, plan
from .undo import snapshot

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

    def __init__(self, name: str, stages: Mapping[str, Step], fuse: bool, lengths: tuple[int, ...] | None) -> None:
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
