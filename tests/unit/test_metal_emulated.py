"""The kernels for Metal as MLX would hand them to Metal, on the CPU: what a machine without one can tell of them."""

import dataclasses
import itertools
import math
import os

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import metal_emulation
from helpers.ewma_cases import OWN_CASES, state_of
from helpers.metal_cases import (
    check_corrected,
    check_long_memory_in_single_samples,
    check_scores,
    run_corrected,
    run_scores,
    scored,
)
from helpers.metal_counts import graph_of
from helpers.metal_emulation import FMA_FLAGS, ORDERS
from helpers.metal_texts import MODULES
from helpers.recurrence_cases import CASES, EXACT_CASES
from helpers.recurrences import RECURRENCES as EVERY
from helpers.recurrences import alpha_of, check_close, noise
from helpers.sosfilt_cases import CASES as SOSFILT_CASES
from helpers.transformers import TRANSFORMERS, filtered, using

from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE, LARGEST_SCORED, buffer_length
from ezmsg.mlx.kernels.metal import ewma, zscore
from ezmsg.mlx.kernels.metal.kernel import SAMPLES, TILE, threadgroups

CALLS = {
    "ewma": (0.01, (2,)),
    "zscore": (0.01, (6,)),
    "sosfilt": (np.array([[1.0, 0.5, 0.25, 1.0, -0.5, 0.25]] * 4), (4, 4)),
}
"""Coefficients, and the shape of a state but for channels."""

ALL = bool(os.environ.get("EZMSG_MLX_ALL_METAL"))
"""Whether all of what follows is tested, which takes minutes, or some of it."""

SOME = {
    "ewma": ("0.01 s", "300.0 s", "alpha 0.999999"),
    "zscore": ("1.0 s", "300.0 s"),
    "sosfilt": (
        "band-pass 8",
        "band-pass 0.5 to 10000 Hz 3",
        "high-pass 0.5 Hz 8",
        "notch 14940 Hz",
        "low-pass 14950 Hz 4",
        "no feedback",
    ),
}


def some(entry):
    """*entry* with the coefficients that are tested."""
    keys = entry.coefficients if ALL else SOME.get(entry.name, entry.coefficients)
    return dataclasses.replace(entry, coefficients={key: entry.coefficients[key] for key in keys})


RECURRENCES = {name: some(entry) for name, entry in EVERY.items() if name in MODULES}

pytestmark = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")

VARIANTS = [
    pytest.param(flags, order, id=f"{' '.join(flags)}, {order}")
    for number, (optimisation, contraction, order) in enumerate(
        itertools.product(["-O0", "-O3"], [("-ffp-contract=off",), ("-ffp-contract=fast", *FMA_FLAGS)], ORDERS)
    )
    if ALL or number in (0, 11)
    for flags in [(optimisation, *contraction)]
]
"""At -O0 without contraction nothing is fused but what says so; at -O3 with it all that can be."""


def order_of(case: str) -> str:
    """Another one for each case, and the same in each run."""
    return list(ORDERS)[sum(case.encode()) % len(ORDERS)]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        yield


# ---------------------------------------------------------------------------------------------------- all recurrences


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_case_of_all_recurrences(recurrence, case):
    with metal_emulation.using(order=order_of(case)):
        CASES[case](RECURRENCES[recurrence], "metal")


@pytest.mark.parametrize("case", EXACT_CASES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_exact_case_of_all_recurrences(recurrence, case):
    with metal_emulation.using(order="random"):
        EXACT_CASES[case](RECURRENCES[recurrence], "metal")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_results_do_not_depend_on_the_order_of_threads(recurrence, order):
    entry = RECURRENCES[recurrence]
    x = mx.array(noise(1000, 9))
    zi = mx.ones(entry.state_shape(x.shape, 0, pair=True))
    expected = [np.array(result) for result in entry.function(x, entry.short, zi, axis=0, path="metal")]
    with metal_emulation.using(order=order):
        results = entry.function(x, entry.short, zi, axis=0, path="metal")
    for result, of_ascending in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.array(result), of_ascending)


@pytest.mark.parametrize(("flags", "order"), VARIANTS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_other_compilers(recurrence, flags, order):
    with metal_emulation.using(order=order, flags=flags):
        EXACT_CASES["bad_samples_in_any_block"](RECURRENCES[recurrence], "metal")
        if ALL:
            CASES["follows_float64"](RECURRENCES[recurrence], "metal")


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_one_compilation_serves_all_lengths(recurrence):
    # From eight entries on, which MLX passes in the same address space.
    entry = RECURRENCES[recurrence]
    with metal_emulation.recorded() as launches:
        for shape in [(1, 8), (8, 1), (300, 8), (TILE, 33), (TILE + 1, 256), (3000, 9), (2, 1030)]:
            zi = mx.zeros(entry.state_shape(shape, 0, pair=True))
            entry.function(mx.zeros(shape), entry.short, zi, axis=0, path="metal")
        texts = {launch.text for launch in launches if "constant float* zi" not in launch.text}
    assert len(launches) == 7 and len(texts) == 1


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_nothing_is_reordered_by_the_compiler(recurrence):
    entry = RECURRENCES[recurrence]
    with metal_emulation.recorded() as launches:
        entry.function(mx.zeros((9, 3)), entry.short, axis=0, path="metal")
    assert [launch.math_mode for launch in launches] == [metal_emulation.SAFE]


@pytest.mark.parametrize("n_channels", [1, 2, 3, 8, 9, 256, 1024, 1025, 5000])
@pytest.mark.parametrize("n_samples", [1, SAMPLES, 30, 300, TILE, TILE + 1, 30000])
def test_threads_are_as_many_as_metal_allows_and_cover_all_channels(n_samples, n_channels):
    threads = threadgroups(n_samples, n_channels)
    (width, height, depth), (lanes, strips, one) = threads["grid"], threads["threadgroup"]
    assert (depth, one, height) == (1, 1, strips)
    assert width % lanes == 0 and n_channels <= width < n_channels + lanes
    assert 1 <= lanes * strips <= 256 and strips * SAMPLES <= TILE
    assert n_samples <= SAMPLES or strips > 1


# ------------------------------------------------------------------------------------------------------------ average


@pytest.mark.parametrize("case", OWN_CASES)
def test_case_of_ewma(case):
    with metal_emulation.using(order=order_of(case)):
        OWN_CASES[case]("metal")


@pytest.mark.parametrize("lengths", [[], [1] * 20, [300, 1, 7, 320, 321]], ids=str)
@pytest.mark.parametrize("time_constant", [1e-5, 0.001, 0.1, 300.0])
def test_bias_is_corrected_in_the_same_launch(time_constant, lengths):
    check_corrected(noise(2000, 3) + np.float32([0, 50, 1e4]), alpha_of(time_constant), lengths)


def test_only_samples_that_are_taken_count_in_the_correction():
    x = noise(1500, 5) + 7
    x[np.random.default_rng(1).random(x.shape) < [0.0, 0.01, 0.3, 0.9, 1.0]] = math.nan
    x[:700, 1] = math.inf
    check_corrected(x, alpha_of(1.0), [1, 320, 5])


def test_a_long_memory_moves_in_single_samples():
    check_long_memory_in_single_samples()


def test_weight_of_a_long_stream_settles_at_one():
    x, alpha = np.full((40000, 2), 3.0, np.float32), alpha_of(0.001)
    y, state = run_corrected(x, alpha, [9999, 1, 20000])
    np.testing.assert_allclose(y, 3.0, rtol=1e-6)
    np.testing.assert_array_equal(state[1], 1.0)


@pytest.mark.parametrize("alpha", [alpha_of(0.01), 0.9])
def test_largest_sample_is_taken_and_a_larger_one_is_not(alpha):
    limit = np.float32(LARGEST_SAMPLE)
    x = np.array([[1.0, 1.0], [limit, np.nextafter(limit, np.float32(np.inf))], [1.0, 1.0]], np.float32)
    y, _ = ewma.run(mx.array(x), alpha, state_of([[1.0, 1.0]], alpha), 0, ())
    y = np.array(y)
    assert y[2, 0] > 1e26 and y[1, 1] == x[1, 1]
    np.testing.assert_allclose(y[2, 1], 1.0, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- graph


@pytest.mark.parametrize("shape", [(1, 256), (300, 256), (3000, 256), (30000, 1024)])
@pytest.mark.parametrize("recurrence", CALLS)
def test_a_message_is_one_kernel_in_the_graph(recurrence, shape):
    coefficients, state_shape = CALLS[recurrence]
    zi = mx.zeros((*state_shape, shape[1]))
    nodes = graph_of(lambda x, zi: MODULES[recurrence].run(x, coefficients, zi, 0, ()), mx.zeros(shape), zi)
    # From 513 samples on, the buffer is longer than the message, and a view is cut from it.
    assert nodes == {"CustomKernel": 1} | ({"Slice": 1} if shape[0] > 512 else {})


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers_use_the_kernels(kind):
    habits, x = TRANSFORMERS[kind], noise(700, 3) + 3
    transformer = habits.make()
    with using("metal"), metal_emulation.recorded() as launches:
        results = [filtered(transformer, mx.array(piece)) for piece in np.split(x, [1, 300, 301])]
    check_close(np.concatenate(results), habits.expected_of(x), habits.tolerance)
    assert launches


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_the_first_message_compiles_what_a_stream_needs(kind, monkeypatch):
    # Three channels, whose states MLX may pass in another address space than those of more.
    transformer = TRANSFORMERS[kind].make()
    monkeypatch.setattr(metal_emulation, "run", lambda launch, inputs, results: [y.fill(0.0) for y in results])
    with using("metal"), metal_emulation.recorded() as launches:
        filtered(transformer, mx.ones((300, 3)))
        at_first = {launch.text for launch in launches}
        for n in (3, 3000, 7):
            filtered(transformer, mx.ones((n, 3)))
    assert {launch.text for launch in launches} == at_first


def test_buffers_have_few_lengths():
    lengths = {buffer_length(n) for n in range(513, 30001)}
    assert len(lengths) < 50 and all(n <= buffer_length(n) <= 1.125 * n + 1 for n in range(1, 30001, 7))
    assert all(buffer_length(n) == n for n in range(1, 513))


# ----------------------------------------------------------------------------------------------------------- sections


@pytest.mark.parametrize("case", [case for case in SOSFILT_CASES if ALL or case != "short_messages_do_not_drift[1]"])
def test_case_of_sosfilt(case):
    with metal_emulation.using(order=order_of(case)):
        SOSFILT_CASES[case]("metal")


# ------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("lengths", [[], [1] * 20, [300, 1, 7, 320, 321]], ids=str)
@pytest.mark.parametrize("alpha", [0.9, 0.5, *map(alpha_of, (0.001, 0.1, 300.0))])
def test_scores_follow_float64(alpha, lengths):
    check_scores(noise(1300, 3) * np.float32([1, 1e-3, 100]) + np.float32([0, 50, 1e4]), alpha, lengths)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n_channels", [1, 7, 33, 300])
def test_scores_of_any_number_of_channels_in_any_order_of_threads(n_channels, order):
    with metal_emulation.using(order=order):
        check_scores(noise(333, n_channels) + 5, alpha_of(0.01), [1, 320])


@pytest.mark.parametrize(("flags", "order"), VARIANTS)
def test_scores_by_other_compilers(flags, order):
    with metal_emulation.using(order=order, flags=flags):
        check_scores(noise(1000, 9) + 5, alpha_of(300.0), [321])


def test_samples_that_are_not_taken_do_not_score():
    x = noise(1500, 6) + 7
    x[np.random.default_rng(1).random(x.shape) < [0.0, 0.01, 0.3, 0.9, 1.0, 0.0]] = math.nan
    x[:700, 1] = math.inf
    x[[0, 3, 900], 5] = np.float32([LARGEST_SCORED * 2, -3e38, LARGEST_SCORED * 1.001])
    check_scores(x, alpha_of(0.01), [1, 320, 5])


@pytest.mark.parametrize("alpha", [0.9, alpha_of(0.001)])
def test_a_first_sample_of_any_size_is_forgotten_as_fast_as_its_weight(alpha):
    x = noise(1200, 2)
    x[0] = np.float32(LARGEST_SCORED)
    y, _ = run_scores(x, alpha, [])
    expected, _ = scored(x, alpha)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(run_scores(x, alpha, [1, 5, 300])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, -777.7, 1e-20, 3e7, 1e18])
def test_a_constant_scores_zero(value):
    x = np.full((1000, 2), value, np.float32)
    x[:200, 1] += noise(200) * np.float32(value)
    y, _ = run_scores(x, alpha_of(0.0003), [1, 300, 320])
    np.testing.assert_array_equal(y[:, 0], 0.0)
    np.testing.assert_array_equal(y[900:, 1], 0.0)


def test_scores_along_any_axis():
    x, alpha = noise(40, 3, 5), alpha_of(0.001)
    expected, _ = run_scores(x.reshape(40, 15), alpha, [])
    for axis in range(3):
        data = mx.array(np.moveaxis(x, 0, axis))
        y, zf = zscore.run(data, alpha, mx.zeros([6 if i == axis else n for i, n in enumerate(data.shape)]), axis, ())
        np.testing.assert_array_equal(np.moveaxis(np.array(y), axis, 0).reshape(40, 15), expected)
        assert zf.shape[axis] == 6 and zf.ndim == 3
