"""What holds for second-order sections whichever kernels compute them.

Each case takes the name of a path of :func:`ezmsg.mlx.sosfilt.sosfilt` and raises AssertionError where it does not
hold, as in :mod:`helpers.ewma_cases`.
"""

import functools
import math
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from scipy.signal import butter, cheby2, iirnotch, sosfilt_zi, tf2sos
from scipy.signal import sosfilt as scipy_sosfilt

from ezmsg.mlx.sosfilt import sosfilt

FS = 30000.0
CASES: dict[str, Callable[[str], None]] = {}

BAND_PASS = butter(4, (300.0, 5000.0), "bandpass", fs=FS, output="sos")
HIGH_PASS = butter(4, 0.5, "highpass", fs=FS, output="sos")

FILTERS = {
    **{f"band-pass {order}": butter(order, (300.0, 5000.0), "bandpass", fs=FS, output="sos") for order in (2, 4, 8)},
    **{f"high-pass 300 Hz {order}": butter(order, 300.0, "highpass", fs=FS, output="sos") for order in (2, 3, 8)},
    **{f"high-pass 0.5 Hz {order}": butter(order, 0.5, "highpass", fs=FS, output="sos") for order in (1, 2, 4, 8)},
    "low-pass 5000 Hz 4": butter(4, 5000.0, fs=FS, output="sos"),
    "low-pass 50 Hz 4": butter(4, 50.0, fs=FS, output="sos"),
    "band-pass 0.5 to 10000 Hz 3": butter(3, (0.5, 10000.0), "bandpass", fs=FS, output="sos"),
    "Chebyshev stop band 4": cheby2(4, 40.0, (55.0, 65.0), "bandstop", fs=FS, output="sos"),
    "notch 60 Hz": tf2sos(*iirnotch(60.0, 30.0, fs=FS)),
    "notch 14940 Hz": tf2sos(*iirnotch(14940.0, 3000.0, fs=FS)),
    "low-pass 14950 Hz 4": butter(4, 14950.0, fs=FS, output="sos"),
    "no feedback": np.array([[0.25, 0.5, 0.25, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]),
}


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


def noise(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def settled_state(sos: npt.NDArray, x: npt.NDArray, axis: int = 0) -> npt.NDArray[np.float64]:
    """scipy's state after a long time of the first sample of each channel."""
    zi = sosfilt_zi(sos)
    shape = [len(sos), *(2 if dim == axis else 1 for dim in range(x.ndim))]
    return zi.reshape(shape) * x.take([0], axis).astype(np.float64)


def pairs_of(zi: npt.NDArray[np.float64], axis: int = 0) -> mx.array:
    """The state of length 4 for scipy's *zi*."""
    high = zi.astype(np.float32)
    return mx.array(np.concatenate([high, (zi - high).astype(np.float32)], axis=axis + 1))


def state_of(pairs: mx.array, axis: int = 0) -> npt.NDArray[np.float64]:
    """The inverse of :func:`pairs_of`."""
    high, low = np.split(np.array(pairs), 2, axis=axis + 1)
    return high.astype(np.float64) + low


def reference(
    x: npt.ArrayLike, sos: npt.NDArray, zi: npt.NDArray | None = None, axis: int = 0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """scipy's results in float64."""
    x = np.asarray(x, np.float64)
    shape = (len(sos), *(2 if dim == axis else n for dim, n in enumerate(x.shape)))
    return scipy_sosfilt(sos, x, axis=axis, zi=np.zeros(shape) if zi is None else zi)


def in_pieces(
    x: mx.array, lengths: Iterable[int], sos: npt.NDArray, zi: mx.array | None, path: str, axis: int = 0
) -> tuple[np.ndarray, mx.array | None]:
    """The result for *x* cut into messages of *lengths* (the last one gets the rest), and the last state."""
    results, start = [], 0
    for n in (*lengths, x.shape[axis]):
        piece = x[(slice(None),) * axis + (slice(start, start + n),)]
        y, zi = sosfilt(piece, sos, zi, axis=axis, path=path)
        results.append(np.array(y))
        start += n
    return np.concatenate(results, axis=axis), zi


def check_close(y: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 1e-5, peak: float | None = None) -> None:
    """Within *tolerance* of *peak*, by default the largest expected value."""
    y, expected = np.asarray(y), np.asarray(expected)
    assert y.dtype == np.float32 and y.shape == expected.shape, (y.dtype, y.shape, expected.shape)
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance * (peak or np.abs(expected).max()))


# ---------------------------------------------------------------------------------------------------------- accuracy


@case(name=FILTERS)
def follows_float64(path: str, name: str) -> None:
    sos, x = FILTERS[name], noise(12000, 2)
    zi = settled_state(sos, x)
    expected, last = reference(x, sos, zi)
    y, zf = in_pieces(mx.array(x), [3000, 1, 2, 299, 300, 1500, 0, 7], sos, pairs_of(zi), path)
    check_close(y, expected)
    np.testing.assert_allclose(state_of(zf), last, rtol=0, atol=1e-5 * np.abs(last).max())


@case(name=FILTERS)
def an_offset_costs_no_more_than_the_resolution_of_the_data(path: str, name: str) -> None:
    # A float32 of 50 is 4e-6 apart from the next.
    sos, x = FILTERS[name], noise(3000, 2) + 50
    zi = settled_state(sos, x)
    y, _ = in_pieces(mx.array(x), [300, 33], sos, pairs_of(zi), path)
    check_close(y, reference(x, sos, zi)[0], 1e-6, peak=50.0)


@case(length=[1, 3])
def short_messages_do_not_drift(path: str, length: int) -> None:
    # 0.5 Hz remember 10000 samples: what each message loses adds up over as many.
    n_messages = 300 if path == "plain" else 3000
    x = noise(n_messages * length, 2) + 50
    zi = settled_state(HIGH_PASS, x)
    y, _ = in_pieces(mx.array(x), [length] * n_messages, HIGH_PASS, pairs_of(zi), path)
    check_close(y, reference(x, HIGH_PASS, zi)[0], 1e-7, peak=50.0)


@case()
def constant_is_removed_without_a_transient(path: str) -> None:
    x = np.full((2000, 3), 123.0, np.float32)
    zi = settled_state(HIGH_PASS, x)
    y, _ = in_pieces(mx.array(x), [1, 300, 999], HIGH_PASS, pairs_of(zi), path)
    assert np.abs(y).max() <= 123e-6


@case(n_sections=[1, 2, 3, 5, 9])
def any_number_of_sections(path: str, n_sections: int) -> None:
    sos, x = butter(2 * n_sections, 3000.0, fs=FS, output="sos"), noise(700, 3)
    assert len(sos) == n_sections
    zi = settled_state(sos, x)
    y, zf = in_pieces(mx.array(x), [400], sos, pairs_of(zi), path)
    expected, last = reference(x, sos, zi)
    check_close(y, expected)
    np.testing.assert_allclose(state_of(zf), last, rtol=0, atol=1e-5 * np.abs(last).max())


@case()
def unstable_sections_are_followed_as_well(path: str) -> None:
    # An integrator, and a pole at 1.001.
    sos, x = np.array([[0.1, 0, 0, 1, -1, 0], [1, 0, 0, 1, -1.501, 0.5005]]), noise(700, 2)
    expected, _ = reference(x, sos)
    y, _ = in_pieces(mx.array(x), [300], sos, None, path)
    check_close(y, expected)


# ----------------------------------------------------------------------------------------------------------- cutting


@case(name=["band-pass 4", "high-pass 0.5 Hz 4"])
def cutting_does_not_matter(path: str, name: str) -> None:
    sos, x = FILTERS[name], noise(1300, 2) + 3
    zi = pairs_of(settled_state(sos, x))
    whole, _ = in_pieces(mx.array(x), [], sos, zi, path)
    for lengths in ([1] * 20, [0, 7, 0, 0, 33, 1, 0, 1023, 0], [1299, 0], [512, 512]):
        y, zf = in_pieces(mx.array(x), lengths, sos, zi, path)
        check_close(y, whole, 2e-6)
        assert zf.shape == zi.shape


@case(length=[None, 2, 4])
def state_is_that_of_scipy(path: str, length: int | None) -> None:
    x = noise(3, 700)
    start = None if length is None else np.full((4, 3, 2), 0.01)
    expected, last = reference(x, BAND_PASS, start, axis=1)
    zi = None if start is None else mx.array(start) if length == 2 else pairs_of(start, axis=1)
    y, zf = sosfilt(mx.array(x), BAND_PASS, zi, axis=1, path=path)
    check_close(y, expected)
    assert zf.shape == (4, 3, length or 4)
    zf = np.array(zf).astype(np.float64) if length == 2 else state_of(zf, axis=1)
    np.testing.assert_allclose(zf, last, rtol=0, atol=1e-5 * np.abs(last).max())


@case(other=["cpu", "plain"])
def state_goes_on_with_other_kernels(path: str, other: str) -> None:
    x = noise(1200, 2) + 3
    zi = settled_state(HIGH_PASS, x)
    first, zf = in_pieces(mx.array(x[:700]), [300], HIGH_PASS, pairs_of(zi), path)
    last, _ = in_pieces(mx.array(x[700:]), [300], HIGH_PASS, zf, other)
    check_close(np.concatenate([first, last]), reference(x, HIGH_PASS, zi)[0])


@case(chunk_sizes=[(1,), (7,), (32, 512), (512, 3, 100)])
def chunk_sizes_do_not_matter(path: str, chunk_sizes: tuple[int, ...]) -> None:
    x = noise(1100, 2)[: 20 if chunk_sizes == (1,) else 200 if chunk_sizes == (7,) else None]
    y, _ = sosfilt(mx.array(x), BAND_PASS, axis=0, chunk_sizes=chunk_sizes, path=path)
    check_close(y, reference(x, BAND_PASS)[0])


# ------------------------------------------------------------------------------------------------- shapes and dtypes

SHAPES = [(60,), (60, 3), (3, 60), (60, 1), (1, 60), (60, 130), (130, 60), (2, 60, 3), (60, 2, 3), (2, 3, 60)]


@case(shape=[*SHAPES, (2, 60, 2, 3), (2, 3, 60, 2), (1, 1, 1, 60), (60, 1025)])
def any_axis(path: str, shape: tuple[int, ...]) -> None:
    axis, x, sos = shape.index(60), noise(*shape), BAND_PASS[:2]
    expected, last = reference(x, sos, axis=axis)
    for given, length in ((axis, 2), (axis - len(shape), 4)):
        zi = mx.zeros((2, *(length if dim == axis else n for dim, n in enumerate(shape))))
        first, zi = sosfilt(mx.array(x.take(range(33), axis)), sos, zi, axis=given, path=path)
        second, zf = sosfilt(mx.array(x.take(range(33, 60), axis)), sos, zi, axis=given, path=path)
        check_close(np.concatenate([np.array(first), np.array(second)], axis), expected)
        assert zf.shape == zi.shape and zf.dtype == mx.float32
    np.testing.assert_allclose(state_of(zf, axis), last, rtol=0, atol=1e-5 * np.abs(last).max())


@case(layout=["transposed", "strided", "reversed", "from the middle", "repeated", "not yet computed"])
def any_layout(path: str, layout: str) -> None:
    x = noise(80, 90)
    view, expected = {
        "transposed": lambda base: (base.T, x.T),
        "strided": lambda base: (base[::2, ::3], x[::2, ::3]),
        "reversed": lambda base: (base[::-1, ::-1], x[::-1, ::-1]),
        "from the middle": lambda base: (base[3:70, 5:60], x[3:70, 5:60]),
        "repeated": lambda base: (mx.broadcast_to(base[:1], (80, 90)), np.broadcast_to(x[:1], (80, 90))),
        "not yet computed": lambda base: ((base * 2 + 1).T, (x * 2 + 1).T),
    }[layout](mx.array(x))
    for axis in (0, 1):
        zi = 0.1 * np.ones((2, *view.shape)).take([0, 0], axis + 1)
        # The state is a view, too: every other entry of a wider one.
        given = mx.repeat(mx.array(zi), 2, axis=2 - axis)[(slice(None),) * (2 - axis) + (slice(None, None, 2),)]
        y, _ = sosfilt(view, BAND_PASS[:2], given, axis=axis, path=path)
        check_close(y, reference(expected, BAND_PASS[:2], zi, axis=axis)[0])


@case(dtype=["bool_", "int8", "uint8", "int16", "uint16", "int32", "float16", "bfloat16", "float64"])
def any_real_dtype_gives_float32(path: str, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool_" else 100, (100, 3))
    x = mx.array(values.astype(np.float32)).astype(getattr(mx, dtype), stream=mx.cpu)
    zi = mx.full((4, 2, 3), 0.5).astype(mx.float16)
    y, zf = sosfilt(x, BAND_PASS, zi, axis=0, path=path)
    assert zf.dtype == mx.float32
    check_close(y, reference(values, BAND_PASS, np.full((4, 2, 3), 0.5))[0])


# --------------------------------------------------------------------------------------------------------- ownership


@case(n=[1, 32, 300, 700])
def inputs_are_left_as_they_are(path: str, n: int) -> None:
    x, zi, sos = mx.array(noise(n, 3)), mx.array(noise(4, 4, 3)), BAND_PASS.copy()
    before = np.array(x).tobytes(), np.array(zi).tobytes()
    mx.eval(sosfilt(x, sos, zi, axis=0, path=path))
    assert (np.array(x).tobytes(), np.array(zi).tobytes()) == before
    np.testing.assert_array_equal(sos, BAND_PASS)


# ------------------------------------------------------------------------------------- samples that are not finite


def without(x: npt.NDArray, sos: npt.NDArray, zi: npt.NDArray) -> npt.NDArray[np.float64]:
    """What comes of *x*, time first, if the samples that are not finite are taken out and put back as they are."""
    expected = x.astype(np.float64)
    for channel in range(x.shape[1]):
        finite = np.abs(x[:, channel]) <= 1e30
        if not finite.any():
            continue
        expected[finite, channel], _ = reference(x[finite, channel], sos, zi[..., channel])
    return expected


@case(bad=[math.nan, math.inf, -math.inf, 3e38])
def bad_sample_comes_out_as_it_is_and_its_channel_goes_on_as_if_without(path: str, bad: float) -> None:
    x = noise(1300, 5) + 3
    zi = settled_state(BAND_PASS, x)
    # The first sample of all, the last of a message, in a row, and in the middle, each in a channel of its own.
    x[[0, 299, 700, 701, 702, 1000], [0, 1, 2, 2, 2, 3]] = np.float32(bad)
    expected = without(x, BAND_PASS, zi)
    bad_places = ~(np.abs(x) <= 1e30)
    for lengths in ([], [300] * 3, [1] * 4):
        y, zf = in_pieces(mx.array(x), lengths, BAND_PASS, pairs_of(zi), path)
        np.testing.assert_array_equal(y[bad_places], x[bad_places])
        check_close(np.where(bad_places, 0, y), np.where(bad_places, 0, expected))
        assert np.isfinite(np.array(zf)).all()


@case(axis=[0, 1])
def channel_bad_for_a_whole_message_keeps_its_state(path: str, axis: int) -> None:
    x = noise(900, 3) + 3
    zi = settled_state(BAND_PASS, x)
    x[300:600, 1] = math.nan
    expected = without(x, BAND_PASS, zi)
    given = mx.array(x) if axis == 0 else mx.array(x.T)
    start = pairs_of(zi) if axis == 0 else mx.swapaxes(pairs_of(zi), 1, 2)
    y, _ = in_pieces(given, [300, 300], BAND_PASS, start, path, axis=axis)
    y = y if axis == 0 else y.T
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    check_close(np.nan_to_num(y), np.nan_to_num(expected))


@case()
def bad_samples_anywhere_are_taken_out(path: str) -> None:
    x = noise(1100, 4)
    x[np.random.default_rng(1).random(x.shape) < [0.0, 0.01, 0.3, 1.0]] = math.nan
    zi = np.zeros((4, 2, 4))
    expected = without(x, BAND_PASS, zi)
    for lengths in ([], [5, 300, 0, 1, 600]):
        y, _ = in_pieces(mx.array(x), lengths, BAND_PASS, pairs_of(zi), path)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
        check_close(np.nan_to_num(y), np.nan_to_num(expected))


@case(name=["band-pass 4", "high-pass 0.5 Hz 4", "low-pass 50 Hz 4", "no feedback"])
def samples_at_the_ends_of_float32_do_no_harm(path: str, name: str) -> None:
    sos, x = FILTERS[name], noise(600, 2)
    largest = np.finfo(np.float32).max
    x[100:104, 0] = [largest, -largest, largest, 1e29]
    zi = settled_state(sos, x)
    y, zf = in_pieces(mx.array(x), [90, 20, 200], sos, pairs_of(zi), path)
    assert np.isfinite(y).all() and np.isfinite(np.array(zf)).all()
    check_close(y[:, 1], reference(x[:, 1], sos, zi[..., 1])[0])
