"""Transformers that run a list of others, and the unit that does."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping

import ezmsg.core as ez
from ezmsg.baseproc import BaseProcessor, CompositeProcessor, SettingsType, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ..asarray import AsArrayTransformer
from ..cache import withdraw_cache_limit
from ..stream.unit import (
    Output,
    PublishesEach,
    Stage,
    Stages,
    a_type,
    attributes_to_copy,
    check_message,
    check_one_of,
    differing_fields,
    flush_steps,
    give_settings,
    run_steps,
    show_settings,
    steps_of,
)
from .runner import Runner


def run_chain(chain: Stages, messages: Iterable[AxisArray]) -> Iterator[AxisArray]:
    """Run bare transformers over messages, from the first message to the flush at the end.

    Args:
        chain: A transformer, or a sequence of them, applied in order. One that returns a list, like
            :class:`~ezmsg.mlx.RechunkTransformer`, has its messages fed on one by one; None ends the message there.
        messages: The stream. It is read one message at a time.

    Yields:
        The results, in order. When *messages* end, every transformer that has a ``flush`` is flushed, and what comes of
        that goes through the rest of the chain.

    Raises:
        TypeError: *chain* holds something that cannot be called, or *messages* something that is not a message.

    Example:
        >>> from ezmsg.mlx import AsArrayTransformer, EWMATransformer, RechunkTransformer, run_chain
        >>> from ezmsg.mlx import SimulatedAcquisitionSettings, simulated_acquisition
        >>> chain = [RechunkTransformer(sizes=(300,)), AsArrayTransformer(backend="mlx"), EWMATransformer()]
        >>> stream = simulated_acquisition(SimulatedAcquisitionSettings(n_channels=4, duration=0.1))
        >>> sum(len(result.data) for result in run_chain(chain, stream))
        3000
    """
    steps = steps_of(chain)
    return _results(steps, messages)


def _results(steps: list, messages: Iterable[AxisArray]) -> Iterator[AxisArray]:
    for message in messages:
        if not isinstance(message, AxisArray):
            raise TypeError(f"'messages' must hold AxisArray messages, got {a_type(message)}")
        yield from run_steps(steps, message)
    yield from flush_steps(steps)


NamedStages: typing.TypeAlias = Stages | Mapping[str, Stage]
"""Transformers in order: one, several, or several by their names."""


def named_stages(stages: NamedStages, name: str) -> dict[str, Stage]:
    """*stages* by their names: those given, or else the class's without "Transformer", numbered from its second on.

    Raises:
        TypeError: There is no stage, or one that cannot be called; the error calls what was given *name*.
    """
    if isinstance(stages, Mapping):
        steps_of(list(stages.values()), name)
        return dict(stages)
    named: dict[str, Stage] = {}
    for stage in steps_of(stages, name):
        label = base = type(stage).__name__.removesuffix("Transformer")
        number = 1
        while label in named:
            number += 1
            label = f"{base}{number}"
        named[label] = stage
    return named


def change_stage(
    stages: Mapping[str, typing.Any], name: str, settings: ez.Settings | None, changes: Mapping[str, object]
) -> None:
    """See :meth:`BaseChainTransformer.update_stage`."""
    outer, _, inner = name.partition("/")
    if name not in stages and inner and hasattr(stages.get(outer), "update_stage"):
        stages[outer].update_stage(inner, settings, **changes)
        return
    check_one_of("name", name, stages)
    stage: object = stages[name]
    if not isinstance(stage, BaseProcessor):
        raise TypeError(f"'name' must be that of a stage with settings, got {name!r}, {a_type(stage)}")
    settings = stage.settings if settings is None else settings
    give_settings(stage, replace(settings, **changes) if changes else settings)


class BaseChainTransformer(CompositeProcessor[SettingsType, AxisArray, Output], typing.Generic[SettingsType]):
    """Base of composites whose stages run as one where they can.

    In the manner of :obj:`ezmsg.baseproc.CompositeProcessor`, which it extends: a subclass has settings of its own and
    says in ``_initialize_processors`` of which stages it consists, by their names. Stages may give lists of messages,
    as Rechunk and ReadLate do.

        >>> import ezmsg.core as ez
        >>> from ezmsg.mlx import AsArrayTransformer, BaseChainTransformer, DetrendTransformer, PowTransformer
        >>> class PowerSettings(ez.Settings):
        ...     time_constant: float = 1.0
        >>> class PowerTransformer(BaseChainTransformer[PowerSettings]):
        ...     @staticmethod
        ...     def _initialize_processors(settings):
        ...         return {
        ...             "to_mlx": AsArrayTransformer(backend="mlx", dtype="float32"),
        ...             "detrend": DetrendTransformer(time_constant=settings.time_constant),
        ...             "square": PowTransformer(),
        ...             "to_numpy": AsArrayTransformer(backend="numpy"),
        ...         }
        >>> list(PowerTransformer().stages)
        ['to_mlx', 'detrend', 'square', 'to_numpy']

    A call takes and gives what the stages would, one by one: a message; a list where a stage gives lists; None where
    one gives None. Values, dtype, axes, offsets and attrs are theirs, and so are errors. What differs:

    - Rounding. On MLX's CPU device the values are the same to the last bit where the same code computes them: averages,
      z-scores, squares, absolute values, limits, medians, minima and maxima. Those of other stages differ by 1e-6 of
      the largest value at most; on a GPU a compiled function may round otherwise.
    - A stage that raises loses its message for all stages: the state of each is as if the message had not come. (One
      by one, those before it have seen the message.) Of stages that are not fused, what they replace in their state
      comes back; arrays, lists and dictionaries that they write to in place stay written to.
    - The state of a stage is kept by the chain while it runs. ``stages`` and ``state`` give it back first.

    A transformer that stands twice in a chain sees the messages of both places, and is not fused. One that stands in
    two chains is shared by them, too. A subclass of a transformer that is fused is run as it is if it overrides
    anything, since it may compute something else. In a graph, coroutines of stages run in the graph's loop.

    Args:
        settings: Those of the subclass.
    """

    _lengths: tuple[int, ...] | None = None
    _fuse = True
    _leaves_last = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._renew()

    def __getstate__(self) -> dict[str, typing.Any]:
        # Before the stages are copied or pickled, they have their state.
        self._runner.store()
        return attributes_to_copy(self)

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages by their names, with their present state."""
        self._runner.store()
        return self._steps()

    @property
    def state(self) -> dict[str, typing.Any]:
        """The state of each stage that has one."""
        self._runner.store()
        return super().state

    @state.setter
    def state(self, state: dict[str, typing.Any] | bytes | None) -> None:
        self._runner.store()
        CompositeProcessor.state.__set__(self, state)  # type: ignore[attr-defined]

    def update_settings(self, new_settings: SettingsType) -> None:
        """Take other settings: stages of the same name and class keep their state as far as their settings allow."""
        self._runner.store()
        # As ezmsg-baseproc's composites do, but for settings with arrays, too.
        changed = differing_fields(self.settings, new_settings)
        self.settings = new_settings
        if changed - self.NONRESET_SETTINGS_FIELDS:
            self._replace_stages(self._initialize_processors(new_settings))
        self._renew()

    def _replace_stages(self, stages: Mapping[str, typing.Any]) -> None:
        before = dict(self._procs)
        self._procs.clear()
        for name, stage in stages.items():
            kept: object = before.pop(name, None)
            if isinstance(kept, BaseProcessor) and type(kept) is type(stage):
                give_settings(kept, stage.settings)
                stage = kept
            else:
                _close(kept)
            self._procs[name] = stage
        for gone in before.values():
            _close(gone)
        self._validate_processor_chain()

    def update_stage(self, name: str, settings: ez.Settings | None = None, **changes: object) -> None:
        """Change the settings of one stage while it runs.

        Args:
            name: Of the stage; for one in a branch, as in ``"Parallel/counts/Rate"``.
            settings: All of its settings; None: those that it has, with *changes*.
            **changes: Fields of its settings.

        Raises:
            ValueError: No stage has this name.
            As the settings of the stage, if they do not allow a value.
        """
        self._runner.store()
        change_stage(self._procs, name, settings, changes)

    def leave_last(self) -> bool:
        """Leave the last stage to the caller from now on: a call gives the messages that would go into it.

        For a caller that reads results from a GPU while it computes the next ones. State and settings of the chain stay
        as they are.

        Returns:
            Whether that is so now: not if there is one stage only, or a subclass does something else with results.
        """
        kind, overridable = type(self), ("__call__", "_process", "_post_process")
        if len(self.stages) < 2 or any(getattr(kind, n) is not getattr(BaseChainTransformer, n) for n in overridable):
            return False
        self._leaves_last = True
        self._renew()
        return True

    def flush(self) -> list[AxisArray]:
        """Flush the stages at the end of a stream, each through those behind it."""
        return self._runner.flush()

    def describe(self) -> str:
        """A line for each stage, which says whether it is fused; the first messages of a stream decide."""
        return self._runner.describe()

    # ezmsg-baseproc declares that processors take None, too, as they do behind a producer.
    def stateful_op(  # type: ignore[override]
        self, state: dict[str, typing.Any] | None, message: AxisArray
    ) -> tuple[dict[str, typing.Any], Output]:
        """Run *message* from the given state, as in ezmsg-baseproc: stage by stage, without lists."""
        self._runner.store()
        return super().stateful_op(state, message)

    def _process(self, message: AxisArray) -> Output:  # type: ignore[override]
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._post_process(self._runner(message))

    async def _aprocess(self, message: AxisArray) -> Output:  # type: ignore[override]
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._post_process(await self._runner.acall(message))

    def _validate_processor_chain(self) -> None:
        # ezmsg-baseproc compares what each stage gives with what the next takes, and knows no lists.
        stages: dict[str, typing.Any] = dict(named_stages(self._steps(), "The chain"))
        self._procs = stages

    def _renew(self) -> None:
        stages = self._steps()
        if self._leaves_last:
            stages = dict(list(stages.items())[:-1])
        self._runner = Runner(type(self).__name__, stages, self._fuse, self._lengths)

    def _steps(self) -> dict[str, Stage]:
        # ezmsg-baseproc declares other kinds of stages, too, and that each gives one message.
        stages: dict[str, typing.Any] = dict(self._procs)
        return stages


def _close(stage: object) -> None:
    """Have a stage that is not used any more let go of what it holds, as ezmsg-baseproc does."""
    close = getattr(stage, "close", None)
    try:
        if callable(close):
            close()
    except Exception:
        ez.logger.exception(f"{type(stage).__name__} could not be closed.")


class ChainSettings(ez.Settings):
    """Settings for :obj:`Chain`."""

    make_chain: Callable[[], NamedStages]
    """Makes the stages: a transformer, a sequence of them, or a dictionary by their names. Called where they run, so a
    function of a module (or :func:`functools.partial` of one) lets the unit start in a spawned process."""

    fuse: bool = True
    """Whether stages run as one where they can. False runs them one by one, to compare."""

    lengths: tuple[int, ...] | None = None
    """Lengths of messages, in samples, that are compiled ahead on a GPU when the stream starts. None: those of the
    Rechunk in front, or else the lengths of the first messages. All other lengths run stage by stage."""

    def __post_init__(self) -> None:
        if not callable(self.make_chain):
            raise TypeError(f"'make_chain' must be a function that makes the stages, got {self.make_chain!r}")
        if not isinstance(self.fuse, bool):
            raise TypeError(f"'fuse' must be True or False, got {self.fuse!r}")
        lengths = self.lengths
        if lengths is not None and not (isinstance(lengths, (tuple, list)) and all(map(_is_length, lengths))):
            raise TypeError(f"'lengths' must be None or a tuple of integers of at least 1, got {lengths!r}")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@show_settings
class ChainTransformer(BaseChainTransformer[ChainSettings]):
    """Run the stages that a function makes, as one where they can; see :obj:`BaseChainTransformer`.

        >>> from ezmsg.mlx import AsArrayTransformer, ChainTransformer, EWMATransformer
        >>> def make_chain():
        ...     return [AsArrayTransformer(backend="mlx", dtype="float32"), EWMATransformer(), AsArrayTransformer()]
        >>> chain = ChainTransformer(make_chain=make_chain)
        >>> list(chain.stages)
        ['AsArray', 'EWMA', 'AsArray2']

    Raises:
        TypeError: ``make_chain`` made something that cannot be called.
    """

    @staticmethod
    def _initialize_processors(settings: ChainSettings) -> dict[str, typing.Any]:
        return named_stages(settings.make_chain(), "The result of 'make_chain'")

    def _renew(self) -> None:
        self._fuse = self.settings.fuse
        self._lengths = None if self.settings.lengths is None else tuple(self.settings.lengths)
        super()._renew()


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """New settings for one stage of a :obj:`Chain`."""

    stage: str
    """Name of the stage."""

    settings: ez.Settings
    """All of its settings."""


class Chain(PublishesEach[ChainSettings, Output, ChainTransformer]):
    """Many stages in one unit: a message costs one hop, and what can be fused costs one call.

    A list is published message by message. A result without samples is published only if the message had none either;
    the units of ezmsg-sigproc that reduce a rate do the same.
    """

    SETTINGS = ChainSettings  # type: ignore[assignment]

    INPUT_STAGE_SETTINGS = ez.InputStream(StageSettings)

    def create_processor(self) -> None:
        """Make the stages, and give those that convert the name that the log and the monitor call them by."""
        super().create_processor()
        for name, stage in self._conversions():
            stage.node_name = f"{self.address}/{name}"

    async def shutdown(self) -> None:
        """Withdraw the limits on MLX's cache that the stages asked for."""
        # As AsArray's own unit: what was asked for must not outlive the graph.
        for _, stage in self._conversions():
            withdraw_cache_limit(stage)

    def _conversions(self) -> list[tuple[str, AsArrayTransformer]]:
        stages = self.processor.stages if hasattr(self, "processor") else {}
        return [(name, stage) for name, stage in stages.items() if isinstance(stage, AsArrayTransformer)]

    def _results(self, message: AxisArray, output: Output) -> list[AxisArray]:
        if output is None:
            return []
        results = [output] if isinstance(output, AxisArray) else list(output)
        return results if 0 in message.data.shape else [result for result in results if not _is_empty(result)]

    @ez.subscriber(INPUT_STAGE_SETTINGS)
    async def on_stage_settings(self, message: StageSettings) -> None:
        """Change the settings of one stage while it runs."""
        self.processor.update_stage(message.stage, message.settings)


def _is_empty(message: AxisArray) -> bool:
    dim = resolve_stream_dim(message) if message.dims else None
    return dim in message.dims and message.data.shape[message.get_axis_idx(dim)] == 0
