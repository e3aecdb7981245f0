"""What holds for second-order sections in particular, whichever kernels compute them.

Each case takes the name of a path of :func:`ezmsg.mlx.sosfilt.sosfilt`. What holds for every recurrence is in
:mod:`helpers.recurrence_cases`.
"""

import math

import mlx.core as mx
import numpy as np
from scipy.signal import butter

from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE

from .recurrences import BAND_PASS, FILTERS, FS, HIGH_PASS, SOSFILT, Cases, check_close, check_state, noise

CASES = Cases()


# ---------------------------------------------------------------------------------------------------------- accuracy


@CASES.add(length=[1, 3])
def short_messages_do_not_drift(path: str, length: int) -> None:
    # 0.5 Hz remember 10000 samples: what each message loses adds up over as many.
    n_messages = 300 if path == "plain" else 3000 // length
    x = noise(n_messages * length, 2) + 50
    zi = SOSFILT.settled_state(HIGH_PASS, x)
    y, _ = SOSFILT.in_pieces(mx.array(x), [length] * n_messages, HIGH_PASS, SOSFILT.pairs_of(zi), path)
    check_close(y, SOSFILT.reference(x, HIGH_PASS, zi)[0], 1e-7, peak=50.0)


@CASES.add()
def constant_is_removed_without_a_transient(path: str) -> None:
    x = np.full((2000, 3), 123.0, np.float32)
    zi = SOSFILT.settled_state(HIGH_PASS, x)
    y, _ = SOSFILT.in_pieces(mx.array(x), [1, 300, 999], HIGH_PASS, SOSFILT.pairs_of(zi), path)
    assert np.abs(y).max() <= 123e-6


@CASES.add(n_sections=[1, 2, 3, 5, 9])
def any_number_of_sections(path: str, n_sections: int) -> None:
    sos, x = butter(2 * n_sections, 3000.0, fs=FS, output="sos"), noise(700, 3)
    assert len(sos) == n_sections
    zi = SOSFILT.settled_state(sos, x)
    y, zf = SOSFILT.in_pieces(mx.array(x), [400], sos, SOSFILT.pairs_of(zi), path)
    expected, last = SOSFILT.reference(x, sos, zi)
    check_close(y, expected)
    check_state(SOSFILT.state_of(zf), last)


@CASES.add()
def unstable_sections_are_followed_as_well(path: str) -> None:
    # An integrator, and a pole at 1.001.
    sos, x = np.array([[0.1, 0, 0, 1, -1, 0], [1, 0, 0, 1, -1.501, 0.5005]]), noise(700, 2)
    expected, _ = SOSFILT.reference(x, sos, np.zeros((2, 2, 2)))
    y, _ = SOSFILT.in_pieces(mx.array(x), [300], sos, None, path)
    check_close(y, expected)


# ------------------------------------------------------------------------------------- samples that are not finite


@CASES.add(bad=[math.nan, math.inf, -math.inf, 3e38])
def bad_sample_comes_out_as_it_is_and_its_channel_goes_on_as_if_without(path: str, bad: float) -> None:
    x = noise(1300, 5) + 3
    zi = SOSFILT.settled_state(BAND_PASS, x)
    # The first sample of all, the last of a message, in a row, and in the middle, each in a channel of its own.
    x[[0, 299, 700, 701, 702, 1000], [0, 1, 2, 2, 2, 3]] = np.float32(bad)
    expected = SOSFILT.without(x, BAND_PASS, zi)
    bad_places = ~(np.abs(x) <= LARGEST_SAMPLE)
    for lengths in ([], [300] * 3, [1] * 4):
        y, zf = SOSFILT.in_pieces(mx.array(x), lengths, BAND_PASS, SOSFILT.pairs_of(zi), path)
        np.testing.assert_array_equal(y[bad_places], x[bad_places])
        check_close(np.where(bad_places, 0, y), np.where(bad_places, 0, expected))
        assert np.isfinite(np.array(zf)).all()


@CASES.add()
def bad_samples_anywhere_are_taken_out(path: str) -> None:
    x = noise(1100, 4)
    x[np.random.default_rng(1).random(x.shape) < [0.0, 0.01, 0.3, 1.0]] = math.nan
    zi = np.zeros((4, 2, 4))
    expected = SOSFILT.without(x, BAND_PASS, zi)
    for lengths in ([], [5, 300, 0, 1, 600]):
        y, _ = SOSFILT.in_pieces(mx.array(x), lengths, BAND_PASS, SOSFILT.pairs_of(zi), path)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
        check_close(np.nan_to_num(y), np.nan_to_num(expected))


@CASES.add(name=["band-pass 4", "high-pass 0.5 Hz 4", "low-pass 50 Hz 4", "no feedback"])
def samples_at_the_ends_of_float32_do_no_harm(path: str, name: str) -> None:
    sos, x = FILTERS[name], noise(600, 2)
    largest = np.finfo(np.float32).max
    x[100:104, 0] = [largest, -largest, largest, 1e29]
    zi = SOSFILT.settled_state(sos, x)
    y, zf = SOSFILT.in_pieces(mx.array(x), [90, 20, 200], sos, SOSFILT.pairs_of(zi), path)
    assert np.isfinite(y).all() and np.isfinite(np.array(zf)).all()
    check_close(y[:, 1], SOSFILT.reference(x[:, 1], sos, zi[..., 1])[0])
