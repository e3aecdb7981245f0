"""Run a chain over whole recordings in bounded memory, and go on where an interrupted run has stopped.

::

    source = NWBSource("session.nwb")
    sink = ZarrSink("session.zarr")
    process_recording(source, make_chain, sink)
"""

import functools
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from ..rechunk import RechunkSettings
from ..stream.checks import check_count, check_number
from ..stream.steps import Chain
from .contracts import RecordingSource, ResultSink
from .crew import Crew, ExecutorCrew, run_through
from .processes import ProcessCrew
from .progress import Report, reporting
from .recordings import Options, Recordings, Told, process_in_pieces
from .sequential import ProcessedRecording as ProcessedRecording
from .sequential import process_in_order

DEFAULT_RECHUNK = RechunkSettings(sizes=(3000,))
"""How a recording is cut unless something else is asked for: 0.1 s at 30 kHz."""

Margin: typing.TypeAlias = float | typing.Literal["exact"] | None
"""Seconds; ``"exact"`` for recordings that are not cut; None for what the chain says."""


def process_recording(
    source: RecordingSource,
    chain_factory: Callable[[], Chain],
    sink: ResultSink,
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Report | typing.Literal[False] | None = None,
    workers: int | Executor | None = None,
    margin: Margin = None,
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
    for argument, value, method, allowed in (
        ("source", source, "read", "a source of recordings, for example an NWBSource"),
        ("sink", sink, "append", "a sink of results, for example a ZarrSink"),
    ):
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{argument} is {value!r}; allowed is {allowed}.")
    if not (progress is None or progress is False or callable(progress)):
        raise TypeError(f"progress is {progress!r}; allowed are a callable, False and None.")
    options = _options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    if source.n_samples < 1:
        raise ValueError(f"{source.identity} has no samples.")
    with reporting(progress, source.identity, source.sampling_rate) as report:
        if workers is None:
            steps = process_in_order(source, chain_factory, sink, rechunk, checkpoint_seconds)
            return run_through(steps, None if report is None else lambda done: report(done, source.n_samples))
        told = None if report is None else lambda number, done, total: report(done, total)
        ((_, outcome),) = process_in_pieces([(source, sink)], options, _crew_of(workers), told)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def process_recordings(
    recordings: Recordings,
    chain_factory: Callable[[], Chain],
    *,
    rechunk: RechunkSettings | None = DEFAULT_RECHUNK,
    checkpoint_seconds: float = 60.0,
    progress: Told | None = None,
    workers: int | Executor | None = None,
    margin: Margin = None,
    tolerance: float = 1e-6,
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    """Run a chain over many recordings, on several workers; what has become of each, in the order they are finished.

    Recordings are cut into pieces of time, and all pieces are one queue, so that no worker waits for the last
    recording. A recording that fails does not stop the others.

    Args:
        recordings: Sources and sinks, in pairs. Taken one by one, as workers come to them.
        chain_factory: As for :func:`process_recording`; for *workers* a function of a module.
        rechunk: As for :func:`process_recording`.
        checkpoint_seconds: As for :func:`process_recording`; the length of a piece at most, or four margins if they are
            longer. A shorter recording is cut into 8 pieces, of 4 s and of 16 margins at least.
        progress: Called with the number of a recording, its samples that are done, and all its samples.
        workers: A number of processes on this machine, this one included: the others are spawned when there is enough
            to do for them, and the iterator is to be used in one thread. Or an executor, for example that of a Dask
            cluster (``client.get_executor(pure=False)``). None: in this process, one recording after the other, with
            threads that read and write.
        margin: Seconds that a piece begins earlier, so that filters and averages have settled. None: it follows from
            the chain. ``"exact"``: recordings are not cut, and results are those of one run to the last bit.
        tolerance: What results may differ from those of one run, as a share of the largest.

    Yields:
        The number of a recording, and what was done or the error that ended it.
    """
    if not (progress is None or callable(progress)):
        raise TypeError(f"progress is {progress!r}; allowed are a callable and None.")
    options = _options(chain_factory, rechunk, checkpoint_seconds, workers, margin, tolerance)
    return _outcomes(recordings, options, workers, progress)


def _outcomes(
    recordings: Recordings, options: Options, workers: int | Executor | None, progress: Told | None
) -> Iterator[tuple[int, ProcessedRecording | Exception]]:
    if workers is not None:
        yield from process_in_pieces(recordings, options, _crew_of(workers), progress)
        return
    for number, (source, sink) in enumerate(recordings):
        report = None if progress is None else functools.partial(progress, number)
        try:
            done = process_recording(
                source,
                options.chain_factory,
                sink,
                rechunk=options.rechunk,
                checkpoint_seconds=options.checkpoint_seconds,
                progress=report or False,
            )
        except Exception as error:
            yield number, error
        else:
            yield number, done


def _crew_of(workers: int | Executor) -> Crew:
    return ExecutorCrew(workers) if isinstance(workers, Executor) else ProcessCrew(workers)


def _options(
    chain_factory: Callable[[], Chain],
    rechunk: RechunkSettings | None,
    checkpoint_seconds: float,
    workers: int | Executor | None,
    margin: Margin,
    tolerance: float,
) -> Options:
    """The options, checked."""
    if not callable(chain_factory):
        raise TypeError(f"chain_factory is {chain_factory!r}; allowed is a callable that builds a chain.")
    if not isinstance(rechunk, (RechunkSettings, type(None))):
        raise TypeError(f"rechunk is {rechunk!r}; allowed are RechunkSettings and None.")
    check_number("checkpoint_seconds", checkpoint_seconds, infinite=True)
    if workers is not None and not isinstance(workers, Executor):
        check_count("workers", workers, 1)
    if not (margin is None or margin == "exact"):
        check_number("margin", margin, zero=True)
    check_number("tolerance", tolerance)
    return Options(chain_factory, rechunk, float(checkpoint_seconds), margin, float(tolerance))
