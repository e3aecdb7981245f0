import typing

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from hypothesis import given, settings
from hypothesis import strategies as st

from ezmsg.mlx.rechunk import RechunkSettings, RechunkTransformer

GAIN = 1 / 30000.0


class Arrival(typing.NamedTuple):
    n: int
    gap: int
    """Samples lost (or repeated, if negative) before this message."""
    jitter: float
    """Distance of the offset from the sample grid, in samples; below half a sample, also from message to message."""


arrivals = st.builds(
    Arrival,
    n=st.one_of(st.integers(0, 2000), st.integers(0, 40), st.sampled_from([300, 0, 1])),
    gap=st.sampled_from([0, 0, 0, 0, 1, 250, -3]),
    jitter=st.sampled_from([0.0, 0.0, 0.2, -0.2]),
)
sizes = st.lists(st.one_of(st.integers(1, 700), st.sampled_from([1, 300, 1200])), min_size=1, max_size=3).map(tuple)
rechunk_settings = st.builds(RechunkSettings, sizes=sizes, remainder=st.sampled_from(["carry", "emit"]))


def messages(stream: list[Arrival], axis: int, backend: str) -> list[AxisArray]:
    """A stream of two channels which count the samples of all messages, whatever their offsets say."""
    if backend == "mlx":
        import mlx.core as mx
    made = []
    seen, at = 0, 3000
    for n, gap, jitter in stream:
        at += gap
        data = np.stack([np.arange(seen, seen + n), -np.arange(seen, seen + n)], axis=1 - axis)
        made.append(
            AxisArray(
                mx.array(data) if backend == "mlx" else data,
                dims=["time", "ch"] if axis == 0 else ["ch", "time"],
                axes={"time": AxisArray.LinearAxis(gain=GAIN, offset=(at + jitter) * GAIN, unit="s")},
            )
        )
        seen, at = seen + n, at + n
    return made


def assert_same_samples(out: list[AxisArray], stream: list[Arrival], sources: list[AxisArray], axis: int) -> None:
    """Every sample once, in order, and under the offset that its message gave it, to the last bit."""
    pieces = [np.moveaxis(np.array(piece.data), axis, -1) for piece in out]
    n_total = sum(arrival.n for arrival in stream)
    got = np.concatenate([np.zeros((2, 0), int), *pieces], axis=-1)
    np.testing.assert_array_equal(got, [np.arange(n_total), -np.arange(n_total)])

    starts = np.cumsum([0] + [arrival.n for arrival in stream])
    for piece, data in zip(out, pieces, strict=True):
        if data.size:
            first = int(data[0, 0])
            source = int(np.searchsorted(starts, first, side="right")) - 1
            assert piece.axes["time"].offset == sources[source].axes["time"].value(first - int(starts[source]))


def stretches(stream: list[Arrival], remainder: str) -> list[int]:
    """Samples in each part of the stream that is cut by itself: between two gaps or, without a carry, each message."""
    parts, gap = [0], 0
    for arrival in stream:
        gap += arrival.gap
        if arrival.n:
            if gap or remainder == "emit":
                parts.append(0)
            parts[-1] += arrival.n
            gap = 0
    return parts


def assert_allowed_lengths(lengths: list[int], stream: list[Arrival], settings: RechunkSettings) -> None:
    """Each stretch comes as sizes and then, at its very end, as descending powers of two below the least of them."""
    rest = [n for n in lengths if n]
    for n_stretch in stretches(stream, settings.remainder):
        pieces: list[int] = []
        while sum(pieces) < n_stretch:
            pieces.append(rest.pop(0))
        assert sum(pieces) == n_stretch
        cut = [n for n in pieces if n in settings.sizes]
        end = pieces[len(cut) :]
        assert pieces == cut + end
        assert end == sorted(set(end), reverse=True) and all(n & (n - 1) == 0 for n in end)
        assert sum(end) < min(settings.sizes)
    assert rest == []


def check(stream: list[Arrival], settings: RechunkSettings, axis: int, backend: str) -> None:
    sources = messages(stream, axis, backend)
    rechunk = RechunkTransformer(settings)
    out: list[AxisArray] = []
    n_waiting = 0
    for source in sources:
        n_carried = n_waiting
        pieces = rechunk(source)
        n = source.data.shape[axis]
        n_waiting += n - sum(piece.data.shape[axis] for piece in pieces)
        assert 0 <= n_waiting < (1 if settings.remainder == "emit" else min(settings.sizes))
        if n == 0 or (n_carried == 0 and n in settings.sizes):
            assert len(pieces) == 1 and pieces[0] is source
        out += pieces
    out += rechunk.flush()
    assert_same_samples(out, stream, sources, axis)
    assert_allowed_lengths([piece.data.shape[axis] for piece in out], stream, settings)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(stream=st.lists(arrivals, max_size=12), rechunk_settings=rechunk_settings, axis=st.sampled_from([0, 1]))
def test_numpy_stream_is_cut_without_loss(stream, rechunk_settings, axis):
    check(stream, rechunk_settings, axis, "numpy")


@settings(deadline=None, max_examples=15, derandomize=True, database=None)
@given(stream=st.lists(arrivals, max_size=5), rechunk_settings=rechunk_settings, axis=st.sampled_from([0, 1]))
def test_mlx_stream_is_cut_without_loss(stream, rechunk_settings, axis):
    pytest.importorskip("mlx.core")
    check(stream, rechunk_settings, axis, "mlx")


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(steps=st.lists(st.tuples(arrivals, rechunk_settings), max_size=12), axis=st.sampled_from([0, 1]))
def test_settings_that_change_with_every_message_lose_nothing(steps, axis):
    stream = [arrival for arrival, _ in steps]
    sources = messages(stream, axis, "numpy")
    rechunk = RechunkTransformer()
    out: list[AxisArray] = []
    for source, (_, new_settings) in zip(sources, steps, strict=False):
        rechunk.update_settings(new_settings)
        out += rechunk(source)
    out += rechunk.flush()
    assert_same_samples(out, stream, sources, axis)
