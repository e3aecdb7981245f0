"""A chain over a recording, one sample after the other, in this process."""

import contextlib
import math
import typing
from collections.abc import Callable, Generator
from dataclasses import dataclass

import ezmsg.core as ez
from ezmsg.baseproc import resolve_stream_dim

from ..asarray import AsArrayTransformer
from ..chain import BaseChainTransformer
from ..rechunk import RechunkSettings, RechunkTransformer
from ..stream.device import uses_gpu
from ..stream.steps import Chain, Step, steps_of
from . import checkpoint
from .contracts import RecordingSource, ResultSink
from .overlap import ReadBehind, WriteBehind, read_ahead
from .resumable import ResumableChain


@dataclass(frozen=True)
class ProcessedRecording:
    """What :func:`process_recording` did."""

    n_samples: int
    """Length of the recording in samples."""

    first_sample: int
    """The sample that this run began at: 0, or the place of a checkpoint; ``n_samples`` if there was nothing to do.
    With several workers, how many samples were there already."""

    n_pieces: int = 1
    """Into how many pieces the recording was cut."""

    largest_difference: float | None = None
    """What the results of neighbouring pieces differ by in front of their seam, at most, as a share of the largest
    result of the channel; None where there is no seam, or the results were there."""


def process_in_order(
    source: RecordingSource,
    chain_factory: Callable[[], Chain],
    sink: ResultSink,
    rechunk: RechunkSettings | None,
    checkpoint_seconds: float,
) -> Generator[int, None, ProcessedRecording]:
    """See :func:`ezmsg.mlx.process_recording`; after each chunk it yields the number of samples that are done."""
    every = float(checkpoint_seconds) * float(source.sampling_rate)
    steps = chain_of(chain_factory, rechunk)
    recipe = recipe_of(source, steps)
    conversion = _left_conversion(steps)
    chain = ResumableChain(steps, leaves_last=conversion is steps[-1])
    try:
        opened = sink.open(recipe, f"{recipe}\n{checkpoint.environment()}")
        if opened.is_complete:
            ez.logger.info(f"Results are there already: {source.identity}")
            return ProcessedRecording(source.n_samples, source.n_samples)
        first = done = saved_at = _resumed(chain, sink, opened.checkpoint, source.identity)
        with contextlib.ExitStack() as stack:
            behind: WriteBehind | ReadBehind
            behind = writing = stack.enter_context(WriteBehind(sink))
            if conversion is not None:
                behind = stack.enter_context(ReadBehind(writing, conversion))
            messages = stack.enter_context(read_ahead(source.read(first)))
            for message in messages:
                for result in chain.process(message):
                    behind.append(result)
                done += message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]
                yield done
                if done - saved_at >= every and done < source.n_samples:
                    saved_at = done
                    try:
                        state = chain.save(done)
                    except checkpoint.CannotSave as error:
                        reason = f"{error} ({source.identity})"
                        ez.logger.info(f"No checkpoints, an interrupted run will start over: {reason}.")
                        every = math.inf
                    else:
                        behind.checkpoint(state)
            if done != source.n_samples:
                raise ValueError(f"{source.identity} has {source.n_samples} samples, but {done} were read.")
            for result in chain.flush():
                behind.append(result)
        sink.commit()
        return ProcessedRecording(source.n_samples, first)
    finally:
        sink.close()


def _left_conversion(steps: list[Step]) -> AsArrayTransformer | None:
    """The conversion of results to NumPy, if they come from a GPU and can be read in another thread.

    It is the last step, or the last stage of the last step, which leaves it to the caller from now on.
    """
    last = steps[-1]
    found = list(last.stages.values())[-1] if isinstance(last, BaseChainTransformer) else last
    if not (ReadBehind.takes_over(found) and _has_gpu()):
        return None
    if isinstance(last, BaseChainTransformer) and not last.leave_last():
        return None
    return typing.cast(AsArrayTransformer, found)


def _has_gpu() -> bool:
    try:
        return uses_gpu()
    except ImportError:  # a chain without MLX, where it is not installed
        return False


def _resumed(chain: ResumableChain, sink: ResultSink, saved: bytes | None, recording: str) -> int:
    """The sample to go on at, with the chain in the state that it had there."""
    if saved is None:
        return 0
    try:
        done = chain.restore(saved)
    except ValueError as error:
        ez.logger.info(f"The last checkpoint cannot be used ({error}); starting over with {recording}.")
        sink.restart()
        return 0
    ez.logger.info(f"Going on at sample {done} of {recording}.")
    return done


def recipe_of(source: RecordingSource, steps: list[Step]) -> str:
    """The recording and the settings of the chain, as text whose first line is the recording."""
    return "\n".join([source.identity, *map(checkpoint.description, steps)])


def chain_of(chain_factory: Callable[[], Chain], rechunk: RechunkSettings | None) -> list[Step]:
    """The chain with what cuts the recording in front.

    Raises:
        TypeError: *chain_factory* is not a callable, or builds no chain.
    """
    if not callable(chain_factory):
        raise TypeError(f"chain_factory is {chain_factory!r}; allowed is a callable that builds a chain.")
    steps = steps_of(chain_factory(), "what chain_factory returned")
    return steps if rechunk is None else [typing.cast(Step, RechunkTransformer(rechunk)), *steps]
