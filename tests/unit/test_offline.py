"""A chain over a whole recording: what comes out, what is refused, and what an interruption leaves."""

import functools
import io
import itertools
import math
import pickle
import re
import sys

import numpy as np
import pytest
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.util.messages.util import replace
from helpers.offline_memory import MemorySink, MemorySource
from helpers.processes import RecordedLog, run_code

from ezmsg.mlx import (
    AsArrayTransformer,
    DetrendTransformer,
    EWMATransformer,
    PowTransformer,
    ProcessedRecording,
    ReadLateTransformer,
    RechunkSettings,
    RechunkTransformer,
    process_recording,
)
from ezmsg.mlx.butterworthfilter import ButterworthFilterTransformer
from ezmsg.mlx.offline import checkpoint
from ezmsg.mlx.offline import engine as overlap
from ezmsg.mlx.offline import engine as sequential
from ezmsg.mlx.scaler import AdaptiveStandardScalerTransformer

pytest.importorskip("mlx.core")

SIZES = RechunkSettings(sizes=(64,))


def band_power_chain():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        CommonRereferenceTransformer(mode="mean"),
        DetrendTransformer(time_constant=0.3),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.1),
        BinnedAggregateTransformer(bin_duration=0.0105),
        LogTransformer(clip_zero=True),
        ReadLateTransformer(depth=2),
    ]


def spike_band_chain():
    """With transformers inside the states of others."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        ButterworthFilterTransformer(order=2, cuton=50.0, cutoff=200.0, coef_type="sos"),
        PowTransformer(exponent=2.0),
        EWMATransformer(time_constant=0.02),
        BinnedAggregateTransformer(bin_duration=0.01),
        AdaptiveStandardScalerTransformer(time_constant=0.5),
        AsArrayTransformer(backend="numpy"),
    ]


CHAINS = pytest.mark.parametrize("factory", [band_power_chain, spike_band_chain])


def processed(source, factory, sink=None, **options):
    sink = sink or MemorySink()
    done = process_recording(source, factory, sink, **({"rechunk": SIZES, "checkpoint_seconds": 0.3} | options))
    return sink, done


def run_by_hand(source, steps):
    """Each step over all messages before the next one."""
    messages = [source.message(0, source.n_samples)]
    for step in [RechunkTransformer(SIZES), *steps]:
        outputs = [step(message) for message in messages]
        flushed = step.flush() if hasattr(step, "flush") else []
        messages = [piece for output in outputs for piece in (output if isinstance(output, list) else [output])]
        messages += flushed
    return np.concatenate([message.data for message in messages if message.data.size])


# ----------------------------------------------------------------------------------------------------------- results


@CHAINS
def test_results_are_those_of_the_steps_one_after_the_other_with_the_rest_flushed(factory):
    source = MemorySource()
    sink, done = processed(source, factory)
    np.testing.assert_array_equal(sink.results, run_by_hand(source, factory()))
    assert done == ProcessedRecording(n_samples=2000, first_sample=0)
    assert sink.n_closed == 1


def test_nothing_is_lost_at_the_end():
    # 2000 samples are 31 pieces of 64 and 16 samples that only a flush brings.
    sink, _ = processed(MemorySource(), lambda: AsArrayTransformer(backend="numpy"))
    np.testing.assert_array_equal(sink.results, MemorySource().data)
    np.testing.assert_allclose(sink.times, np.arange(2000) / 1000.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 64, 333, 5000])
def test_results_do_not_depend_on_how_the_recording_is_read(chunk):
    expected, _ = processed(MemorySource(), band_power_chain)
    sink, _ = processed(MemorySource(chunk=chunk), band_power_chain)
    np.testing.assert_array_equal(sink.results, expected.results)


def test_without_rechunk_the_chain_sees_the_messages_as_they_were_read():
    sink, _ = processed(MemorySource(n_samples=400), lambda: lambda message: message, rechunk=None)
    assert sink.lengths == [170, 170, 60]


def test_steps_may_return_lists_tuples_and_none():
    def halves(message):
        middle = len(message.data) // 2
        return replace(message, data=message.data[:middle]), replace(message, data=message.data[middle:])

    def every_other():
        number = -1

        def step(message):
            nonlocal number
            number += 1
            return [message] if number % 2 == 0 else None

        return step

    source = MemorySource(n_samples=128)
    sink, _ = processed(source, lambda: [halves, every_other()])
    np.testing.assert_array_equal(sink.results, np.concatenate([source.data[:32], source.data[64:96]]))


def test_little_is_collected_between_reading_and_writing(monkeypatch):
    events = []

    class Source(MemorySource):
        def read(self, start):
            for message in super().read(start):
                events.append("read")
                yield message

    sink = MemorySink()
    sink.before = events.append
    monkeypatch.setattr(sequential, "WriteBehind", functools.partial(overlap.WriteBehind, most=1))
    source = Source(n_samples=6400, chunk=64)
    processed(source, lambda: AsArrayTransformer(backend="numpy"), sink, checkpoint_seconds=9.0)
    assert events.count("read") == events.count("append") == 100 and events[-1] == "commit"
    between = itertools.accumulate({"read": 1, "append": -1, "commit": 0}[event] for event in events)
    # Those read ahead, one in the hands of each thread, and one that waits to be written.
    assert max(between) <= overlap.MOST_AHEAD + 4


def test_progress_is_told_after_each_chunk():
    told = []
    processed(MemorySource(n_samples=400), band_power_chain, progress=lambda *numbers: told.append(numbers))
    assert told == [(170, 400), (340, 400), (400, 400)]


def test_results_that_are_there_are_left_alone():
    source = MemorySource()
    sink, _ = processed(source, band_power_chain)
    sink, done = processed(source, band_power_chain, sink)
    assert done.first_sample == done.n_samples
    assert source.started_at == [0]


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (lambda: 3, "must be .*, got 3"),
        (lambda: [], r"must be .*, got \[\]"),
        (lambda: [AsArrayTransformer(backend="numpy"), "no step"], "no step"),
        (lambda: None, "must be .*, got None"),
        ([AsArrayTransformer(backend="numpy")], "'chain_factory' must be a callable"),
    ],
)
def test_a_factory_that_builds_no_chain_is_refused_before_anything_is_opened(factory, named):
    sink = MemorySink()
    with pytest.raises(TypeError, match=named):
        processed(MemorySource(), factory, sink)
    assert sink.recipe == ""


def test_a_step_that_returns_no_message_is_named():
    with pytest.raises(TypeError, match=r"but .*PowTransformer gave an int"):

        class Wrong(PowTransformer):
            __qualname__ = "PowTransformer"

            def _process(self, message):
                return 3

        processed(MemorySource(), lambda: [Wrong(exponent=2.0), AsArrayTransformer(backend="numpy")])


def test_a_recording_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        processed(MemorySource(n_samples=0), band_power_chain)


def test_a_recording_that_ends_too_early_is_not_committed():
    source = MemorySource()
    source.n_samples += 1
    sink = MemorySink()
    source.read = lambda start: iter([source.message(0, 2000)])
    with pytest.raises(ValueError, match="has 2001 samples, but 2000 were read"):
        processed(source, band_power_chain, sink)
    assert sink.results is None


@pytest.mark.parametrize(
    ("seconds", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_seconds_between_checkpoints_are_checked(seconds, error):
    with pytest.raises(error, match="'checkpoint_seconds' must be a number > 0, got .*"):
        processed(MemorySource(), band_power_chain, checkpoint_seconds=seconds)


@pytest.mark.parametrize(
    ("argument", "value"), [("rechunk", 0), ("rechunk", "x"), ("rechunk", (3000,)), ("rechunk", True), ("progress", 3)]
)
def test_arguments_of_a_wrong_type_are_named_before_anything_is_opened(argument, value):
    sink = MemorySink()
    with pytest.raises(TypeError, match=rf"^'{argument}' must be .* or None, got {re.escape(repr(value))}"):
        processed(MemorySource(), band_power_chain, sink, **{argument: value})
    assert sink.recipe == "" and sink.n_closed == 0


# ------------------------------------------------------------------------------------------------------ interruptions


class Killed(BaseException):
    pass


def killed_after(n_events):
    left = n_events

    def before(event):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    return before


@CHAINS
def test_interrupted_anywhere_a_run_goes_on_with_the_same_bits(factory):
    expected, _ = processed(MemorySource(), factory)
    events = []
    counting = MemorySink()
    counting.before = events.append
    processed(MemorySource(), factory, counting)
    assert events.count("checkpoint") == 5

    checkpoints = [place for place, event in enumerate(events) if event == "checkpoint"]
    resumed_at = set()
    for place in [checkpoints[0], checkpoints[0] + 1, checkpoints[2] + 3, checkpoints[4] + 1, len(events) - 1]:
        sink = MemorySink()
        sink.before = killed_after(place)
        with pytest.raises(Killed):
            processed(MemorySource(), factory, sink)
        assert sink.results is None and sink.n_closed == 1
        sink.before = lambda event: None
        _, done = processed(MemorySource(), factory, sink)
        resumed_at.add(done.first_sample)
        np.testing.assert_array_equal(sink.results, expected.results)
        np.testing.assert_array_equal(sink.times, expected.times)
    # Chunks of 170 samples, and a checkpoint once 300 more are done.
    assert resumed_at == {0, 340, 1020, 1700}


def slow_chain():
    """Whose last step gets something only now and then, and has it wait."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        EWMATransformer(time_constant=0.1),
        BinnedAggregateTransformer(bin_duration=0.45),
        ReadLateTransformer(depth=2),
    ]


@pytest.mark.parametrize("n_checkpoints", [1, 3, 6, 10, 11])
def test_interrupted_twice_before_each_step_got_something_it_goes_on_with_the_same_bits(n_checkpoints):
    expected, _ = processed(MemorySource(), slow_chain)
    sink = MemorySink()
    for _ in range(2):
        # Right after a checkpoint, or at the end if there is none after it.
        stop_at = sink.n_checkpoints + (1 if sink.n_checkpoints else n_checkpoints)

        def before(event, stop_at=stop_at):
            if event == "commit" or (sink.n_checkpoints == stop_at):
                raise Killed

        sink.before = before
        with pytest.raises(Killed):
            processed(MemorySource(), slow_chain, sink, checkpoint_seconds=0.1)
    sink.before = lambda event: None
    _, done = processed(MemorySource(), slow_chain, sink)
    assert done.first_sample == min(n_checkpoints + 1, 11) * 170
    np.testing.assert_array_equal(sink.results, expected.results)


def test_a_rate_that_wobbles_below_notice_does_not_lose_the_state():
    class Source(MemorySource):
        def message(self, begin, end):
            message = super().message(begin, end)
            wobble = 1.0 + 1e-8 * (begin // self.chunk % 3)
            return replace(message, axes={**message.axes, "time": replace(message.axes["time"], gain=0.001 * wobble)})

    def factory():
        return [AsArrayTransformer(backend="mlx", dtype="float32"), EWMATransformer(time_constant=0.3)]

    def bits(sink):
        return np.array(sink.results).tobytes()

    expected, _ = processed(Source(), factory, rechunk=None)
    for n_events in (5, 8, 12):
        sink = MemorySink()
        sink.before = killed_after(n_events)
        with pytest.raises(Killed):
            processed(Source(), factory, sink, rechunk=None)
        sink.before = lambda event: None
        assert processed(Source(), factory, sink, rechunk=None)[1].first_sample > 0
        assert bits(sink) == bits(expected)


def test_another_process_goes_on_with_the_same_bits(tmp_path):
    """Python salts the hashes of text anew in each process, and states are kept or reset by hashes."""
    factories = {factory.__name__: factory for factory in (band_power_chain, spike_band_chain)}
    kept = {name: interrupted_sink(factory).kept for name, factory in factories.items()}
    (tmp_path / "kept").write_bytes(pickle.dumps(kept))
    run_code(
        """
        import importlib.util, pathlib, pickle, sys
        spec = importlib.util.spec_from_file_location("test_offline", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        folder = pathlib.Path(sys.argv[2])
        results = {}
        for name, kept in pickle.loads((folder / "kept").read_bytes()).items():
            sink = module.MemorySink()
            sink.kept = kept
            _, done = module.processed(module.MemorySource(), getattr(module, name), sink)
            assert done.first_sample > 0
            results[name] = sink.results
        (folder / "results").write_bytes(pickle.dumps(results))
        """,
        __file__,
        tmp_path,
    )
    for name, results in pickle.loads((tmp_path / "results").read_bytes()).items():
        np.testing.assert_array_equal(results, processed(MemorySource(), factories[name])[0].results)


def interrupted_sink(factory=band_power_chain, source=None):
    sink = MemorySink()
    sink.before = killed_after(15)
    with pytest.raises(Killed):
        processed(source or MemorySource(), factory, sink)
    sink.before = lambda event: None
    assert sink.kept is not None
    return sink


def test_a_checkpoint_of_another_recording_is_not_used():
    sink = interrupted_sink(source=MemorySource(seed=1))
    _, done = processed(MemorySource(), band_power_chain, sink)
    assert done.first_sample == 0


def test_a_checkpoint_of_other_settings_is_not_used():
    sink = interrupted_sink()
    chain = band_power_chain()
    chain[2] = DetrendTransformer(time_constant=0.31)
    assert processed(MemorySource(), lambda: chain, sink)[1].first_sample == 0


def test_a_checkpoint_from_another_environment_is_not_used(monkeypatch):
    sink = interrupted_sink()
    environment = checkpoint.environment()
    assert "ezmsg-mlx" in environment and "numpy" in environment
    monkeypatch.setattr(checkpoint, "environment", lambda: environment.replace("numpy", "pynum"))
    assert processed(MemorySource(), band_power_chain, sink)[1].first_sample == 0


def test_the_cache_limit_is_no_other_setting():
    descriptions = {
        checkpoint.description(AsArrayTransformer(backend="mlx", mlx_cache_limit_mb=limit)) for limit in (64.0, 128.0)
    }
    assert len(descriptions) == 1


def test_settings_are_compared_to_the_last_entry_of_long_arrays():
    first, second = np.zeros((2, 2000))
    second[1000] = 1e-17
    one, other = (EWMATransformer(time_constant=1.0) for _ in range(2))
    object.__setattr__(one.settings, "axis", first)
    object.__setattr__(other.settings, "axis", second)
    assert checkpoint.description(one) != checkpoint.description(other)


@pytest.mark.parametrize("what", ["a function", "a state with an open file"])
def test_a_state_that_cannot_be_saved_means_starting_over(what, tmp_path):
    def factory():
        chain = band_power_chain()
        if what == "a function":
            return [*chain, lambda message: message]
        file = open(tmp_path / "file", "w")
        chain[4].state.file = file
        return chain

    sink = MemorySink()
    sink.before = killed_after(25)
    with RecordedLog() as log, pytest.raises(Killed):
        processed(MemorySource(), factory, sink)
    assert [info for info in log.infos if "checkpoint" in info] == [
        info for info in log.infos if info.startswith("No checkpoints, an interrupted run will start over: ")
    ]
    assert len([info for info in log.infos if "No checkpoints" in info]) == 1
    sink.before = lambda event: None
    _, done = processed(MemorySource(), factory, sink)
    assert sink.n_checkpoints == 0 and done.first_sample == 0
    expected, _ = processed(MemorySource(), band_power_chain)
    np.testing.assert_array_equal(sink.results, expected.results)


def test_mlx_dtypes_and_arrays_of_all_kinds_survive_in_a_state():
    import mlx.core as mx

    one, other = EWMATransformer(time_constant=1.0), EWMATransformer(time_constant=1.0)
    one.state.zi = mx.array([1.5, -0.0, math.inf]).astype(mx.bfloat16)
    one.state.bias_corr = mx.arange(3, dtype=mx.int64)
    one.state.stream_dim = mx.float16
    checkpoint.restore(other, checkpoint.save(one))
    assert other.state.zi.dtype == mx.bfloat16 and other.state.bias_corr.dtype == mx.int64
    assert other.state.stream_dim == mx.float16
    for name in ("zi", "bias_corr"):
        a, b = (np.array(getattr(step.state, name).astype(mx.float32)) for step in (one, other))
        assert a.tobytes() == b.tobytes()


def test_libraries_of_the_extra_are_loaded_when_they_are_needed_and_named_when_they_are_missing():
    out = run_code(
        """
        import sys
        import ezmsg.mlx.offline.checkpoint, ezmsg.mlx.offline.nwbsource, ezmsg.mlx.offline, ezmsg.mlx.offline.zarrsink
        from ezmsg.mlx import NWBSource, ZarrSink, process_recording
        extra = {"dask", "distributed", "h5py", "pandas", "pynwb", "rich", "zarr"}
        print(sorted(extra & set(sys.modules)))
        sys.modules["zarr"] = sys.modules["h5py"] = None
        for needs in (lambda: ZarrSink("x.zarr"), lambda: NWBSource("x.nwb")):
            try:
                needs()
            except ImportError as error:
                print(error)
        """
    )
    assert out.splitlines() == [
        "[]",
        'This needs zarr: pip install "ezmsg-mlx[offline]".',
        'This needs h5py: pip install "ezmsg-mlx[offline]".',
    ]


@pytest.mark.parametrize("argument", ["source", "sink"])
def test_a_path_instead_of_a_source_or_sink_is_refused(argument):
    given = {"source": MemorySource.__new__(MemorySource), "sink": MemorySink(), argument: "session.nwb"}
    with pytest.raises(TypeError, match=f"'{argument}' must be a {argument} of .*, got 'session.nwb'"):
        process_recording(given["source"], list, given["sink"])


# ---------------------------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_and_names_the_recording(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    processed(MemorySource(), band_power_chain)
    shown = sys.stderr.getvalue()
    assert "noise" in shown and "100%" in shown and "x real time" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_no_bar_is_shown_elsewhere_or_if_it_is_not_wanted(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    processed(MemorySource(), band_power_chain, **({"progress": False} if terminal else {}))
    assert sys.stderr.getvalue() == ""


def test_without_rich_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    processed(MemorySource(), band_power_chain)
    assert sys.stderr.getvalue() == ""


def test_log_lines_name_the_recording():
    source, sink = MemorySource(), MemorySink()
    sink.before = killed_after(15)
    with pytest.raises(Killed):
        processed(source, band_power_chain, sink)
    sink.before = lambda event: None
    with RecordedLog() as log:
        processed(source, band_power_chain, sink)
        processed(source, band_power_chain, sink)
        processed(MemorySource(seed=1), lambda: lambda message: message)
    assert [text for text in log.infos if "sample" in text or "checkpoints" in text or "already" in text]
    for number, text in enumerate(log.infos):
        assert ("noise 1" if number == len(log.infos) - 1 else "noise 0") in text


def test_errors_name_the_recording():
    source = MemorySource()
    source.n_samples = 0
    with pytest.raises(ValueError, match="^noise 0, .* has no samples"):
        processed(source, band_power_chain)
    source.n_samples = 3000
    with pytest.raises(ValueError, match="^noise 0, .* has 3000 samples, but 2000 were read"):
        processed(source, band_power_chain)
