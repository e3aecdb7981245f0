"""What holds for the moving average in particular, whichever kernels compute it.

Each case takes the name of a path of :func:`ezmsg.mlx.ewma.ewma`. What holds for every recurrence is in
:mod:`helpers.recurrence_cases`.
"""

import functools
import itertools
import math

import ezmsg.sigproc.ewma as sigproc
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ezmsg.mlx.ewma import EWMATransformer

from .recurrence_cases import CASES as GENERAL_CASES
from .recurrences import EWMA, FS, ULP, Cases, alpha_of, check_close, noise
from .transformers import filtered, using

OWN_CASES = Cases()


# ----------------------------------------------------------------------------------------------------------- helpers


def state_of(average: npt.ArrayLike, alpha: float, axis: int = 0) -> mx.array:
    """The state of length 2 at which the average is *average*, which has length 1 along *axis*."""
    exact = (1.0 - alpha) * np.asarray(average, np.float64)
    rounded = exact.astype(np.float32)
    return mx.array(np.concatenate([rounded, (exact - rounded).astype(np.float32)], axis=axis))


def zero_state(shape: tuple[int, ...]) -> mx.array:
    """The state of length 2 for data of *shape*, time first."""
    return mx.zeros(EWMA.state_shape(shape, 0, pair=True))


def reference(x: npt.ArrayLike, alpha: float, axis: int = 0) -> npt.NDArray[np.float64]:
    """From zero, in float64."""
    return EWMA.reference(x, alpha, axis=axis)[0]


def corrected(x: npt.ArrayLike, alpha: float) -> npt.NDArray[np.float64]:
    """The average over the samples so far, time first, in float64."""
    weight = -np.expm1(np.arange(1, len(x) + 1) * np.log1p(-alpha))
    return reference(x, alpha) / weight.reshape(-1, *[1] * (np.ndim(x) - 1))


# ---------------------------------------------------------------------------------------------------------- accuracy


@OWN_CASES.add(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def step_response_has_the_time_constant(path: str, time_constant: float) -> None:
    n, alpha = 60000, alpha_of(time_constant)
    x = mx.full((n, 1), 7.0)
    expected = -7.0 * np.expm1(-np.arange(1, n + 1) / (FS * time_constant))
    y, _ = EWMA.in_pieces(x, [300, 1024, 1, 5000], alpha, zero_state(x.shape), path)
    np.testing.assert_allclose(y[:, 0], expected, rtol=1e-3)


@OWN_CASES.add(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def step_on_an_offset_has_the_time_constant(path: str, time_constant: float) -> None:
    # In messages of ten samples each moves a 300 s average by no more than the resolution of float32.
    n, alpha = 1000, alpha_of(time_constant)
    y, _ = EWMA.in_pieces(mx.full((n, 1), 148.0), [10] * 99, alpha, state_of([[100.0]], alpha), path)
    expected = -48.0 * np.expm1(-np.arange(1, n + 1) / (FS * time_constant))
    np.testing.assert_allclose(y[:, 0] - 100.0, expected, rtol=1e-3, atol=100 * ULP)


@OWN_CASES.add(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def constant_stays_constant(path: str, time_constant: float) -> None:
    alpha, values = alpha_of(time_constant), np.array([[1.0, -777.7, 1e-20, 3e7, 0.0]], np.float32)
    x = mx.array(np.repeat(values, 40000, axis=0))
    y, zf = EWMA.in_pieces(x, [1, 2, 31, 32, 33, 300, 1024, 1025, 9999], alpha, state_of(values, alpha), path)
    np.testing.assert_allclose(y, np.broadcast_to(values, y.shape), rtol=ULP, atol=0)
    np.testing.assert_allclose(
        np.array(zf).astype(np.float64).sum(axis=0), (1.0 - alpha) * values[0].astype(np.float64), rtol=ULP
    )


@OWN_CASES.add()
def alpha_of_one_is_the_identity(path: str) -> None:
    assert alpha_of(1e-9) == 1.0
    x = noise(3000, 3)
    for pair in (False, True):
        zi = mx.zeros(EWMA.state_shape(x.shape, 0, pair=pair))
        y, zf = EWMA.in_pieces(mx.array(x), [1, 999], 1.0, zi, path)
        check_close(y, x, ULP)
        assert not np.array(zf).any()


# ------------------------------------------------------------------------------------- samples that are not finite


@OWN_CASES.add(bad=[math.nan, math.inf, -math.inf])
def bad_sample_is_worth_one_more_or_less(path: str, bad: float) -> None:
    # Of a memory of 300.
    alpha, x = alpha_of(0.01), noise(2100, 5) + 3
    run = functools.partial(
        EWMA.in_pieces, lengths=[300] * 6, coefficients=alpha, zi=state_of(np.full((1, 5), 3.0), alpha), path=path
    )
    clean, _ = run(mx.array(x))
    rows = [0, 299, 700, 701, 702, 1000]
    x[rows, [0, 1, 2, 2, 2, 3]] = bad
    y, _ = run(mx.array(x))
    np.testing.assert_array_equal(y[:, 4], clean[:, 4])
    np.testing.assert_allclose(np.delete(y, rows, 0).mean(0), clean.mean(0), atol=0.02)
    np.testing.assert_allclose(y[-1], clean[-1], atol=0.01)


@OWN_CASES.add(alpha=[0.1, 0.9, 1.0])
def samples_at_the_ends_of_float32_do_no_lasting_harm(path: str, alpha: float) -> None:
    largest = np.finfo(np.float32).max
    x = np.repeat(np.array([1, largest, -largest, largest, *[1] * 8], np.float32), 1024)[:, None]
    y, zf = EWMA.in_pieces(mx.array(x), [1024] * 11, alpha, zero_state(x.shape), path)
    assert np.isfinite(y).all() and np.isfinite(np.array(zf)).all()
    np.testing.assert_allclose(y[-1], 1.0, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- transformer


@OWN_CASES.add(time_constant=[1e-9, 0.001, 0.01, 1.0, 60.0, 300.0])
def transformer_gives_the_results_of_sigproc_on_numpy(path: str, time_constant: float) -> None:
    x = noise(9000, 3) + np.float32([0, 5, -50])
    ours, theirs = EWMATransformer(time_constant=time_constant), sigproc.EWMATransformer(time_constant=time_constant)
    with using(path):
        for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 1324, 4000, 9000]):
            y = filtered(ours, mx.array(x[start:stop]))
            check_close(y, filtered(theirs, x[start:stop].astype(np.float64))) if stop > start else None
            assert y.shape == (stop - start, 3) and y.dtype == np.float32


@OWN_CASES.add(time_constant=[0.001, 1.0, 300.0])
def first_sample_is_its_own_average_and_a_constant_stays_constant(path: str, time_constant: float) -> None:
    transformer = EWMATransformer(time_constant=time_constant)
    with using(path):
        for n in (1, 299, 1, 1024, 5000):
            y = filtered(transformer, mx.full((n, 2), 1234.5))
            np.testing.assert_allclose(y, 1234.5, rtol=3e-6)


@OWN_CASES.add(time_constant=[1.0, 60.0, 300.0])
def transformer_has_the_time_constant(path: str, time_constant: float) -> None:
    # A second of nothing and a second of 1: the average tells how much more the newer second counts.
    transformer = EWMATransformer(time_constant=time_constant)
    with using(path):
        for value in (0.0, 1.0):
            for _ in range(10):
                y = filtered(transformer, mx.full((3000, 1), value))
    old, new = np.exp(-np.arange(60000) / (FS * time_constant)).reshape(2, -1).sum(axis=1)[::-1]
    assert abs((y[-1, 0] - 0.5) / (new / (old + new) - 0.5) - 1.0) < 1e-3


@OWN_CASES.add(bad=[math.nan, math.inf])
def channel_dead_from_the_start_begins_anew_when_it_lives(path: str, bad: float) -> None:
    # 25 time constants of 30 samples: far beyond the point where the other channel needs no correction.
    dead, x = np.full((750, 2), 2.0, np.float32), noise(600, 2) + 9
    dead[:, 0] = bad
    transformer = EWMATransformer(time_constant=0.001)
    with using(path):
        for piece in np.split(dead, 5):
            y = filtered(transformer, mx.array(piece))
            np.testing.assert_array_equal(y[:, 0], piece[:, 0])
            np.testing.assert_allclose(y[:, 1], piece[:, 1], rtol=3 * ULP)
        y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 4)])
        check_close(y[:, 0], corrected(x[:, 0], alpha_of(0.001)))
        for _ in range(9):
            filtered(transformer, mx.full((100, 2), 9.0))
    # The correction ends when the last channel has no need of it.
    assert transformer.state.zi.shape == (2, 2)


@OWN_CASES.add()
def bad_samples_do_not_count_in_the_correction(path: str) -> None:
    x = noise(40, 2) + 100
    x[[0, 3, 4], 0] = math.nan
    with using(path):
        y = filtered(EWMATransformer(time_constant=1.0), mx.array(x))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    check_close(y[:, 1], corrected(x[:, 1], alpha_of(1.0)))
    # Right after the start everything depends on the correction: 100, where one sample too many would give 90.
    finite = np.isfinite(y[:, 0])
    np.testing.assert_allclose(y[finite, 0], corrected(x[finite, 0], alpha_of(1.0)), rtol=1e-3)


@OWN_CASES.add(dtype=["bool_", "int8", "int16", "int32", "float16", "bfloat16", "float64"])
def transformer_takes_any_real_dtype_and_leaves_it_as_it_is(path: str, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool_" else 100, (300, 3)).astype(np.float32)
    x = mx.array(values).astype(getattr(mx, dtype), stream=mx.cpu)
    with using(path):
        check_close(filtered(EWMATransformer(time_constant=0.01), x), corrected(values, alpha_of(0.01)))
    assert str(x.dtype) == f"mlx.core.{dtype.rstrip('_')}"
    np.testing.assert_array_equal(np.array(x.astype(mx.float32, stream=mx.cpu)), values)


@OWN_CASES.add()
def with_alpha_of_1_each_message_is_its_own_average(path: str) -> None:
    x = noise(700, 3) * 1e3
    x[[5, 400], 1] = math.nan
    pieces = np.split(x, [1, 2, 40, 41, 400])
    with using(path):
        # A time constant of a thousandth of a sample: alpha rounds to 1.
        transformer = EWMATransformer(time_constant=1e-3 / FS)
        for piece in pieces:
            np.testing.assert_array_equal(filtered(transformer, mx.array(piece)), piece)
        assert transformer.state.alpha == 1.0
    for state in (None, zero_state(x.shape)):
        for piece in pieces:
            y, state = EWMA.function(mx.array(piece), 1.0, state, axis=0, path=path)
            np.testing.assert_array_equal(np.array(y), piece)
            assert not np.array(state).any()


CASES = {**{name: functools.partial(case, EWMA) for name, case in GENERAL_CASES.items()}, **OWN_CASES}
"""All, for kernels that only this recurrence has."""
