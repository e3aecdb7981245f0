"""Every setting of every stage that can be fused changes in a running chain, as it does in the stages one by one."""

import dataclasses
from collections.abc import Callable

import ezmsg.sigproc.affinetransform as sigproc_affine
import ezmsg.sigproc.math.pow as sigproc_pow
import numpy as np
import pytest
from ezmsg.sigproc.affinetransform import AffineTransformTransformer
from ezmsg.sigproc.aggregate import AggregateTransformer, AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.downsample import DownsampleSettings, DownsampleTransformer
from ezmsg.sigproc.materialize import MaterializeMode
from ezmsg.sigproc.math.abs import AbsTransformer
from ezmsg.sigproc.math.clip import ClipTransformer
from ezmsg.sigproc.math.log import LogTransformer
from helpers import chains
from scipy.signal import butter

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

import ezmsg.mlx as package
from ezmsg.mlx import ChainTransformer
from ezmsg.mlx.chain import foreign, runner
from ezmsg.mlx.stream import device, fusible
from ezmsg.mlx.stream.unit import give_settings

# Of ezmsg-baseproc: the setting "axis" is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MEAN, MAX, MEDIAN = AggregationFunction.MEAN, AggregationFunction.MAX, AggregationFunction.MEDIAN
LOW, LOWER, HIGHER = (butter(order, corner, output="sos") for order, corner in ((2, 0.2), (2, 0.1), (4, 0.2)))
WEIGHTS = np.random.default_rng(1).standard_normal((chains.N_CHANNELS, chains.N_CHANNELS)).astype(np.float32)
GROUPS = [[0, 1, 2], [4, 5]]

AVERAGE = {
    "time_constant": [0.01, 0.5],
    "axis": ["ch", "time"],
    "accumulate": [False],
    "passthrough": [True],
    "reset_on_resume": [True],
    "mlx_metal_chunk_sizes": [(16,)],
}
OF_FILTERS = {
    "axis": ["ch", "time"],
    "coef_type": ["ba"],
    "use_fast_sosfilt": [False],
    "use_mlx_metal": [False],
    "mlx_metal_chunk_sizes": [(16,)],
    "thread_min_bytes": [0],
    # Of filters without feedback, which are not fused.
    "fir_fft_min_taps": [],
}
MIXTURE: tuple[dict, dict[str, list]] = (
    {"weights": WEIGHTS},
    {
        "weights": [None, "passthrough", 2.0 * WEIGHTS, WEIGHTS[:, :2], np.eye(6, dtype=np.float32)],
        "axis": ["ch"],
        "right_multiply": [False],
        "channel_groups": [GROUPS],
        "kernel": ["dense", "blocks"],
    },
)
REFERENCE = {
    "mode": ["median", "passthrough"],
    "axis": ["time", "ch"],
    "include_current": [False],
    "channel_groups": [GROUPS, np.array([[0, 1], [2, 3]])],
}


def band(cuton: float | None, cutoff: float, order: int = 2) -> package.ButterworthFilterSettings:
    return package.ButterworthFilterSettings(order=order, cuton=cuton, cutoff=cutoff, coef_type="sos")


PACKAGES_OWN: dict[type, tuple[dict, dict[str, list]]] = {
    package.EWMATransformer: ({"time_constant": 0.002}, AVERAGE),
    package.DetrendTransformer: ({"time_constant": 0.002}, AVERAGE),
    package.AdaptiveStandardScalerTransformer: ({"time_constant": 0.002}, AVERAGE),
    package.FilterTransformer: (
        {"coefs": LOW, "coef_type": "sos"},
        # The coefficients of another form come with it.
        {**OF_FILTERS, "coefs": [None, LOWER, HIGHER, LOW.copy()], "coef_type": []},
    ),
    package.ButterworthFilterTransformer: (
        {"order": 2, "cuton": 300.0, "cutoff": 5000.0, "coef_type": "sos"},
        {**OF_FILTERS, "order": [0, 3], "cuton": [500.0, None], "cutoff": [4000.0, None], "wn_hz": []},
    ),
    package.ChebyshevFilterTransformer: (
        {"order": 2, "ripple_tol": 1.0, "Wn": (300.0, 5000.0), "btype": "bandpass", "coef_type": "sos"},
        {
            **OF_FILTERS,
            "order": [0, 3],
            "ripple_tol": [2.0],
            "Wn": [(400.0, 5000.0)],
            "btype": ["bandstop"],
            "cheby_type": ["cheby2"],
            # Frequencies of this size, and a design of this kind, are none without those.
            "analog": [],
            "wn_hz": [],
        },
    ),
    package.ChebyForDecimateTransformer: (
        {"order": 2, "ripple_tol": 1.0, "Wn": 0.5, "coef_type": "sos"},
        {
            **OF_FILTERS,
            "order": [0, 3],
            "ripple_tol": [2.0],
            "Wn": [0.4],
            "btype": ["highpass"],
            "cheby_type": ["cheby2"],
            "analog": [],
            "wn_hz": [],
        },
    ),
    package.CombFilterTransformer: (
        {"coef_type": "sos"},
        {
            **OF_FILTERS,
            "fundamental_freq": [50.0],
            "num_harmonics": [2],
            "q_factor": [10.0],
            "filter_type": ["peak"],
            "quality_scaling": ["proportional"],
        },
    ),
    package.PowTransformer: ({}, {"exponent": [3.0, 1.0]}),
    package.ActivationTransformer: ({"function": "expit"}, {"function": ["logit", "none"]}),
    package.CommonRereferenceTransformer: ({}, REFERENCE),
    package.AffineTransformTransformer: MIXTURE,
    package.RMSBandPowerTransformer: (
        {"bandpass": band(300.0, 5000.0), "bin_duration": 0.001},
        {
            "bandpass": [band(400.0, 5000.0), band(300.0, 5000.0, order=0)],
            "bin_duration": [0.00051],
            "apply_sqrt": [False],
            "materialize": [MaterializeMode.OFF],
        },
    ),
    package.SquareLawBandPowerTransformer: (
        {"bandpass": band(300.0, 5000.0), "lowpass": band(None, 1000.0), "downsample": DownsampleSettings(factor=4)},
        {
            "bandpass": [band(400.0, 5000.0), band(300.0, 5000.0, order=0)],
            "lowpass": [band(None, 2000.0)],
            "downsample": [DownsampleSettings(factor=3)],
        },
    ),
    package.ThresholdCrossingTransformer: (
        {"threshold": 200.0, "output_format": "dense"},
        {
            "threshold": [150.0, -100.0],
            "max_peak_dur": [0.001],
            "min_peak_dur": [0.0001],
            "refrac_dur": [0.0],
            "align_on_peak": [True],
            "return_peak_val": [True],
            "auto_scale_tau": [0.01],
            "auto_scale": ["rms"],
            # Results of another type go past AsArray.
            "output_format": [],
        },
    ),
}
OF_SIGPROC: dict[type, tuple[dict, dict[str, list]]] = {
    AbsTransformer: ({}, {}),
    ClipTransformer: ({"min": -50.0, "max": 50.0}, {"min": [-20.0, None], "max": [20.0, None]}),
    sigproc_pow.PowTransformer: ({}, {"exponent": [3.0]}),
    LogTransformer: ({"clip_zero": True}, {"base": [2.0], "clip_zero": [False]}),
    sigproc_affine.CommonRereferenceTransformer: ({}, {**REFERENCE, "channel_groups": [GROUPS]}),
    AffineTransformTransformer: MIXTURE,
    AggregateTransformer: (
        {"axis": "ch", "operation": MAX},
        {"operation": [MEAN, MEDIAN], "axis": ["time"]},
    ),
    BinnedAggregateTransformer: (
        {"bin_duration": 0.001},
        {
            "bin_duration": [0.0005, 0.00111],
            "operation": [MAX, (MEAN, MAX), MEDIAN],
            "axis": ["ch"],
            "newaxis": ["m"],
            "passthrough": [True],
            "fractional": [False],
        },
    ),
    DownsampleTransformer: (
        {"factor": 4},
        {"factor": [3, 1, None], "target_rate": [1000.0]},
    ),
}
STAGES = {**PACKAGES_OWN, **OF_SIGPROC}
NOT_HERE = {"LinearRegressorTransformer", "RefitKalmanFilterTransformer", "FIRHilbertFilterTransformer"}
"""Those whose settings are a fitted model, and one that inherits how others are fused, and has no sections."""


def values_of(kind: type) -> list[tuple[str, object]]:
    _, changes = STAGES[kind]
    fields = {field.name for field in dataclasses.fields(kind.get_settings_type())}
    return [(field, value) for field in sorted(fields) for value in changes.get(field, ())]


CHANGES = [(kind, field, value) for kind in STAGES for field, value in values_of(kind)]


def named(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__module__.split('.')[1]} {value.__name__.removesuffix('Transformer')}"
    return value if isinstance(value, str) else str(value).replace("\n", "")[:20]


def test_each_stage_that_can_be_fused_is_here():
    ours = {
        name
        for name in dir(package)
        if name.endswith("Transformer") and callable(getattr(getattr(package, name), "fuse", None))
    }
    assert ours - NOT_HERE == {kind.__name__ for kind in PACKAGES_OWN}
    registered = {
        kind
        for kind, method in fusible._registered
        if method == "fuse" and kind.__module__.startswith("ezmsg.sigproc.")
    }
    assert registered == set(OF_SIGPROC) and foreign


@pytest.mark.parametrize("kind", STAGES, ids=named)
def test_each_setting_of_each_stage_is_here(kind):
    assert STAGES[kind][1].keys() == {field.name for field in dataclasses.fields(kind.get_settings_type())}


def outcome(run: Callable, message) -> object:
    """What comes out, or the class of the error."""
    try:
        return run(message)
    except Exception as error:
        return type(error)


def check_message(stages, chain: ChainTransformer, message, tolerance: float) -> None:
    want = outcome(lambda each: chains.one_by_one(stages, each)[0], message)
    got = outcome(chain, message)
    if isinstance(want, type):
        assert got is want
        return
    assert not isinstance(got, type), got
    chains.assert_same(got, want, exact=False, tolerance=tolerance)


@pytest.mark.parametrize("way", ["cpu", "compiled"])
@pytest.mark.parametrize(("kind", "field", "value"), CHANGES, ids=named)
def test_a_setting_that_changes_and_changes_back_is_in_force_at_once(kind, field, value, way, monkeypatch, request):
    if way == "compiled":
        request.addfinalizer(mx.enable_compile)
        monkeypatch.setattr(device, "backend_in_use", lambda: "gpu")
        mx.disable_compile()
    before, _ = STAGES[kind]

    def make() -> list:
        return [chains.to_mlx(), kind(**before), chains.to_numpy()]

    stages, chain = make(), ChainTransformer(make_chain=make)
    old = getattr(stages[1].settings, field)
    name = list(chain.stages)[1]
    tolerance = 1e-5 if way == "compiled" else 2e-6
    # After both, the same lengths come again, so that both are fused, compiled functions, too.
    messages = chains.stream([40] * 15)
    for number, message in enumerate(messages):
        if number in (5, 10):
            changes = {field: value if number == 5 else old}
            give_settings(stages[1], dataclasses.replace(stages[1].settings, **changes))
            chain.update_stage(name, **changes)
        with np.errstate(all="ignore"):
            check_message(stages, chain, message, tolerance)
    assert chain.describe().count("fused with stages") == 3


def test_a_chain_is_fused_again_however_often_settings_change(monkeypatch):
    monkeypatch.setattr(runner, "MOST_PLANS", 3)
    stages = {
        "in": chains.to_mlx(),
        "square": package.PowTransformer(),
        "average": chains.STAGES["average"](),
        "out": chains.to_numpy(),
    }
    chain = ChainTransformer(make_chain=lambda: stages)
    for number in range(6):
        chain.update_stage("square", exponent=2.0 + number)
        for message in chains.stream([60] * 4):
            chain(message)
        assert chain.describe().count("fused with stages 1 to 4") == 4, number


def test_lengths_are_those_of_one_sample_and_more():
    assert package.ChainSettings(make_chain=list, lengths=(1,)).lengths == (1,)
    for lengths in ((0,), (True,), (1.0,), 1):
        with pytest.raises(TypeError, match="'lengths' must be None or a tuple of integers of at least 1"):
            package.ChainSettings(make_chain=list, lengths=lengths)
