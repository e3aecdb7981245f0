"""Mixtures of channels and common references: the values of ezmsg-sigproc; dead channels leave others alone."""

import numpy as np
import pytest
from ezmsg.sigproc import affinetransform as sigproc
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer as Namesake
from ezmsg.util.messages.axisarray import AxisArray
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ezmsg.mlx import (
    AffineTransformTransformer,
    AsArrayTransformer,
    ChainTransformer,
    CommonRereferenceSettings,
    CommonRereferenceTransformer,
)

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.affinetransform import may_hold_infinite
from ezmsg.mlx.kernels.cpu.median import subtract_medians
from ezmsg.mlx.stream import device

N_CHANNELS = 7
BANKS = np.array([(f"ch{i}", "ab"[i % 2]) for i in range(N_CHANNELS)], [("label", "U4"), ("bank", "U1")])

GROUPS = {
    "all": None,
    "two": [[0, 3, 5], [6, 1]],
    "one of some": [[4, 2, 1]],
    "one alone": [[0], [1, 2, 3, 4]],
    "all in another order": [[6, 5, 4, 3, 2, 1, 0]],
    "by a field": "bank",
}


def message(data: np.ndarray | mx.array, dims: tuple[str, ...] = ("time", "ch")) -> AxisArray:
    axes = {"time": AxisArray.TimeAxis(fs=30000.0), "ch": AxisArray.CoordinateAxis(data=BANKS, dims=["ch"])}
    return AxisArray(data, list(dims), axes=axes, stream_dim="time")


def noise(n_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_samples, N_CHANNELS)).astype(np.float32)


@pytest.mark.parametrize("mode", ["mean", "median", "passthrough"])
@pytest.mark.parametrize("include_current", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("to_backend", [np.array, mx.array], ids=["numpy", "mlx"])
def test_values_are_those_of_the_namesake(mode, include_current, groups, to_backend):
    asked = {"mode": mode, "include_current": include_current, "channel_groups": GROUPS[groups]}
    ours, theirs = CommonRereferenceTransformer(**asked), Namesake(**asked)
    for seed, dims in enumerate([("time", "ch"), ("ch", "time"), ("time", "ch")]):
        data = noise(50, seed) if dims[0] == "time" else np.ascontiguousarray(noise(50, seed).T)
        before = data.copy()
        given_message = message(to_backend(data), dims)
        result, expected = ours(given_message), theirs(given_message)
        assert type(result.data) is type(expected.data) and result.data.dtype == expected.data.dtype
        # A mean within groups is no product with a matrix, as there.
        tolerance = 1e-6 if mode == "mean" and groups != "all" else 0.0
        np.testing.assert_allclose(np.array(result.data), np.array(expected.data), rtol=0, atol=tolerance)
        np.testing.assert_array_equal(np.array(given_message.data), before)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("mode", ["mean", "median"])
@pytest.mark.parametrize("to_backend", [np.array, mx.array], ids=["numpy", "mlx"])
def test_a_dead_channel_in_one_bank_leaves_the_others_alone(mode, to_backend, on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
    x = noise(20)
    x[:, 5] = np.nan
    transformer = CommonRereferenceTransformer(mode=mode, channel_groups=[[0, 1, 2], [4, 5]])
    chain = ChainTransformer(
        make_chain=lambda: [
            AsArrayTransformer(backend="mlx"),
            CommonRereferenceTransformer(mode=mode, channel_groups=[[0, 1, 2], [4, 5]]),
            AsArrayTransformer(backend="numpy"),
        ]
    )
    expected = x.copy()
    expected[:, :3] -= getattr(np, mode)(x[:, :3], axis=1, keepdims=True)
    expected[:, 4:6] = np.nan
    np.testing.assert_allclose(np.array(transformer(message(to_backend(x))).data), expected, rtol=0, atol=1e-6)
    for _ in range(3):
        np.testing.assert_allclose(chain(message(x)).data, expected, rtol=0, atol=1e-6)
    assert "fused with stages 1 to 3" in chain.describe()


RNG = np.random.default_rng(3)
DENSE = RNG.standard_normal((N_CHANNELS, 4)).astype(np.float32)
SPARSE = DENSE * (RNG.random(DENSE.shape) < 0.5)
BLOCKS = np.kron(np.eye(2), np.ones((4, 2)))[:N_CHANNELS] * DENSE
OFFSET = np.ones((1, 4), np.float32)
WEIGHTS = {
    "dense": DENSE,
    "with zeros": SPARSE,
    "with zeros and an offset": np.concatenate([SPARSE, OFFSET]),
    "blocks with zeros": BLOCKS * (SPARSE != 0),
}


def mixed(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The sum of products with the weights that are not zero, in float64."""
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)[:, : len(weights)].astype(np.float64)
    columns = [rows[:, used] @ column[used] for column in weights.T.astype(np.float64) for used in [column != 0]]
    return np.stack(columns, axis=1)


def with_dead_channels(n_samples: int) -> np.ndarray:
    x = noise(n_samples)
    x[n_samples // 3 :, 2] = np.nan
    x[1, 0], x[2, 1], x[3, :2], x[4, :2] = np.inf, -np.inf, [np.inf, np.inf], [-np.inf, np.inf]
    return x


def mixtures(**settings) -> ChainTransformer:
    return ChainTransformer(
        make_chain=lambda: [
            AsArrayTransformer(backend="mlx"),
            AffineTransformTransformer(**settings),
            AsArrayTransformer(backend="numpy"),
        ]
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("given", WEIGHTS)
def test_a_dead_channel_leaves_outputs_alone_whose_weight_for_it_is_zero(given, on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
    weights, x = WEIGHTS[given], with_dead_channels(20)
    expected, whole = mixed(x, weights), noise(9)
    if given == "dense":
        assert np.isnan(expected[10]).all()
    asked = {"weights": weights, "kernel": "blocks" if given == "blocks with zeros" else "auto"}
    bare, chain = AffineTransformTransformer(**asked), mixtures(**asked)
    for data, of_numbers in ((x, expected), (whole, mixed(whole, weights)), (x[:11], expected[:11])):
        for to_backend in (np.array, mx.array):
            result = bare(message(to_backend(data))).data
            assert is_of(to_backend, result)
            np.testing.assert_allclose(np.array(result), of_numbers, rtol=0, atol=1e-5)
        np.testing.assert_allclose(chain(message(data)).data, of_numbers, rtol=0, atol=1e-5)
        across = AffineTransformTransformer(**asked, axis="ch")(message(data.T.copy(), ("ch", "time"))).data
        np.testing.assert_allclose(across.T, of_numbers, rtol=0, atol=1e-5)
    assert ("fused with stages 1 to 3" in chain.describe()) == (given != "blocks with zeros")


def is_of(to_backend, data) -> bool:
    return isinstance(data, np.ndarray if to_backend is np.array else mx.array)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_that_are_set_in_a_fused_chain_may_be_zero_elsewhere():
    x, chain = with_dead_channels(20), mixtures(weights=SPARSE, kernel="dense")
    others = [SPARSE, 2 * SPARSE, np.roll(SPARSE, 1, axis=0), DENSE, SPARSE]
    chain(message(x))
    for weights in others:
        chain.stages["AffineTransform"].set_weights(mx.array(weights.astype(np.float32)))
        for _ in range(2):
            np.testing.assert_allclose(chain(message(x)).data, mixed(x, weights), rtol=0, atol=1e-5)
    assert "fused with stages 1 to 3" in chain.describe()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_of_mlx_are_looked_at_where_their_structure_is_asked_for():
    x, transformer = mx.array(with_dead_channels(20)), AffineTransformTransformer(weights=DENSE)
    transformer(message(x))
    for recalculates in (False, True):
        transformer.set_weights(mx.array(SPARSE), recalc_structure=recalculates)
        result = np.array(transformer(message(x)).data)
        assert np.isnan(result[10]).all() != recalculates
    np.testing.assert_allclose(result, mixed(np.array(x), SPARSE), rtol=0, atol=1e-5)


class OnAnotherDevice:
    """An array as CuPy has it, which does not become one of NumPy unless it is asked in its own words."""

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def test_data_of_other_array_libraries_is_left_to_sigproc():
    assert not may_hold_infinite(OnAnotherDevice())


@pytest.mark.parametrize("settings", [{"kernel": "sparse"}, {"right_multiply": 1}, {"axis": 0}])
def test_settings_of_a_mixture_are_checked_when_they_are_built(settings):
    (field,) = settings
    with pytest.raises((TypeError, ValueError), match=f"'{field}' must be"):
        AffineTransformTransformer(weights=DENSE, **settings)


@pytest.mark.parametrize("weights", [None, "passthrough"])
async def test_without_weights_messages_pass_in_a_graph_too(weights):
    sent = message(noise(3))
    assert await AffineTransformTransformer(weights=weights).__acall__(sent) is sent


@pytest.mark.parametrize("kernel", sigproc.KERNELS)
@pytest.mark.parametrize("to_backend", [np.array, mx.array], ids=["numpy", "mlx"])
def test_mixtures_have_the_values_and_labels_of_the_namesake(to_backend, kernel):
    for weights in (np.eye(N_CHANNELS)[:, [0, 2]], BLOCKS):
        ours = AffineTransformTransformer(weights=weights, kernel=kernel)(message(to_backend(noise(30))))
        theirs = sigproc.AffineTransformTransformer(weights=weights, kernel=kernel)(message(to_backend(noise(30))))
        np.testing.assert_array_equal(np.array(ours.data), np.array(theirs.data))
        np.testing.assert_array_equal(ours.axes["ch"].data, theirs.axes["ch"].data)


@pytest.mark.parametrize("groups", [None, [[0, 1, 2], [3, 4, 5, 6]]])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_means_in_half_precision_are_added_up_in_float32(dtype, groups):
    # Their sum is beyond the largest of float16.
    x = mx.array(np.float32([[30000.0] * 6 + [30016.0]])).astype(getattr(mx, dtype))
    result = CommonRereferenceTransformer(channel_groups=groups)(message(x)).data
    assert result.dtype == x.dtype
    exact = np.array(x.astype(mx.float32))
    for members in groups or [list(range(7))]:
        exact[:, members] -= exact[:, members].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(np.array(result.astype(mx.float32)), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("mode", ["mean", "median"])
@pytest.mark.parametrize("to_backend", [np.array, mx.array], ids=["numpy", "mlx"])
def test_a_reference_over_samples_is_that_of_each_message_whatever_its_length(mode, to_backend):
    transformer = CommonRereferenceTransformer(mode=mode, axis="time")
    for n in (50, 3, 700, 0, 4):
        x = noise(n)
        result = np.array(transformer(message(to_backend(x))).data)
        expected = x - getattr(np, mode)(x, axis=0, keepdims=True) if n else x
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


def test_the_kernel_takes_no_channel_that_is_not_there():
    x, ones = noise(3), np.ones(2, np.float32)
    for members, ends, gains in (
        (np.array([0, 7]), np.array([2]), ones),
        (np.array([0, -1]), np.array([2]), ones),
        (np.arange(7), np.array([3, 9]), ones),
        (np.zeros(20, np.int64), np.array([20]), ones),
        (np.arange(7), np.array([3, 5, 7]), ones),
    ):
        with pytest.raises(IndexError):
            subtract_medians(x, x.copy(), members, ends, gains)
    with pytest.raises(IndexError):
        subtract_medians(x, x[:2].copy(), np.arange(7), np.array([7]), ones)


@pytest.mark.parametrize("dtype", ["int16", "float16", "float64"])
@pytest.mark.parametrize("to_backend", [np.array, mx.array], ids=["numpy", "mlx"])
def test_other_dtypes_are_those_of_the_namesake(dtype, to_backend):
    data = (100 * noise(20)).astype(dtype)
    results = [
        transformer(mode="median")(message(to_backend(data)))
        for transformer in (CommonRereferenceTransformer, Namesake)
    ]
    assert results[0].data.dtype == results[1].data.dtype
    np.testing.assert_array_equal(*(np.array(result.data) for result in results))


def test_large_messages_are_computed_in_place_and_leave_their_input_alone():
    from ezmsg.mlx.kernels.cpu.compiled import KEPT_FLOATS

    data = noise(KEPT_FLOATS // N_CHANNELS + 10)
    given_message = message(mx.array(data))
    result = CommonRereferenceTransformer(mode="median")(given_message)
    np.testing.assert_array_equal(np.array(result.data), data - np.median(data, axis=1, keepdims=True))
    np.testing.assert_array_equal(np.array(given_message.data), data)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 20)),
        elements=st.one_of(
            st.floats(width=32),
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3e38, -3e38, float("inf"), float("-inf"), 1e-45]),
        ),
    )
)
def test_the_median_is_exact_for_all_values(x):
    y, n = np.empty_like(x), x.shape[1]
    subtract_medians(x, y, np.arange(n), np.array([n]), np.ones(1, np.float32))
    ordered = np.sort(x, axis=1)
    with np.errstate(all="ignore"):
        median = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) * np.float32(0.5) if n % 2 == 0 else ordered[:, n // 2]
        median[np.isnan(x).any(axis=1)] = np.nan
        np.testing.assert_array_equal(y, x - median[:, None])


def test_values_that_lie_close_far_and_on_top_of_each_other():
    rng = np.random.default_rng(3)
    rows = [
        np.rint(rng.standard_normal(384) * 3),
        rng.standard_normal(384) * 1e-42,
        np.where(np.arange(384) % 2, 1e38, -1e-38),
        1e30 ** rng.uniform(-1, 1, 384),
        np.ones(384),
        np.r_[1e20, rng.standard_normal(383)],
        1e6 + np.arange(384) * 0.0625,
    ]
    x = np.array(rows, np.float32)
    y = np.empty_like(x)
    subtract_medians(x, y, np.arange(384), np.array([384]), np.ones(1, np.float32))
    ordered = np.sort(x, axis=1)
    np.testing.assert_array_equal(y, x - ((ordered[:, 191] + ordered[:, 192]) * np.float32(0.5))[:, None])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"mode": "average"}, "'mode' must be one of 'mean', 'median', 'passthrough', got 'average'"),
        ({"include_current": 1}, "'include_current' must be True or False, got 1"),
        ({"axis": 0}, "'axis' must be None or a name, got 0"),
    ],
)
def test_settings_are_checked(asked, error):
    with pytest.raises((TypeError, ValueError), match=error):
        CommonRereferenceSettings(**asked)


def test_a_change_of_library_and_type_in_the_stream():
    transformer = CommonRereferenceTransformer(mode="median", channel_groups=GROUPS["two"], include_current=False)
    for seed, convert in enumerate([mx.array, np.array, lambda x: mx.array(x).astype(mx.float16), np.float64]):
        given_message = message(convert(noise(5, seed)))
        expected = Namesake(mode="median", channel_groups=GROUPS["two"], include_current=False)(given_message)
        np.testing.assert_array_equal(np.array(transformer(given_message).data), np.array(expected.data))
