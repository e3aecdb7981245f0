"""Branches on one message: what their stages and ezmsg-sigproc's Concat give, one by one and as one function."""

import asyncio
import pickle

import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import AffineTransformTransformer
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.concat import ConcatProcessor, ConcatSettings
from ezmsg.sigproc.downsample import DownsampleTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.recurrences import noise

mx = pytest.importorskip("mlx.core")

from helpers.on_no_gpu import no_fallback

from ezmsg.mlx import (
    AsArrayTransformer,
    BinnedEventAggregator,
    ChainTransformer,
    EWMATransformer,
    Parallel,
    ParallelSettings,
    PowSettings,
    PowTransformer,
    ThresholdCrossingTransformer,
    run_chain,
)
from ezmsg.mlx.stream import device
from ezmsg.mlx.stream.fusible import settling_time

FS = 30000.0
LENGTHS = [30] * 45 + [7, 1, 1300, 0, 650, 30]
CHANNELS = AxisArray.CoordinateAxis(data=np.array(["a", "b", "c"]), dims=["ch"])


def messages(backend=np.array) -> list[AxisArray]:
    x = noise(sum(LENGTHS), 3)
    starts, found = np.cumsum([0, *LENGTHS[:-1]]), []
    attrs = {"of": ["any", "kind"]}
    for piece, start in zip(np.split(x, starts[1:]), starts, strict=True):
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=start / FS), "ch": CHANNELS}
        found.append(AxisArray(backend(piece), ["time", "ch"], axes=axes, attrs=attrs, key="amp", stream_dim="time"))
    return found


def branches(n: int = 2) -> dict:
    made = {
        "counts": [
            ThresholdCrossingTransformer(threshold=-1.0, output_format="dense"),
            BinnedEventAggregator(bin_duration=0.02, scale_output=False),
        ],
        "power": {"square": PowTransformer(), "bins": BinnedAggregateTransformer(bin_duration=0.02)},
        "largest": BinnedAggregateTransformer(bin_duration=0.02, operation=AggregationFunction.MAX),
    }
    return dict(list(made.items())[:n])


def stages_of(n: int = 2, **fields) -> list[BaseTransformer]:
    parallel = Parallel(branches(n), **fields)
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        EWMATransformer(time_constant=0.0001),
        parallel,
        AsArrayTransformer(backend="numpy"),
    ]


@pytest.fixture(params=["cpu", "compiled"])
def way(request, monkeypatch):
    """How chains are fused: as on the CPU, or as on a GPU, with functions that MLX need not compile."""
    if request.param == "compiled":
        monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
        mx.disable_compile()
    with no_fallback():
        yield request.param
    mx.enable_compile()


def check_same(results, expected) -> None:
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert (result.dims, result.key, result.attrs, result.stream_dim) == (
            other.dims,
            other.key,
            other.attrs,
            other.stream_dim,
        )
        assert list(result.axes) == list(other.axes)
        np.testing.assert_allclose(np.array(result.data), np.array(other.data), rtol=0, atol=1e-5)
        if len(other.data):
            for name, axis in other.axes.items():
                assert result.axes[name] == axis


@pytest.mark.parametrize("axis", ["ch", "feature"])
def test_results_are_those_of_concat(axis):
    parallel = Parallel(branches(), axis=axis)
    alone = [list(branch.values()) if isinstance(branch, dict) else branch for branch in branches().values()]
    settings = (
        {"label_a": "_counts", "label_b": "_power"} if axis == "ch" else {"label_a": "counts", "label_b": "power"}
    )
    concat = ConcatProcessor(ConcatSettings(axis=axis, **settings))
    results, expected = [], []
    for given in messages(mx.array):
        results.append(parallel(given))
        outputs = []
        for stages in alone:
            output = given
            for stage in stages:
                output = stage(output)
            outputs.append(replace(output, attrs={}))
        concat.push_a(outputs[0])
        concat.push_b(outputs[1])
        expected.append(replace(asyncio.run(concat.__acall__()), attrs=given.attrs))
    check_same(results, expected)
    labels = list(results[0].axes[axis].data)
    assert labels == (
        ["a_counts", "b_counts", "c_counts", "a_power", "b_power", "c_power"] if axis == "ch" else ["counts", "power"]
    )


@pytest.mark.parametrize("fields", [{}, {"axis": "feature"}, {"relabel_axis": False}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_chain_runs_branches_as_part_of_one_function(n, fields, way):
    chain, stages = ChainTransformer(make_chain=lambda: stages_of(n, **fields)), stages_of(n, **fields)
    results, expected = [], []
    for given in messages():
        results.append(chain(given))
        for stage in stages:
            given = stage(given)
        expected.append(given)
    check_same(results, expected)
    assert sum(len(result.data) for result in results) == 5
    assert chain.describe().count("fused with stages 1 to 4") == 4
    # And back, in the middle of a bin.
    inner, outer = chain.stages["Parallel"].stages, stages[2].stages
    assert inner.keys() == outer.keys()
    for name, stage in outer.items():
        if hasattr(stage.state, "schedule") if hasattr(stage, "state") else False:
            assert inner[name].state.schedule.carry_count == stage.state.schedule.carry_count > 0


def test_labels_of_three_branches_have_one_name_each():
    result = Parallel(branches(3))(messages(mx.array)[0])
    assert list(result.axes["ch"].data)[::3] == ["a_counts", "a_power", "a_largest"]
    result = Parallel(branches(3), axis="feature")(messages(mx.array)[0])
    assert list(result.axes["feature"].data) == ["counts", "power", "largest"] and result.dims[-1] == "feature"


def test_a_stage_of_a_branch_changes_while_it_runs(way):
    chain = ChainTransformer(make_chain=stages_of)
    totals = []
    for number, given in enumerate(messages()):
        if number == 20:
            chain.update_stage("Parallel/counts/ThresholdCrossing", threshold=-9.0)
        if number == 30:
            # Behind the back of the chain.
            chain.stages["Parallel"].stages["power/square"].update_settings(PowSettings(exponent=0.0))
        totals.append(chain(given).data)
    assert totals[19][:, :3].sum() > 5 and not any(total[:, :3].any() for total in totals[40:])
    np.testing.assert_allclose(np.concatenate(totals)[-3:, 3:], 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="'name' must be one of 'counts/ThresholdCrossing', "):
        chain.update_stage("Parallel/rate", threshold=0.0)


def test_weights_that_are_set_in_a_branch_count_at_once(way):
    mixing = AffineTransformTransformer(weights=np.eye(3))
    chain = ChainTransformer(make_chain=lambda: [PowTransformer(), Parallel({"a": mixing, "b": PowTransformer()})])
    given = messages(mx.array)
    for message in given[:40]:
        chain(message)
    assert chain.describe().count("fused with") == 2
    mixing.set_weights(mx.array(3.0 * np.eye(3, dtype=np.float32)))
    result = chain(given[40])
    np.testing.assert_allclose(np.array(result.data)[:, :3], 3.0 * np.array(given[40].data) ** 2, rtol=1e-5)


def test_a_branch_that_cannot_be_fused_leaves_its_neighbours_to_run_alone(way):
    def doubled(message: AxisArray) -> AxisArray:
        return replace(message, data=message.data * 2)

    def stages():
        return [AsArrayTransformer(backend="mlx"), Parallel({"a": doubled, "b": PowTransformer()}), EWMATransformer()]

    chain, alone = ChainTransformer(make_chain=stages), stages()
    check_same([chain(given) for given in messages()], list(run_chain(alone, messages())))


def test_branches_that_give_different_lengths_are_refused():
    parallel = Parallel({"all": PowTransformer(), "some": DownsampleTransformer(target_rate=FS / 2)})
    with pytest.raises(
        ValueError, match="Branches must give results that differ along 'ch' only, got {'all': {'time': 30"
    ):
        parallel(messages(mx.array)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (({},), TypeError, "'branches' must be stages by the names of branches"),
        (([PowTransformer()],), TypeError, "'branches' must be stages"),
        (({"a": []},), TypeError, "The branch 'a' must be a callable or a sequence"),
        (({"a": PowTransformer()}, 1), TypeError, "'axis' must be the name of a dimension, got 1"),
        (({"a": PowTransformer()}, "ch", 1), TypeError, "'relabel_axis' must be True or False, got 1"),
    ],
    ids=["none", "no names", "no stage", "axis", "labels"],
)
def test_bad_branches_are_refused_when_they_are_given(arguments, error, words):
    with pytest.raises(error, match=words):
        Parallel(*arguments)


def test_what_is_no_message_is_refused():
    parallel = Parallel({"a": lambda message: [message]})
    with pytest.raises(TypeError, match="gave a list"):
        parallel(messages()[0])
    with pytest.raises(TypeError, match="Parallel takes an AxisArray"):
        parallel("text")


def test_the_state_of_branches_comes_and_goes():
    one, other = Parallel(branches), Parallel(branches)
    given = messages(mx.array)
    for message in given[:10]:
        one(message)
    other.state = pickle.dumps(one.state)
    for name, stage in other.stages.items():
        if hasattr(stage, "_hash"):
            stage._hash = one.stages[name]._hash
    for message in given[10:30]:
        check_same([one(message)], [other(message)])


@pytest.mark.parametrize(("name", "error"), [("a/b", ValueError), (3, TypeError)])
def test_names_of_branches_are_checked(name, error):
    with pytest.raises(error, match="'branches' must have names"):
        Parallel({name: PowTransformer()})


def test_branches_say_how_long_they_remember():
    branches = {"a": [PowTransformer(), EWMATransformer(time_constant=0.1)], "b": EWMATransformer(time_constant=1.0)}
    assert settling_time(Parallel(branches), 1e-6, 0.001) == settling_time(
        EWMATransformer(time_constant=1.0), 1e-6, 0.001
    )
    assert settling_time(Parallel({"a": lambda message: message}), 1e-6, 0.001) is None


def test_other_branches_are_taken_by_update_settings():
    parallel, given = Parallel(branches()), messages(mx.array)
    parallel(given[0])
    parallel.update_settings(ParallelSettings(lambda: {"one": [PowTransformer(exponent=2.0)]}))
    np.testing.assert_allclose(np.array(parallel(given[1]).data), np.array(given[1].data) ** 2, rtol=1e-6)
