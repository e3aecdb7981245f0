"""The time of a fused chain in the self-test, beside that of its stages one by one."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import cast

import numpy as np
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.util.messages.axisarray import AxisArray

from .asarray import AsArrayTransformer
from .chain import ChainTransformer
from .detrend import DetrendTransformer
from .ewma import EWMATransformer
from .pow import PowTransformer
from .simulate import SimulatedAcquisitionSettings, simulated_acquisition
from .stream.steps import Step

N_FIRST = 8
"""Messages that are not timed: they load and compile."""

N_TIMED = 200

TOLERANCE = 1e-4
"""Largest difference of the features, which are powers of ten."""

RATE = 30000.0


@dataclasses.dataclass(frozen=True)
class Times:
    """Medians in microseconds a message, from int16 on the host to features on the host."""

    fused: float
    stage_by_stage: float

    difference: float
    """The largest between the features of both; NaN if one is."""


def _stages(n_samples: int) -> list[Step]:
    """The example chain, with a feature for each message."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        CommonRereferenceTransformer(),
        DetrendTransformer(time_constant=1.0),
        PowTransformer(),
        EWMATransformer(time_constant=0.1),
        BinnedAggregateTransformer(bin_duration=n_samples / RATE),
        LogTransformer(clip_zero=True),
        AsArrayTransformer(backend="numpy"),
    ]


def time_chains(n_samples: int, n_channels: int) -> Times:
    """Run the example chain fused and stage by stage, in turns, over messages of *n_samples* of *n_channels*."""
    stages = _stages(n_samples)
    chain = ChainTransformer(make_chain=functools.partial(_stages, n_samples), lengths=(n_samples,))

    def one_by_one(message: AxisArray) -> AxisArray:
        for stage in stages:
            message = cast(AxisArray, stage(message))
        return message

    runs = cast(tuple[Callable[[AxisArray], AxisArray], ...], (chain, one_by_one))
    times: tuple[list[float], list[float]] = ([], [])
    n_messages, largest = N_FIRST + N_TIMED, 0.0
    source = simulated_acquisition(
        SimulatedAcquisitionSettings(
            n_channels=n_channels,
            samples_per_message=n_samples,
            duration=n_messages * n_samples / RATE,
            stall_every=0,
        )
    )
    for number, message in enumerate(source):
        features = []
        for run, taken in zip(runs, times, strict=True):
            begin = time.perf_counter()
            features.append(run(message).data)
            if number >= N_FIRST:
                taken.append(1e6 * (time.perf_counter() - begin))
        # In this order, so that a NaN stays.
        largest = float(np.maximum(np.abs(features[0] - features[1]).max(initial=0.0), largest))
    return Times(statistics.median(times[0]), statistics.median(times[1]), largest)
