"""A decoder whose step is one launch on CUDA: the source of its kernel, run on the CPU."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.util.messages.axisarray import AxisArray
from helpers import cuda_emulation

from ezmsg.mlx import NetworkTransformer
from ezmsg.mlx.kernels import kernel
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.network import model as network_model
from ezmsg.mlx.stream import device

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="needs Linux and a C++ compiler")

X = np.random.default_rng(0).standard_normal((60, 16)).astype(np.float32)
KWARGS = {"input_size": 16, "hidden_size": 64, "num_layers": 3, "patch": 4}


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched, by a process that thinks it has a GPU."""
    found = []

    class Kernel(cuda_emulation.CudaKernel):
        def __call__(self, **arguments):
            found.append(self.name)
            return super().__call__(**arguments)

    monkeypatch.setattr(mx.fast, "cuda_kernel", Kernel)
    monkeypatch.setattr(device, "backend_in_use", lambda: "cuda")
    monkeypatch.setattr(network_model, "bus", lambda: True)
    [clear() for clear in (cuda_kernel.cache_clear, kernel.cache_clear)]
    yield found
    [clear() for clear in (cuda_kernel.cache_clear, kernel.cache_clear)]


def results_of(lengths, to_backend=np.array, samples=X, exchanged=None, **settings):
    mx.random.seed(0)
    kwargs = {**KWARGS, "output_size": 5, **settings.pop("model_kwargs", {})}
    settings = {"window": 4, "hop": 2, **settings}
    transformer = NetworkTransformer(model_class="ezmsg.mlx.network.RecurrentDecoder", model_kwargs=kwargs, **settings)
    found, first = {}, 0
    for length in lengths:
        axes = {"time": AxisArray.TimeAxis(fs=50.0, offset=first / 50.0)}
        for result in transformer(AxisArray(to_backend(samples[first : first + length]), ["time", "ch"], axes=axes)):
            found.setdefault(result.key, []).append(np.array(result.data))
        first += length
        if first == exchanged:
            shapes = {name: weight.shape for name, weight in transformer._model.template.items()}
            generator = np.random.default_rng(1)
            transformer.exchange_weights(
                {n: generator.uniform(-0.1, 0.1, shape) for n, shape in shapes.items()}
            ).result()
    return {key: np.concatenate(parts) for key, parts in found.items()}, transformer


CASES = {
    "float32": {},
    "8 bits": {"quantize": 8},
    "bfloat16": {"dtype": "bfloat16"},
    "LSTM, heads": {"model_kwargs": {"rnn_type": "LSTM", "output_size": {"one": 2, "other": 3}}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_is_one_launch(case, launches, monkeypatch):
    settings = CASES[case]
    lengths = [6] + [2] * 20 + [14]
    found, transformer = results_of(lengths, exchanged=10, **settings)
    of_device, _ = results_of(lengths, mx.array, exchanged=10, **settings)
    launches.clear()
    axes = {"time": AxisArray.TimeAxis(fs=50.0, offset=60 / 50.0)}
    transformer(AxisArray(X[:2], ["time", "ch"], axes=axes))
    assert len(launches) == 1 and "recurrentstack" in launches[0]
    monkeypatch.setattr(device, "backend_in_use", lambda: "cpu")
    expected, _ = results_of(lengths, exchanged=10, **settings)
    tolerance = 2e-2 if case == "bfloat16" else 2e-6
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=tolerance)
        np.testing.assert_allclose(of_device[key], values, atol=tolerance)


def test_what_blocks_wait_for_is_not_in_memory_of_arrays_from_the_host(launches, monkeypatch):
    """A launch counts in the zeros that the one before has left, in memory of a size that such arrays hardly have."""
    sizes, launch = [], mx.fast.cuda_kernel.__call__

    def noted(kernel, *, inputs, **arguments):
        if "recurrentstack" in kernel.name:
            sizes.append(inputs[1].nbytes)
        return launch(kernel, inputs=inputs, **arguments)

    monkeypatch.setattr(mx.fast.cuda_kernel, "__call__", noted)
    results_of([6, 2, 2])
    assert len(sizes) > 4 and min(sizes[-2:]) > 2**20


def test_a_window_that_is_not_finite_leaves_the_state(launches):
    samples = X.copy()
    samples[20] = np.nan
    for to_backend in (np.array, mx.array):
        found, _ = results_of([4] * 15, to_backend, samples, hop=4)
        (values,) = found.values()
        assert np.isnan(values[5]).all() and np.isfinite(np.delete(values, 5, axis=0)).all()
        whole, _ = results_of([4] * 14, to_backend, np.delete(X, slice(20, 24), axis=0), hop=4)
        (expected,) = whole.values()
        np.testing.assert_array_equal(np.delete(values, 5, axis=0), expected)


@pytest.mark.parametrize("rnn_type", ["GRU", "LSTM"])
def test_the_state_of_one_launch_goes_on_elsewhere(launches, monkeypatch, rnn_type):
    """As after a checkpoint that another machine goes on from."""
    kwargs = {"rnn_type": rnn_type}
    _, transformer = results_of([20], model_kwargs=kwargs)
    expected, _ = results_of([20, 40], model_kwargs=kwargs)
    state = transformer.state.of_model
    assert isinstance(state, mx.array)
    monkeypatch.setattr(device, "backend_in_use", lambda: "cpu")
    mx.random.seed(0)
    model = network_model.Model(
        "ezmsg.mlx.network.RecurrentDecoder", {**KWARGS, **kwargs, "output_size": 5}, 16, None, "float32", None, True
    )
    found = []
    for start in range(18, 57, 2):
        y, state = model(model.weights, mx.array(X[None, start : start + 4]), state)
        found.append(np.array(y).reshape(5))
    assert isinstance(state, list)
    np.testing.assert_allclose(found, expected[""][-20:], atol=2e-6)
    # And back again.
    monkeypatch.setattr(device, "backend_in_use", lambda: "cuda")
    y, after = transformer._model(transformer._model.weights, mx.array(X[None, :4]), state)
    assert after.shape == (3, 2 if rnn_type == "LSTM" else 1, 1, 64)
