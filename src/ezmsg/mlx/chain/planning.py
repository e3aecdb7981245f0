"""Find the stages that can be fused, by what came in and out of each of them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import NamedTuple, cast

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ..asarray import AsArrayTransformer
from ..stream.convert import is_mlx_array
from ..stream.device import uses_gpu
from ..stream.fusible import FusedStage, fused_stage
from ..stream.steps import Output, Step
from .fusedrun import ON_ENTRY, Configured, Ends, FusedRun
from .likeness import Likeness


class Passed(NamedTuple):
    """One stage that a message has gone through."""

    number: int
    stage: Step
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

    def has_settings_of(self, stages: Sequence[Step]) -> bool:
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
        if not (_is_float32(step.message) and Likeness.has_regular_samples(step.message)):
            break
        if _is_exit(step):
            leaves = cast(AsArrayTransformer, step.stage)
            n_taken += 1
            break
        stage = _fused_stage(step) if isinstance(step.output, AxisArray) and _is_float32(step.output) else None
        if stage is None:
            break
        stages.append(stage)
        n_taken += 1
    if not stages or n_taken < 2:
        return None
    first, message = passed[0].number, passed[0].message
    transformers = [cast(Configured, step.stage) for step in passed[:n_taken]]
    ends, result = Ends(entry, leaves), cast(AxisArray, passed[n_taken - 1].output)
    if not uses_gpu():
        from .fusions.loops import compile_ahead
        from .hostrun import HostRun

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


def _is_float32(message: AxisArray) -> bool:
    if not is_mlx_array(message.data):
        return False
    import mlx.core as mx

    return message.data.dtype == mx.float32


def _is_entry(step: Passed) -> bool:
    return (
        type(step.stage) is AsArrayTransformer
        and type(step.message.data) is np.ndarray
        and step.message.data.dtype in ON_ENTRY
        and isinstance(step.output, AxisArray)
        and _is_float32(step.output)
    )


def _is_exit(step: Passed) -> bool:
    stage = step.stage
    return type(stage) is AsArrayTransformer and stage.settings.backend == "numpy" and type(step.output) is AxisArray
