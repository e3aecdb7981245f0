"""What all filters with a memory do alike: settings, messages, resets, refusals and ownership."""

import copy
import dataclasses
import gc
import itertools
import math
import pickle
import threading

import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

mx = pytest.importorskip("mlx.core")

from helpers.recurrences import FS, check_close, noise
from helpers.transformers import TRANSFORMERS, Habits, call, filtered, labelled, message, using

import ezmsg.mlx.filter
import ezmsg.mlx.kernels
from ezmsg.mlx.kernels import kernel, recursion

HOW = ["sync", "async"]
AVERAGES = ["EWMA", "scaler"]
# Of ezmsg-baseproc: the setting "axis" is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(params=TRANSFORMERS)
def habits(request) -> Habits:
    return TRANSFORMERS[request.param]


@pytest.fixture(params=["cpu", "plain"])
def path(request):
    with using(request.param):
        yield request.param


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "scenario"), [(name, scenario) for name in TRANSFORMERS for scenario in TRANSFORMERS[name].scenarios]
)
def test_settings_at_run_time_do_what_they_do_in_sigproc_called_bare(path, name, scenario):
    # In a graph, that is in an asynchronous call, ezmsg-sigproc starts a filter anew, which makes a click.
    habits, x = TRANSFORMERS[name], noise(1000, 3) + 9
    ours, theirs = {how: habits.make() for how in HOW}, habits.make_theirs()
    for step in habits.scenarios[scenario]:
        if isinstance(step, dict):
            for transformer in (*ours.values(), theirs):
                transformer.update_settings(dataclasses.replace(transformer.settings, **step))
            continue
        piece, x = x[:step], x[step:]
        expected = filtered(theirs, piece.astype(np.float64))
        for how, transformer in ours.items():
            y = filtered(transformer, mx.array(piece), how)
            assert y.shape == piece.shape
            check_close(y, expected, habits.tolerance, name=how) if step else None


def test_settings_are_found_by_the_framework_and_have_the_defaults_of_sigproc(habits):
    settings = habits.ours.get_settings_type()
    assert habits.unit.SETTINGS is settings
    assert habits.ours().settings == settings()
    ours, theirs = (
        {field.name: field.default for field in dataclasses.fields(kind)}
        for kind in (settings, habits.theirs.get_settings_type())
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["EWMA", "scaler", "Butterworth"])
@pytest.mark.parametrize("value", [(), (0,), (2000,), (32.0,), (True,), 32, None, "zpk"], ids=repr)
def test_chunk_sizes_are_checked_when_the_settings_are_built(name, value):
    with pytest.raises(ValueError, match="'mlx_metal_chunk_sizes' must be "):
        TRANSFORMERS[name].ours.get_settings_type()(mlx_metal_chunk_sizes=value)


def test_chunk_sizes_may_be_a_list_as_json_gives_it(path, habits):
    x = noise(100, 2)
    y = filtered(habits.make(mlx_metal_chunk_sizes=[8, 64]), mx.array(x))
    check_close(y, habits.expected_of(x), habits.tolerance)


@pytest.mark.parametrize("how", HOW)
def test_switched_off_gives_back_the_message_itself(habits, how):
    for off in habits.off:
        transformer = habits.make(**off)
        for data in (noise(5, 2), *(mx.zeros((n, 2), dtype=dtype) for n in (5, 0) for dtype in (mx.float32, mx.int16))):
            sent = message(data)
            assert call(transformer, sent, how) is sent


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("how", HOW)
def test_everything_but_the_data_goes_through_and_the_message_stays_as_it_is(path, habits, how):
    x = mx.array(noise(50, 4))
    given = labelled(x, "abcd", attrs={"a": 1}, key="k", stream_dim="time")
    before = dict(given.axes), np.array(x).tobytes()
    transformer = habits.make()
    for _ in range(2):
        result = call(transformer, given, how)
    assert given.data is x and given.axes == before[0] and np.array(x).tobytes() == before[1]
    assert result is not given
    assert all(result.axes[dim] is given.axes[dim] for dim in given.axes)
    assert (result.dims, result.attrs, result.key, result.stream_dim) == (["time", "ch"], {"a": 1}, "k", "time")
    assert isinstance(result.data, mx.array)
    check_close(result.data, habits.expected_of(np.tile(np.array(x), (2, 1)))[50:], habits.tolerance)


@pytest.mark.parametrize("how", HOW)
def test_dtype_does_not_depend_on_whether_a_message_is_empty(path, habits, how):
    for empty in ((0, 3), (40, 0)):
        transformer = habits.make()
        for dtype, shape in itertools.product((mx.float32, mx.int16, mx.float16), (empty, (7, 3), empty)):
            result = call(transformer, message(mx.zeros(shape, dtype=dtype)), how)
            assert (result.data.shape, result.data.dtype) == (shape, mx.float32)


def test_filter_runs_along_the_stream_dimension_wherever_it_is(path, habits):
    x = noise(60, 3, 2) + 5
    expected = habits.expected_of(x)
    for dims in (*itertools.permutations(["time", "ch", "x"]), ("win", "time", "ch")):
        stream = "win" if "win" in dims else "time"
        place, transformer = dims.index(stream), habits.make()
        fields = dict(dims=list(dims), stream_dim=stream, axes={stream: AxisArray.TimeAxis(fs=FS)})
        pieces = [
            filtered(transformer, mx.array(piece), **fields)
            for piece in np.split(np.moveaxis(x, 0, place), [1, 30], axis=place)
        ]
        y = np.moveaxis(np.concatenate(pieces, axis=place), place, 0)
        check_close(y, expected, habits.tolerance, name=dims)


def test_configured_axis_takes_the_place_of_the_stream_dimension(path, habits):
    x = noise(100, 3)
    fields = dict(dims=["win", "time"], axes={"win": AxisArray.TimeAxis(fs=FS)})
    check_close(filtered(habits.make(axis="win"), mx.array(x), **fields), habits.expected_of(x), habits.tolerance)


@pytest.mark.parametrize("name", AVERAGES)
def test_numpy_data_is_left_to_sigproc_and_the_backend_may_change_within_the_stream(path, name):
    habits, x = TRANSFORMERS[name], noise(400, 2) + 5
    ours, theirs = habits.make(), habits.make_theirs()
    for n, backend in enumerate(("numpy", "mlx", "numpy", "mlx")):
        for piece in np.split(x.astype(np.float64), 4):
            expected = filtered(theirs, piece)
            given = message(piece if backend == "numpy" else mx.array(piece.astype(np.float32)))
            result = ours(given)
            assert type(result.data) is type(given.data)
            if n == 0:
                np.testing.assert_array_equal(result.data, expected)
            else:
                check_close(np.asarray(result.data, np.float32), expected, habits.tolerance)


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("first", ["numpy", "mlx"])
def test_channel_that_was_dead_under_one_backend_begins_under_the_other(path, name, first):
    habits, dead, x = TRANSFORMERS[name], noise(200, 2), noise(400, 2) + 5
    dead[:, 0] = math.nan
    given = {"numpy": lambda data: data.astype(np.float64), "mlx": mx.array}
    (second,) = given.keys() - {first}
    transformer = habits.make()
    filtered(transformer, given[first](dead))
    y = filtered(transformer, given[second](x))
    # ezmsg-sigproc counts samples and not those of a channel.
    start = 0 if second == "mlx" else 399
    np.testing.assert_allclose(y[start:, 0], habits.expected_of(x)[start:, 0], atol=1e-4 if second == "mlx" else 3.0)


@pytest.mark.parametrize("name", AVERAGES)
def test_another_backend_and_another_stream_at_once_start_anew(path, name):
    habits, x = TRANSFORMERS[name], noise(100, 2) + 5
    for to_backends in ((np.asarray, mx.array), (mx.array, np.asarray)):
        transformer = habits.make()
        first, second = (to_backend(x) for to_backend in to_backends)
        filtered(transformer, first, key="a")
        check_close(np.float32(filtered(transformer, second, key="b")), habits.expected_of(x), habits.tolerance)


# ------------------------------------------------------------------------------------------------------------ resets


def are_new(habits: Habits, transformer, sent: list[AxisArray]) -> list[bool]:
    """For each message of a stream whether the result is that of a transformer that has seen no other."""
    results = ((np.array(transformer(each).data), np.array(habits.make()(each).data)) for each in sent)
    return [np.allclose(y, new, rtol=0, atol=1e-6 * np.abs(new).max()) for y, new in results]


def stream(rates: list[float], **fields) -> list[AxisArray]:
    data = noise(100 * len(rates), 2) + 5
    return [
        message(mx.array(piece), fs=fs, **fields) for piece, fs in zip(np.split(data, len(rates)), rates, strict=True)
    ]


ZEROS = mx.zeros((3, 4))


@pytest.mark.parametrize(
    ("other", "is_new"),
    [
        (labelled(ZEROS, "abcd"), False),
        (labelled(ZEROS.astype(mx.int16), "abcd"), False),
        (labelled(ZEROS, "abcd", attrs={"new": 1}), False),
        (labelled(ZEROS, "abcd", fs=FS * (1 + 1e-8)), False),
        (labelled(ZEROS, "abcd", key="other"), True),
        (labelled(ZEROS, "abdc"), True),
        (labelled(ZEROS[:, :3], "abc"), True),
        (labelled(mx.zeros((4, 4)), "abcd", dims=["ch", "time"]), True),
        (labelled(ZEROS, "abcd", fs=FS * 1.001), True),
        (message(ZEROS), True),
    ],
    ids="same dtype attributes wobble key relabelled fewer dimensions rate unlabelled".split(),
)
def test_another_stream_starts_anew(habits, other, is_new):
    transformer = habits.make()
    transformer(labelled(mx.ones((300, 4)), "abcd"))
    # Zeros come out as zeros where they are the first that there is.
    y = np.array(transformer(other).data)
    assert not y.any() if is_new else y.all()


@pytest.mark.parametrize("data", ["mlx", "numpy"])
def test_rate_that_wobbles_by_less_than_1_ppm_keeps_the_state(path, habits, data):
    transformer, x, pieces = habits.make(), noise(1000, 2) + 5, []
    for piece, wobble in zip(np.split(x, 10), [0, 1e-15, 9e-7, -9e-7, 1e-9, 0, 5e-7, -1e-12, 9e-7, 0], strict=True):
        given = mx.array(piece) if data == "mlx" else piece.astype(np.float64)
        pieces.append(filtered(transformer, given, fs=FS * (1 + wobble)))
    check_close(np.concatenate(pieces).astype(np.float32), habits.expected_of(x), habits.tolerance)


@pytest.mark.parametrize("change", [1e-3, -1e-3, 1e-5, -2e-6])
def test_real_change_of_rate_resets_once(habits, change):
    rates = [FS, FS, FS * (1 + change), FS * (1 + change) * (1 + 1e-9), FS * (1 + change)]
    assert are_new(habits, habits.make(), stream(rates)) == [True, False, True, False, False]


def test_rate_that_drifts_away_in_small_steps_resets_when_it_is_1_ppm_off(habits):
    sent = stream([FS * (1 + step * 1e-7) for step in range(26)])
    assert sum(are_new(habits, habits.make(), sent)) == 3


def test_wobbling_rate_resets_no_further_once_something_else_did(habits):
    transformer, rates = habits.make(), FS * (1 + 1e-8 * noise(10).astype(np.float64))
    for key in ("a", "b"):
        assert are_new(habits, transformer, stream(list(rates), key=key)) == [True] + [False] * 9


def test_axis_of_the_message_is_not_changed_by_a_wobbling_rate(habits):
    transformer = habits.make()
    transformer(message(mx.ones((5, 2))))
    given = message(mx.ones((5, 2)), fs=FS * (1 + 1e-8))
    assert transformer(replace(given)).axes["time"] is given.axes["time"]


# ------------------------------------------------------------------------------------------- messages that are refused

AXES_REFUSED = [
    AxisArray.CoordinateAxis(data=np.arange(300) / FS, dims=["time"]),
    AxisArray.CoordinateAxis(data=np.zeros(1), dims=["time"]),
    *(AxisArray.LinearAxis(gain=gain) for gain in (0.0, -1 / FS, math.nan, math.inf)),
    None,
]


@pytest.mark.parametrize("data", ["mlx", "numpy"])
@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if TRANSFORMERS[name].needs_rate])
def test_stream_dimension_without_a_rate_is_refused_and_loses_that_message_only(name, data):
    habits, x, pieces = TRANSFORMERS[name], noise(2100, 2) + 5, []
    transformer, given = habits.make(), mx.array if data == "mlx" else np.array
    for piece, axis in zip(np.split(x, len(AXES_REFUSED)), AXES_REFUSED, strict=True):
        n = 300 if axis is None or isinstance(axis, AxisArray.LinearAxis) else len(axis.data)
        refused = message(given(noise(n, 2)), axes={"time": axis} if axis else {})
        for _ in range(2):
            with pytest.raises(ValueError, match="stream dimension 'time'.*(LinearAxis|gain)"):
                transformer(refused)
        pieces.append(filtered(transformer, given(piece)))
    check_close(np.concatenate(pieces).astype(np.float32), habits.expected_of(x), habits.tolerance)


def test_complex_data_is_refused_and_loses_that_message_only(habits):
    transformer, x, pieces = habits.make(), noise(300, 2) + 5, []
    for piece in np.split(x, 3):
        for n in (0, 5):
            with pytest.raises(TypeError, match="of complex64"):
                transformer(message(mx.zeros((n, 2), dtype=mx.complex64)))
        pieces.append(filtered(transformer, mx.array(piece)))
    check_close(np.concatenate(pieces), habits.expected_of(x), habits.tolerance)


# --------------------------------------------------------------------------------------- state: path, threads, copies


def test_path_is_chosen_for_each_message_anew_and_may_change_within_the_stream(habits):
    transformer, x, pieces = habits.make(), noise(900, 2) + 5, []
    for piece, path in zip(np.split(x, 9), itertools.cycle(["cpu", "plain", "plain"])):
        with using(path) as chosen:
            pieces.append(filtered(transformer, mx.array(piece)))
        assert set(chosen) == {path}
    check_close(np.concatenate(pieces), habits.expected_of(x), habits.tolerance)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("n_messages", [1, 3])
def test_transformer_warmed_up_in_one_thread_goes_on_in_another(path, habits, read, n_messages):
    transformer, x = habits.make(), noise(160, 2) + 5
    first, last = x[: 40 * n_messages], x[40 * n_messages :]

    def warm_up():
        for piece in np.split(first, n_messages):
            result = transformer(message(mx.array(piece)))
            if read:
                mx.eval(result.data)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    check_close(filtered(transformer, mx.array(last)), habits.expected_of(x)[len(first) :], habits.tolerance)


def test_message_refused_in_one_thread_is_no_harm_to_another(path, habits):
    transformer, x, refused = habits.make(), noise(40, 2), []

    def first():
        with pytest.raises(TypeError):
            transformer(message(mx.array(x).astype(mx.complex64)))
        refused.append(True)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert refused
    check_close(filtered(transformer, mx.array(x)), habits.expected_of(x), habits.tolerance)


def test_buffers_overwritten_after_the_call_change_neither_results_nor_state(path, habits):
    transformer, x, results = habits.make(), noise(400, 2) + 5, []
    for piece in np.split(x, 4):
        data = mx.array(piece)
        result = transformer(message(data)).data
        mx.eval(result)
        # Waits for the state, whose computation has begun.
        mx.synchronize()
        np.testing.assert_array_equal(np.array(data), piece)
        # Windows into the MLX arrays, which a receiver of either may write to.
        np.asarray(data)[:] = 99
        results.append(np.array(result))
        np.asarray(result)[:] = 99
    check_close(np.concatenate(results), habits.expected_of(x), habits.tolerance)


def unread(transformer: BaseTransformer, n_messages: int) -> int:
    """Bytes that *n_messages* more of 4 KiB add to what is alive, if nobody reads their results."""

    def drop(n: int) -> int:
        for _ in range(n):
            transformer(message(mx.array(np.ones((1, 1024), np.float32))))
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    before = drop(10)
    return drop(n_messages) - before


@pytest.mark.parametrize(
    ("name", "settings"), [(name, settings) for name in TRANSFORMERS for settings in TRANSFORMERS[name].unread]
)
def test_outputs_that_nobody_reads_do_not_grow_memory(path, name, settings):
    # The messages alone are 128 KiB.
    assert unread(TRANSFORMERS[name].make(mlx_metal_chunk_sizes=(1,), **settings), 32) < 2**16


def test_filter_outputs_that_nobody_reads_do_not_grow_memory_on_cuda(monkeypatch):
    """Where states are computed before the next message: CUDA's kernels, in whose place are lazy operations here."""
    monkeypatch.setattr(ezmsg.mlx.filter, "kernel", lambda recurrence, path: kernel(recurrence, "plain"))
    monkeypatch.setattr(ezmsg.mlx.kernels, "recursion", lambda recurrence, path: recursion(recurrence, "plain"))
    for name in ("filter", "Butterworth"):
        with using("cuda"):
            # A chunk of one sample: plain operations are to take no longer than they must.
            assert unread(TRANSFORMERS[name].make(mlx_metal_chunk_sizes=(1,)), 32) < 2**16


@pytest.mark.parametrize("name", ["EWMA", "scaler", "filter"])
def test_state_without_transformers_can_be_pickled_and_taken_up_by_another_transformer(path, name):
    habits, x, state, pieces = TRANSFORMERS[name], noise(1200, 2) + 5, None, []
    for piece in np.split(x, 4):
        state, result = habits.make().stateful_op(state, message(mx.array(piece)))
        pieces.append(np.array(result.data))
        state = pickle.loads(pickle.dumps(state))
    check_close(np.concatenate(pieces), habits.expected_of(x), habits.tolerance)


def test_a_copy_of_the_state_goes_its_own_way(path, habits):
    x = noise(300, 2) + 5
    state, first = habits.make().stateful_op(None, message(mx.array(x[:100])))
    habits.make().stateful_op(copy.deepcopy(state), message(mx.zeros((500, 2))))
    _, last = habits.make().stateful_op(state, message(mx.array(x[100:])))
    y = np.concatenate([np.array(first.data), np.array(last.data)])
    check_close(y, habits.expected_of(x), habits.tolerance)
