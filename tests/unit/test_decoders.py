"""Linear decoders: the predictions of ezmsg-learn's fitted models, from MLX data."""

import contextlib
import pickle
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx import (
    ArrayBackend,
    AsArraySettings,
    AsArrayTransformer,
    ChainTransformer,
    LinearRegressorSettings,
    LinearRegressorTransformer,
    RefitKalmanFilterSettings,
    RefitKalmanFilterTransformer,
)
from ezmsg.mlx.kernels import products

FS = 50.0
N_FEATURES, N_STATES = 24, 4


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The decoders in MLX operations, as on a GPU."""
    with contextlib.ExitStack() as stack:
        for module in ("kernels.products", "refit_kalman"):
            stack.enter_context(mock.patch(f"ezmsg.mlx.{module}.uses_gpu", lambda: True))
        yield


def message(data, first: int = 0, **fields) -> AxisArray:
    channels = AxisArray.CoordinateAxis(data=np.array([f"f{i}" for i in range(data.shape[1])]), dims=["ch"])
    axes = {"time": AxisArray.TimeAxis(fs=FS, offset=first / FS), "ch": channels}
    return AxisArray(data, ["time", "ch"], axes=axes, key="amp", **fields)


def recording(n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Features, as float32 holds them, and the states that they follow."""
    rng = np.random.default_rng(5)
    states = np.sin(np.arange(n)[:, None] / 20 + np.arange(N_STATES)) + 0.01 * rng.standard_normal((n, N_STATES))
    features = states @ rng.standard_normal((N_STATES, N_FEATURES)) + rng.standard_normal((n, N_FEATURES))
    return features.astype(np.float32), states


def cut(data: np.ndarray, length: int, backend=mx.array) -> list[AxisArray]:
    return [message(backend(data[i : i + length]), i) for i in range(0, len(data), length)]


def joined(messages: list[AxisArray]) -> np.ndarray:
    return np.concatenate([np.array(each.data) for each in messages])


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def kalman(steady: bool = False, **fields) -> RefitKalmanFilterSettings:
    rng = np.random.default_rng(1)
    h = rng.standard_normal((N_FEATURES, N_STATES))
    q = rng.standard_normal((N_FEATURES, 2 * N_FEATURES))
    a = 0.95 * np.eye(N_STATES) + 0.01 * rng.standard_normal((N_STATES, N_STATES))
    return RefitKalmanFilterSettings(a, 0.01 * np.eye(N_STATES), h, q @ q.T / 40, steady, **fields)


def in_float64(settings: RefitKalmanFilterSettings, rows: np.ndarray) -> np.ndarray:
    """The textbook's equations, with the gain of each sample from the covariance of its features."""
    from scipy.linalg import solve_discrete_are

    a, w, h, q = (
        settings.A_state_transition_matrix,
        settings.W_process_noise_covariance,
        settings.H_observation_matrix,
        settings.Q_measurement_noise_covariance,
    )
    steady = p = solve_discrete_are(a.T, h.T, w, q)
    x, found = np.zeros(len(a)), []
    for row in rows:
        prior = settings.alpha_fading_memory**2 * (a @ p @ a.T + w)
        used = steady if settings.steady_state else prior
        k = used @ h.T @ np.linalg.inv(h @ used @ h.T + q)
        x = a @ x
        if np.isfinite(row).all():
            x = x + k @ (row - h @ x)
        p = (np.eye(len(a)) - k @ h) @ prior
        found.append(x)
    return np.array(found)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fields", [{"steady": True}, {}, {"alpha_fading_memory": 1.02}], ids=["steady", "", "fading"])
def test_kalman_filter_is_that_of_the_textbook_however_it_is_cut(fields, on_gpu):
    rows, _ = recording()
    settings = kalman(**fields)
    with as_on_a_gpu() if on_gpu else contextlib.nullcontext():
        for length in (1, 7, 300):
            decode = RefitKalmanFilterTransformer(settings)
            results = [decode(each) for each in cut(rows, length)]
            assert_close(joined(results), in_float64(settings, rows))
            assert isinstance(results[0].data, mx.array) and results[0].data.dtype == mx.float32


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_sample_with_nan_is_left_out(on_gpu):
    rows, _ = recording()
    rows[40, 3], rows[200:210, 5] = np.nan, np.inf
    settings = kalman(True)
    with as_on_a_gpu() if on_gpu else contextlib.nullcontext():
        decode = RefitKalmanFilterTransformer(settings)
        assert_close(joined([decode(each) for each in cut(rows, 9)]), in_float64(settings, rows))


def test_a_kalman_filter_takes_another_model_and_goes_on():
    rows, _ = recording()
    first, second = kalman(True), kalman(True, K_kalman_gain=np.zeros((N_STATES, N_FEATURES)))
    decode = RefitKalmanFilterTransformer(first)
    before = np.array(decode(message(mx.array(rows))).data)[-1]
    decode.update_settings(second)
    # Without a gain the state only goes on by itself.
    after = np.array(decode(message(mx.array(rows), 300)).data)
    assert_close(after[0], first.A_state_transition_matrix @ before)


def test_a_feature_that_is_always_zero_has_no_part():
    """Its noise has no inverse either."""
    rows, _ = recording()
    rows[:, 2] = 0.0
    settings = kalman()
    h, q = settings.H_observation_matrix.copy(), settings.Q_measurement_noise_covariance.copy()
    h[2], q[2], q[:, 2] = 0.0, 0.0, 0.0
    silent = RefitKalmanFilterSettings(
        settings.A_state_transition_matrix,
        settings.W_process_noise_covariance,
        h,
        q,
        P_state_covariance=np.eye(N_STATES),
    )
    kept = np.arange(N_FEATURES) != 2
    without = RefitKalmanFilterSettings(
        settings.A_state_transition_matrix,
        settings.W_process_noise_covariance,
        h[kept],
        q[np.ix_(kept, kept)],
        P_state_covariance=np.eye(N_STATES),
    )
    found, expected = (
        np.array(RefitKalmanFilterTransformer(one)(message(data)).data)
        for one, data in ((silent, rows.astype(float)), (without, rows[:, kept].astype(float)))
    )
    assert_close(found, expected)


def test_linear_model_in_float32_on_every_device():
    rng = np.random.default_rng(2)
    weights, intercept = rng.standard_normal((200, 3)), rng.standard_normal(3)
    data = rng.standard_normal((50, 200)).astype(np.float32)
    expected = data.astype(float) @ weights + intercept
    settings = LinearRegressorSettings(weights, intercept, labels=("x", "y", "z"))
    result = LinearRegressorTransformer(settings)(message(mx.array(data)))
    assert_close(np.array(result.data), expected, 1e-6)
    assert list(result.axes["ch"].data) == ["x", "y", "z"] and result.key == "amp"
    with as_on_a_gpu():
        on_gpu = LinearRegressorTransformer(settings)(message(mx.array(data)))
    assert_close(np.array(on_gpu.data), expected, 1e-6)


def test_products_keep_float32_where_factors_are_rounded_to_11_bits():
    """What a GPU does in TF32, in NumPy."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)

    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((40, 300)).astype(np.float32), rng.standard_normal((300, 2))
    with as_on_a_gpu():
        tall = np.array(products.Factor(w).arrays()[0])
    first = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    wide = np.concatenate([first, first, x - first], axis=1)
    expected = x.astype(float) @ w
    assert_close(rounded(wide) @ rounded(tall), expected, 1e-6)
    assert np.abs(rounded(x) @ rounded(w.astype(np.float32)) - expected).max() > 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dims", [["time", "ch"], ["ch", "time"]], ids="-".join)
def test_decoders_in_a_chain_are_fused(dims):
    rows, _ = recording()
    weights = np.random.default_rng(0).standard_normal((N_FEATURES, N_STATES))
    for decoder in (
        LinearRegressorTransformer(LinearRegressorSettings(weights, key="velocity")),
        RefitKalmanFilterTransformer(kalman(True, labels=("a", "b", "c", "d"))),
    ):
        stages: list = [
            AsArrayTransformer(AsArraySettings(backend=ArrayBackend.mlx)),
            decoder,
            AsArrayTransformer(AsArraySettings(backend=ArrayBackend.numpy)),
        ]
        chain, alone = ChainTransformer(stages.copy), type(decoder)(decoder.settings)
        for each in cut(rows, 10, np.array):
            given = AxisArray(each.data if dims[0] == "time" else each.data.T.copy(), dims, each.axes, key="amp")
            found, expected = chain(given), alone(given)
            assert_close(found.data, expected.data)
            assert (found.dims, found.key, found.axes.keys()) == (expected.dims, expected.key, expected.axes.keys())
        is_fused = dims[0] == "time" or isinstance(decoder, LinearRegressorTransformer)
        assert bool(chain._runner._usual) is is_fused


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LinearRegressorSettings(np.zeros(3)), "'weights' must be a matrix of shape"),
        (lambda: LinearRegressorSettings(np.zeros((3, 2)), np.zeros(3)), "'intercept' must be"),
        (lambda: LinearRegressorSettings(np.full((3, 2), np.nan)), "'weights' must have finite numbers"),
        (lambda: LinearRegressorSettings(np.zeros((3, 2)), labels=("x",)), "'labels' must have 2 names"),
        (lambda: LinearRegressorSettings.of(object()), "'fitted' must be a fitted linear model"),
        (lambda: RefitKalmanFilterSettings.of(object()), "'fitted' must be a fitted Kalman filter"),
        (lambda: kalman(K_kalman_gain=np.zeros((2, 2))), "'K_kalman_gain' must be a matrix of shape"),
        (
            lambda: LinearRegressorTransformer(LinearRegressorSettings(np.eye(5)))(message(np.zeros((2, 4)))),
            "The message has 4 features along 'ch', the weights are for 5",
        ),
        (lambda: RefitKalmanFilterTransformer(kalman())(message(np.zeros((2, 4)))), "one of 24 features"),
    ],
)
def test_what_does_not_fit_is_refused(make, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make()


class TestAsInEzmsgLearn:
    """The same predictions from the same fitted state."""

    @pytest.mark.parametrize("steady", [False, True])
    def test_kalman_filter(self, steady, tmp_path):
        from ezmsg.learn.model.refit_kalman import RefitKalmanFilter as Model
        from ezmsg.learn.process import refit_kalman as learn

        features, states = recording()
        model = Model(steady_state=steady)
        model.fit(features.astype(float), states)
        theirs = learn.RefitKalmanFilterProcessor(learn.RefitKalmanFilterSettings(steady_state=steady))
        theirs.state.model = model
        theirs.save_checkpoint(str(tmp_path / "kalman.pkl"))
        ours = RefitKalmanFilterTransformer(RefitKalmanFilterSettings.of(theirs))
        loaded = RefitKalmanFilterSettings.of(tmp_path / "kalman.pkl")
        from_file = RefitKalmanFilterTransformer(RefitKalmanFilterSettings(**{**vars(loaded), "steady_state": steady}))
        expected = [theirs(each) for each in cut(features.astype(float), 7, np.array)]
        for decoder in (ours, from_file):
            found = [decoder(each) for each in cut(features, 7)]
            assert_close(joined(found), joined(expected))
            assert (found[-1].dims, found[-1].key) == (expected[-1].dims, expected[-1].key)
            assert found[-1].axes["time"] == expected[-1].axes["time"]

    @pytest.mark.parametrize("kind", ["linear", "ridge"])
    def test_linear_regression(self, kind):
        pytest.importorskip("sklearn", reason="needs scikit-learn, which fits these models")
        from ezmsg.baseproc import SampleTriggerMessage
        from ezmsg.learn.process import linear_regressor as learn

        features, states = recording()
        theirs = learn.LinearRegressorTransformer(learn.LinearRegressorSettings(model_type=kind))
        theirs.partial_fit(message(features, attrs={"trigger": SampleTriggerMessage(value=message(states))}))
        ours = LinearRegressorTransformer(LinearRegressorSettings.of(theirs))
        found, expected = ours(message(mx.array(features), 30)), theirs(message(features, 30))
        assert_close(np.array(found.data), expected.data)
        assert (found.dims, found.key, found.axes["time"]) == (expected.dims, expected.key, expected.axes["time"])
        assert list(found.axes["ch"].data) == list(expected.axes["ch"].data)
        pickle.loads(pickle.dumps(ours.settings))
        # Also from the model alone.
        alone = LinearRegressorTransformer(LinearRegressorSettings.of(theirs.state.model))
        assert_close(np.array(alone(message(mx.array(features))).data), expected.data)

    def test_adaptive_linear_regression(self):
        pytest.importorskip("river", reason="needs river, which fits this model")
        from ezmsg.baseproc import SampleTriggerMessage
        from ezmsg.learn.process import adaptive_linear_regressor as learn

        features, states = recording()
        theirs = learn.AdaptiveLinearRegressorTransformer(learn.AdaptiveLinearRegressorSettings())
        theirs.partial_fit(message(features, attrs={"trigger": SampleTriggerMessage(value=message(states))}))
        ours = LinearRegressorTransformer(LinearRegressorSettings.of(theirs))
        found, expected = ours(message(mx.array(features))), theirs(message(features))
        assert_close(np.array(found.data), expected.data)
        assert (found.key, list(found.axes["ch"].data)) == (expected.key, list(expected.axes["ch"].data))

    def test_linear_regression_rereferencing(self):
        from ezmsg.learn.process import ssr as learn

        features, _ = recording()
        theirs = learn.LRRTransformer(learn.LRRSettings())
        theirs.partial_fit(message(features.astype(float)))
        expected = theirs(message(features.astype(float)))
        ours = LinearRegressorTransformer(LinearRegressorSettings.of(theirs))
        given = message(mx.array(features))
        found = ours(given)
        assert_close(np.array(found.data), expected.data)
        assert found.key == "amp" and found.axes["ch"] is given.axes["ch"]
