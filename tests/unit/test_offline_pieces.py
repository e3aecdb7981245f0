"""A recording in pieces of time: results like those of one run, and what is refused."""

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.aggregate import AggregateTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.downsample import DownsampleSettings, DownsampleTransformer
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.offline_memory import MemorySink, MemorySource
from helpers.processes import RecordedLog, in_fresh_process
from helpers.random_recordings import RandomRecording, detrended
from scipy import signal

from ezmsg.mlx import (
    AsArrayTransformer,
    BinnedEventAggregator,
    ButterworthFilterSettings,
    ChainTransformer,
    CombFilterTransformer,
    DetrendTransformer,
    EWMATransformer,
    Parallel,
    PowTransformer,
    Rate,
    ReadLateTransformer,
    RechunkSettings,
    RMSBandPowerTransformer,
    SquareLawBandPowerTransformer,
    ThresholdCrossingTransformer,
    ZarrSink,
    process_recording,
    process_recordings,
)
from ezmsg.mlx.butterworthfilter import ButterworthFilterTransformer
from ezmsg.mlx.offline.pieces import (
    MOST_ROWS,
    Piece,
    PieceResults,
    Seams,
    chain_settling_time,
    differences,
    plan_pieces,
)
from ezmsg.mlx.offline.zarrlayout import RowWriter, rows_of_chunk
from ezmsg.mlx.scaler import AdaptiveStandardScalerTransformer
from ezmsg.mlx.stream.fusible import averaging_time, filter_time, grid_in_a_row

zarr = pytest.importorskip("zarr")
pytest.importorskip("mlx.core")

RATE = 1000.123
"""So that bins of 10.5 ms begin at no regular samples."""


def bins_chain():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        CommonRereferenceTransformer(mode="mean"),
        DetrendTransformer(time_constant=0.03),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.01),
        BinnedAggregateTransformer(bin_duration=0.0105),
        DownsampleTransformer(factor=3),
        ReadLateTransformer(depth=2),
    ]


def one_chain():
    return ChainTransformer(make_chain=bins_chain)


def filter_chain():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        ButterworthFilterTransformer(order=2, cuton=50.0, cutoff=200.0),
        AdaptiveStandardScalerTransformer(time_constant=0.02),
        AsArrayTransformer(backend="numpy"),
    ]


def window_chain():
    return [
        AsArrayTransformer(backend="numpy", dtype="float64"),
        WindowTransformer(newaxis="win", window_dur=0.05, window_shift=0.013, zero_pad_until="none"),
        AggregateTransformer(axis="time"),
    ]


BAND = ButterworthFilterSettings(order=2, cuton=50.0, cutoff=200.0, coef_type="sos")


def branches_chain():
    """Branches of this package alone, one with a composite."""
    events = ThresholdCrossingTransformer(threshold=150.0, output_format="dense")
    counts = [events, BinnedEventAggregator(bin_duration=0.011, fractional=False)]
    power = RMSBandPowerTransformer(bandpass=BAND, bin_duration=0.011)
    return [AsArrayTransformer(backend="mlx"), Parallel({"n": counts, "p": power}), AsArrayTransformer(backend="numpy")]


def smoothed_chain():
    smooth = ButterworthFilterSettings(order=2, cutoff=20.0, coef_type="sos")
    power = SquareLawBandPowerTransformer(bandpass=BAND, lowpass=smooth, downsample=DownsampleSettings(factor=7))
    return [AsArrayTransformer(backend="mlx"), Parallel({"power": power}), AsArrayTransformer(backend="numpy")]


def double():
    return [AsArrayTransformer(backend="numpy", dtype="float32"), PowTransformer(exponent=2.0)]


def source(n_samples=9000, **options):
    return MemorySource(n_samples=n_samples, chunk=1700, **({"rate": RATE} | options))


@pytest.fixture(scope="module")
def executor():
    """Workers that cost nothing to start: what a worker is, is not the point here."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.zarr"


def sink(path):
    return ZarrSink(path, chunk_mb=0.03)


def in_pieces(recording, factory, path, executor, into=sink, **options):
    options = {"rechunk": RechunkSettings(sizes=(64,)), "checkpoint_seconds": 1.9, "progress": False} | options
    return process_recording(recording, factory, into(path), workers=executor, **options)


def in_one(recording, factory):
    memory = MemorySink()
    process_recording(recording, factory, memory, rechunk=RechunkSettings(sizes=(64,)), progress=False)
    return memory


def contents(path):
    group = zarr.open_group(str(path), mode="r")
    data = group["data"]
    when = "time" if "time" in group else data.attrs["_ARRAY_DIMENSIONS"][0]
    return data[:], group[when][:]


# ----------------------------------------------------------------------------------------------------------- results


CHAINS = [bins_chain, one_chain, filter_chain, window_chain, branches_chain, smoothed_chain]


@pytest.mark.parametrize("factory", CHAINS)
def test_results_are_those_of_one_run_within_the_tolerance(factory, path, executor):
    expected = in_one(source(), factory)
    done = in_pieces(source(), factory, path, executor)
    data, times = contents(path)
    np.testing.assert_allclose(times, expected.times, rtol=0, atol=1e-9)
    assert data.shape == expected.results.shape and done.n_pieces > 3
    peak = np.abs(expected.results).max(axis=0)
    assert (np.abs(data - expected.results) <= 1e-6 * peak).all()
    assert 0.0 <= done.largest_difference <= 1e-6
    about = zarr.open_group(str(path), mode="r").attrs["pieces"]
    assert (about["count"], about["largest_difference"]) == (done.n_pieces, done.largest_difference)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@in_fresh_process
def test_a_branch_says_where_its_results_lie_before_a_chain_has_run():
    """What is known of ezmsg-sigproc's transformers is registered by whoever asks first."""
    power = RMSBandPowerTransformer(bandpass=BAND, bin_duration=0.01)
    for stages in (power, BinnedAggregateTransformer(bin_duration=0.01), Rate(bin_duration=0.01)):
        grid = grid_in_a_row([Parallel({"branch": stages})], 1e-3)
        assert (grid.gain, grid.results_after(1000), grid.start_of(3)) == (0.01, 100, 30)
        assert chain_settling_time([Parallel({"branch": stages})], 1e-6, 1e-3) < 1.0


def test_margins_in_seconds_serve_branches(path, executor):
    expected = in_one(source(), branches_chain)
    assert in_pieces(source(), branches_chain, path, executor, margin=0.5).n_pieces > 3
    np.testing.assert_allclose(contents(path)[0], expected.results, rtol=1e-6, atol=1e-6 * expected.results.max())


def test_a_branch_that_says_nothing_is_named(path, executor):
    def chain():
        return Parallel({"a": lambda message: message})

    with pytest.raises(ValueError, match=r"Parallel.* does not say how long it remembers"):
        in_pieces(source(), chain, path, executor)


def test_a_recording_that_is_not_cut_gives_the_very_bits(path, executor):
    expected = in_one(source(), filter_chain)
    done = in_pieces(source(), filter_chain, path, executor, margin="exact")
    np.testing.assert_array_equal(contents(path)[0], expected.results)
    assert (done.n_pieces, done.largest_difference) == (1, None)


def test_a_recording_of_one_piece_gives_the_very_bits(path, executor):
    expected = in_one(source(), filter_chain)
    assert in_pieces(source(), filter_chain, path, executor, checkpoint_seconds=math.inf).n_pieces == 1
    np.testing.assert_array_equal(contents(path)[0], expected.results)


@pytest.mark.parametrize("layout", [{"chunk_samples": 100}, {"chunk_mb": 0.03, "chunk_channels": 3}])
@pytest.mark.parametrize("factory", [double, bins_chain])
def test_no_two_pieces_write_to_one_chunk(layout, factory, path, executor, monkeypatch):
    written, write = [], RowWriter.write

    def noted(self, begin, rows):
        written.append((self.array.basename, begin, begin + len(rows), self.array.chunks[0], self.array.shape[0]))
        write(self, begin, rows)

    monkeypatch.setattr(RowWriter, "write", noted)
    in_pieces(source(9001), factory, path, executor, lambda place: ZarrSink(place, **layout))
    expected = in_one(source(9001), factory)
    np.testing.assert_allclose(contents(path)[0], expected.results, rtol=1e-5)
    chunks = [(name, begin // size) for name, begin, end, size, _ in written for _ in range(-(-(end - begin) // size))]
    assert len(chunks) == len(set(chunks))
    assert all(begin % size == 0 and (end % size == 0 or end == n) for _, begin, end, size, n in written)
    assert zarr.open_group(str(path), mode="r").attrs["pieces"]["count"] > 3


@pytest.mark.parametrize(
    ("most", "n_rows", "length"), [(16384, None, 16384), (100, 40, 40), (100, 1024, 64), (100, 10007, 1)]
)
def test_chunks_divide_a_piece(most, n_rows, length):
    assert rows_of_chunk(most, n_rows) == length


@pytest.mark.parametrize("rate", [1000.0, 30000.3])
@pytest.mark.parametrize("factory", [bins_chain, window_chain, filter_chain])
def test_pieces_have_equal_numbers_of_results_and_read_no_further_than_they_need(factory, rate):
    steps = [*factory()]
    plan = plan_pieces(round(60 * rate), rate, steps, seconds=7.0, margin=None, tolerance=1e-6)
    *lengths, last = np.diff(plan.borders)
    assert len(set(lengths)) == 1 and 0 < last <= lengths[0] and len(lengths) > 7
    assert all(lengths[0] % 2**k == 0 for k in range(int(math.log2(lengths[0] / 16))))
    results_after = grid_in_a_row(steps, 1.0 / rate).results_after
    for one, other in itertools.pairwise(plan.pieces):
        assert one.end == other.begin and results_after(one.end) == one.results_end
        assert results_after(one.end - 1) < one.results_end
        # Compared are results that have settled, and at least one.
        assert results_after(other.start + other.margin - 1) <= other.first_settled < other.results_begin


def test_progress_is_that_of_the_recording(path, executor):
    told = []
    in_pieces(source(), double, path, executor, progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (9000, 9000) and [done for done, _ in told] == sorted(done for done, _ in told)


# ----------------------------------------------------------------------------------------------------------- margins


@pytest.mark.parametrize(
    "sos",
    [
        signal.butter(2, 300.0, "highpass", fs=30_000.0, output="sos"),
        signal.butter(5, (300.0, 6000.0), "bandpass", fs=30_000.0, output="sos"),
        signal.butter(4, 50.0, "lowpass", fs=30_000.0, output="sos"),
        signal.cheby1(8, 0.1, 200.0, fs=2000.0, output="sos"),
        signal.iirnotch(50.0, 30.0, 1000.0),
    ],
    ids=["high-pass", "band-pass", "low-pass", "Chebyshev", "notch"],
)
def test_a_filter_has_forgotten_how_it_began_after_its_settling_time(sos):
    sos = sos if isinstance(sos, np.ndarray) else signal.tf2sos(*sos)
    n = round(filter_time(sos, "sos", 1e-6, 1.0))
    walk = np.random.default_rng(0).standard_normal(2 * n + 1000).cumsum()
    square = np.sign(np.sin(np.arange(2 * n + 1000) * 0.073))
    settled, at_first = [], []
    for x in (walk - walk.mean(), square):
        begun_late = signal.sosfilt(sos, x[n:], zi=signal.sosfilt_zi(sos) * x[n])[0]
        differences = np.abs(signal.sosfilt(sos, x)[n:] - begun_late) / np.abs(x).max()
        settled.append(differences[n:].max())
        at_first.append(differences[: n // 4].max())
    assert max(settled) <= 1e-6 < max(at_first)


def test_settling_of_taps_and_averages():
    assert filter_time((np.ones(7), np.array([1.0])), "ba", 1e-6, 0.5) == 3.5
    assert filter_time(np.array([[1.0, 0, 0, 1.0, -1.0, 0]]), "sos", 1e-6, 1.0) == math.inf
    assert math.exp(-averaging_time(2.0, 1e-6) / 2.0) == pytest.approx(1e-7)


def test_a_step_that_says_nothing_is_named_and_a_given_margin_serves(path, executor):
    def halved(message):
        return replace(message, data=message.data / 2)

    with pytest.raises(ValueError, match=r"halved does not say how long it remembers .*margin='exact'"):
        in_pieces(source(), lambda: halved, path, executor)
    assert in_pieces(source(), lambda: halved, path, executor, margin=0.0).n_pieces > 3
    np.testing.assert_array_equal(contents(path)[0], source().data / 2)


def test_a_filter_that_cannot_be_is_named(path, executor):
    for step, words in (
        (
            CombFilterTransformer(q_factor=0.1),
            r"'q_factor' must give bands that a filter can have at 1000.12 Hz, got 0.1",
        ),
        (ButterworthFilterTransformer(order=2, cutoff=900.0), r"'cutoff' must be below half the sampling rate"),
    ):
        with pytest.raises(ValueError, match=words):
            in_pieces(source(), lambda step=step: step, path, executor)


def test_a_step_that_does_not_forget_is_named(path, executor):
    with pytest.raises(ValueError, match=r"EWMATransformer\(.*does not forget how it began"):
        in_pieces(source(), lambda: EWMATransformer(accumulate=False), path, executor)


def test_a_margin_that_is_too_short_is_found_out(path, executor):
    with pytest.raises(ValueError, match=r"neighbouring pieces differ at .* s by 0\.\d+ of the largest, and tol"):
        in_pieces(source(), filter_chain, path, executor, margin=0.02)
    assert not path.exists()
    done = in_pieces(source(), filter_chain, path, executor, margin=0.02, tolerance=0.5)
    # The pieces were there: nothing is computed again for another tolerance.
    assert done.first_sample == done.n_samples and 1e-6 < done.largest_difference < 0.5


class Counting(BaseTransformer[None, AxisArray, AxisArray]):
    """Says that it has no state."""

    n_seen = 0

    def _process(self, message):
        self.n_seen += len(message.data)
        return message


class Halving(BaseTransformer[None, AxisArray, AxisArray]):
    def _process(self, message):
        return replace(message, data=message.data[::2])


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (Counting, "Counting keeps n_seen outside of its state.*settling_time says how long"),
        (Halving, "gave .* results of samples .*, but its steps say .*margin='exact'"),
    ],
)
def test_a_step_that_is_not_what_it_seems_is_refused(step, match, path, executor):
    with pytest.raises(ValueError, match=match):
        in_pieces(source(), step, path, executor)
    assert not path.exists()


def in_floats(*gaps, value=np.nan, n_samples=9000):
    """A recording in float32 with *value* at some samples and channels."""
    given = source(n_samples)
    given.data = given.data.astype(np.float32)
    for place in gaps:
        given.data[place] = value
    return given


@pytest.mark.parametrize(
    ("gaps", "value"),
    [
        ([], np.nan),
        ([np.s_[5000:5600]], np.nan),
        ([np.s_[2000:2010, 1], np.s_[3500:4100, 2]], np.inf),
        ([np.s_[:, 3]], np.nan),
        ([np.s_[1000:8000, 0]], np.nan),
        ([np.s_[1000:3000:2, 1]], 1e31),
    ],
    ids=["none", "all channels", "here and there", "a dead channel", "one for long", "every other sample"],
)
def test_samples_that_are_left_out_have_pieces_begin_earlier(gaps, value, path, executor):
    """Averages and filters leave them out, so that they settle later; also across a seam, where nothing can be seen."""
    expected = in_one(in_floats(*gaps, value=value), filter_chain).results
    done = in_pieces(in_floats(*gaps, value=value), filter_chain, path, executor)
    data = contents(path)[0]
    assert done.n_pieces > 3
    np.testing.assert_array_equal(np.isfinite(data), np.isfinite(expected))
    finite = np.where(np.isfinite(expected), expected, 0.0)
    assert (np.abs(np.where(np.isfinite(data), data, 0.0) - finite) <= 1e-6 * np.abs(finite).max(axis=0)).all()


def test_without_such_samples_no_piece_begins_earlier(path, executor):
    whole = in_floats()
    done = in_pieces(whole, filter_chain, path, executor)
    assert len(set(whole.started_at)) == done.n_pieces


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"workers": 0}, ValueError, "'workers' must be an integer of at least 1, got 0"),
        ({"workers": 1.5}, TypeError, "'workers' must be .*, got 1.5"),
        ({"margin": -1.0}, ValueError, "'margin' must be .*, got -1.0"),
        ({"margin": "long"}, TypeError, "'margin' must be .*, got 'long'"),
        ({"tolerance": 0.0}, ValueError, "'tolerance' must be .*, got 0.0"),
    ],
)
def test_arguments_are_checked(options, error, match, path):
    with pytest.raises(error, match=match):
        process_recording(source(), double, sink(path), **options)


def test_a_sink_without_pieces_is_named(executor):
    with pytest.raises(TypeError, match=r"'sink' must be .*MemorySink.*margin='exact'"):
        process_recording(source(), double, MemorySink(), workers=executor, progress=False)


# -------------------------------------------------------------------------------------------------------- one queue


class Failing(MemorySource):
    """Whose third reading raises in the middle, as a disk that fails does."""

    fails = True

    def read(self, start):
        for message in super().read(start):
            if self.fails and message.axes["time"].offset * self.sampling_rate > 4000:
                raise OSError(5, "Input/output error")
            yield message


def test_recordings_are_one_queue_and_a_bad_one_does_not_stop_the_others(tmp_path, executor):
    told = {}
    recordings = [source(seed=0), Failing(n_samples=9000, chunk=1700, rate=RATE), source(seed=2)]
    paths = [tmp_path / f"{number}.zarr" for number in range(3)]
    taken = []

    def pairs():
        for number, (recording, path) in enumerate(zip(recordings, paths, strict=True)):
            taken.append(number)
            yield recording, sink(path)

    outcomes = dict(
        process_recordings(
            pairs(),
            filter_chain,
            rechunk=RechunkSettings(sizes=(64,)),
            checkpoint_seconds=1.9,
            workers=executor,
            progress=lambda number, done, total: told.update({number: (done, total)}),
        )
    )
    assert outcomes.keys() == {0, 1, 2} and taken == [0, 1, 2]
    assert isinstance(outcomes[1], OSError) and outcomes[0].n_pieces == outcomes[2].n_pieces > 3
    assert [path.exists() for path in paths] == [True, False, True]
    assert told[0] == told[2] == (9000, 9000)


def test_pieces_that_are_there_are_left_alone_and_the_bits_are_those_of_a_run_without_faults(tmp_path, path, executor):
    in_pieces(source(), filter_chain, tmp_path / "expected.zarr", executor)
    failing = Failing(n_samples=9000, chunk=1700, rate=RATE)
    with pytest.raises(OSError, match="Input/output"):
        in_pieces(failing, filter_chain, path, executor)
    assert not path.exists()
    failing.fails = False
    done = in_pieces(failing, filter_chain, path, executor)
    assert 0 < done.first_sample < done.n_samples
    for one, other in zip(contents(path), contents(tmp_path / "expected.zarr"), strict=True):
        np.testing.assert_array_equal(one, other)
    with RecordedLog() as log:
        again = in_pieces(source(), filter_chain, path, executor)
    assert again.first_sample == again.n_samples and any("there already" in info for info in log.infos)


# ------------------------------------------------------------------------------------------------------------ seams


def seams(before, last, largest):
    return Seams(np.asarray(before, float), np.asarray(last, float), np.asarray(largest, float), 0.0)


def difference(one, other, largest=(1.0,)):
    """What two pieces differ by whose rows in front of the seam are these."""
    return differences([seams([], one, largest), seams(other, [], largest)])


def test_differences_are_shares_of_the_largest_result_of_each_channel_in_all_pieces():
    pieces = [seams([], [[1.0, 10.0]], [2.0, 10.0]), seams([[1.0, 11.0]], [[0.0, 0.0]], [1.0, 40.0])]
    assert differences(pieces) == [1.0 / 40.0]
    assert difference([[1.0, 10.0]], [[1.5, 10.0]], (2.0, 1000.0)) == [0.25]
    # A channel that holds noise only is measured on a ten-thousandth of the largest.
    assert difference([[1e-9, 10.0]], [[2e-9, 10.0]], (2e-9, 1000.0)) == [pytest.approx(1e-8)]
    assert difference([[0.0]], [[1e-9]], (0.0,)) == [math.inf]


def test_a_result_that_is_not_finite_in_one_piece_alone_is_an_infinite_difference():
    for value in (np.nan, np.inf):
        assert difference([[value, 1.0]], [[value, 1.0]], (0.0, 1.0)) == [0.0]
        assert difference([[value, 1.0]], [[0.5, 1.0]], (1.0, 1.0)) == [math.inf]
        assert difference([[0.5, 1.0]], [[value, 1.0]], (1.0, 1.0)) == [math.inf]
    assert difference([[np.inf]], [[-np.inf]]) == [math.inf]


def test_integers_may_differ_by_one_and_no_more():
    one = Seams(np.zeros((0, 1), np.int16), np.array([[100]], np.int16), np.array([100.0]), 0.0)
    for value, expected in ((101, 0.0), (99, 0.0), (102, 0.02)):
        assert differences([one, one._replace(before=np.array([[value]], np.int16))]) == [expected]


class KeptSink(MemorySink):
    """Of a piece: the checkpoint is what is kept with it."""

    def checkpoint(self, state):
        self.kept_with = state


@pytest.mark.parametrize("n", [1, 3, 10, 1000])
def test_what_is_compared_are_the_last_rows_and_those_in_front_that_have_settled(n):
    """However messages lie: wholly inside the margin, across its end, or one for all."""
    piece = Piece(1, 100, 400, 50, start=20, first_result=20, first_settled=95, results_begin=100, results_end=400)
    sink = KeptSink()
    results = PieceResults(sink, piece)
    recording = MemorySource(n_samples=400, chunk=n)
    recording.data[:] = np.arange(400)[:, None] * [1, -1, 0, 2]
    for message in recording.read(20):
        results.append(message)
    results.finish("a recording")
    kept = Seams.unpacked(sink.kept_with)
    np.testing.assert_array_equal(kept.before, recording.data[95:100])
    np.testing.assert_array_equal(kept.last, recording.data[400 - MOST_ROWS :])
    np.testing.assert_array_equal(kept.largest, [399, 399, 0, 798])
    np.testing.assert_array_equal(np.concatenate([row.data for row in sink.rows]), recording.data[100:])


def test_the_largest_result_is_that_of_what_is_finite():
    rows = np.array([[np.nan, -3.0, np.inf], [np.inf, 2.0, np.nan]])
    piece = Piece(0, 0, 2, results_end=2)
    results = PieceResults(KeptSink(), piece)
    axes = {"time": AxisArray.TimeAxis(fs=1.0)}
    results.append(AxisArray(rows, ["time", "ch"], axes=axes, stream_dim="time"))
    np.testing.assert_array_equal(Seams.unpacked(results.seams).largest, [0.0, 3.0, 0.0])


# ------------------------------------------------------------------------------------------------- as they are found

N_RANDOM = int(os.environ.get("EZMSG_MLX_RANDOM_RECORDINGS", "6"))
"""The whole number is 200."""


@pytest.mark.parametrize("seed", range(N_RANDOM))
def test_any_recording_gives_the_results_of_one_run(seed, path, executor):
    recording, expected = RandomRecording(seed), MemorySink()
    options = {"rechunk": recording.rechunk, "progress": False}
    process_recording(recording, recording.factory, expected, **options)
    done = in_pieces(recording, recording.factory, path, executor, checkpoint_seconds=recording.seconds, **options)
    data, times = contents(path)
    assert data.shape == expected.results.shape and done.n_pieces > 1
    np.testing.assert_allclose(times, expected.times, rtol=0, atol=1e-9)
    finite = np.isfinite(expected.results)
    np.testing.assert_array_equal(np.isfinite(data), finite)
    one, other = (np.where(finite, each, 0.0).astype(np.float64) for each in (data, expected.results))
    peak = np.abs(other).max(axis=0)
    room = 1.0 if data.dtype.kind == "i" else 0.0
    scale = np.maximum(peak, 1e-4 * peak.max())
    if not np.ptp(recording.data, axis=0).any():
        scale = np.abs(recording.data).max()  # of nothing but constants the noise of rounding is left
    # Twice the tolerance: beside a channel at its rail, float32 rounds to as much.
    assert (np.abs(one - other) <= room + 2e-6 * scale).all()


class Sums(BaseTransformer[None, AxisArray, AxisArray]):
    """Does not forget, though it says so."""

    total = 0.0

    def settling_time(self, tolerance, gain):
        return 10 * gain

    def _process(self, message):
        data = np.cumsum(message.data, axis=0, dtype=float) + self.total
        self.total = data[-1]
        return replace(message, data=data)


def test_of_constants_alone_the_noise_of_rounding_is_no_difference_but_others_are(path, executor):
    recording = source()
    recording.data[:] = [1000, 0, 32767, -5]
    assert in_pieces(recording, detrended, path, executor).largest_difference < 1e-6
    with pytest.raises(ValueError, match="neighbouring pieces differ"):
        in_pieces(recording, Sums, path.with_name("sums.zarr"), executor)
