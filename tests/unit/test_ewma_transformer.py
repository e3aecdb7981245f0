"""EWMATransformer: settings, resets and ownership, on both paths that run anywhere. Values: helpers/ewma_cases.py."""

import asyncio
import copy
import dataclasses
import gc
import itertools
import math
import pickle
import threading
import warnings
from unittest import mock

import ezmsg.sigproc.ewma as sigproc
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

mx = pytest.importorskip("mlx.core")

from helpers.ewma_cases import FS, alpha_of, check_close, corrected, filtered, message, noise, using  # noqa: E402

import ezmsg.mlx.ewma as module  # noqa: E402
from ezmsg.mlx.ewma import EWMASettings, EWMATransformer, EWMAUnit  # noqa: E402


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


@pytest.fixture
def resets(monkeypatch) -> list[AxisArray]:
    """The messages that reset a state, up to now."""
    seen: list[AxisArray] = []
    reset = EWMATransformer._reset_state

    def noted(self, message):
        seen.append(message)
        reset(self, message)

    monkeypatch.setattr(EWMATransformer, "_reset_state", noted)
    return seen


def labelled(data, labels: str, **fields) -> AxisArray:
    axes = {
        "time": AxisArray.TimeAxis(fs=FS),
        "ch": AxisArray.CoordinateAxis(data=np.array(list(labels)), dims=["ch"]),
    }
    return message(data, axes=axes, **fields)


# ---------------------------------------------------------------------------------------------------------- settings

SCENARIOS = {
    "accumulate switched off and on": [200, dict(accumulate=False), 50, 50, 7, dict(accumulate=True), 300],
    "accumulate off from the start": [dict(accumulate=False), 40, 40, 3, dict(accumulate=True), 100, 1],
    "passthrough": [200, dict(passthrough=True), 50, 0, dict(passthrough=False), 70, 3],
    "passthrough from the start": [dict(passthrough=True), 50, dict(passthrough=False), 70, 3],
    "reset on resume": [dict(reset_on_resume=True), 200, dict(passthrough=True), 50, dict(passthrough=False), 70, 3],
    "reset on resume, but only empty messages passed": [
        dict(reset_on_resume=True), 200, dict(passthrough=True), 0, dict(passthrough=False), 70, 3,
    ],
    "reset on resume set during the gap": [
        200, dict(passthrough=True), 9, dict(reset_on_resume=True), 9, dict(passthrough=False), 70,
    ],
    "another time constant": [200, dict(time_constant=0.1), 70, 3],
    "the same time constant again": [200, dict(time_constant=0.01), 70, 3],
    "chunk sizes": [200, dict(mlx_metal_chunk_sizes=(8, 64)), 100, 3],
    "empty messages": [0, 0, 200, 0, 30, 0],
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_settings_at_run_time_do_what_they_do_in_sigproc(path, scenario):
    ours, theirs = EWMATransformer(time_constant=0.01), sigproc.EWMATransformer(time_constant=0.01)
    x = noise(1000, 3) + 9
    for step in SCENARIOS[scenario]:
        if isinstance(step, dict):
            for transformer in (ours, theirs):
                transformer.update_settings(dataclasses.replace(transformer.settings, **step))
            continue
        piece, x = x[:step], x[step:]
        y, expected = filtered(ours, mx.array(piece)), filtered(theirs, piece.astype(np.float64))
        check_close(y, expected) if y.size else None
        assert y.shape == piece.shape


def test_settings_and_state_are_found_by_the_framework():
    assert EWMATransformer.get_settings_type() is EWMASettings
    assert EWMATransformer().settings == EWMASettings()
    assert EWMAUnit.SETTINGS is EWMASettings
    ours = {field.name: field.default for field in dataclasses.fields(EWMASettings)}
    assert ours == {field.name: field.default for field in dataclasses.fields(sigproc.EWMASettings)}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf, None, "1", True, 1j, [1.0]], ids=repr)
def test_time_constant_must_be_a_finite_number_above_0(value):
    with pytest.raises((ValueError, TypeError), match="time_constant is .*allowed"):
        EWMASettings(time_constant=value)
    with pytest.raises((ValueError, TypeError), match="time_constant is .*allowed"):
        dataclasses.replace(EWMASettings(), time_constant=value)


@pytest.mark.parametrize("value", [1, 1e-320, 1e30, np.float32(0.5), np.int64(2)], ids=repr)
def test_time_constant_may_be_any_real_number(path, value):
    y = filtered(EWMATransformer(time_constant=value), mx.full((9, 2), 3.0))
    np.testing.assert_allclose(y, 3.0, rtol=1e-6)


@pytest.mark.parametrize("value", [(), (0,), (2000,), (32.0,), (True,), 32, None], ids=repr)
def test_chunk_sizes_are_checked_when_the_settings_are_built(value):
    with pytest.raises(ValueError, match="mlx_metal_chunk_sizes is "):
        EWMASettings(mlx_metal_chunk_sizes=value)


def test_chunk_sizes_may_be_a_list_as_json_gives_it(path):
    x = noise(100, 2)
    y = filtered(EWMATransformer(time_constant=0.01, mlx_metal_chunk_sizes=[8, 64]), mx.array(x))
    check_close(y, corrected(x, alpha_of(0.01)))


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("call", ["sync", "async"])
def test_everything_but_the_data_goes_through_and_the_message_stays_as_it_is(path, call):
    x = mx.array(noise(50, 4))
    given = labelled(x, "abcd", attrs={"a": 1}, key="k", stream_dim="time")
    before = copy.copy(given), dict(given.axes), np.array(x).tobytes()
    transformer = EWMATransformer(time_constant=0.01)
    for _ in range(2):
        result = transformer(given) if call == "sync" else asyncio.run(transformer.__acall__(given))
    assert given.data is x and given.axes == before[1] and np.array(x).tobytes() == before[2]
    assert result is not given
    assert all(result.axes[dim] is given.axes[dim] for dim in given.axes)
    assert (result.dims, result.attrs, result.key, result.stream_dim) == (["time", "ch"], {"a": 1}, "k", "time")
    assert isinstance(result.data, mx.array)
    check_close(np.array(result.data), corrected(np.tile(np.array(x), (2, 1)), alpha_of(0.01))[50:])


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.int16, mx.bfloat16])
def test_passthrough_gives_back_the_message_itself(path, dtype, call):
    transformer = EWMATransformer(passthrough=True)
    for n in (5, 0):
        given = message(mx.zeros((n, 2), dtype=dtype))
        assert (transformer(given) if call == "sync" else asyncio.run(transformer.__acall__(given))) is given


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("shape", [(0, 3), (40, 0)], ids=str)
def test_dtype_does_not_depend_on_whether_a_message_is_empty(path, shape, call):
    transformer = EWMATransformer(time_constant=0.01)
    for dtype in (mx.float32, mx.int16, mx.float16):
        for given in (mx.zeros(shape, dtype=dtype), mx.zeros((7, 3), dtype=dtype), mx.zeros(shape, dtype=dtype)):
            sent = message(given)
            result = transformer(sent) if call == "sync" else asyncio.run(transformer.__acall__(sent))
            assert (result.data.shape, result.data.dtype) == (given.shape, mx.float32)


@pytest.mark.parametrize("dims", list(itertools.permutations(["time", "ch", "x"])) + [("win", "time", "ch")], ids=str)
def test_average_runs_along_the_stream_dimension_wherever_it_is(path, dims):
    x = noise(60, 3, 2) + 5
    stream = "win" if "win" in dims else "time"
    data = np.moveaxis(x, 0, dims.index(stream))
    transformer = EWMATransformer(time_constant=0.001)
    pieces = [
        filtered(
            transformer,
            mx.array(piece),
            dims=list(dims),
            stream_dim=stream,
            axes={stream: AxisArray.TimeAxis(fs=FS)},
        )
        for piece in np.split(data, [1, 30], axis=dims.index(stream))
    ]
    y = np.moveaxis(np.concatenate(pieces, axis=dims.index(stream)), dims.index(stream), 0)
    check_close(y, corrected(x, alpha_of(0.001)))


def test_configured_axis_takes_the_place_of_the_stream_dimension(path):
    x = noise(40, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = EWMATransformer(time_constant=0.001, axis="win")
    y = filtered(transformer, mx.array(x), dims=["win", "time"], axes={"win": AxisArray.TimeAxis(fs=FS)})
    check_close(y, corrected(x, alpha_of(0.001)))


# ------------------------------------------------------------------------------------------------------------ resets


def continued(transformer: EWMATransformer, sent: AxisArray) -> bool:
    """Whether a message of zeros after one of ones was averaged with it."""
    y = np.array(transformer(sent).data)
    assert ((y == 0) | (y > 0.9)).all()
    return bool((y != 0).all())


ONES, ZEROS = mx.ones((300, 4)), mx.zeros((3, 4))


def test_same_stream_goes_on(path):
    transformer = EWMATransformer(time_constant=0.01)
    transformer(labelled(ONES, "abcd"))
    assert continued(transformer, labelled(ZEROS, "abcd"))
    assert continued(transformer, labelled(ZEROS.astype(mx.int16), "abcd"))
    assert continued(transformer, labelled(ZEROS, "abcd", attrs={"new": 1}))


@pytest.mark.parametrize(
    "other",
    [
        labelled(ZEROS, "abcd", key="other"),
        labelled(ZEROS, "abdc"),
        labelled(ZEROS[:, :3], "abc"),
        labelled(mx.zeros((4, 4)), "abcd", dims=["ch", "time"]),
        replace(
            labelled(ZEROS, "abcd"),
            axes={**labelled(ZEROS, "abcd").axes, "time": AxisArray.TimeAxis(fs=FS * 1.001)},
        ),
    ],
    ids=["key", "channels relabelled", "fewer channels", "dimensions", "rate"],
)
def test_another_stream_starts_anew(path, other):
    transformer = EWMATransformer(time_constant=0.01)
    transformer(labelled(ONES, "abcd"))
    assert not continued(transformer, other)


@pytest.mark.parametrize("data", ["mlx", "numpy"])
def test_rate_that_wobbles_by_less_than_1_ppm_keeps_the_state(path, data, resets):
    transformer = EWMATransformer(time_constant=0.5)
    x, pieces = noise(1000, 2) + 5, []
    for piece, wobble in zip(np.split(x, 10), [0, 1e-15, 9e-7, -9e-7, 1e-9, 0, 5e-7, -1e-12, 9e-7, 0], strict=True):
        pieces.append(filtered(transformer, mx.array(piece) if data == "mlx" else piece, fs=FS * (1 + wobble)))
    check_close(np.concatenate(pieces).astype(np.float32), corrected(x, alpha_of(0.5)))
    assert len(resets) == 1


@pytest.mark.parametrize("change", [1e-3, -1e-3, 1e-5, -2e-6])
def test_real_change_of_rate_resets_once(path, change, resets):
    transformer = EWMATransformer(time_constant=0.5)
    for fs in (FS, FS, FS * (1 + change), FS * (1 + change) * (1 + 1e-9), FS * (1 + change)):
        y = filtered(transformer, mx.array(noise(100, 2)), fs=fs)
    assert len(resets) == 2
    assert transformer.state.alpha == pytest.approx(alpha_of(0.5, FS * (1 + change)), rel=1e-12)
    assert np.isfinite(y).all()


def test_rate_that_drifts_away_in_small_steps_resets_when_it_is_1_ppm_off(path, resets):
    transformer = EWMATransformer(time_constant=0.5)
    for step in range(26):
        filtered(transformer, mx.ones((1, 2)), fs=FS * (1 + step * 1e-7))
    assert len(resets) == 3


@pytest.mark.parametrize("cause", ["key", "settings", "gap"])
def test_wobbling_rate_resets_no_further_once_something_else_did(path, cause, resets):
    transformer = EWMATransformer(time_constant=0.5, reset_on_resume=True)
    rates = iter(FS * (1 + 1e-8 * noise(40).astype(np.float64)))
    for _ in range(5):
        filtered(transformer, mx.ones((10, 2)), fs=next(rates))
    if cause == "settings":
        transformer.update_settings(dataclasses.replace(transformer.settings, time_constant=0.4))
    if cause == "gap":
        for on in (True, False):
            transformer.update_settings(dataclasses.replace(transformer.settings, passthrough=on))
            filtered(transformer, mx.ones((10, 2)), fs=next(rates))
    for _ in range(5):
        filtered(transformer, mx.ones((10, 2)), fs=next(rates), key="other" if cause == "key" else "amp")
    assert len(resets) == 2


# ------------------------------------------------------------------------------------------- messages that are refused

AXES_REFUSED = {
    "coordinates": AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"]),
    "one coordinate": AxisArray.CoordinateAxis(data=np.zeros(1), dims=["time"]),
    "gain 0": AxisArray.LinearAxis(gain=0.0),
    "negative gain": AxisArray.LinearAxis(gain=-1 / FS),
    "gain nan": AxisArray.LinearAxis(gain=math.nan),
    "gain inf": AxisArray.LinearAxis(gain=math.inf),
    "no axis": None,
}


@pytest.mark.parametrize("data", ["mlx", "numpy"])
@pytest.mark.parametrize("kind", AXES_REFUSED)
def test_irregular_stream_dimension_is_refused_and_loses_that_message_only(path, kind, data, resets):
    transformer, x = EWMATransformer(time_constant=0.01), noise(300, 2) + 5
    axis = AXES_REFUSED[kind]
    given = (mx.array if data == "mlx" else np.array)(x)
    refused = message(given[:1] if kind == "one coordinate" else given, axes={"time": axis} if axis else {})
    pieces = []
    for n in range(3):
        for _ in range(2):
            with pytest.raises(ValueError, match="stream dimension 'time'.*(LinearAxis|gain)"):
                transformer(refused)
        pieces.append(filtered(transformer, given))
    check_close(np.concatenate(pieces).astype(np.float32), corrected(np.tile(x, (3, 1)), alpha_of(0.01)))


@pytest.mark.parametrize("n", [0, 5])
def test_complex_data_is_refused_and_loses_that_message_only(path, n):
    transformer, x = EWMATransformer(time_constant=0.01), noise(300, 2) + 5
    refused = message(mx.zeros((n, 2), dtype=mx.complex64))
    pieces = []
    for piece in np.split(x, 3):
        with pytest.raises(TypeError, match="complex64"):
            transformer(refused)
        pieces.append(filtered(transformer, mx.array(piece)))
    check_close(np.concatenate(pieces), corrected(x, alpha_of(0.01)))


# ------------------------------------------------------------------------------------------------------------- numpy


def test_numpy_data_is_left_to_sigproc_and_the_backend_may_change_within_the_stream(path):
    ours, x = EWMATransformer(time_constant=0.01), noise(400, 2) + 5
    for backend in ("numpy", "mlx", "numpy", "mlx"):
        theirs = sigproc.EWMATransformer(time_constant=0.01)
        for piece in np.split(x, 4):
            expected = filtered(theirs, piece)
            given = message(piece if backend == "numpy" else mx.array(piece))
            result = ours(given)
            assert type(result.data) is type(given.data)
            if backend == "numpy":
                np.testing.assert_array_equal(result.data, expected)
            check_close(np.array(result.data).astype(np.float32), expected)


# --------------------------------------------------------------------------------------------- state: path, ownership


def test_path_may_change_within_the_stream():
    transformer, x = EWMATransformer(time_constant=0.01), noise(900, 2) + 5
    pieces = []
    for piece, path in zip(np.split(x, 9), itertools.cycle(["cpu", "plain", "plain"])):
        with using(path):
            pieces.append(filtered(transformer, mx.array(piece)))
    check_close(np.concatenate(pieces), corrected(x, alpha_of(0.01)))


def test_path_is_chosen_for_each_message_anew():
    transformer, chosen = EWMATransformer(time_constant=0.01), []
    with mock.patch.object(module, "_select_path", lambda: chosen.append("cpu") or "cpu"):
        for _ in range(3):
            transformer(message(ONES))
    assert len(chosen) == 3


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("n_messages", [1, 3])
def test_transformer_warmed_up_in_one_thread_goes_on_in_another(path, accumulate, read, n_messages):
    transformer, x = EWMATransformer(time_constant=0.01, accumulate=accumulate), noise(160, 2) + 5
    first, last = x[: 40 * n_messages], x[40 * n_messages :]

    def warm_up():
        for piece in np.split(first, n_messages):
            result = transformer(message(mx.array(piece)))
            if read:
                mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    expected = corrected(x, alpha_of(0.01))[len(first) :] if accumulate else corrected(last, alpha_of(0.01))
    check_close(filtered(transformer, mx.array(last)), expected)


def test_message_refused_in_one_thread_is_no_harm_to_another(path):
    transformer, x = EWMATransformer(time_constant=0.01), noise(40, 2)
    refused = []

    def first():
        with pytest.raises(TypeError):
            transformer(message(mx.array(x).astype(mx.complex64)))
        refused.append(True)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert refused
    check_close(filtered(transformer, mx.array(x)), corrected(x, alpha_of(0.01)))


def test_buffers_overwritten_after_the_call_change_neither_results_nor_state(path):
    transformer, x = EWMATransformer(time_constant=0.01), noise(400, 2) + 5
    results = []
    for piece in np.split(x, 4):
        data = mx.array(piece)
        result = transformer(message(data)).data
        mx.eval(result, transformer.state.zi, transformer.state.weight)
        # Windows into the MLX arrays, which a receiver of either may write to.
        np.asarray(data)[:] = 99
        results.append(np.array(result))
        np.asarray(result)[:] = 99
    check_close(np.concatenate(results), corrected(x, alpha_of(0.01)))


@pytest.mark.parametrize("time_constant", [1e-6, 10.0], ids=["settled", "corrected"])
def test_outputs_that_nobody_reads_do_not_grow_memory(path, time_constant):
    transformer = EWMATransformer(time_constant=time_constant, mlx_metal_chunk_sizes=(1,))

    def drop(n: int) -> int:
        for _ in range(n):
            transformer(message(mx.array(np.ones((1, 256), np.float32))))
        mx.eval(transformer.state.zi)
        gc.collect()
        return mx.get_active_memory()

    before = drop(20)
    # The messages alone are 1 MiB.
    assert drop(1000) - before < 2**17


@pytest.mark.parametrize("settled", [False, True])
def test_state_can_be_pickled_and_taken_up_by_another_transformer(path, settled):
    x = noise(1200, 2) + 5
    settings = EWMASettings(time_constant=0.001 if settled else 0.5)
    state = None
    pieces = []
    for piece in np.split(x, 4):
        state, result = EWMATransformer(settings).stateful_op(state, message(mx.array(piece)))
        pieces.append(np.array(result.data))
        state = pickle.loads(pickle.dumps(state))
    check_close(np.concatenate(pieces), corrected(x, alpha_of(settings.time_constant)))
    assert (state[0].weight is None) == settled


def test_a_copy_of_the_transformer_goes_its_own_way(path):
    x = noise(300, 2) + 5
    transformer = EWMATransformer(time_constant=0.01)
    first = filtered(transformer, mx.array(x[:100]))
    other = EWMATransformer(time_constant=0.01)
    other.stateful_op((copy.deepcopy(transformer.state), transformer._hash), message(mx.zeros((500, 2))))
    y = np.concatenate([first, filtered(transformer, mx.array(x[100:]))])
    check_close(y, corrected(x, alpha_of(0.01)))


def test_correction_ends_after_some_17_time_constants(path):
    transformer = EWMATransformer(time_constant=0.001)
    for _ in range(17):
        filtered(transformer, mx.ones((30, 2)))
    assert transformer.state.weight is not None
    filtered(transformer, mx.ones((30, 2)))
    assert transformer.state.weight is None
