"""Transformers in several threads: each in its own, and one that goes from thread to thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.processes import in_fresh_process

from ezmsg.mlx import (
    AdaptiveStandardScalerSettings,
    AdaptiveStandardScalerTransformer,
    AsArraySettings,
    AsArrayTransformer,
    ButterworthFilterSettings,
    ButterworthFilterTransformer,
    DetrendTransformer,
    EWMASettings,
    EWMATransformer,
    PowSettings,
    PowTransformer,
    RechunkSettings,
    RechunkTransformer,
)

N_THREADS = 8
LENGTHS = (300, 1, 0, 299, 700, 300, 33) * 3

Chain = Callable[[AxisArray], list[np.ndarray]]


@pytest.fixture
def needs_mlx() -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)


def messages(seed: int) -> list[AxisArray]:
    rng = np.random.default_rng(seed)
    stops = np.cumsum(LENGTHS)
    return [
        AxisArray(
            rng.integers(-500, 500, (n, 8)).astype(np.int16) + np.int16(200),
            dims=["time", "ch"],
            axes={"time": AxisArray.TimeAxis(fs=30000.0, offset=(stop - n) / 30000.0)},
            key="amp",
        )
        for n, stop in zip(LENGTHS, stops, strict=False)
    ]


def make_chain() -> Chain:
    """All that keeps a state, one after the other, from NumPy to NumPy."""
    stages = (
        AsArrayTransformer(AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=64.0)),
        ButterworthFilterTransformer(ButterworthFilterSettings(order=2, cuton=300.0, cutoff=6000.0, coef_type="sos")),
        DetrendTransformer(EWMASettings(time_constant=0.1)),
        AdaptiveStandardScalerTransformer(AdaptiveStandardScalerSettings(time_constant=0.05)),
        PowTransformer(PowSettings(exponent=2.0)),
        EWMATransformer(EWMASettings(time_constant=0.01)),
    )
    cut = RechunkTransformer(RechunkSettings(sizes=(100,)))
    back = AsArrayTransformer(AsArraySettings(backend="numpy"))

    def run(message: AxisArray) -> list[np.ndarray]:
        for stage in stages:
            message = stage(message)
        return [back(piece).data for piece in cut(message)]

    return run


def run_here(seed: int) -> np.ndarray:
    chain = make_chain()
    return np.concatenate([piece for message in messages(seed) for piece in chain(message)])


@in_fresh_process
def test_eight_threads_convert_and_filter_at_once(needs_mlx):
    start = threading.Barrier(N_THREADS)

    def work(seed: int) -> np.ndarray:
        start.wait()
        return run_here(seed)

    with ThreadPoolExecutor(N_THREADS) as executor:
        results = list(executor.map(work, range(N_THREADS), timeout=240.0))
    # Afterwards, so that the threads are the first to load MLX and to compile.
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(result, run_here(seed))


def test_what_was_warmed_up_in_one_thread_works_in_others(needs_mlx):
    chain = make_chain()
    arrived = messages(0)
    pieces = chain(arrived[0])
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number, message in enumerate(arrived[1:]):
            executor = (first, second)[number % 2]
            pieces += executor.submit(chain, message).result(timeout=240.0)
    np.testing.assert_array_equal(np.concatenate(pieces), run_here(0))
