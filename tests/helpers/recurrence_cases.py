"""What holds for every recurrence whichever kernels compute it.

Each case takes an entry of :data:`helpers.recurrences.RECURRENCES` and the name of a path::

    @pytest.mark.parametrize("path", ["cpu", "plain"])
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("recurrence", RECURRENCES)
    def test_case(recurrence, case, path):
        CASES[case](RECURRENCES[recurrence], path)
"""

import functools
import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .recurrences import RECURRENCES, ULP, Cases, Float64, Recurrence, check_close, check_state, noise

CASES = Cases()


# ------------------------------------------------------------------------------------------------- values and cutting


@functools.cache
def _noise_on_offsets() -> npt.NDArray[np.float32]:
    # A float32 of 50 is 4e-6 apart from the next.
    return noise(12000, 3) + np.float32([0, 50, 50])


@functools.cache
def _expected(recurrence: str, name: str) -> tuple[Float64, Float64, Float64]:
    """The state that *follows_float64* begins with, and the results: those of one sample after the other take time."""
    entry, x = RECURRENCES[recurrence], _noise_on_offsets()
    coefficients = entry.coefficients[name]
    zi = entry.settled_state(coefficients, x) * [0, 0, 1]
    return zi, *entry.reference(x, coefficients, zi)


@CASES.add()
def follows_float64(recurrence: Recurrence, path: str) -> None:
    # From zero, from zero on an offset, and settled on the offset.
    x = _noise_on_offsets()
    for name, coefficients in recurrence.coefficients.items():
        zi, expected, last = _expected(recurrence.name, name)
        lengths, pairs = [3000, 1, 2, 299, 300, 1500, 0, 7], recurrence.pairs_of(zi)
        y, zf = recurrence.in_pieces(mx.array(x), lengths, coefficients, pairs, path)
        state = recurrence.state_of(zf)
        for channel in range(3):
            check_close(y[:, channel], expected[:, channel], name=(name, channel))
            check_close(y[:, channel], expected[:, channel], recurrence.tolerance, np.abs(x[:, channel]).max(), name)
            check_state(state[..., channel], last[..., channel], peak=np.abs(expected[:, channel]).max())


@CASES.add(memory=["short", "long"])
def cutting_does_not_matter(recurrence: Recurrence, path: str, memory: str) -> None:
    coefficients, x = getattr(recurrence, memory), noise(1300, 2) + 3
    settled = recurrence.settled_state(coefficients, x)
    for pair in recurrence.forms:
        zi = recurrence.pairs_of(settled) if pair else mx.array(settled)
        whole, _ = recurrence.in_pieces(mx.array(x), [], coefficients, zi, path)
        # What rounding takes from a state without pairs adds up in a long memory.
        for lengths in ([1] * 30, [0, 7, 0, 0, 33, 1, 0, 1023, 0], [1299, 0], [512, 512])[: 4 if pair else 2]:
            y, zf = recurrence.in_pieces(mx.array(x), lengths, coefficients, zi, path)
            assert zf.shape == zi.shape
            if pair or memory == "short":
                check_close(y, whole, 2e-6, name=(pair, lengths))


@CASES.add(given=["none", "single", "pair"])
def state_is_that_of_scipy(recurrence: Recurrence, path: str, given: str) -> None:
    if given == "single" and False not in recurrence.forms:
        return
    x, coefficients = noise(3, 700), recurrence.short
    start = np.full(recurrence.state_shape(x.shape, 1, pair=False), 0.0 if given == "none" else 0.01)
    expected, last = recurrence.reference(x, coefficients, start, axis=1)
    zi = {"none": None, "single": mx.array(start), "pair": recurrence.pairs_of(start, axis=1)}[given]
    y, zf = recurrence.function(mx.array(x), coefficients, zi, axis=1, path=path)
    check_close(y, expected)
    pair = given == "pair" or (given == "none" and recurrence.starts_with_a_pair)
    assert zf.shape == recurrence.state_shape(x.shape, 1, pair=pair)
    check_state(recurrence.state_of(zf, axis=1) if pair else np.array(zf), last)


@CASES.add(other=["cpu", "plain"])
def state_goes_on_with_other_kernels(recurrence: Recurrence, path: str, other: str) -> None:
    x, coefficients = noise(1200, 2) + 3, recurrence.long
    zi = recurrence.settled_state(coefficients, x)
    first, zf = recurrence.in_pieces(mx.array(x[:700]), [300], coefficients, recurrence.pairs_of(zi), path)
    last, _ = recurrence.in_pieces(mx.array(x[700:]), [300], coefficients, zf, other)
    check_close(np.concatenate([first, last]), recurrence.reference(x, coefficients, zi)[0])


@CASES.add(chunk_sizes=[(1,), (7,), (32, 512), (512, 3, 100)])
def chunk_sizes_do_not_matter(recurrence: Recurrence, path: str, chunk_sizes: tuple[int, ...]) -> None:
    x = noise({1: 20, 7: 200}.get(chunk_sizes[0], 1100), 2)
    y, _ = recurrence.function(mx.array(x), recurrence.short, axis=0, chunk_sizes=chunk_sizes, path=path)
    check_close(y, recurrence.reference(x, recurrence.short)[0])


# ------------------------------------------------------------------------------------------------- shapes and dtypes

SHAPES = [(60,), (60, 3), (3, 60), (60, 1), (1, 60), (60, 1025), (257, 60), (2, 60, 3), (60, 2, 3), (2, 3, 60)]


@CASES.add(shape=[*SHAPES, (60, 2, 3, 2), (2, 60, 2, 3), (2, 3, 60, 2), (1, 1, 1, 60)])
def any_axis(recurrence: Recurrence, path: str, shape: tuple[int, ...]) -> None:
    axis, x, coefficients = shape.index(60), noise(*shape), recurrence.short
    expected, last = recurrence.reference(x, coefficients, axis=axis)
    for given, pair in zip((axis - len(shape), axis), recurrence.forms, strict=False):
        zi = mx.zeros(recurrence.state_shape(shape, axis, pair=pair))
        first, zi = recurrence.function(mx.array(x.take(range(33), axis)), coefficients, zi, axis=given, path=path)
        second, zf = recurrence.function(mx.array(x.take(range(33, 60), axis)), coefficients, zi, axis=given, path=path)
        check_close(np.concatenate([np.array(first), np.array(second)], axis), expected)
        assert zf.shape == zi.shape and zf.dtype == mx.float32
        if pair:
            check_state(recurrence.state_of(zf, axis), last)


@CASES.add(layout=["transposed", "strided", "reversed", "from the middle", "repeated", "not yet computed"])
def any_layout(recurrence: Recurrence, path: str, layout: str) -> None:
    x, coefficients = noise(80, 90), recurrence.short
    view, expected = {
        "transposed": lambda base: (base.T, x.T),
        "strided": lambda base: (base[::2, ::3], x[::2, ::3]),
        "reversed": lambda base: (base[::-1, ::-1], x[::-1, ::-1]),
        "from the middle": lambda base: (base[3:70, 5:60], x[3:70, 5:60]),
        "repeated": lambda base: (mx.broadcast_to(base[:1], (80, 90)), np.broadcast_to(x[:1], (80, 90))),
        "not yet computed": lambda base: ((base * 2 + 1).T, (x * 2 + 1).T),
    }[layout](mx.array(x))
    for axis in (0, 1):
        zi = np.full(recurrence.state_shape(view.shape, axis, pair=False), 0.1)
        # The state is a view, too: every other entry of a wider one.
        channels = recurrence.state_axis(1 - axis)
        given = mx.repeat(recurrence.given(zi, axis), 2, axis=channels)[
            (slice(None),) * channels + (slice(None, None, 2),)
        ]
        y, _ = recurrence.function(view, coefficients, given, axis=axis, path=path)
        check_close(y, recurrence.reference(expected, coefficients, zi, axis=axis)[0])


@CASES.add(dtype=["bool_", "int8", "uint8", "int16", "uint16", "int32", "float16", "bfloat16", "float64"])
def any_real_dtype_gives_float32(recurrence: Recurrence, path: str, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool_" else 100, (100, 3))
    x = mx.array(values.astype(np.float32)).astype(getattr(mx, dtype), stream=mx.cpu)
    zi = np.full(recurrence.state_shape(x.shape, 0, pair=False), 0.5)
    y, zf = recurrence.function(x, recurrence.short, recurrence.given(zi).astype(mx.float16), axis=0, path=path)
    assert zf.dtype == mx.float32
    check_close(y, recurrence.reference(values, recurrence.short, zi)[0])


# --------------------------------------------------------------------------------------------------------- ownership


@CASES.add(n=[1, 32, 300, 1100])
def inputs_are_left_as_they_are(recurrence: Recurrence, path: str, n: int) -> None:
    x, zi = mx.array(noise(n, 3)), mx.array(noise(*recurrence.state_shape((n, 3), 0, pair=True)))
    coefficients = np.copy(recurrence.short)
    before = np.array(x).tobytes(), np.array(zi).tobytes()
    mx.eval(recurrence.function(x, recurrence.short, zi, axis=0, path=path))
    assert (np.array(x).tobytes(), np.array(zi).tobytes()) == before
    np.testing.assert_array_equal(recurrence.short, coefficients)


# ------------------------------------------------------------------------------------- samples that are not finite


@CASES.add(bad=[math.nan, math.inf, -math.inf])
def bad_sample_comes_out_as_it_is_and_its_channel_goes_on(recurrence: Recurrence, path: str, bad: float) -> None:
    coefficients, x = recurrence.short, noise(2100, 5) + 3
    zi = recurrence.settled_state(coefficients, x)
    # The first sample of all, the last of a message, in a row, and in the middle, each in a channel of its own.
    x[[0, 299, 700, 701, 702, 1000], [0, 1, 2, 2, 2, 3]] = bad
    expected, is_bad = recurrence.without(x, coefficients, zi), ~np.isfinite(x)
    y, zf = recurrence.in_pieces(mx.array(x), [300] * 6, coefficients, recurrence.pairs_of(zi), path)
    np.testing.assert_array_equal(y[is_bad], x[is_bad])
    assert np.isfinite(y).sum() == y.size - 6 and np.isfinite(np.array(zf)).all()
    check_close(y[:, 4], expected[:, 4])
    # What a sample counts that is not there is forgotten after 30 memories.
    check_close(y[1900:], expected[1900:])


@CASES.add(axis=[0, 1])
def channel_bad_for_a_whole_message_keeps_its_state(recurrence: Recurrence, path: str, axis: int) -> None:
    coefficients = recurrence.short
    for bad in (math.nan, math.inf, -math.inf):
        x = noise(900, 3) + 3
        x[300:600, 1] = bad
        is_bad = ~np.isfinite(x)
        expected = recurrence.without(x, coefficients, recurrence.settled_state(coefficients, x))
        data = x.T if axis else x
        zi = recurrence.pairs_of(recurrence.settled_state(coefficients, data, axis), axis)
        results, states = [], []
        for piece in np.split(data, 3, axis):
            y, zi = recurrence.function(mx.array(piece), coefficients, zi, axis=axis, path=path)
            results.append(np.array(y))
            states.append(recurrence.state_of(zi, axis).take(1, recurrence.state_axis(1 - axis)))
        y = np.concatenate(results, axis)
        y = y.T if axis else y
        np.testing.assert_array_equal(y[is_bad], x[is_bad])
        check_close(np.where(is_bad, 0, y), np.where(is_bad, 0, expected))
        check_state(states[1], states[0], ULP)


@CASES.add(sign=[1.0, -1.0])
def largest_sample_is_taken_and_a_larger_one_is_not(recurrence: Recurrence, path: str, sign: float) -> None:
    coefficients, x = recurrence.short, noise(300, 3)
    largest = np.float32(recurrence.largest)
    x[100, 0], x[100, 1] = sign * largest, sign * np.nextafter(largest, np.float32(math.inf))
    zi = np.zeros(recurrence.state_shape(x.shape, 0, pair=False))
    expected = recurrence.without(x, coefficients, zi)
    y, _ = recurrence.in_pieces(mx.array(x), [101], coefficients, recurrence.pairs_of(zi), path)
    assert y[100, 1] == x[100, 1]
    check_close(y[101:, 0], expected[101:, 0], peak=np.abs(expected[:, 0]).max())
    # What counts as one more sample or less is soon forgotten.
    check_close(y[280:, 1:], expected[280:, 1:], 1e-2)


# ------------------------------------------------------------------------------------------------------------- blocks


@CASES.add(n_channels=[33, 70])
def more_samples_and_channels_than_a_block_takes(recurrence: Recurrence, path: str, n_channels: int) -> None:
    x, coefficients = noise(1100, n_channels) + 5, recurrence.short
    zi = recurrence.settled_state(coefficients, x)
    expected, last = recurrence.reference(x, coefficients, zi)
    y, zf = recurrence.in_pieces(mx.array(x), [], coefficients, recurrence.pairs_of(zi), path)
    check_close(y, expected, recurrence.tolerance, np.abs(x).max())
    check_state(recurrence.state_of(zf), last, peak=np.abs(x).max())


EXACT_CASES = Cases()
"""For kernels that leave out what is not finite, as if it were not there: ``"cpu"`` and ``"cuda"``."""


@EXACT_CASES.add()
def bad_samples_in_any_block(recurrence: Recurrence, path: str) -> None:
    coefficients, x = recurrence.short, noise(2000, 40)
    x[np.random.default_rng(1).random(x.shape) < 0.001] = math.nan
    # Whole blocks of a channel, one of them the last.
    x[200:700, 3] = x[1500:, 35] = math.inf
    zi = np.zeros(recurrence.state_shape(x.shape, 0, pair=False))
    y, zf = recurrence.in_pieces(mx.array(x), [], coefficients, recurrence.pairs_of(zi), path)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(y[~finite], x[~finite])
    check_close(np.where(finite, y, 0), np.where(finite, recurrence.without(x, coefficients, zi), 0))
    _, last = recurrence.reference(x[:1500, 35][finite[:1500, 35]], coefficients, zi[..., 35])
    check_state(recurrence.state_of(zf)[..., 35], last)
