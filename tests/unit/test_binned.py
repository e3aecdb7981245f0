"""Events in bins: what ezmsg-event gives, one by one and fused with the stages before."""

import ezmsg.event.binned as event_binned
import ezmsg.event.rate as event_rate
import numpy as np
import pytest
import sparse
from ezmsg.util.messages.axisarray import AxisArray
from helpers.recurrences import noise

mx = pytest.importorskip("mlx.core")

from helpers.on_no_gpu import no_fallback

from ezmsg.mlx import (
    AsArrayTransformer,
    BinnedEventAggregator,
    BinnedEventAggregatorSettings,
    BinnedEventAggregatorUnit,
    ChainTransformer,
    EventRateSettings,
    Rate,
    ThresholdCrossingTransformer,
)
from ezmsg.mlx.stream import device as device_module

FS = 30000.0
LENGTHS = [30] * 45 + [7, 1, 1300, 0, 650, 30]


def message(data, first: int) -> AxisArray:
    return AxisArray(data, ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=FS, offset=1 + first / FS)}, key="amp")


def messages(convert, seed: int = 0, scale: float = 1.0) -> list[AxisArray]:
    x = noise(sum(LENGTHS), 5, seed=seed) * np.float32(scale)
    starts = np.cumsum([0, *LENGTHS[:-1]])
    return [message(convert(piece), first) for piece, first in zip(np.split(x, starts[1:]), starts, strict=True)]


def marks(x: np.ndarray) -> np.ndarray:
    """Few entries that are not 0."""
    return np.where(x > 1.5, x, 0).astype(np.float32)


KINDS = {
    "rate in bins": (BinnedEventAggregator, event_binned.BinnedEventAggregator, {"bin_duration": 0.0201}),
    "counts": (
        BinnedEventAggregator,
        event_binned.BinnedEventAggregator,
        {"bin_duration": 0.02, "scale_output": False},
    ),
    "values": (
        BinnedEventAggregator,
        event_binned.BinnedEventAggregator,
        {"bin_duration": 0.0033, "scale_by_value": True, "fractional": False},
    ),
    "rate": (Rate, event_rate.Rate, {"bin_duration": 0.00333}),
    "rate of whole samples": (Rate, event_rate.Rate, {"bin_duration": 0.00333, "fractional": False}),
}


def reference_of(kind: str):
    of_event, fields = KINDS[kind][1:]
    settings = (
        event_rate.EventRateSettings if of_event is event_rate.Rate else event_binned.BinnedEventAggregatorSettings
    )
    return of_event(settings(**fields))


def check_same(results: list[AxisArray], expected: list[AxisArray], tolerance: float = 1e-6) -> None:
    assert sum(np.array(result.data).sum() for result in expected) > 50
    for result, other in zip(results, expected, strict=True):
        assert result.dims == other.dims and result.key == other.key
        np.testing.assert_allclose(np.array(result.data), np.array(other.data), rtol=tolerance, atol=1e-6)
        if len(other.data):
            assert result.axes["time"].gain == pytest.approx(other.axes["time"].gain, rel=1e-12)
            assert result.axes["time"].offset == pytest.approx(other.axes["time"].offset, rel=1e-12)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_ezmsg_event(kind, device, monkeypatch):
    # On a GPU, where MLX data stays.
    monkeypatch.setattr("ezmsg.mlx.binned.uses_gpu", lambda: device == "gpu")
    ours, _, fields = KINDS[kind]
    reference = reference_of(kind)
    expected = [reference(given) for given in messages(marks)]
    for convert in (marks, lambda x: mx.array(marks(x))):
        counter = ours(**fields)
        results = [counter(given) for given in messages(convert)]
        check_same(results, expected)
        assert type(results[0].data) is type(convert(np.zeros((0, 1), np.float32)))


@pytest.mark.parametrize("kind", ["counts", "rate"])
def test_sparse_events_are_counted_as_dense_ones(kind):
    results = []
    for output_format in ("dense", "sparse"):
        for convert in (np.array, mx.array):
            find = ThresholdCrossingTransformer(threshold=-1.0, output_format=output_format)
            counter = KINDS[kind][0](**KINDS[kind][2])
            results.append([counter(find(given)) for given in messages(convert)])
    assert isinstance(find(messages(np.array)[0]).data, sparse.COO)
    for others in results[1:]:
        check_same(others, results[0])


def chain_of(kind: str, threshold: float = -1.0, **fields) -> list:
    ours, _, of_counter = KINDS[kind]
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        ThresholdCrossingTransformer(threshold=threshold, output_format="dense", **fields),
        ours(**of_counter),
        AsArrayTransformer(backend="numpy"),
    ]


@pytest.fixture(params=["cpu", "compiled"])
def way(request, monkeypatch):
    """How chains are fused: as on the CPU, or as on a GPU, with functions that MLX need not compile."""
    if request.param == "compiled":
        monkeypatch.setattr(device_module, "backend_in_use", lambda: "gpu")
        mx.disable_compile()
    with no_fallback():
        yield request.param
    mx.enable_compile()


@pytest.mark.parametrize("fields", [{}, {"align_on_peak": True, "max_peak_dur": 5.01 / FS}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_crossings_and_counts_are_one_function(kind, fields, way):
    chain = ChainTransformer(make_chain=lambda: chain_of(kind, **fields))
    stages = chain_of(kind, **fields)
    results, expected = [], []
    for given in messages(np.array):
        results.append(chain(given))
        for stage in stages:
            given = stage(given)
        expected.append(given)
    check_same(results, expected)
    assert all(result.data.dtype == np.float32 for result in results)
    assert chain.describe().count("fused with stages 1 to 4") == 4
    # And back, in the middle of a bin.
    for stage, alone in zip(chain.stages.values(), stages, strict=True):
        if hasattr(stage, "state") and stage.state is not None and hasattr(stage.state, "schedule"):
            assert stage.state.schedule.carry_count == alone.state.schedule.carry_count > 0
            np.testing.assert_array_equal(
                np.array(stage.state.carry).sum(axis=0), np.array(alone.state.carry).sum(axis=0)
            )


@pytest.mark.parametrize("shape", [(5,), (5, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_counted_in_its_bin(kind, shape, way):
    """With an event in each sample, several bins in a message, and bins that end with one."""

    def stages() -> list:
        counter = KINDS[kind][0](**KINDS[kind][2])
        return [AsArrayTransformer(backend="mlx", dtype="float32"), counter, AsArrayTransformer(backend="numpy")]

    chain, (_, alone, _) = ChainTransformer(make_chain=stages), stages()
    results, expected, start = [], [], 0
    for length in [600, 99, 100, 30] * 4:
        data = 1 + np.abs(noise(length, *shape, seed=start))
        given = AxisArray(
            data, ["time", "ch", "band"][: data.ndim], axes={"time": AxisArray.TimeAxis(fs=FS, offset=start / FS)}
        )
        results.append(chain(given))
        expected.append(alone(given))
        start += length
    check_same(results, expected)
    assert chain.describe().count("fused with stages 1 to 3") == 3


def test_a_chain_may_end_with_events(way):
    chain = ChainTransformer(make_chain=lambda: [*chain_of("counts")[:2], AsArrayTransformer(backend="numpy")])
    find = ThresholdCrossingTransformer(threshold=-1.0, output_format="dense")
    for given in messages(np.array):
        result = chain(given).data
        assert result.dtype == bool
        np.testing.assert_array_equal(result, find(given).data)
    assert "fused with stages 1 to 3" in chain.describe()


def test_the_threshold_of_a_chain_changes_while_it_runs(way):
    chain = ChainTransformer(make_chain=lambda: dict(zip("acbd", chain_of("counts"), strict=True)))
    totals = []
    for number, given in enumerate(messages(np.array)):
        if number == 20:
            chain.update_stage("c", threshold=-9.0)
        totals.append(chain(given).data.sum())
    assert totals[19] > 50 and not any(totals[40:])


def test_a_unit_publishes_nothing_where_no_bin_ends():
    unit = BinnedEventAggregatorUnit(BinnedEventAggregatorSettings())
    unit._set_name("UNIT")
    unit._set_location(["GRAPH"])
    unit.create_processor()
    given = message(mx.zeros((30, 2)), 0)
    assert unit._results(given, unit.processor(given)) == []


@pytest.mark.parametrize("kind", [BinnedEventAggregatorSettings, EventRateSettings])
def test_bad_settings_are_refused_when_they_are_built(kind):
    with pytest.raises(ValueError, match="'bin_duration' must be a finite number > 0, got 0"):
        kind(bin_duration=0)
    with pytest.raises(TypeError, match="'fractional' must be True or False, got 1"):
        kind(fractional=1)
