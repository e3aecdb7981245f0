"""The states of all transformers of this package can be saved, and are gone on with bit for bit."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import inspect
import pickle
import re
import threading

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.baseproc import BaseStatefulTransformer, CompositeProcessor, processor_state
from ezmsg.sigproc.butterworthfilter import ButterworthFilterSettings
from ezmsg.sigproc.butterworthzerophase import ButterworthZeroPhaseTransformer
from ezmsg.sigproc.filterbank import FilterbankMode
from ezmsg.sigproc.slicer import SlicerTransformer
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray
from helpers.on_no_gpu import as_on_a_gpu

import ezmsg.mlx
from ezmsg.mlx.network.model import Model
from ezmsg.mlx.offline import checkpoint
from ezmsg.mlx.stream.convert import is_mlx_array

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

RATE = 1000.0


def make_chain():
    return [
        ezmsg.mlx.AsArrayTransformer(backend="mlx"),
        ezmsg.mlx.EWMATransformer(time_constant=0.05),
        ezmsg.mlx.ButterworthFilterTransformer(order=4, cuton=30.0, cutoff=100.0),
        ezmsg.mlx.PowTransformer(),
        ezmsg.mlx.RechunkTransformer(),
        ezmsg.mlx.ReadLateTransformer(depth=1),
    ]


BAND = {"order": 2, "cuton": 30.0, "cutoff": 100.0, "coef_type": "sos"}
LOW_PASS = {"order": 2, "cutoff": 20.0, "coef_type": "sos"}
HILBERT = {"order": 30, "f_lo": 50.0, "f_hi": 300.0, "trans_lo": 20.0, "trans_hi": 20.0}

LINEAR = {"input_dims": 4, "output_dims": 2}

FACTORIES = {
    "ActivationTransformer": {"function": "sigmoid"},
    "AdaptiveLNCTransformer": {"num_harmonics": 2},
    "ButterworthZeroPhaseTransformer": BAND,
    "CWTTransformer": {"frequencies": [50.0], "wavelet": "mexh"},
    "ChebyForDecimateTransformer": {"order": 2, "ripple_tol": 0.5, "Wn": 100.0},
    "CombFilterTransformer": {"coef_type": "sos"},
    "FIRHilbertEnvelopeTransformer": HILBERT,
    "FIRHilbertFilterTransformer": HILBERT,
    "FilterbankTransformer": {"kernels": [np.ones(9), np.ones(4)]},
    "RMSBandPowerTransformer": {"bandpass": ButterworthFilterSettings(**BAND)},
    "SquareLawBandPowerTransformer": {
        "bandpass": ButterworthFilterSettings(**BAND),
        "lowpass": ButterworthFilterSettings(**LOW_PASS),
    },
    "AdaptiveStandardScalerTransformer": {"time_constant": 0.05},
    "AsArrayTransformer": {"backend": "numpy"},
    "AffineTransformTransformer": {"weights": np.triu(np.ones((4, 4)))},
    "ButterworthFilterTransformer": {"order": 4, "cuton": 30.0, "cutoff": 100.0},
    "ChainTransformer": {"make_chain": make_chain},
    "ChebyshevFilterTransformer": {"order": 2, "ripple_tol": 0.5, "Wn": 100.0, "btype": "lowpass"},
    "CommonRereferenceTransformer": {"mode": "median", "channel_groups": [[0, 3], [1, 2]], "include_current": False},
    "DetrendTransformer": {"time_constant": 0.05},
    "EWMATransformer": {"time_constant": 0.05},
    "FilterTransformer": {"coefs": None},
    "LinearRegressorTransformer": {"weights": np.ones((4, 2)), "intercept": np.ones(2)},
    "NetworkTransformer": {"model_class": "helpers.networks.Counting", "window": 7, "hop": 3},
    "PowTransformer": {"exponent": 2.0},
    "ThresholdCrossingTransformer": {"threshold": -1.0, "output_format": "dense"},
    "ReadLateTransformer": {"depth": 2},
    "RechunkTransformer": {},
    "RefitKalmanFilterTransformer": {
        "A_state_transition_matrix": 0.9 * np.eye(2),
        "W_process_noise_covariance": np.eye(2),
        "H_observation_matrix": np.ones((4, 2)),
        "Q_measurement_noise_covariance": np.eye(4),
    },
}


def make(name):
    settings = FACTORIES[name]
    if name == "FilterTransformer":
        from scipy.signal import butter

        settings = {"coefs": butter(2, 100.0, fs=RATE, output="sos"), "coef_type": "sos"}
    return getattr(ezmsg.mlx, name)(**settings)


def stream(backend):
    data = np.random.default_rng(0).standard_normal((6 * 130, 4)).astype(np.float32)
    channels = AxisArray.CoordinateAxis(data=np.array(list("abcd")), dims=["ch"])
    for begin in range(0, len(data), 130):
        part = data[begin : begin + 130]
        yield AxisArray(
            data=mx.array(part) if backend == "mlx" else part,
            dims=["time", "ch"],
            axes={"time": AxisArray.TimeAxis(fs=RATE, offset=begin / RATE), "ch": channels},
            stream_dim="time",
            key="k",
        )


def bits(outputs):
    found = []
    for output in outputs:
        for message in output if isinstance(output, (list, tuple)) else [output]:
            data = np.array(message.data)
            found.append((is_mlx_array(message.data), data.shape, data.dtype, data.tobytes(), message.axes["time"]))
    return found


def test_all_transformers_are_here():
    public = {name for name in dir(ezmsg.mlx) if name.endswith("Transformer") and not name.startswith("Base")}
    assert public == FACTORIES.keys()
    assert all(inspect.isclass(getattr(ezmsg.mlx, name)) for name in public)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_is_gone_on_with_bit_for_bit(name, backend):
    messages = list(stream(backend))
    step = make(name)
    expected = [step(message) for message in messages]
    # A class of somebody else's, which may have attributes of its own.
    kind = type(make(name))
    step = type(f"Their{name}", (kind,), {"__module__": "theirs"})(make(name).settings)
    made = checkpoint.as_made(step)
    for message in messages[:3]:
        step(message)
    saved = checkpoint.save(step, made)
    fresh = make(name)
    if saved is None:
        outputs = [fresh(message) for message in messages[3:]]
    else:
        outputs = [checkpoint.call_restored(fresh, saved, messages[3]), *(fresh(message) for message in messages[4:])]
    assert bits(outputs) == bits(expected[3:])
    assert len(bits(expected[3:])) > 0


def make_chain_of_others():
    """Transformers of ezmsg-sigproc, which hold a buffer, and what they recognize their last message by."""
    return [
        ezmsg.mlx.AsArrayTransformer(backend="mlx"),
        SlicerTransformer(selection="1:3"),
        WindowTransformer(newaxis="win", window_dur=0.1, window_shift=0.07, zero_pad_until="none"),
    ]


COPIED = {
    **{name: functools.partial(make, name) for name in FACTORIES},
    "chain of others": lambda: ezmsg.mlx.ChainTransformer(make_chain=make_chain_of_others),
    "filters by windows": lambda: ezmsg.mlx.FilterbankTransformer(kernels=[np.ones(9)], mode=FilterbankMode.FFT),
    "compiled network": lambda: ezmsg.mlx.NetworkTransformer(model_class=nn.Linear, model_kwargs=LINEAR, window=7),
    "resampled": lambda: resampled(ezmsg.mlx.ResampleProcessor(resample_rate=700.0)),
}


HOLD_OTHERS = {("CWTTransformer", "numpy"), ("filters by windows", "numpy")}
"""There are transformers of ezmsg-sigproc in their states, which can be pickled with the whole only."""


def resampled(processor):
    """A transformer for a test: a message, and the samples that there are after it."""

    def step(message):
        step.processor(message)
        return next(step.processor)

    step.processor = processor
    return step


def pickled(step):
    return pickle.loads(pickle.dumps(step))


def copied(step, how):
    return resampled(how(step.processor)) if hasattr(step, "processor") else how(step)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_and_a_pickle_go_on_bit_for_bit_and_on_their_own(name, backend):
    messages = list(stream(backend))
    with as_on_a_gpu() if name == "compiled network" else contextlib.nullcontext():
        step = COPIED[name]()
        for message in messages[:3]:
            step(message)
        copies = [copied(step, copy.deepcopy), copied(step, pickled)]
        expected = [step(message) for message in messages[3:]]
        for made in copies:
            assert bits(made(message) for message in messages[3:]) == bits(expected)
    assert len(bits(expected)) > 0
    if (name, backend) not in HOLD_OTHERS:
        pickled(getattr(step, "state", None))


def test_a_copy_of_a_network_has_weights_that_are_being_loaded(monkeypatch, request):
    messages = list(stream("numpy"))
    # Weights are not loaded before somebody waits for them.
    load, somebody_waits = Model.load, threading.Event()
    request.addfinalizer(somebody_waits.set)

    def load_late(model, weights):
        somebody_waits.wait()
        return load(model, weights)

    def wait(loading):
        somebody_waits.set()
        concurrent.futures.wait(loading)

    monkeypatch.setattr(Model, "load", load_late)
    monkeypatch.setattr("ezmsg.mlx.network.unit.wait", wait)
    weights = {"weight": np.eye(2, 4, dtype=np.float32), "bias": np.ones(2, np.float32)}
    for n_before in (0, 1):
        somebody_waits.clear()
        step = ezmsg.mlx.NetworkTransformer(model_class=nn.Linear, model_kwargs=LINEAR, window=7)
        for message in messages[:n_before]:
            step(message)
        loading = step.exchange_weights(weights)
        copies = [copy.deepcopy(step), pickled(step)]
        somebody_waits.set()
        for made in (step, *copies):
            if not n_before:
                # It has no model yet to load them for.
                made.prepare(4)
                made.exchange_weights(weights).result()
            made(messages[1])
            np.testing.assert_array_equal(made.state.weights["weight"], weights["weight"])
        assert loading.done()


def test_a_composite_of_ezmsg_baseproc_can_be_saved():
    """Through a private attribute of it."""

    class Composite(CompositeProcessor[None, AxisArray, AxisArray]):
        @staticmethod
        def _initialize_processors(settings):
            return {"average": make("EWMATransformer"), "filter": make("ButterworthFilterTransformer")}

    messages = list(stream("mlx"))
    step, fresh = Composite(), Composite()
    made = checkpoint.as_made(step)
    for message in messages[:3]:
        step(message)
    saved = checkpoint.save(step, made)
    expected = [step(message) for message in messages[3:]]
    outputs = [checkpoint.call_restored(fresh, saved, messages[3]), *(fresh(message) for message in messages[4:])]
    assert bits(outputs) == bits(expected)


@dataclasses.dataclass
class Peak:
    value: float = 0.0


@processor_state
class PeakState:
    peak: Peak | None = None


class PeakSettings(ez.Settings):
    pass


class PeakTransformer(BaseStatefulTransformer[PeakSettings, AxisArray, AxisArray, PeakState]):
    """Gives the largest sample so far."""

    def _reset_state(self, message):
        self.state.peak = Peak()

    def _process(self, message):
        self.state.peak.value = max(self.state.peak.value, float(np.max(message.data)))
        return AxisArray(data=np.array([self.state.peak.value]), dims=["time"], axes=message.axes)


def test_a_state_may_consist_of_classes_from_the_package_of_its_transformer():
    first, *others = stream("numpy")
    step = PeakTransformer()
    step(first)
    saved = checkpoint.save(step)
    others[0].data[:] = 0.0
    assert checkpoint.call_restored(PeakTransformer(), saved, others[0]).data == np.max(first.data)


def test_a_state_is_refused_for_a_transformer_without_one():
    saved = checkpoint.save(PeakTransformer())
    checkpoint.check(PeakTransformer(), saved)
    with pytest.raises(ValueError, match="not one of PowTransformer"):
        checkpoint.check(make("PowTransformer"), saved)


def test_what_is_kept_outside_of_a_state_is_noticed():
    step = ButterworthZeroPhaseTransformer(order=2, cuton=30.0, cutoff=100.0)
    made = checkpoint.as_made(step)
    for message in stream("numpy"):
        step(message)
    with pytest.raises(checkpoint.CannotSave, match="ButterworthBackwardFilterTransformer keeps .*_tail.* outside of"):
        checkpoint.save(step, made)


def test_a_chain_is_described_by_its_stages_and_without_addresses():
    def chain(**changes):
        return ezmsg.mlx.ChainTransformer(make_chain=functools.partial(_some_chain, **changes))

    text = checkpoint.description(chain(time_constant=0.5))
    assert "0x" not in text and "EWMASettings" not in text and "time_constant=0.5" in text
    assert text == checkpoint.description(chain(time_constant=0.5))
    assert text != checkpoint.description(chain(time_constant=0.25))


def _some_chain(time_constant):
    return [ezmsg.mlx.EWMATransformer(time_constant=time_constant)]


def test_a_function_in_a_chain_cannot_be_saved():
    step = ezmsg.mlx.ChainTransformer(make_chain=lambda: [ezmsg.mlx.PowTransformer(), lambda message: message])
    with pytest.raises(checkpoint.CannotSave, match="is not a processor"):
        checkpoint.save(step)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ezmsg.mlx.EWMATransformer(time_constant=0.1), ezmsg.mlx.EWMATransformer(time_constant=0.1 + 1e-12)),
        (
            ezmsg.mlx.FilterTransformer(coefs=np.array([[1.0, 0.0, 0.0, 1.0, -0.5, 0.1]]), coef_type="sos"),
            ezmsg.mlx.FilterTransformer(coefs=np.array([[1.0, 0.0, 0.0, 1.0, -0.5, 0.1 + 1e-12]]), coef_type="sos"),
        ),
        (
            ezmsg.mlx.FilterTransformer(coefs=(np.ones(2000), np.ones(1))),
            ezmsg.mlx.FilterTransformer(coefs=(np.ones(2000) + (np.arange(2000) == 999) * 1e-12, np.ones(1))),
        ),
    ],
    ids=["a number", "an array", "the middle of a long one"],
)
def test_settings_that_differ_far_behind_the_point_are_others(one, other):
    """So that nobody goes on at a checkpoint of other settings, or takes their results for its own."""
    assert checkpoint.description(one) != checkpoint.description(other)


def test_settings_that_differ_are_named_with_their_stage_also_inside_of_chains():
    def recipe(weights, time_constant):
        stages = [
            ezmsg.mlx.EWMATransformer(time_constant=time_constant),
            ezmsg.mlx.AffineTransformTransformer(weights=weights),
        ]
        return f"a.nwb x, 3 samples\n{checkpoint.description(ezmsg.mlx.ChainTransformer(make_chain=stages.copy))}"

    one, other = recipe(np.eye(2), 0.1), recipe(2.0 * np.eye(2), 0.1)
    (said,) = checkpoint.differing_settings(one, other)
    assert re.fullmatch(
        r"weights of AffineTransformTransformer is array\(.*2.*, there it is array\(.*", said, re.DOTALL
    )
    (said,) = checkpoint.differing_settings(one, recipe(np.eye(2), 0.2))
    assert said == "time_constant of EWMATransformer is 0.2, there it is 0.1"


def test_brackets_in_a_name_do_not_hide_the_settings_behind_it():
    def recipe(axis, **settings):
        step = ezmsg.mlx.AffineTransformTransformer(axis=axis, **settings)
        return f"a.nwb x, 3 samples\n{checkpoint.description(step)}"

    for axis in ("ch (", "ch [uV's"):
        one, other = (recipe(axis, weights=np.eye(2), kernel=kernel) for kernel in ("auto", "dense"))
        (said,) = checkpoint.differing_settings(one, other)
        assert said == "kernel of AffineTransformTransformer is 'dense', there it is 'auto'"
