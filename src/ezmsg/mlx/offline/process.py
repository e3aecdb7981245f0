"""Run a chain over a whole recording in bounded memory, and go on where an interrupted run has stopped.

::

    source = NWBSource("session.nwb")
    sink = ZarrSink("session.zarr")
    process_recording(source, make_chain, sink)
"""

import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import ezmsg.core as ez
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ..rechunk import RechunkSettings, RechunkTransformer
from ..stream.checks import check_count, check_number
from ..stream.steps import Chain, Output, Step, flush_steps, run_steps, steps_of
from . import checkpoint
from .contracts import RecordingSource, ResultSink
from .packing import pack
from .progress import Report, reporting
from .unpacking import unpack

DEFAULT_RECHUNK = RechunkSettings(sizes=(3000,))
"""How a recording is cut unless something else is asked for: 0.1 s at 30 kHz."""


@dataclass(frozen=True)
class ProcessedRecording:
    """What :func:`process_recording` did."""

    n_samples: int
    """Length of the recording in samples."""

    first_sample: int
    """The sample that this run began at: 0, or the place of a checkpoint; ``n_samples`` if there was nothing to do."""


def process_recording(
    source: RecordingSource,
    chain_factory: Callable[[], Chain],
    sink: ResultSink,
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Report | typing.Literal[False] | None = None,
    workers: int | Executor | None = None,
    margin: float | typing.Literal["exact"] | None = None,
    tolerance: float = 1e-6,
) -> ProcessedRecording:
    """Run a chain over a recording.

    In memory at any time: one chunk that was read, the state of the chain, and what the sink collects for one write.
    When the recording ends, every step that has a ``flush`` (Rechunk, ReadLate) is flushed. An incomplete last bin or
    window is not part of the results, as it is not in a graph.

    **Interrupted** by Ctrl-C, an exception or the end of the process, the run leaves nothing under the final name. The
    next one goes on at the last checkpoint, with results equal bit for bit to those of one run, if recording, settings,
    versions of the packages, processor and MLX's device are the same; else it starts over and says why (INFO).
    The source code of your own steps is not compared: after a change, delete the partial results.

    States that can be saved are those of ezmsg-baseproc's processors, nested ones included, if they consist of numbers,
    text, containers, NumPy and MLX arrays, and objects of ezmsg's packages or of the step's own: all states of this
    package do. With a function, a generator or anything else in the chain or in a state, there are no checkpoints (the
    log says so once, INFO), and an interrupted run starts over. Reading a checkpoint cannot run code.

    Args:
        source: The recording, for example an :obj:`ezmsg.mlx.NWBSource`.
        chain_factory: Builds the chain, for this recording alone: a transformer, or another callable that takes and
            returns a message, or a sequence of them, applied in order. One that returns a list or tuple has its
            messages fed on one by one; None ends the message there.
        sink: Where the results go, for example a :obj:`ezmsg.mlx.ZarrSink`. Closed at the end, whatever happens.
        rechunk: How the recording is cut before the chain, so that the chain sees few message lengths and the same
            ones however the file is read: 3000 samples, 0.1 s at 30 kHz, by default. None: as the source reads it.
        checkpoint_seconds: Seconds of the recording between checkpoints, ``math.inf`` for none.
        progress: Called after each chunk with the number of samples done and that of all samples. None: a bar on stderr
            if that is a terminal and rich is installed. False: nothing.
        workers: See :func:`process_recordings`. None: in this process, one sample after the other.
        margin: See :func:`process_recordings`.
        tolerance: See :func:`process_recordings`.

    Raises:
        ValueError: The recording has no samples, or others than it announced; *checkpoint_seconds* is not above 0.
        TypeError: An argument is not of its type; *chain_factory* builds no chain; a step returns something else than
            messages.
        FileExistsError: The sink holds complete results of another recording or other settings.
    """
    _check_pieces(workers, margin, tolerance)
    for argument, value, method, allowed in (
        ("source", source, "read", "a source of recordings, for example an NWBSource"),
        ("sink", sink, "append", "a sink of results, for example a ZarrSink"),
    ):
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{argument} is {value!r}; allowed is {allowed}.")
    if not isinstance(rechunk, (RechunkSettings, type(None))):
        raise TypeError(f"rechunk is {rechunk!r}; allowed are RechunkSettings and None.")
    if not (progress is None or progress is False or callable(progress)):
        raise TypeError(f"progress is {progress!r}; allowed are a callable, False and None.")
    check_number("checkpoint_seconds", checkpoint_seconds, infinite=True)
    every = float(checkpoint_seconds) * float(source.sampling_rate)
    if source.n_samples < 1:
        raise ValueError(f"{source.identity} has no samples.")
    steps = _steps_of(chain_factory, rechunk)
    chain = _ResumableChain(steps)
    recipe = "\n".join([source.identity, *map(checkpoint.description, steps)])
    environment = checkpoint.environment()
    try:
        opened = sink.open(recipe, f"{recipe}\n{environment}")
        if opened.is_complete:
            ez.logger.info(f"Results are there already: {source.identity}")
            return ProcessedRecording(source.n_samples, source.n_samples)
        first = done = saved_at = _resumed(chain, sink, opened.checkpoint, source.identity)
        with reporting(progress, source.identity, source.sampling_rate) as report:
            for message in source.read(first):
                for result in chain.process(message):
                    sink.append(result)
                done += message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]
                if report is not None:
                    report(done, source.n_samples)
                if done - saved_at >= every and done < source.n_samples:
                    saved_at = done
                    try:
                        state = chain.save(done)
                    except checkpoint.CannotSave as error:
                        ez.logger.info(
                            f"No checkpoints, an interrupted run will start over: {error} ({source.identity})."
                        )
                        every = math.inf
                    else:
                        sink.checkpoint(state)
        if done != source.n_samples:
            raise ValueError(f"{source.identity} has {source.n_samples} samples, but {done} were read.")
        for result in chain.flush():
            sink.append(result)
        sink.commit()
        return ProcessedRecording(source.n_samples, first)
    finally:
        sink.close()


def process_recordings(
    recordings: Iterable[tuple[RecordingSource, ResultSink]],
    chain_factory: Callable[[], Chain],
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Callable[[int, int, int], None] | None = None,
    workers: int | Executor | None = None,
    margin: float | typing.Literal["exact"] | None = None,
    tolerance: float = 1e-6,
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    """Run a chain over many recordings, on several workers; what has become of each, in the order they are finished.

    Recordings are cut into pieces of time, and all pieces are one queue, so that no worker waits for the last
    recording. A recording that fails does not stop the others.

    Args:
        recordings: Sources and sinks, in pairs. Taken one by one, as workers come to them.
        chain_factory: As for :func:`process_recording`; for *workers* a function of a module.
        rechunk: As for :func:`process_recording`.
        checkpoint_seconds: As for :func:`process_recording`; the length of a piece, or four margins if they are longer.
        progress: Called with the number of a recording, its samples that are done, and all its samples.
        workers: A number of processes on this machine, which are spawned; or an executor, for example that of a Dask
            cluster (``client.get_executor(pure=False)``). None: in this process, one recording after the other.
        margin: Seconds that a piece begins earlier, so that filters and averages have settled. None: it follows from
            the chain. ``"exact"``: recordings are not cut, and results are those of one run to the last bit.
        tolerance: What results may differ from those of one run, as a share of the largest.

    Yields:
        The number of a recording, and what was done or the error that ended it.
    """
    _check_pieces(workers, margin, tolerance)
    for number, (source, sink) in enumerate(recordings):
        report: Report | typing.Literal[False] = False
        if progress is not None:
            report = functools.partial(progress, number)
        try:
            done = process_recording(
                source, chain_factory, sink, rechunk=rechunk, checkpoint_seconds=checkpoint_seconds, progress=report
            )
        except Exception as error:
            yield number, error
        else:
            yield number, done


def _check_pieces(
    workers: int | Executor | None, margin: float | typing.Literal["exact"] | None, tolerance: float
) -> None:
    if workers is not None and not isinstance(workers, Executor):
        check_count("workers", workers, 1)
    if not (margin is None or margin == "exact"):
        check_number("margin", margin, zero=True)
    check_number("tolerance", tolerance)


def _resumed(chain: "_ResumableChain", sink: ResultSink, saved: bytes | None, recording: str) -> int:
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


def _steps_of(chain_factory: Callable[[], Chain], rechunk: RechunkSettings | None) -> list[Step]:
    if not callable(chain_factory):
        raise TypeError(f"chain_factory is {chain_factory!r}; allowed is a callable that builds a chain.")
    steps = steps_of(chain_factory(), "what chain_factory returned")
    return steps if rechunk is None else [RechunkTransformer(rechunk), *steps]


class _ResumableStep:
    """A step that may go on from a saved state, and that names whoever gives it something else than a message."""

    def __init__(self, step: Step, giver: str) -> None:
        self.step = step
        self.giver = giver
        self._made = checkpoint.as_made(step)
        self.saved: bytes | None = None
        """State to go on from, until the first message with samples has come."""

    def __call__(self, message: AxisArray) -> Output:
        _check_type(message, self.giver)
        if self.saved is None:
            return self.step(message)
        if 0 in message.data.shape:
            # Not yet: a step without samples may not know enough to take its state, nor have anything to say.
            return None
        saved, self.saved = self.saved, None
        return checkpoint.call_restored(self.step, saved, message)

    @property
    def flush(self) -> Callable[[], Sequence[AxisArray]] | None:
        flush = getattr(self.step, "flush", None)
        if callable(flush) and self.saved is not None:
            checkpoint.restore(self.step, self.saved)
            self.saved = None
        return flush

    def save(self) -> bytes | None:
        return self.saved or checkpoint.save(self.step, self._made)


class _ResumableChain:
    """Steps in a row, with their states."""

    def __init__(self, steps: list[Step]) -> None:
        givers = ["the source", *(checkpoint.description(step).partition("(")[0] for step in steps)]
        self.steps = [_ResumableStep(step, giver) for step, giver in zip(steps, givers, strict=False)]
        self._last_giver = givers[-1]

    def process(self, message: AxisArray) -> Iterator[AxisArray]:
        return self._checked(run_steps(self.steps, message))

    def flush(self) -> Iterator[AxisArray]:
        """The rest, once there are no more messages."""
        return self._checked(flush_steps(self.steps))

    def _checked(self, results: Iterator[AxisArray]) -> Iterator[AxisArray]:
        for result in results:
            _check_type(result, self._last_giver)
            yield result

    def save(self, done: int) -> bytes:
        for step in self.steps:
            checkpoint.check_savable(step.step)
        return pack((done, [step.save() for step in self.steps]))

    def restore(self, saved: bytes) -> int:
        """Go on from a state that was saved; the number of samples done then.

        Raises:
            ValueError: *saved* is not one of this chain. The steps are as they were.
        """
        done, states = typing.cast(tuple[int, list[bytes | None]], unpack(saved))
        if not isinstance(done, int) or len(states) != len(self.steps):
            raise ValueError("it is not one of this chain")
        for step, state in zip(self.steps, states, strict=True):
            if state is not None:
                checkpoint.check(step.step, state)
        for step, state in zip(self.steps, states, strict=True):
            step.saved = state
        return done


def _check_type(message: object, giver: str) -> None:
    if not isinstance(message, AxisArray):
        raise TypeError(f"Messages are of type AxisArray, but {giver} gave a {type(message).__name__}.")
