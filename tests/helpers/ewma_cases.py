"""What holds for the moving average whichever kernels compute it.

Each case takes the name of a path of :func:`ezmsg.mlx.ewma.ewma` and raises AssertionError where it does not hold::

    @pytest.mark.parametrize("path", ["cpu", "plain"])
    @pytest.mark.parametrize("case", CASES)
    def test_case(case, path):
        CASES[case](path)
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import ezmsg.sigproc.ewma as sigproc
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray
from scipy.signal import lfilter

import ezmsg.mlx.ewma as module
from ezmsg.mlx.ewma import EWMATransformer, ewma

FS = 30000.0
ULP = 2.0**-23
CASES: dict[str, Callable[[str], None]] = {}


def case(**parameters: Iterable) -> Callable:
    """Register a function of the path, once for each value of its one parameter, if it has one."""

    def register(function: Callable) -> Callable:
        for name, values in parameters.items():
            for value in values:
                CASES[f"{function.__name__}[{value}]"] = functools.partial(function, **{name: value})
        if not parameters:
            CASES[function.__name__] = function
        return function

    return register


# ----------------------------------------------------------------------------------------------------------- helpers


def alpha_of(time_constant: float, fs: float = FS) -> float:
    return -math.expm1(-1.0 / (fs * time_constant))


def noise(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def state_of(average: npt.ArrayLike, alpha: float, axis: int = 0) -> mx.array:
    """The state of length 2 at which the average is *average*, which has length 1 along *axis*."""
    exact = (1.0 - alpha) * np.asarray(average, np.float64)
    rounded = exact.astype(np.float32)
    return mx.array(np.concatenate([rounded, (exact - rounded).astype(np.float32)], axis=axis))


def zero_state(shape: tuple[int, ...], axis: int, length: int = 2) -> mx.array:
    return mx.zeros([length if dim == axis % len(shape) else n for dim, n in enumerate(shape)])


def reference(x: npt.ArrayLike, alpha: float, axis: int = 0) -> npt.NDArray[np.float64]:
    """From zero, in float64."""
    return lfilter([alpha], [1.0, alpha - 1.0], np.asarray(x, np.float64), axis=axis)


def in_pieces(
    x: mx.array, lengths: Iterable[int], alpha: float, zi: mx.array | None, path: str, axis: int = 0
) -> tuple[np.ndarray, mx.array | None]:
    """The averages of *x* cut into messages of *lengths* (the last one gets the rest), and the last state."""
    averages, start = [], 0
    for n in (*lengths, x.shape[axis]):
        piece = x[(slice(None),) * axis + (slice(start, start + n),)]
        y, zi = ewma(piece, alpha, zi, axis=axis, path=path)
        averages.append(np.array(y))
        start += n
    return np.concatenate(averages, axis=axis), zi


def check_close(y: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 1e-5) -> None:
    """Within *tolerance* of the largest expected value."""
    y, expected = np.asarray(y), np.asarray(expected)
    assert y.dtype == np.float32 and y.shape == expected.shape, (y.dtype, y.shape, expected.shape)
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@contextlib.contextmanager
def using(path: str) -> Iterator[None]:
    """Make transformers take *path*, whatever MLX's default device."""
    with mock.patch.object(module, "_select_path", lambda: path):
        yield


def message(data: np.ndarray | mx.array, fs: float = FS, key: str = "amp", **fields) -> AxisArray:
    dims = fields.pop("dims", ["time", "ch", "x"][: data.ndim])
    axes = fields.pop("axes", {"time": AxisArray.TimeAxis(fs=fs)})
    return AxisArray(data, dims=dims, axes=axes, key=key, **fields)


def filtered(transformer: Callable[[AxisArray], AxisArray], data: np.ndarray | mx.array, **fields) -> np.ndarray:
    return np.array(transformer(message(data, **fields)).data)


# ---------------------------------------------------------------------------------------------------------- accuracy


@case(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def follows_float64(path: str, time_constant: float) -> None:
    alpha = alpha_of(time_constant)
    for offset in (0.0, 50.0):
        x = noise(24000, 3) + np.float32(offset)
        y, _ = in_pieces(mx.array(x), [3000] * 7, alpha, zero_state(x.shape, 0), path)
        check_close(y, reference(x, alpha))


@case(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def step_response_has_the_time_constant(path: str, time_constant: float) -> None:
    n, alpha = 60000, alpha_of(time_constant)
    x = mx.full((n, 1), 7.0)
    expected = -7.0 * np.expm1(-np.arange(1, n + 1) / (FS * time_constant))
    y, _ = in_pieces(x, [300, 1024, 1, 5000], alpha, zero_state(x.shape, 0), path)
    np.testing.assert_allclose(y[:, 0], expected, rtol=1e-3)


@case(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def step_on_an_offset_has_the_time_constant(path: str, time_constant: float) -> None:
    # In messages of ten samples each moves a 300 s average by no more than the resolution of float32.
    n, alpha = 1000, alpha_of(time_constant)
    y, _ = in_pieces(mx.full((n, 1), 148.0), [10] * 99, alpha, state_of([[100.0]], alpha), path)
    expected = -48.0 * np.expm1(-np.arange(1, n + 1) / (FS * time_constant))
    np.testing.assert_allclose(y[:, 0] - 100.0, expected, rtol=1e-3, atol=100 * ULP)


@case(time_constant=[0.001, 0.01, 0.1, 1.0, 60.0, 300.0])
def constant_stays_constant(path: str, time_constant: float) -> None:
    alpha, values = alpha_of(time_constant), np.array([[1.0, -777.7, 1e-20, 3e7, 0.0]], np.float32)
    x = mx.array(np.repeat(values, 40000, axis=0))
    y, zf = in_pieces(x, [1, 2, 31, 32, 33, 300, 1024, 1025, 9999], alpha, state_of(values, alpha), path)
    np.testing.assert_allclose(y, np.broadcast_to(values, y.shape), rtol=ULP, atol=0)
    np.testing.assert_allclose(
        np.array(zf).astype(np.float64).sum(axis=0), (1.0 - alpha) * values[0].astype(np.float64), rtol=ULP
    )


@case()
def alpha_of_one_is_the_identity(path: str) -> None:
    assert alpha_of(1e-9) == 1.0
    x = noise(3000, 3)
    for length in (1, 2):
        y, zf = in_pieces(mx.array(x), [1, 999], 1.0, zero_state(x.shape, 0, length), path)
        check_close(y, x, ULP)
        assert not np.array(zf).any()


@case(alpha=[0.5, 0.9, 0.999999, 1.0 - 2.0**-40])
def short_memory_follows_float64(path: str, alpha: float) -> None:
    x = noise(500, 3)
    y, _ = in_pieces(mx.array(x), [1, 1, 98], alpha, zero_state(x.shape, 0), path)
    check_close(y, reference(x, alpha))


# ---------------------------------------------------------------------------------------------------------- cutting


@case(time_constant=[0.001, 1.0, 300.0])
def cutting_does_not_matter(path: str, time_constant: float) -> None:
    alpha, x = alpha_of(time_constant), noise(2500, 2) + 3
    zi = state_of([[2.0, 4.0]], alpha)
    whole, _ = in_pieces(mx.array(x), [], alpha, zi, path)
    for lengths in ([1] * 150, [0, 7, 0, 0, 33, 1, 0, 1023, 0], [2499, 0], [1024, 1024]):
        y, zf = in_pieces(mx.array(x), lengths, alpha, zi, path)
        check_close(y, whole, 1e-6)
        assert zf.shape == zi.shape


@case()
def cutting_does_not_matter_to_a_state_of_length_1(path: str) -> None:
    alpha, x = alpha_of(0.01), noise(2500, 2) + 3
    whole, _ = in_pieces(mx.array(x), [], alpha, None, path)
    for lengths in ([1] * 150, [0, 7, 0, 0, 33, 1, 0, 1023, 0]):
        y, zf = in_pieces(mx.array(x), lengths, alpha, None, path)
        check_close(y, whole, 2e-6)
        assert zf.shape == (1, 2)


@case()
def state_is_that_of_lfilter(path: str) -> None:
    alpha, x = alpha_of(0.01), noise(3, 700)
    expected, last = lfilter([alpha], [1.0, alpha - 1.0], x.astype(np.float64), axis=1, zi=np.full((3, 1), 0.5))
    y, zf = ewma(mx.array(x), alpha, mx.full((3, 1), 0.5), axis=1, path=path)
    check_close(y, expected)
    check_close(zf, last)


@case(chunk_sizes=[(1,), (7,), (32, 1024), (1024, 3, 100)])
def chunk_sizes_do_not_matter(path: str, chunk_sizes: tuple[int, ...]) -> None:
    alpha, x = alpha_of(0.01), noise(1100, 2)[: 60 if chunk_sizes == (1,) else None]
    y, _ = ewma(mx.array(x), alpha, axis=0, chunk_sizes=chunk_sizes, path=path)
    check_close(y, reference(x, alpha))


# ------------------------------------------------------------------------------------------------- shapes and dtypes

SHAPES = [(60,), (60, 3), (3, 60), (60, 1), (1, 60), (60, 257), (257, 60), (2, 60, 3), (60, 2, 3), (2, 3, 60)]


@case(shape=[*SHAPES, (60, 2, 3, 2), (2, 60, 2, 3), (2, 3, 60, 2), (2, 3, 2, 60), (60, 1, 1), (1, 1, 1, 60)])
def any_axis(path: str, shape: tuple[int, ...]) -> None:
    axis, x, alpha = shape.index(60), noise(*shape), alpha_of(0.001)
    for given in (axis, axis - len(shape)):
        for length in (1, 2):
            zi = zero_state(shape, axis, length)
            first, zi = ewma(mx.array(np.take(x, range(33), axis)), alpha, zi, axis=given, path=path)
            last, zf = ewma(mx.array(np.take(x, range(33, 60), axis)), alpha, zi, axis=given, path=path)
            check_close(np.concatenate([np.array(first), np.array(last)], axis), reference(x, alpha, axis))
            assert zf.shape == zi.shape and zf.dtype == mx.float32


@case(layout=["transposed", "strided", "reversed", "from the middle", "repeated", "not yet computed"])
def any_layout(path: str, layout: str) -> None:
    x, alpha = noise(80, 90), alpha_of(0.001)
    view, expected = {
        "transposed": lambda base: (base.T, x.T),
        "strided": lambda base: (base[::2, ::3], x[::2, ::3]),
        "reversed": lambda base: (base[::-1, ::-1], x[::-1, ::-1]),
        "from the middle": lambda base: (base[3:70, 5:60], x[3:70, 5:60]),
        "repeated": lambda base: (mx.broadcast_to(base[:1], (80, 90)), np.broadcast_to(x[:1], (80, 90))),
        "not yet computed": lambda base: ((base * 2 + 1).T, (x * 2 + 1).T),
    }[layout](mx.array(x))
    for axis in (0, 1):
        zi = np.ones(view.shape, np.float32).take([0], axis)
        # The state is a view, too: every other entry of a wider one.
        given = mx.repeat(mx.array(zi), 2, axis=1 - axis)[(slice(None),) * (1 - axis) + (slice(None, None, 2),)]
        y, _ = ewma(view, alpha, given, axis=axis, path=path)
        check_close(y, lfilter([alpha], [1.0, alpha - 1.0], expected.astype(np.float64), axis=axis, zi=zi)[0])


@case(dtype=["bool_", "int8", "uint8", "int16", "uint16", "int32", "float16", "bfloat16", "float64"])
def any_real_dtype_gives_float32(path: str, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool_" else 100, (300, 3))
    x = mx.array(values.astype(np.float32)).astype(getattr(mx, dtype), stream=mx.cpu)
    zi = mx.full((1, 3), 0.5).astype(mx.float16)
    y, zf = ewma(x, 0.1, zi, axis=0, path=path)
    assert zf.dtype == mx.float32
    check_close(y, lfilter([0.1], [1.0, -0.9], values.astype(np.float64), axis=0, zi=np.full((1, 3), 0.5))[0])
    with using(path):
        check_close(filtered(EWMATransformer(time_constant=0.01), x)[-1:], corrected(values, alpha_of(0.01))[-1:])


# --------------------------------------------------------------------------------------------------------- ownership


@case(n=[1, 32, 300, 1500])
def inputs_are_left_as_they_are(path: str, n: int) -> None:
    x, zi = mx.array(noise(n, 3)), mx.array(noise(2, 3))
    before = np.array(x).tobytes(), np.array(zi).tobytes()
    mx.eval(ewma(x, 0.1, zi, axis=0, path=path))
    assert (np.array(x).tobytes(), np.array(zi).tobytes()) == before
    with using(path):
        transformer = EWMATransformer(time_constant=0.01)
        for _ in range(2):
            mx.eval(transformer(message(x)).data)
    assert np.array(x).tobytes() == before[0]


# ------------------------------------------------------------------------------------- samples that are not finite


BAD = [math.nan, math.inf, -math.inf]


@case(bad=BAD)
def bad_sample_comes_out_as_it_is_and_its_channel_goes_on(path: str, bad: float) -> None:
    alpha, x = alpha_of(0.01), noise(2100, 5) + 3
    clean, _ = in_pieces(mx.array(x), [300] * 6, alpha, state_of(np.full((1, 5), 3.0), alpha), path)
    # The first sample of all, the last of a message, in a row, and in the middle, each in a channel of its own.
    where = (np.array([0, 299, 700, 701, 702, 1000]), np.array([0, 1, 2, 2, 2, 3]))
    x[where] = bad
    y, zf = in_pieces(mx.array(x), [300] * 6, alpha, state_of(np.full((1, 5), 3.0), alpha), path)
    np.testing.assert_array_equal(y[where], np.full(6, bad, np.float32))
    np.testing.assert_array_equal(y[:, 4], clean[:, 4])
    assert np.isfinite(y).sum() == y.size - 6 and np.isfinite(np.array(zf)).all()
    # Each bad sample is worth one sample more or less of a memory of 300.
    np.testing.assert_allclose(np.delete(y, [0, 299, 700, 701, 702, 1000], 0).mean(0), clean.mean(0), atol=0.02)
    np.testing.assert_allclose(y[-1], clean[-1], atol=0.01)


@case(bad=BAD)
def channel_bad_for_a_whole_message_keeps_its_average(path: str, bad: float) -> None:
    alpha, zi = alpha_of(0.01), state_of([[5.0, 6.0]], alpha_of(0.01))
    x = np.full((300, 2), 6.0, np.float32)
    x[:, 0] = bad
    y, zf = ewma(mx.array(x), alpha, zi, axis=0, path=path)
    np.testing.assert_array_equal(np.array(y), x)
    check_close(np.array(zf).sum(axis=0), (1 - alpha) * np.array([5.0, 6.0]), ULP)
    y, _ = ewma(mx.full((1, 2), 6.0), alpha, zf, axis=0, path=path)
    check_close(y, [[5.0 + alpha, 6.0]], ULP)


@case(alpha=[0.1, 0.9, 1.0])
def samples_at_the_ends_of_float32_do_no_lasting_harm(path: str, alpha: float) -> None:
    largest = np.finfo(np.float32).max
    x = np.repeat(np.array([1, largest, -largest, largest, *[1] * 8], np.float32), 1024)[:, None]
    y, zf = in_pieces(mx.array(x), [1024] * 11, alpha, zero_state(x.shape, 0), path)
    assert np.isfinite(y).all() and np.isfinite(np.array(zf)).all()
    np.testing.assert_allclose(y[-1], 1.0, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- transformer


def corrected(x: npt.ArrayLike, alpha: float) -> npt.NDArray[np.float64]:
    """The average over the samples so far, time first, in float64."""
    weight = -np.expm1(np.arange(1, len(x) + 1) * np.log1p(-alpha))
    return reference(x, alpha) / weight.reshape(-1, *[1] * (np.ndim(x) - 1))


@case(time_constant=[1e-9, 0.001, 0.01, 1.0, 60.0, 300.0])
def transformer_gives_the_results_of_sigproc_on_numpy(path: str, time_constant: float) -> None:
    x = noise(9000, 3) + np.float32([0, 5, -50])
    ours, theirs = EWMATransformer(time_constant=time_constant), sigproc.EWMATransformer(time_constant=time_constant)
    with using(path):
        for start, stop in itertools.pairwise([0, 1, 2, 300, 300, 1324, 4000, 9000]):
            y = filtered(ours, mx.array(x[start:stop]))
            check_close(y, filtered(theirs, x[start:stop].astype(np.float64))) if stop > start else None
            assert y.shape == (stop - start, 3) and y.dtype == np.float32


@case(time_constant=[0.001, 1.0, 300.0])
def first_sample_is_its_own_average_and_a_constant_stays_constant(path: str, time_constant: float) -> None:
    transformer = EWMATransformer(time_constant=time_constant)
    with using(path):
        for n in (1, 299, 1, 1024, 5000):
            y = filtered(transformer, mx.full((n, 2), 1234.5))
            np.testing.assert_allclose(y, 1234.5, rtol=3e-6)


@case(time_constant=[1.0, 60.0, 300.0])
def transformer_has_the_time_constant(path: str, time_constant: float) -> None:
    # A second of nothing and a second of 1: the average tells how much more the newer second counts.
    transformer = EWMATransformer(time_constant=time_constant)
    with using(path):
        for value in (0.0, 1.0):
            for _ in range(10):
                y = filtered(transformer, mx.full((3000, 1), value))
    old, new = np.exp(-np.arange(60000) / (FS * time_constant)).reshape(2, -1).sum(axis=1)[::-1]
    assert abs((y[-1, 0] - 0.5) / (new / (old + new) - 0.5) - 1.0) < 1e-3


@case(bad=[math.nan, math.inf])
def channel_dead_from_the_start_begins_anew_when_it_lives(path: str, bad: float) -> None:
    # 25 time constants of 30 samples: far beyond the point where the other channel needs no correction.
    dead, x = np.full((750, 2), 2.0, np.float32), noise(600, 2) + 9
    dead[:, 0] = bad
    transformer = EWMATransformer(time_constant=0.001)
    with using(path):
        for piece in np.split(dead, 5):
            np.testing.assert_array_equal(filtered(transformer, mx.array(piece)), piece)
        y = np.concatenate([filtered(transformer, mx.array(piece)) for piece in np.split(x, 4)])
        check_close(y[:, 0], corrected(x[:, 0], alpha_of(0.001)))
        for _ in range(9):
            filtered(transformer, mx.full((100, 2), 9.0))
    # The correction ends when the last channel has no need of it.
    assert transformer.state.weight is None


@case()
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
