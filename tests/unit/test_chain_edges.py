"""Fused chains at the edges of what they were made for: other axes, rates, channels, copies, and messages refused."""

import asyncio
import copy

import ezmsg.core as ez
import ezmsg.sigproc.affinetransform as sigproc
import numpy as np
import pytest
from ezmsg.baseproc import BaseAsyncTransformer, BaseTransformer, processor_state
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.downsample import DownsampleTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers import chains
from scipy.signal import butter

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers.on_no_gpu import no_fallback

from ezmsg.mlx import (
    AdaptiveStandardScalerTransformer,
    ChainTransformer,
    CommonRereferenceTransformer,
    DetrendTransformer,
    EWMASettings,
    EWMATransformer,
    FilterTransformer,
    Parallel,
    PowSettings,
    PowTransformer,
    RechunkTransformer,
)
from ezmsg.mlx.chain.fusedrun import FusedRun
from ezmsg.mlx.kernels import recursion
from ezmsg.mlx.stream import device
from ezmsg.mlx.stream.fusible import FusedStage, fused_stage, fusion_of
from ezmsg.mlx.stream.unit import run_steps

# Of ezmsg-baseproc: the setting "axis" is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

AVERAGES = [EWMATransformer, DetrendTransformer, AdaptiveStandardScalerTransformer]


@pytest.fixture(params=["cpu", "compiled"])
def way(request, monkeypatch):
    """How chains are fused: as on the CPU, or as on a GPU, with functions that MLX need not compile."""
    if request.param == "compiled":
        monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
        mx.disable_compile()
    with no_fallback():
        yield request.param
    mx.enable_compile()


def message(data: np.ndarray, dims=("time", "ch"), *, start: int = 0, fs: float = 1000.0, key: str = "k") -> AxisArray:
    axes = {"time": AxisArray.TimeAxis(fs=fs, offset=start / fs)} if "time" in dims else {}
    if "ch" in dims:
        axes["ch"] = AxisArray.LinearAxis(unit="", gain=1.0, offset=0.0)
    if "win" in dims:
        axes["win"] = AxisArray.LinearAxis(unit="s", gain=0.1, offset=start)
    return AxisArray(data, list(dims), axes=axes, key=key, stream_dim="win" if "win" in dims else "time")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 100 + 50).astype(np.float32)


def between(*stages):
    return [chains.to_mlx(), *stages, chains.to_numpy()]


def runs_of(chain: ChainTransformer) -> list[tuple[int, int]]:
    return [(run.first, run.stop) for found in chain._runner._found for run in found if isinstance(run, FusedRun)]


def alike(make, messages, tolerance: float = 1e-5) -> ChainTransformer:
    """Errors included, the chain does what its stages do one by one."""
    stages, chain = make(), ChainTransformer(make_chain=make)
    for each in messages:
        results = []
        for run in (lambda m: chains.one_by_one(stages, m)[0], chain):
            try:
                results.append(run(each))
            except Exception as error:
                results.append((type(error), str(error)))
        want, got = results
        if isinstance(want, tuple):
            assert got == want
        else:
            assert not isinstance(got, tuple), got
            chains.assert_same(got, want, exact=False, tolerance=tolerance)
    return chain


# Memory


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize(
    ("shape", "dims", "axis"),
    [
        ((3, 10), ("time", "ch"), "ch"),
        ((30, 10), ("time", "ch"), "ch"),
        ((10, 30), ("ch", "time"), "ch"),
        ((5, 20, 3), ("win", "time", "ch"), "time"),
    ],
)
def test_an_average_along_another_axis_than_the_stream_is_not_fused(kind, shape, dims, axis, way):
    chain = alike(
        lambda: between(kind(time_constant=0.01, axis=axis)),
        [message(noise(*shape, seed=k), dims, start=k * 30) for k in range(5)],
    )
    assert runs_of(chain) == []


class AlongChannels(EWMATransformer):
    """A stage of somebody who forgets to look at the axis."""

    def _process(self, message: AxisArray) -> AxisArray:
        return super()._process(message)

    def fuse(self, message: AxisArray) -> FusedStage:
        return FusedStage(self, message)


def test_nobody_fuses_a_stage_along_another_axis_than_its_state():
    stage, along = AlongChannels(axis="ch"), AlongChannels()
    given = chains.to_mlx()(message(noise(30, 10)))
    stage(given), along(given)
    assert fused_stage(stage, given) is None and fused_stage(along, given) is not None


@pytest.mark.parametrize("path", ["cpu", "plain", "cuda", "metal"])
@pytest.mark.parametrize(
    ("recurrence", "coefficients", "good"),
    [("ewma", 0.5, (4, 3)), ("zscore", 0.5, (6, 3)), ("sosfilt", None, (1, 4, 3))],
)
def test_no_kernel_takes_a_state_of_another_shape_than_it_reads(recurrence, coefficients, good, path):
    if coefficients is None:
        coefficients = butter(2, 0.1, output="sos")
    run = recursion(recurrence, path)
    for wrong in ((*good[:-1], 2), (*good[:-1], 300), (*good[:-2], 3, good[-1]), good[1:], (*good, 1)):
        with pytest.raises(ValueError, match="'zi' must have shape"):
            run(mx.zeros((8, 3)), coefficients, mx.zeros(wrong), 0, (32,))
    if path in ("cpu", "plain"):
        y, zf = run(np.zeros((8, 3), np.float32), coefficients, np.zeros(good, np.float32), 0, (32,))
        assert isinstance(y, np.ndarray) and zf.shape == good


def _cutting(cut, dtype=None):
    class Cut(BaseTransformer[ez.Settings, AxisArray, AxisArray]):
        def _process(self, each: AxisArray) -> AxisArray:
            return replace(each, data=each.data[cut])

    class FusedCut(FusedStage):
        def apply(self, x, arrays, variant):
            return (x[cut] if dtype is None or not isinstance(x, np.ndarray) else x[cut].astype(dtype)), arrays

    fusion_of(Cut)(FusedCut)
    return Cut


@pytest.mark.parametrize("dtype", [None, np.float64])
@pytest.mark.parametrize("behind", [CommonRereferenceTransformer, PowTransformer, EWMATransformer])
def test_a_stage_may_give_a_view_or_float64(behind, dtype, way):
    cut = _cutting((slice(None), slice(1, None)), dtype)
    messages = [message(noise(20, 3, 5, seed=k), ("time", "x", "ch"), start=20 * k) for k in range(5)]
    assert runs_of(alike(lambda: between(cut(), behind()), messages)) == [(0, 4)]
    branches = lambda: between(Parallel({"a": [cut(), behind()], "b": [cut(), PowTransformer()]}, axis="ch"))  # noqa: E731
    assert runs_of(alike(branches, messages)) == [(0, 3)]


# What a run was made for


def test_the_rate_changes_in_a_running_chain(way):
    messages = [message(noise(20, 3, seed=k), start=20 * k, fs=1000.0 if k < 4 else 500.0) for k in range(9)]
    chain = alike(lambda: between(DetrendTransformer(time_constant=0.01), DownsampleTransformer(factor=3)), messages)
    assert len(runs_of(chain)) == 2


def test_a_rate_that_wobbles_and_one_that_drifts(way):
    sos = butter(2, 0.1, output="sos")

    def make():
        filter_ = FilterTransformer(coefs=sos, coef_type="sos")
        return between(EWMATransformer(time_constant=0.05), filter_, AdaptiveStandardScalerTransformer())

    # By 1e-7 forth and back, which all take for one rate; and away by 4e-7 each, where all begin anew now and then.
    for step, wobbles in ((1e-7, True), (4e-7, False)):
        rates = [1000.0 * (1 + step * (k % 2 if wobbles else k)) for k in range(16)]
        messages = [message(noise(20, 3, seed=k), start=20 * k, fs=fs) for k, fs in enumerate(rates)]
        chain = alike(make, messages)
        assert len(runs_of(chain)) == 1 if wobbles else runs_of(chain)


def test_dims_may_be_a_tuple(way):
    messages = [message(noise(20, 3, seed=k), start=20 * k) for k in range(5)]
    for each in messages[1:]:
        each.dims = tuple(each.dims)
    assert len(runs_of(alike(lambda: between(EWMATransformer()), messages))) == 1


def test_the_number_of_channels_changes_where_time_is_last(way):
    shapes = [(3, 20)] * 4 + [(5, 20)] * 4 + [(3, 20)] * 2
    messages = [message(noise(*shape, seed=k), ("ch", "time"), start=20 * k) for k, shape in enumerate(shapes)]
    chain = alike(lambda: between(EWMATransformer(time_constant=0.05), CommonRereferenceTransformer()), messages)
    assert len(runs_of(chain)) == 2


def test_messages_without_dimensions_and_without_a_rate(way):
    no_dimension = AxisArray(np.float32(1.0).reshape(()), [], axes={}, key="k")
    stamps = [message(noise(20, 3, seed=k), start=20 * k) for k in range(4)]
    for each in stamps:
        each.axes["time"] = AxisArray.CoordinateAxis(data=np.sort(noise(20)), dims=["time"], unit="s")
    good = [message(noise(20, 3, seed=k), start=20 * k) for k in range(6)]
    messages = [*good[:3], no_dimension, *good[3:], *stamps, no_dimension]
    alike(lambda: between(PowTransformer(), CommonRereferenceTransformer(), EWMATransformer()), messages)
    alike(lambda: between(PowTransformer(), CommonRereferenceTransformer(), PowTransformer()), messages)


@pytest.mark.parametrize("dims", [("time", "ch"), ("ch", "time")])
@pytest.mark.parametrize(
    "kind",
    [
        lambda: CommonRereferenceTransformer(mode="median"),
        lambda: CommonRereferenceTransformer(channel_groups=[[0, 2], [1, 3]], include_current=False),
        lambda: DownsampleTransformer(factor=3),
        lambda: EWMATransformer(time_constant=0.02),
    ],
    ids=["median", "means of groups", "downsample", "average"],
)
def test_time_first_and_last(kind, dims, way):
    def make():
        stage = kind()
        if isinstance(stage, CommonRereferenceTransformer):
            stage.update_settings(replace(stage.settings, axis="ch"))
        return between(stage)

    shape = (20, 4) if dims[0] == "time" else (4, 20)
    messages = [message(noise(*shape, seed=k), dims, start=20 * k) for k in range(6)]
    assert runs_of(alike(make, messages)) == [(0, 3)]


def test_coefficients_that_are_not_normalized_go_on_when_the_array_library_changes():
    b, a = butter(2, 0.1)
    scaled, plain = FilterTransformer(coefs=(3.0 * b, 3.0 * a)), FilterTransformer(coefs=(b, a))
    for number in range(8):
        x = noise(20, 3, seed=number)
        convert = mx.array if number in (1, 2, 4, 7) else np.array
        y, expected = (np.array(each(message(convert(x), start=20 * number)).data) for each in (scaled, plain))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Messages are whole


def refuse(each: AxisArray) -> AxisArray:
    if each.attrs.get("refuse"):
        raise ValueError("refused")
    return each


def with_refusals() -> list:
    stages = between(CommonRereferenceTransformer(), DetrendTransformer(time_constant=0.02), PowTransformer())
    return [RechunkTransformer(sizes=(4,)), *stages, refuse]


@pytest.mark.parametrize("look", [False, True])
def test_refused_messages_of_any_kind_leave_all_state_as_it_was(look, way):
    rng, spared, hit = np.random.default_rng(3), with_refusals(), ChainTransformer(make_chain=with_refusals)
    start = 0
    for number in range(24):
        kind = int(rng.integers(3))
        data = noise(7, 2 if kind < 2 else 3, seed=number).astype("f4" if kind else "i2")
        given = message(data, start=start, key=f"k{kind}")
        if look:
            hit.state  # noqa: B018
        if number % 3 == 2:
            with pytest.raises(ValueError, match="refused"):
                hit(replace(given, attrs={"refuse": True}))
            continue
        start += 7
        expected, results = chains.one_by_one(spared, given), hit(given)
        for result, other in zip(results, expected, strict=True):
            chains.assert_same(result, other, exact=False)


def test_a_copy_of_a_running_chain_goes_its_own_way(way):
    def make():
        return between(EWMATransformer(time_constant=0.05), PowTransformer())

    messages = [message(noise(20, 3, seed=k), start=20 * k) for k in range(12)]
    chain, stages = ChainTransformer(make_chain=make), make()
    for each in messages[:5]:
        chain(each), chains.one_by_one(stages, each)
    other = copy.deepcopy(chain)
    for each in messages[8:]:
        other(each)
    for each in messages[5:]:
        chains.assert_same(chain(each), chains.one_by_one(stages, each)[0], exact=False)
    assert runs_of(other) and other.stages["EWMA"] is not chain.stages["EWMA"]


def test_a_transformer_in_two_chains_is_shared_by_them(way):
    average, alone = EWMATransformer(time_constant=0.05), EWMATransformer(time_constant=0.05)
    two = [ChainTransformer(make_chain=lambda: between(average)) for _ in range(2)]
    for number in range(12):
        given = message(noise(20, 3, seed=number), start=20 * number)
        expected = chains.one_by_one(between(alone), given)[0]
        chains.assert_same(two[number // 2 % 2](given), expected, exact=False)
    assert all(map(runs_of, two))


@pytest.mark.parametrize("where", ["in a row", "in branches"])
def test_a_transformer_that_stands_twice_sees_the_messages_of_both_places(where, way):
    def make():
        average = EWMATransformer(time_constant=0.05)
        return between(average, average) if where == "in a row" else between(Parallel({"a": average, "b": average}))

    alike(make, [message(noise(20, 3, seed=k), start=20 * k) for k in range(6)])


@processor_state
class Seen:
    n: int = 0


class Waits(BaseAsyncTransformer[ez.Settings, AxisArray, AxisArray, Seen]):
    """Counts its messages, in a coroutine."""

    loop: asyncio.AbstractEventLoop | None = None

    def _reset_state(self, message: AxisArray) -> None: ...

    async def _aprocess(self, message: AxisArray) -> AxisArray:
        Waits.loop = asyncio.get_running_loop()
        self._state.n += 1
        await asyncio.sleep(0)
        return message


def test_coroutines_of_stages_run_in_the_loop_and_are_taken_back_with_the_rest():
    chain = ChainTransformer(make_chain=lambda: [*between(EWMATransformer(time_constant=0.05)), Waits(), refuse])
    stages = between(EWMATransformer(time_constant=0.05))

    async def main() -> None:
        for number in range(9):
            given = message(noise(20, 3, seed=number), start=20 * number)
            if number % 3 == 2:
                with pytest.raises(ValueError, match="refused"):
                    await chain.__acall__(replace(given, attrs={"refuse": True}))
                continue
            result = await chain.__acall__(given)
            assert Waits.loop is asyncio.get_running_loop()
            chains.assert_same(result, chains.one_by_one(stages, given)[0], exact=False)

    asyncio.run(main())
    assert chain.stages["Waits"].state.n == 6 and runs_of(chain) == [(0, 3)]


# What a subclass inherits


class Renamed(PowTransformer):
    """A subclass that computes nothing else."""

    def describe(self) -> str:
        return "a power"


class OneMore(PowTransformer):
    def _process(self, message: AxisArray) -> AxisArray:
        return replace(message, data=super()._process(message).data + 1.0)


@pytest.mark.parametrize(("kind", "is_fused"), [(Renamed, True), (OneMore, False)])
def test_a_subclass_is_fused_unless_it_overrides_a_method(kind, is_fused, way):
    chain = alike(lambda: between(kind()), [message(noise(20, 3, seed=k), start=20 * k) for k in range(4)])
    assert bool(runs_of(chain)) == is_fused


def test_settings_with_arrays_reset_by_a_name_of_ezmsg_baseproc():
    """Private there; without it, stages with arrays in their settings would go on with the old ones."""
    average = EWMATransformer()
    average(chains.to_mlx()(message(noise(20, 3))))
    average._request_reset()
    assert average._hash == -1


def test_a_copy_goes_on_from_the_state_of_the_original():
    stages = chains.make(["average", "bins"])
    chain = ChainTransformer(make_chain=lambda: stages)
    messages = chains.stream([70] * 8)
    for message in messages[:5]:
        chain(message)
    other = copy.deepcopy(chain)
    for message in messages[5:]:
        chains.assert_same(other(message), chain(message))


def test_weights_that_are_set_in_a_running_chain_count_at_once():
    stages, reference = chains.make(["mix"]), chains.make(["mix"])
    chain = ChainTransformer(make_chain=lambda: stages)
    for number, message in enumerate(chains.stream([60] * 8)):
        if number == 4:
            for some in (stages, reference):
                some[1].set_weights(mx.array(3.0 * np.eye(chains.N_CHANNELS, dtype=np.float32)))
        (expected,) = chains.one_by_one(reference, message)
        chains.assert_same(chain(message), expected, exact=False)


def test_settings_of_all_stages_that_change_at_once(way):
    def make():
        return between(PowTransformer(exponent=2.0), EWMATransformer(time_constant=0.02))

    alone = make()
    chain = ChainTransformer(make_chain=make)
    for number in range(4):
        if number == 2:
            for to_mlx, power, average, to_numpy in (alone, chain.stages.values()):
                power.update_settings(PowSettings(exponent=1.0))
                average.update_settings(EWMASettings(time_constant=0.5))
                for conversion in (to_mlx, to_numpy):
                    conversion.update_settings(replace(conversion.settings))
        result = chain(message(noise(20, 3, seed=number), start=20 * number))
        (expected,) = run_steps(alone, message(noise(20, 3, seed=number), start=20 * number))
        np.testing.assert_allclose(result.data, expected.data, rtol=1e-5)
    assert runs_of(chain) == [(0, 4)]


def test_the_state_of_a_chain_can_be_set(way):
    def make():
        return between(EWMATransformer(time_constant=0.02))

    one, other = ChainTransformer(make_chain=make), ChainTransformer(make_chain=make)
    for number in range(3):
        one(message(noise(20, 3, seed=number), start=20 * number))
        other(message(noise(20, 3, seed=number + 9), start=20 * number))
    other.state = one.state
    last = message(noise(20, 3, seed=3), start=60)
    np.testing.assert_array_equal(one(last).data, other(last).data)


@pytest.mark.parametrize("dims", [("time", "ch"), ("ch", "time")])
def test_bins_that_are_not_of_one_length_are_reduced_each_by_itself(dims, way):
    messages = [
        message(noise(*((50, 4) if dims[0] == "time" else (4, 50)), seed=k), dims, start=50 * k) for k in range(4)
    ]
    # 12.5 samples.
    chain = alike(lambda: between(PowTransformer(), BinnedAggregateTransformer(bin_duration=0.0125)), messages)
    assert runs_of(chain) == [(0, 4 if dims[0] == "time" else 2)]


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(
    "settings", [{}, {"channel_groups": [[0, 1], [2, 3, 4, 5]], "include_current": False}], ids=str
)
def test_a_median_of_sigproc_takes_messages_without_samples_in_a_chain(settings, how, way):
    """Alone it raises for MLX data."""

    def reference() -> sigproc.CommonRereferenceTransformer:
        return sigproc.CommonRereferenceTransformer(sigproc.CommonRereferenceSettings(mode="median", **settings))

    chain_of = (
        lambda: [chains.to_mlx(), reference(), chains.to_numpy()],
        lambda: [chains.to_mlx(), Parallel({"a": reference(), "b": PowTransformer()}), chains.to_numpy()],
    )
    lengths = [0, 30, 0, 30, 30, 0, 30]
    for make in chain_of:
        chain, alone = ChainTransformer(make_chain=make), reference()
        for each in chains.stream(lengths, "int16"):
            output = chain(each) if how == "sync" else asyncio.run(chain.__acall__(each))
            (result,) = chains.as_list(output)
            if not each.data.size:
                assert len(result.data) == 0 and result.data.dtype == np.float32
                continue
            expected = alone(replace(each, data=each.data.astype(np.float32))).data
            np.testing.assert_allclose(result.data[:, : expected.shape[1]], expected, rtol=0, atol=1e-3)
