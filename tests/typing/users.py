"""What a type checker sees of the public names. Checked by mypy, not run."""

from collections.abc import Iterator

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from typing_extensions import assert_type

from ezmsg.mlx import (
    ArrayBackend,
    AsArray,
    AsArraySettings,
    AsArrayTransformer,
    CacheLimit,
    CacheRecommendation,
    EWMASettings,
    EWMATransformer,
    EWMAUnit,
    MemorySnapshot,
    Rechunk,
    RechunkSettings,
    RechunkTransformer,
    SimulatedAcquisitionSettings,
    cache_limit,
    chunked_scan,
    measure_working_set,
    memory_snapshot,
    recommend_cache_limit,
    run_chain,
    simulated_acquisition,
)
from ezmsg.mlx.ewma import ewma
from ezmsg.mlx.sosfilt import sosfilt

# Settings have the fields that they document, and no others.
settings = AsArraySettings(backend=ArrayBackend.mlx, dtype="float32", mlx_cache_limit_mb=None)
assert_type(settings.dtype, str | None)
assert_type(EWMASettings(time_constant=0.1).time_constant, float)
assert_type(RechunkSettings(sizes=(300, 1200)).sizes, tuple[int, ...])
AsArraySettings(dtypes="float32")  # type: ignore[call-arg]
RechunkSettings(remainder="drop")  # type: ignore[arg-type]

# Transformers, called bare.
message = AxisArray(np.zeros((300, 4)), ["time", "ch"])
assert_type(AsArrayTransformer(settings)(message), AxisArray)
assert_type(EWMATransformer(time_constant=0.1)(message), AxisArray)
assert_type(RechunkTransformer(sizes=(300,))(message), list[AxisArray])
assert_type(RechunkTransformer().flush(), list[AxisArray])
AsArrayTransformer(settings)("text")  # type: ignore[arg-type]

# Units, in a graph.
units: list[ez.Unit] = [AsArray(settings), EWMAUnit(EWMASettings()), Rechunk(RechunkSettings())]

# Functions.
stream = simulated_acquisition(SimulatedAcquisitionSettings(duration=1.0))
assert_type(stream, Iterator[AxisArray])
assert_type(run_chain([EWMATransformer()], stream), Iterator[AxisArray])
assert_type(cache_limit(), CacheLimit)
assert_type(memory_snapshot(), MemorySnapshot)
assert_type(recommend_cache_limit([EWMATransformer()], [message]), CacheRecommendation)
assert_type(measure_working_set(EWMATransformer(), message), float)

x = mx.zeros((300, 4))
assert_type(ewma(x, 0.1, axis=0), tuple[mx.array, mx.array])
assert_type(sosfilt(x, np.ones((1, 6)), axis=0), tuple[mx.array, mx.array])


def launch(chunk: mx.array, state: float, size: int, valid_length: mx.array) -> tuple[mx.array, float]:
    return chunk, state


assert_type(chunked_scan(x, 300, (32, 512), 0.0, launch, axis=0), tuple[mx.array, float])
