"""Every unit of the package goes through the contract of units."""

import importlib
import warnings
from importlib import metadata

import ezmsg.event.binned
import ezmsg.event.peak
import ezmsg.event.rate
import ezmsg.sigproc.affinetransform
import ezmsg.sigproc.asarray
import ezmsg.sigproc.butterworthfilter
import ezmsg.sigproc.cheby
import ezmsg.sigproc.ewma
import ezmsg.sigproc.filter
import ezmsg.sigproc.math.pow
import ezmsg.sigproc.scaler
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers.recurrences import BAND_PASS
from helpers.unit_contract import CASES, Subject

import ezmsg.mlx as package

BAND = {"order": 2, "cuton": 300.0, "cutoff": 5000.0, "coef_type": "sos"}
BAND_PASS_SETTINGS = ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND)
LOW_PASS_SETTINGS = ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(order=2, cutoff=100.0, coef_type="sos")
HILBERT = {"order": 30, "f_lo": 3000.0, "f_hi": 9000.0, "trans_lo": 1000.0, "trans_hi": 1000.0}
CHEBYSHEV = {"order": 2, "Wn": 300.0, "ripple_tol": 1.0, "coef_type": "sos"}


def average(name: str, unit: str) -> Subject:
    settings = {"time_constant": 0.01}
    return Subject(
        f"mlx.{unit}",
        getattr(package, f"{name}Transformer"),
        getattr(package, unit),
        package.EWMASettings(**settings),
        ezmsg.sigproc.ewma.EWMASettings(**settings),
    )


def namesake(module: str, unit: str, settings: dict, changes: set[str] = frozenset()) -> Subject:
    """A unit with its namesake's settings."""
    own, theirs = (importlib.import_module(f"ezmsg.{name}.{module}") for name in ("mlx", "sigproc"))
    transformer = getattr(package, f"{unit.removesuffix('Unit')}Transformer")
    kind = transformer.get_settings_type()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Subject(
            f"mlx.{unit}",
            transformer,
            getattr(own, unit),
            kind(**settings),
            getattr(theirs, kind.__name__)(**settings),
            frozenset(changes),
        )


SUBJECTS = [
    Subject(
        "mlx.AsArray",
        package.AsArrayTransformer,
        package.AsArray,
        package.AsArraySettings(backend=package.ArrayBackend.mlx),
        ezmsg.sigproc.asarray.AsArraySettings(backend=package.ArrayBackend.mlx),
    ),
    average("EWMA", "EWMAUnit"),
    average("Detrend", "DetrendUnit"),
    Subject(
        "mlx.AdaptiveStandardScaler",
        package.AdaptiveStandardScalerTransformer,
        package.AdaptiveStandardScaler,
        package.AdaptiveStandardScalerSettings(time_constant=0.01),
        ezmsg.sigproc.scaler.AdaptiveStandardScalerSettings(time_constant=0.01),
    ),
    Subject(
        "mlx.Filter",
        package.FilterTransformer,
        package.Filter,
        package.FilterSettings(coefs=BAND_PASS, coef_type="sos"),
        ezmsg.sigproc.filter.FilterSettings(coefs=BAND_PASS, coef_type="sos"),
    ),
    Subject(
        "mlx.ButterworthFilter",
        package.ButterworthFilterTransformer,
        package.ButterworthFilter,
        package.ButterworthFilterSettings(**BAND),
        ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND),
    ),
    Subject(
        "mlx.ChebyshevFilter",
        package.ChebyshevFilterTransformer,
        package.ChebyshevFilter,
        package.ChebyshevFilterSettings(**CHEBYSHEV),
        ezmsg.sigproc.cheby.ChebyshevFilterSettings(**CHEBYSHEV),
    ),
    Subject(
        "mlx.AffineTransform",
        package.AffineTransformTransformer,
        package.AffineTransform,
        package.AffineTransformSettings(weights=np.eye(3)),
        ezmsg.sigproc.affinetransform.AffineTransformSettings(weights=np.eye(3)),
    ),
    Subject(
        "mlx.CommonRereference",
        package.CommonRereferenceTransformer,
        package.CommonRereference,
        package.CommonRereferenceSettings(mode="median"),
        ezmsg.sigproc.affinetransform.CommonRereferenceSettings(mode="median"),
    ),
    Subject(
        "mlx.Network",
        package.NetworkTransformer,
        package.Network,
        package.NetworkSettings(model_class="helpers.networks.Doubled"),
    ),
    Subject(
        "mlx.Pow",
        package.PowTransformer,
        package.Pow,
        package.PowSettings(exponent=2.0),
        ezmsg.sigproc.math.pow.PowSettings(exponent=2.0),
    ),
    Subject(
        "mlx.LinearRegressor",
        package.LinearRegressorTransformer,
        package.LinearRegressor,
        package.LinearRegressorSettings(np.eye(3)[:, :2], labels=("x", "y"), key="decoded"),
        changes=frozenset({"ch", "key"}),
    ),
    Subject(
        "mlx.RefitKalmanFilter",
        package.RefitKalmanFilterTransformer,
        package.RefitKalmanFilter,
        package.RefitKalmanFilterSettings(0.9 * np.eye(2), np.eye(2), np.ones((3, 2)), np.eye(3)),
        changes=frozenset({"dims", "ch", "key"}),
    ),
    Subject(
        "mlx.ThresholdCrossing",
        package.ThresholdCrossingTransformer,
        package.ThresholdCrossing,
        package.ThresholdSettings(threshold=-1.0, output_format="dense"),
        ezmsg.event.peak.ThresholdSettings(threshold=-1.0, output_format="dense"),
    ),
    Subject(
        "mlx.BinnedEventAggregatorUnit",
        package.BinnedEventAggregator,
        package.BinnedEventAggregatorUnit,
        package.BinnedEventAggregatorSettings(bin_duration=0.005),
        ezmsg.event.binned.BinnedEventAggregatorSettings(bin_duration=0.005),
        changes=frozenset({"gain"}),
    ),
    Subject(
        "mlx.EventRate",
        package.Rate,
        package.EventRate,
        package.EventRateSettings(bin_duration=0.005),
        ezmsg.event.rate.EventRateSettings(bin_duration=0.005),
        changes=frozenset({"gain"}),
    ),
    *(
        namesake(*given)
        for given in (
            ("activation", "Activation", {"function": "sigmoid"}),
            ("adaptive_lnc", "AdaptiveLNC", {}),
            ("butterworthzerophase", "ButterworthZeroPhase", BAND),
            ("combfilter", "CombFilterUnit", {"coef_type": "sos"}),
            ("decimate", "ChebyForDecimate", CHEBYSHEV),
            ("filterbank", "Filterbank", {"kernels": [np.ones(9), np.ones(4)]}, {"dims", "ch", "attrs"}),
            ("fir_hilbert", "FIRHilbertFilterUnit", HILBERT),
            ("fir_hilbert", "FIRHilbertEnvelopeUnit", HILBERT),
            ("singlebandpow", "RMSBandPower", {"bandpass": BAND_PASS_SETTINGS, "bin_duration": 0.002}, {"gain"}),
            ("singlebandpow", "SquareLawBandPower", {"bandpass": BAND_PASS_SETTINGS, "lowpass": LOW_PASS_SETTINGS}),
            ("wavelets", "CWT", {"frequencies": [300.0, 3000.0], "wavelet": "mexh"}, {"dims", "ch", "attrs"}),
        )
    ),
    Subject("mlx.ReadLate", package.ReadLateTransformer, package.ReadLate, package.ReadLateSettings(depth=0)),
    Subject("mlx.Rechunk", package.RechunkTransformer, package.Rechunk, package.RechunkSettings(sizes=(200,))),
]

TWO_INPUTS = {"mlx.ResampleUnit", "mlx.ResampleConcat"}
"""Their own tests are in test_resample.py."""

WITHOUT_INPUT = {"mlx.MemoryMonitor", "mlx.SimulatedAcquisition"}
"""Producers."""

COMPOSED = {"mlx.Chain"}
"""Units whose settings say what they do."""


def test_every_unit_is_here():
    components = {
        point.name for point in metadata.entry_points(group="ezmsg.components") if point.dist.name == "ezmsg-mlx"
    }
    assert {subject.component for subject in SUBJECTS} == components - WITHOUT_INPUT - COMPOSED - TWO_INPUTS


OTHER_CHANNELS = ("mlx.Network", "called_bare_it_leaves_its_input_alone_and_keeps_what_is_known_of_it")
"""Its channels are those of the model; what else is known of its input is looked at in test_network.py."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.component)
def test_case(subject, case):
    if (subject.component, case) == OTHER_CHANNELS:
        return
    CASES[case](subject)
