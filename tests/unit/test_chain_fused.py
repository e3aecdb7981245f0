"""A fused chain gives what its stages give one by one: on the CPU, and as compiled functions in plain operations."""

import gc
import os
import threading
import weakref

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.math.abs import AbsTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers import chains
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers.on_no_gpu import no_fallback

from ezmsg.mlx import (
    AsArraySettings,
    AsArrayTransformer,
    BaseChainTransformer,
    ChainTransformer,
    EWMASettings,
    EWMATransformer,
    PowTransformer,
    ReadLateTransformer,
    RechunkTransformer,
)
from ezmsg.mlx.chain import compiledrun
from ezmsg.mlx.chain import compiledrun as inflight
from ezmsg.mlx.chain.fusedrun import FusedRun
from ezmsg.mlx.stream import device, hostmemory
from ezmsg.mlx.stream.device import CUDA_GRAPHS
from ezmsg.mlx.stream.fusible import FusedStage, fusion_of

fuzz = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=["cpu", "compiled"])
def way(request, monkeypatch):
    """How chains are fused: as on the CPU, or as on a GPU, with functions that MLX need not compile."""
    if request.param == "compiled":
        run_as_on_a_gpu(monkeypatch)
    with no_fallback():
        yield request.param
    mx.enable_compile()


def run_as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
    mx.disable_compile()


def runs_of(chain: BaseChainTransformer) -> list[FusedRun]:
    return [run for found in chain._runner._found for run in found if isinstance(run, FusedRun)]


def fused(stages) -> ChainTransformer:
    return ChainTransformer(make_chain=lambda: stages)


def tolerance_of(way: str) -> float:
    """How far results may differ, where the same code does not compute them: as a compiled function, or in a loop."""
    return 1e-6 if way == "cpu" else 1e-5


def compare(stages, reference, messages, *, exact: bool = True, way: str = "compiled") -> ChainTransformer:
    chain = fused(stages)
    for message in messages:
        expected = chains.one_by_one(reference, message)
        results = chains.as_list(chain(message))
        assert len(results) == len(expected)
        for result, other in zip(results, expected, strict=True):
            chains.assert_same(result, other, exact=exact, tolerance=tolerance_of(way))
    return chain


names = st.lists(st.sampled_from(sorted(chains.STAGES)), min_size=1, max_size=4)
lengths = st.lists(st.sampled_from([30, 30, 60, 60, 7, 1, 0, 137]), min_size=3, max_size=9)


def is_possible(stages: list[str]) -> bool:
    """Each needs its dimension, and what gives another rate or dimension may come once."""
    if len({"bins", "uneven bins", "envelope"} & set(stages)) > 1 or len(set(stages)) < len(stages):
        return False
    for rare in ("over channels", "envelope"):
        if rare in stages[:-1]:
            return False
    # At a lower rate there is no such band, and there may be messages without samples.
    first = [stages.index(name) for name in ("bins", "uneven bins", "downsample") if name in stages]
    return not {"band", "median"} & set(stages[min(first, default=len(stages)) :])


@example(["detrend", "square", "bins", "log"], [30, 30, 0, 60, 7, 30, 60, 60], "int16")
@example(["downsample", "average"], [60, 60, 7, 60, 1, 60, 60], "float64")
@given(stages=names.filter(is_possible), n=lengths, dtype=st.sampled_from(["int16", "float32", "float64", ">i2"]))
@settings(fuzz, max_examples=40)
def test_any_chain_gives_what_its_stages_give(way, stages, n, dtype):
    # The median of ezmsg-sigproc takes no MLX message without samples.
    assume("median" not in stages or 0 not in n)
    event(way)
    exact = chains.is_exact(way, stages)
    compare(chains.make(stages), chains.make(stages), chains.stream(n, dtype), exact=exact, way=way)


def test_a_chain_is_fused_from_end_to_end(way):
    stages = ["reference", "detrend", "square", "average", "bins", "log"]
    chain = compare(chains.make(stages), chains.make(stages), chains.stream([60] * 6), exact=False, way=way)
    (run,) = runs_of(chain)
    assert (run.first, run.stop) == (0, 8)
    text = chain.describe()
    assert text.count("fused with stages 1 to 8") == 8 and "BinnedAggregate" in text


@pytest.mark.parametrize("bins", ["bins", "uneven bins", "envelope"])
def test_several_bins_of_a_message_are_one_result(bins, way):
    # Of 60, of 45 or 46, and of 30 samples.
    lengths = [300, 300, 137, 300, 60, 60, 60, 300]
    chain = compare(chains.make([bins]), chains.make([bins]), chains.stream(lengths), exact=False, way=way)
    assert [(run.first, run.stop) for run in runs_of(chain)] == [(0, 3)]
    assert chain.describe().count("fused with stages 1 to 3") == 3


@pytest.mark.parametrize("name", sorted(chains.STAGES.keys() - {"reference groups"}))
def test_each_stage_is_fused(name):
    chain = compare(chains.make([name]), chains.make([name]), chains.stream([60] * 3), exact=name in chains.EXACT)
    assert [(run.first, run.stop) for run in runs_of(chain)] == [(0, 3)]


def test_integers_at_the_end_are_rounded_and_saturate(way):
    def stages() -> list[BaseTransformer]:
        to_numpy = AsArrayTransformer(AsArraySettings(backend="numpy", dtype="int16", rounding="nearest"))
        return [*chains.make(["detrend", "square"])[:-1], to_numpy]

    chain = compare(stages(), stages(), chains.stream([60] * 6), exact=way == "cpu")
    assert [(run.first, run.stop) for run in runs_of(chain)] == [(0, 4)]
    result = chain(chains.stream([60] * 7)[6])
    assert result.data.dtype == np.int16 and result.data.max() == 32767


def test_averages_that_have_settled_go_on_as_those_of_the_stages(way):
    """Until then they are corrected for their start, and from then on not any more."""
    n = [600] * 5 + [60] * 4
    chain = compare(chains.make(["average"]), chains.make(["average"]), chains.stream(n), exact=way == "cpu")
    assert chain.stages["EWMA"].state.zi.shape[0] == (2 if way == "cpu" else 4)


def test_the_log_says_once_what_is_fused(caplog):
    with caplog.at_level("INFO", logger="ezmsg"):
        chain = fused(chains.make(["square", "abs"]))
        for message in chains.stream([60] * 4):
            chain(message)
    lines = [record.getMessage() for record in caplog.records if "as one function" in record.getMessage()]
    assert len(lines) == 1 and "AsArray -> Pow -> Abs -> AsArray2" in lines[0]


def test_the_state_can_be_looked_at_in_the_middle_of_a_stream(way):
    chain, reference = fused(chains.make(["average"])), chains.make(["average"])
    for message in chains.stream([60] * 5):
        chain(message)
        chains.one_by_one(reference, message)
    assert runs_of(chain)
    np.testing.assert_allclose(chain.stages["EWMA"].state.zi, reference[1].state.zi, rtol=1e-6)
    assert chain.state["EWMA"].n_seen == reference[1].state.n_seen


def test_settings_of_a_stage_change_by_its_name(way):
    chain, reference = fused(chains.make(["average", "square", "abs"])), chains.make(["average", "square", "abs"])
    for number, message in enumerate(chains.stream([60] * 12)):
        if number == 4:
            chain.update_stage("Pow", exponent=3.0)
            reference[2].update_settings(replace(reference[2].settings, exponent=3.0))
        if number == 8:
            other = EWMASettings(time_constant=0.5)
            chain.update_stage("EWMA", other)
            reference[1].update_settings(other)
        expected = chains.one_by_one(reference, message)[0]
        chains.assert_same(chain(message), expected, exact=False, tolerance=tolerance_of(way))
    with pytest.raises(ValueError, match="'name' must be one of 'AsArray', 'EWMA', .*, got 'Power'"):
        chain.update_stage("Power", exponent=1.0)


class Refusing(BaseTransformer[ez.Settings, AxisArray, AxisArray]):
    """Refuses messages by their attrs, as a stage that nobody fuses."""

    def _process(self, message: AxisArray) -> AxisArray:
        if message.attrs.get("refuse"):
            raise RuntimeError("refused")
        return message


@pytest.mark.parametrize("cut", [False, True])
def test_a_stage_that_raises_loses_that_message_only(way, cut):
    def stages():
        first = [RechunkTransformer(sizes=(60,))] if cut else []
        return [*first, *chains.make(["reference", "average", "bins"]), Refusing()]

    chain, reference = fused(stages()), stages()
    for number, message in enumerate(chains.stream([60, 60, 90, 90, 60, 7, 60, 60, 60])):
        if number in (3, 4, 6):
            with pytest.raises(RuntimeError, match="refused"):
                chain(replace(message, attrs={"refuse": True}))
            if cut:
                # The carry does not fit to the next message any more, in neither.
                continue
            continue
        expected, results = chains.one_by_one(reference, message), chains.as_list(chain(message))
        for result, other in zip(results, expected, strict=True):
            chains.assert_same(result, other, exact=False, tolerance=tolerance_of(way))


def test_lists_go_on_piece_by_piece_and_are_flushed(way):
    def stages():
        return [RechunkTransformer(sizes=(60,)), *chains.make(["average", "square"])[:-1], ReadLateTransformer()]

    chain, reference = fused(stages()), stages()
    messages = chains.stream([60, 60, 100, 33, 60, 60])
    results = [result for message in messages for result in chain(message)] + chain.flush()
    expected = list(chains_run(reference, messages))
    assert sum(len(result.data) for result in results) == sum(len(message.data) for message in messages)
    assert runs_of(chain)
    for result, other in zip(results, expected, strict=True):
        chains.assert_same(result, other, exact=way == "cpu")


def chains_run(stages, messages):
    from ezmsg.mlx import run_chain

    return run_chain(stages, messages)


def test_another_stream_and_the_old_one_again(way):
    reference, stages = chains.make(["reference", "average"]), chains.make(["reference", "average"])
    first, other = chains.stream([60] * 9), chains.stream([60] * 9, n_channels=4)
    for message in other:
        message.axes.pop("ch")
    compare(stages, reference, [*first[:3], *other[:3], *first[3:6], *other[3:6]], exact=False, way=way)


def test_the_stages_of_a_chain_that_nobody_uses_are_gone_at_once():
    stages = chains.make(["detrend"])
    chain, gone = fused(stages), weakref.ref(stages[0])
    for message in chains.stream([60] * 4):
        chain(message)
    assert runs_of(chain)
    gc.collect()
    gc.disable()
    try:
        del chain, stages
        assert gone() is None
    finally:
        gc.enable()


# Compiled functions


def test_a_dtype_that_changes_and_changes_back_goes_on_from_the_state_of_the_other(way):
    stages = ["detrend", "bins", "log"]
    of_each = [chains.stream([60] * 16, dtype) for dtype in ("int16", "float32")]
    # Both are known after the first eight messages.
    kinds = [0] * 4 + [1] * 4 + [0, 0, 1, 1, 0, 1, 0, 1]
    messages = [of_each[kind][number] for number, kind in enumerate(kinds)]
    chain = compare(chains.make(stages), chains.make(stages), messages, exact=False, way=way)
    assert len(runs_of(chain)) == 2


def test_what_is_compiled_is_bounded(monkeypatch, request):
    request.addfinalizer(mx.enable_compile)
    run_as_on_a_gpu(monkeypatch)
    rng = np.random.default_rng(0)
    n = [60, 60, 61, 62, 63, 64, 65, 61, 62, 63, 64, 65, *rng.integers(1, 200, 60).tolist(), 60, 60]
    stages = ["average", "bins"]
    chain = compare(chains.make(stages), chains.make(stages), chains.stream(n), exact=False)
    (run,) = runs_of(chain)
    assert run._lengths == {60, 61, 62, 63}
    assert len(run._functions) <= compiledrun.MOST_FUNCTIONS


def test_the_lengths_of_a_rechunk_are_compiled_when_the_stream_starts(monkeypatch, request, caplog):
    request.addfinalizer(mx.enable_compile)
    run_as_on_a_gpu(monkeypatch)
    chain = fused([RechunkTransformer(sizes=(60, 240)), *chains.make(["average", "bins"])])
    with caplog.at_level("INFO", logger="ezmsg"):
        messages = chains.stream([60, 240, 240, 60, 33, 27, 500])
        chain(messages[0])
        (run,) = runs_of(chain)
        known = dict(run._functions)
        assert run._lengths == {60, 240}
        for message in messages[1:]:
            chain(message)
    assert run._functions == known
    assert sum("Cold start" in record.getMessage() for record in caplog.records) == 1


def test_one_function_is_really_compiled(monkeypatch):
    monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
    stages = ["square", "abs"]
    chain = compare(chains.make(stages), chains.make(stages), chains.stream([60] * 4), exact=False)
    assert runs_of(chain)[0]._functions


def test_a_message_is_one_evaluation(monkeypatch, request):
    """What costs most on a GPU; on Metal, where nothing can be timed here, it can still be counted."""
    request.addfinalizer(mx.enable_compile)
    run_as_on_a_gpu(monkeypatch)
    chain, evaluations = fused(chains.make(["reference", "detrend", "square", "average", "bins", "log"])), []
    messages = chains.stream([60] * 8 + [30] * 8)
    for message in messages[:4] + messages[8:12]:
        chain(message)
    async_eval = mx.async_eval
    # Beside these, evaluations that have begun are waited for.
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (evaluations.append(1), async_eval(*arrays)))
    for message in messages[4:8] + messages[12:]:
        chain(message)
    assert len(evaluations) == 8


def test_what_is_in_flight_is_bounded_and_the_newest_is_not_waited_for(monkeypatch, request):
    request.addfinalizer(mx.enable_compile)
    run_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(inflight, "MOST_BYTES", 10 * 60 * chains.N_CHANNELS * 2)
    monkeypatch.setattr(hostmemory, "MOST_READ", 1000)
    chain = fused(chains.make(["square"])[:-1])
    messages = chains.stream([60] * 30)
    for message in messages[:4]:
        chain(message)
    given, behind, eval_, async_eval = [], [], mx.eval, mx.async_eval

    def waited_for(marks):
        behind.extend(len(given) - 1 - place for place, mark in enumerate(given) if mark is marks[0])
        eval_(marks)

    monkeypatch.setattr(inflight.mx, "eval", waited_for)
    monkeypatch.setattr(inflight.mx, "async_eval", lambda arrays: (given.append(arrays[-1]), async_eval(arrays)))
    for message in messages[4:]:
        chain(message)
    # Three messages of three buffers each are as much as is allowed.
    assert len(given) == 26 and behind == [3] * 23


def test_compiled_functions_end_with_their_thread(monkeypatch, request):
    # Else MLX lets go of them when Python has left the thread, and the process aborts if it ends meanwhile.
    request.addfinalizer(mx.enable_compile)
    run_as_on_a_gpu(monkeypatch)
    chain = fused(chains.make(["square"]))
    dropped_in: list[int] = []

    class Watched:
        def __init__(self, function) -> None:
            self.function = function

        def __call__(self, *arrays):
            return self.function(*arrays)

        def __del__(self) -> None:
            dropped_in.append(threading.get_ident())

    compile_ = mx.compile
    monkeypatch.setattr(compiledrun.mx, "compile", lambda function: Watched(compile_(function)))

    def work() -> None:
        for message in chains.stream([60] * 4):
            chain(message)
        assert not dropped_in

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dropped_in and set(dropped_in) == {thread.ident}
    # What the chain does then is right, too.
    assert chain(chains.stream([60])[0]).data.shape == (60, chains.N_CHANNELS)


# What others fuse


class HalfSettings(ez.Settings):
    by: float = 2.0


class Half(BaseTransformer[HalfSettings, AxisArray, AxisArray]):
    def _process(self, message: AxisArray) -> AxisArray:
        return replace(message, data=message.data / self.settings.by)

    def fuse(self, message: AxisArray) -> FusedStage:
        return FusedHalf(self, message)


class FusedHalf(FusedStage[Half]):
    def apply(self, x, arrays, variant):
        return x / self.transformer.settings.by, arrays


class Doubled(BaseTransformer[ez.Settings, AxisArray, AxisArray]):
    def _process(self, message: AxisArray) -> AxisArray:
        return replace(message, data=message.data * 2.0)


@fusion_of(Doubled)
def fuse_doubled(transformer, message):
    class FusedDoubled(FusedStage):
        def apply(self, x, arrays, variant):
            return x * 2.0, arrays

    return FusedDoubled(transformer, message)


class OffsetAbs(AbsTransformer):
    """A subclass that computes something else than what is registered for its base."""

    def _process(self, message: AxisArray) -> AxisArray:
        return replace(message, data=super()._process(message).data + 1.0)


def test_a_transformer_of_others_is_fused_by_its_method_or_by_what_is_registered(way):
    def stages():
        return [chains.to_mlx(), Half(), Doubled(), chains.to_numpy()]

    chain = compare(stages(), stages(), chains.stream([60] * 4), exact=way == "cpu")
    assert [(run.first, run.stop) for run in runs_of(chain)] == [(0, 4)]


def test_a_subclass_is_not_taken_for_its_base(way):
    def stages():
        return [*chains.make(["square", "abs"])[:-1], OffsetAbs(), *chains.make(["average"])[1:]]

    chain = compare(stages(), stages(), chains.stream([60] * 4), exact=way == "cpu")
    assert [(run.first, run.stop) for run in runs_of(chain)] == [(0, 3), (4, 6)]
    assert "OffsetAbs: by itself" in chain.describe()


class BrokenFuse(Half):
    def fuse(self, message: AxisArray) -> FusedStage:
        raise RuntimeError("not today")


def test_a_stage_whose_fusion_fails_runs_by_itself(caplog):
    def stages():
        return [chains.to_mlx(), PowTransformer(), BrokenFuse(), chains.to_numpy()]

    compare(stages(), stages(), chains.stream([60] * 3))
    assert "BrokenFuse could not be fused and is run by itself." in caplog.text


# The composite


class PowerSettings(ez.Settings):
    time_constant: float = 0.01
    exponent: float = 2.0


class PowerChain(BaseChainTransformer[PowerSettings]):
    @staticmethod
    def _initialize_processors(settings: PowerSettings) -> dict:
        average = EWMATransformer(time_constant=settings.time_constant)
        power = PowTransformer(exponent=settings.exponent)
        return {"in": chains.to_mlx(), "average": average, "power": power, "out": chains.to_numpy()}


def test_a_composite_has_settings_of_its_own_and_keeps_the_state_of_what_they_leave_alone(way):
    chain = PowerChain(PowerSettings())
    reference = chain._initialize_processors(chain.settings)
    for number, message in enumerate(chains.stream([60] * 8)):
        if number == 4:
            chain.update_settings(PowerSettings(exponent=3.0))
            reference["power"].update_settings(replace(reference["power"].settings, exponent=3.0))
        expected = chains.one_by_one(list(reference.values()), message)[0]
        chains.assert_same(chain(message), expected, exact=False, tolerance=tolerance_of(way))
    assert list(chain.stages) == ["in", "average", "power", "out"]


def test_what_is_no_message_is_refused_before_any_stage():
    with pytest.raises(TypeError, match="ChainTransformer takes an AxisArray as its message, got a list"):
        fused(chains.make(["square"]))([1, 2])


@pytest.mark.parametrize("made", [[], [1], {}, {"a": None}])
def test_what_is_no_chain_is_refused_when_it_is_made(made):
    with pytest.raises(TypeError, match="The result of 'make_chain' must be"):
        ChainTransformer(make_chain=lambda: made)


@pytest.mark.parametrize(
    "wrong", [{"make_chain": []}, {"make_chain": list, "fuse": 1}, {"make_chain": list, "lengths": (0,)}]
)
def test_settings_are_checked_when_they_are_built(wrong):
    from ezmsg.mlx import ChainSettings

    with pytest.raises(TypeError, match="must be"):
        ChainSettings(**wrong)


def test_stateful_transformers_keep_the_hash_that_a_run_looks_at():
    """Private in ezmsg-baseproc; without it a reset that is asked for would go unnoticed."""
    transformer = EWMATransformer()
    before = transformer._hash
    transformer(chains.to_mlx()(chains.stream([60])[0]))
    after = transformer._hash
    assert before == -1 and after != -1
    transformer.update_settings(EWMASettings(time_constant=2.0))
    assert transformer._hash == -1


@pytest.mark.parametrize(("asked", "fuse", "found"), [(None, True, "0"), ("1", True, "1"), (None, False, None)])
def test_mlx_makes_no_cuda_graphs_unless_the_user_asks_for_them(asked, fuse, found, monkeypatch):
    # Set and deleted, so that it is put back whatever it was.
    monkeypatch.setenv(CUDA_GRAPHS, "1")
    if asked is None:
        monkeypatch.delenv(CUDA_GRAPHS)
    ChainTransformer(make_chain=AbsTransformer, fuse=fuse)
    assert os.environ.get(CUDA_GRAPHS) == found
