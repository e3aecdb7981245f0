"""The chain of the self-test, bare and as a graph of processes that are started for it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray

from .asarray import AsArray, AsArraySettings, AsArrayTransformer
from .chain import run_chain
from .detrend import DetrendTransformer, DetrendUnit
from .ewma import EWMASettings, EWMATransformer, EWMAUnit
from .pow import Pow, PowSettings, PowTransformer
from .simulate import SimulatedAcquisition, SimulatedAcquisitionSettings, simulated_acquisition

TO_MLX = AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=512)
BASELINE = EWMASettings(time_constant=1.0)
SQUARE = PowSettings(exponent=2.0)
POWER = EWMASettings(time_constant=0.1)
TO_NUMPY = AsArraySettings(backend="numpy")

LIMIT = 60.0
"""Seconds after which the graph is ended with all its processes. Starting them takes some seconds."""


@dataclasses.dataclass
class Outcome:
    """What came out of the chain."""

    n_messages: int = 0
    n_samples: int = 0
    sum_of_means: float = 0.0
    """Of the means of messages: NaN if a single value is."""

    first_at: float = 0.0
    """When the first message came out, by ``time.perf_counter()``."""

    last_at: float = 0.0

    def add(self, result: npt.NDArray[np.float32]) -> None:
        """Count one message."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.n_messages += 1
        self.n_samples += len(result)
        self.sum_of_means += float(result.mean(dtype=np.float64))

    def is_that_of(self, other: Outcome) -> bool:
        """Whether both are finite, and the same but for rounding."""
        counts = (self.n_messages, self.n_samples) == (other.n_messages, other.n_samples)
        is_close = math.isclose(self.sum_of_means, other.sum_of_means, rel_tol=1e-5)
        return counts and is_close and math.isfinite(self.sum_of_means)


class GraphError(Exception):
    """The graph has not run as it should; the message is the end of a sentence about it."""


def _stream(seconds: float) -> SimulatedAcquisitionSettings:
    return SimulatedAcquisitionSettings(stall_every=100, duration=seconds)


def run_bare(seconds: float) -> Outcome:
    """Run the chain in this process over *seconds* of a simulated stream."""
    chain: list[Callable[[AxisArray], AxisArray]] = [
        AsArrayTransformer(TO_MLX),
        DetrendTransformer(BASELINE),
        PowTransformer(SQUARE),
        EWMATransformer(POWER),
        AsArrayTransformer(TO_NUMPY),
    ]
    outcome = Outcome()
    for result in run_chain(chain, list(simulated_acquisition(_stream(seconds)))):
        outcome.add(result.data)
    return outcome


class _Chain(ez.Collection):
    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    TO_MLX = AsArray(TO_MLX)
    DETREND = DetrendUnit(BASELINE)
    SQUARE = Pow(SQUARE)
    POWER = EWMAUnit(POWER)
    TO_NUMPY = AsArray(TO_NUMPY)

    def network(self) -> ez.NetworkDefinition:
        stages: tuple[BaseTransformerUnit, ...] = (self.TO_MLX, self.DETREND, self.SQUARE, self.POWER, self.TO_NUMPY)
        return (
            (self.INPUT_SIGNAL, stages[0].INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in itertools.pairwise(stages)),
            (stages[-1].OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


class _SinkSettings(ez.Settings):
    n_samples: int
    outcome: Outcome


class _Sink(ez.Unit):
    SETTINGS = _SinkSettings  # type: ignore[assignment]
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.SETTINGS.outcome.add(message.data)
        if self.SETTINGS.outcome.n_samples >= self.SETTINGS.n_samples:
            raise ez.NormalTermination


def graph_main(seconds: float) -> None:
    """Run the graph with this process as that of the sink, and write what came out to stdout, as JSON."""
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    stream, outcome = _stream(seconds), Outcome()
    source, chain, sink = SimulatedAcquisition(stream), _Chain(), _Sink(_SinkSettings(stream.n_samples or 0, outcome))
    ez.run(
        SOURCE=source,
        CHAIN=chain,
        SINK=sink,
        connections=((source.OUTPUT_SIGNAL, chain.INPUT_SIGNAL), (chain.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)),
        process_components=(source, chain),
        # A graph server of its own on a free port.
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    sys.stdout.write(f"\n{json.dumps(dataclasses.asdict(outcome))}\n")


def run_graph(seconds: float) -> Outcome:
    """Run the chain as a graph: source, chain and sink in processes of their own.

    Raises:
        GraphError: It did not end within :data:`LIMIT`, or with an error.
    """
    # Not as a module that is the main one: the other processes would import it under two names.
    code = f"from {__name__} import graph_main; graph_main({seconds!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"EZMSG_DISABLE_BACKPRESSURE_WARNING": "1"},
        # A group of its own, to be ended as a whole.
        start_new_session=True,
    )
    try:
        output, log = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise GraphError(f"does not end within {LIMIT:g} s") from None
    finally:
        # Also of one that was interrupted, and what a main process that has failed has left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = (log.strip() or "no message").splitlines()[-1]
        raise GraphError(f"ends with exit status {process.returncode}: {last}")
    return Outcome(**json.loads(output.strip().splitlines()[-1]))
