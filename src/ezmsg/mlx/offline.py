"""Run a chain over a whole recording in bounded memory, and go on where an interrupted run has stopped.

::

    source = NWBSource("session.nwb")
    sink = ZarrSink("session.zarr")
    process_recording(source, make_chain, sink)

:obj:`ezmsg.mlx.NWBSource` and :obj:`ezmsg.mlx.ZarrSink` need the extra ``offline``. Others can take their places: what
a source and a sink have to do is said by :obj:`RecordingSource` and :obj:`ResultSink`.
"""

import math
import pickle
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ezmsg.core as ez
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from . import checkpoint
from .checkpoint import Step
from .checks import check_number
from .rechunk import RechunkSettings, RechunkTransformer


class RecordingSource(typing.Protocol):
    """A recording that can be read from any sample on."""

    n_samples: int
    """Its length in samples."""

    sampling_rate: float
    """Samples a second."""

    identity: str
    """Tells this recording, read in this way, from all others."""

    def read(self, start: int) -> Iterator[AxisArray]:
        """The samples from number *start* on, in order, as messages of bounded length.

        *start* is 0 or a place where a message of an earlier reading ended; the messages from there on must be the
        same ones.
        """


class Opened(typing.NamedTuple):
    """What a sink found when it was opened."""

    is_complete: bool
    """The results of this very recipe are there already. Nothing else will be called but ``close``."""

    checkpoint: bytes | None
    """The last checkpoint of an interrupted run with this fingerprint, to whose results the next ones are appended."""


class ResultSink(typing.Protocol):
    """Takes results, and shows them under their final name when they are complete, not before."""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """Begin, or go on.

        Args:
            recipe: The recording and the settings of the chain, as text whose first line is the recording. Complete
                results of another recipe are not to be replaced: FileExistsError.
            fingerprint: The recipe and what else bits depend on. A checkpoint of another one is not to be used.
        """

    def append(self, message: AxisArray) -> None:
        """Take the next results."""

    def checkpoint(self, state: bytes) -> None:
        """Keep *state* together with all results so far, or, if it is interrupted, the last checkpoint as it was."""

    def commit(self) -> None:
        """Show the results under their final name."""

    def close(self) -> None:
        """Let go. Without a commit, what the last checkpoint needs stays, and nothing under the final name."""


@dataclass(frozen=True)
class ProcessedRecording:
    """What :func:`process_recording` did."""

    n_samples: int
    """Length of the recording in samples."""

    first_sample: int
    """The sample that this run began at: 0, or the place of a checkpoint; ``n_samples`` if there was nothing to do."""


def process_recording(
    source: RecordingSource,
    chain_factory: Callable[[], Step | Sequence[Step]],
    sink: ResultSink,
    *,
    rechunk: RechunkSettings | None = RechunkSettings(sizes=(3000,)),
    checkpoint_seconds: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> ProcessedRecording:
    """Run a chain over a recording.

    In memory at any time: one chunk that was read, the state of the chain, and what the sink collects for one write.
    When the recording ends, every step that has a ``flush`` (Rechunk, ReadLate) is flushed. An incomplete last bin or
    window is not part of the results, as it is not in a graph.

    **Interrupted** by Ctrl-C, an exception or the end of the process, the run leaves nothing under the final name. The
    next one goes on at the last checkpoint, with results equal bit for bit to those of one run, if recording, settings,
    versions of the packages, processor and MLX's device are the same; else it starts over and says why (INFO).
    The source code of your own steps is not compared: after a change, delete the partial results.

    States that can be saved are those of ezmsg-baseproc's processors, nested ones included, if they can be pickled: all
    of this package's are. With a function, a generator or any other object in the chain, or with a state that cannot be
    pickled, there are no checkpoints (told once, INFO), and an interrupted run starts over.

    Args:
        source: The recording, such as :obj:`ezmsg.mlx.NWBSource`.
        chain_factory: Builds the chain, for this recording alone: a callable that takes and returns a message, such as
            a transformer, or a sequence of them, applied in order. One that returns a list or tuple has its messages
            fed on one by one; None ends the message there.
        sink: Where the results go, such as :obj:`ezmsg.mlx.ZarrSink`. Closed at the end, whatever happens.
        rechunk: How the recording is cut before the chain, so that the chain sees few message lengths and the same
            ones however the file is read: 3000 samples, 0.1 s at 30 kHz, by default. None: as the source reads it.
        checkpoint_seconds: Seconds of the recording between checkpoints, ``math.inf`` for none.
        progress: Called after each chunk with the number of samples done and that of all samples.

    Raises:
        ValueError: The recording has no samples, or others than it announced; *checkpoint_seconds* is not above 0.
        TypeError: An argument is not of its type; *chain_factory* builds no chain; a step returns something else than
            messages.
        FileExistsError: The sink holds complete results of another recording or other settings.
    """
    for argument, value, method in (("source", source, "read"), ("sink", sink, "append")):
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{argument} must be such as NWBSource or ZarrSink, got {value!r}.")
    if not isinstance(rechunk, (RechunkSettings, type(None))):
        raise TypeError(f"rechunk must be RechunkSettings or None, got {rechunk!r}.")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a callable or None, got {progress!r}.")
    check_number("checkpoint_seconds", checkpoint_seconds, infinite=True)
    every = checkpoint_seconds * source.sampling_rate
    if source.n_samples < 1:
        raise ValueError("The recording has no samples.")
    chain = _Chain(_steps_of(chain_factory, rechunk))
    recipe = "\n".join([source.identity, *map(checkpoint.description, chain.steps)])
    environment = checkpoint.environment()
    try:
        opened = sink.open(recipe, f"{recipe}\n{environment}")
        if opened.is_complete:
            ez.logger.info(f"Results are there already: {source.identity}")
            return ProcessedRecording(source.n_samples, source.n_samples)
        first = done = saved_at = chain.restore(opened.checkpoint)
        for message in source.read(first):
            for result in chain.process(message):
                sink.append(result)
            done += message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]
            if progress is not None:
                progress(done, source.n_samples)
            if done - saved_at >= every and done < source.n_samples:
                saved_at = done
                try:
                    state = chain.save(done)
                except checkpoint.CannotSave as error:
                    ez.logger.info(f"No checkpoints, an interrupted run will start over: {error}.")
                    every = math.inf
                else:
                    sink.checkpoint(state)
        if done != source.n_samples:
            raise ValueError(f"The recording has {source.n_samples} samples, but {done} were read.")
        for result in chain.flush():
            sink.append(result)
        sink.commit()
        return ProcessedRecording(source.n_samples, first)
    finally:
        sink.close()


def _steps_of(chain_factory: Callable[[], Step | Sequence[Step]], rechunk: RechunkSettings | None) -> list[Step]:
    if not callable(chain_factory):
        raise TypeError(f"chain_factory must be a callable that builds a chain, got {type(chain_factory).__name__}.")
    built = chain_factory()
    steps = list(built) if isinstance(built, Sequence) else [built]
    if not steps or not all(map(callable, steps)):
        raise TypeError(f"chain_factory must return a callable or a sequence of callables, got {built!r}.")
    return steps if rechunk is None else [RechunkTransformer(rechunk), *steps]


class _Chain:
    """Steps in a row, with their states."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self._to_restore: dict[int, bytes] = {}
        """Saved states, by number, of steps that no message has reached yet."""

    def process(self, message: AxisArray, first: int = 0) -> Iterator[AxisArray]:
        """Results of a message that goes into step number *first*."""
        if not isinstance(message, AxisArray):
            source = "the source" if first == 0 else checkpoint.description(self.steps[first - 1]).partition("(")[0]
            raise TypeError(f"Messages are of type AxisArray, but {source} gave a {type(message).__name__}.")
        if first == len(self.steps):
            yield message
            return
        step = self.steps[first]
        if first not in self._to_restore:
            yield from self._feed(step(message), first + 1)
        elif 0 not in message.data.shape:
            # Not earlier: a step without samples may not know enough to take its state, nor have anything to say.
            yield from self._feed(checkpoint.call_restored(step, self._to_restore.pop(first), message), first + 1)

    def flush(self) -> Iterator[AxisArray]:
        """The rest, once there are no more messages."""
        for number, step in enumerate(self.steps):
            if callable(flush := getattr(step, "flush", None)):
                if number in self._to_restore:
                    checkpoint.restore(step, self._to_restore.pop(number))
                yield from self._feed(flush(), number + 1)

    def _feed(self, output: AxisArray | Sequence[AxisArray] | None, number: int) -> Iterator[AxisArray]:
        if output is None:
            return
        for message in output if isinstance(output, (list, tuple)) else (output,):
            yield from self.process(message, number)

    def save(self, done: int) -> bytes:
        for step in self.steps:
            checkpoint.check_savable(step)
        states = [self._to_restore.get(number) or checkpoint.save(step) for number, step in enumerate(self.steps)]
        return pickle.dumps((done, states))

    def restore(self, saved: bytes | None) -> int:
        """Go on from a state that was saved; the number of samples done then."""
        if saved is None:
            return 0
        done, states = pickle.loads(saved)
        self._to_restore = {number: state for number, state in enumerate(states) if state is not None}
        ez.logger.info(f"Going on at sample {done}.")
        return done
