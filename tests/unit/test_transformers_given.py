"""What every transformer of the package makes of what it does not expect: no message, no dimension, other settings."""

import asyncio
import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import ezmsg.core as ez
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
from ezmsg.util.messages.axisarray import AxisArray

mx = pytest.importorskip("mlx.core")

from helpers.recurrences import BAND_PASS
from helpers.transformers import call

import ezmsg.mlx as package

BAND = {"order": 2, "cuton": 300.0, "cutoff": 5000.0, "coef_type": "sos"}
HILBERT = {"order": 30, "f_lo": 3000.0, "f_hi": 9000.0, "trans_lo": 1000.0, "trans_hi": 1000.0}
ALONG_A_DIMENSION = {
    "EWMATransformer": {},
    "DetrendTransformer": {},
    "AdaptiveStandardScalerTransformer": {},
    "FilterTransformer": {"coefs": BAND_PASS, "coef_type": "sos"},
    "ButterworthFilterTransformer": BAND,
    "ChebyshevFilterTransformer": {"order": 2, "Wn": 300.0, "ripple_tol": 1.0, "coef_type": "sos"},
    "RechunkTransformer": {},
    "AdaptiveLNCTransformer": {},
    "ButterworthZeroPhaseTransformer": BAND,
    "ChebyForDecimateTransformer": {"order": 2, "Wn": 300.0, "ripple_tol": 1.0},
    "CombFilterTransformer": {},
    "CWTTransformer": {"frequencies": [300.0], "wavelet": "mexh"},
    "FIRHilbertEnvelopeTransformer": HILBERT,
    "FIRHilbertFilterTransformer": HILBERT,
    "FilterbankTransformer": {"kernels": [np.ones(3)]},
    "SquareLawBandPowerTransformer": {"bandpass": ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND)},
    "RMSBandPowerTransformer": {"bandpass": ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND)},
}
TRANSFORMERS = {
    **ALONG_A_DIMENSION,
    "ActivationTransformer": {"function": "sigmoid"},
    "AffineTransformTransformer": {"weights": np.eye(2)},
    "AsArrayTransformer": {"backend": "numpy"},
    "CommonRereferenceTransformer": {"mode": "median"},
    "LinearRegressorTransformer": {"weights": np.eye(2)},
    "PowTransformer": {},
    "ReadLateTransformer": {"depth": 0},
    "ThresholdCrossingTransformer": {"output_format": "dense"},
    "RefitKalmanFilterTransformer": {
        "A_state_transition_matrix": np.eye(1),
        "W_process_noise_covariance": np.eye(1),
        "H_observation_matrix": np.ones((2, 1)),
        "Q_measurement_noise_covariance": np.eye(2),
    },
}

SIGPROC = {
    ("AsArrayTransformer", "AsArray"): ezmsg.sigproc.asarray.AsArraySettings(backend="mlx", dtype="float16"),
    ("EWMATransformer", "EWMAUnit"): ezmsg.sigproc.ewma.EWMASettings(time_constant=0.5),
    ("DetrendTransformer", "DetrendUnit"): ezmsg.sigproc.ewma.EWMASettings(time_constant=0.5),
    ("AdaptiveStandardScalerTransformer", "AdaptiveStandardScaler"): (
        ezmsg.sigproc.scaler.AdaptiveStandardScalerSettings(time_constant=0.5)
    ),
    ("FilterTransformer", "Filter"): ezmsg.sigproc.filter.FilterSettings(coefs=None, coef_type="sos"),
    ("ButterworthFilterTransformer", "ButterworthFilter"): (
        ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND)
    ),
    ("ChebyshevFilterTransformer", "ChebyshevFilter"): (
        ezmsg.sigproc.cheby.ChebyshevFilterSettings(order=2, Wn=300.0, ripple_tol=1.0)
    ),
    ("CommonRereferenceTransformer", "CommonRereference"): (
        ezmsg.sigproc.affinetransform.CommonRereferenceSettings(mode="median", include_current=False)
    ),
    ("PowTransformer", "Pow"): ezmsg.sigproc.math.pow.PowSettings(exponent=3.0),
}


OWN_FIELDS = {"AsArrayTransformer": {"rounding": "truncate"}}
"""What this package has besides, with its defaults."""


def make(name: str):
    return getattr(package, name)(**TRANSFORMERS[name])


def test_every_transformer_is_here():
    # What a chain or a network makes of such messages is up to its stages and its model.
    chains = {"BaseChainTransformer", "ChainTransformer", "NetworkTransformer"}
    assert {name for name in package.__all__ if name.endswith("Transformer")} - chains == set(TRANSFORMERS)


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_is_no_message_is_refused_and_named(name, how):
    transformer = make(name)
    for given in (np.zeros((3, 2)), mx.zeros((3, 2)), [1.0], None, "text"):
        kind = "an " if type(given).__name__ in ("ndarray", "array") else "a "
        kind += type(given).__name__
        with pytest.raises(TypeError, match=f"^{name} takes an AxisArray as its message, got {kind}.$"):
            call(transformer, given, how)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_message_of_a_class_derived_from_axisarray_is_one(name):
    @dataclasses.dataclass(eq=False)
    class Special(AxisArray):
        pass

    given = Special(np.ones((5, 2), np.float32), ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=30000.0)})
    make(name)(given)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("name", ALONG_A_DIMENSION)
def test_a_message_without_a_dimension_is_refused_and_the_next_one_is_taken(name, how):
    transformer = make(name)
    for data in (np.array(1.0), mx.array(1.0)):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"^The message has data of shape \(\), without a dimension; .* needs "
            ):
                call(transformer, AxisArray(data, [], axes={"time": AxisArray.TimeAxis(fs=30000.0)}), how)
        call(transformer, AxisArray(mx.ones((5, 2)), ["time", "ch"], {"time": AxisArray.TimeAxis(fs=30000.0)}), how)


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("names", "given"), SIGPROC.items(), ids=[name for name, _ in SIGPROC])
def test_settings_of_sigproc_count_as_ours(names, given):
    transformer, unit = (getattr(package, name) for name in names)
    running, running_unit = transformer(), unit()
    running.update_settings(given)
    running_unit.apply_settings(given)
    taken = [made.settings for made in (transformer(given), transformer(settings=given), running)]
    taken += [made.SETTINGS for made in (unit(given), unit(settings=given), running_unit)]
    for settings in taken:
        assert type(settings) is transformer.get_settings_type() is unit.SETTINGS
        assert dataclasses.asdict(settings) == OWN_FIELDS.get(names[0], {}) | dataclasses.asdict(given)


@pytest.mark.parametrize(("names", "given"), SIGPROC.items(), ids=[name for name, _ in SIGPROC])
def test_settings_of_a_class_derived_from_that_of_sigproc_count_as_ours(names, given):
    derived = type("Derived", (type(given),), {"__annotations__": {"note": str}, "note": "x"})
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    transformer, unit = (getattr(package, name) for name in names)
    running = transformer()
    running.update_settings(derived(**values))
    for settings in (transformer(derived(**values)).settings, unit(derived(**values)).SETTINGS, running.settings):
        assert type(settings) is transformer.get_settings_type()
        assert dataclasses.asdict(settings) == OWN_FIELDS.get(names[0], {}) | dataclasses.asdict(given)


def test_settings_of_another_filter_are_no_substitute():
    for given in (ezmsg.sigproc.butterworthfilter.ButterworthFilterSettings(**BAND), package.ChebyshevFilterSettings()):
        with pytest.raises(TypeError, match="'settings' must be ezmsg.mlx.filter.FilterSettings, got .*"):
            package.FilterTransformer(given)


def test_each_unit_describes_itself():
    # A dashboard shows the docstring, which Python takes from a base class where there is none.
    units = [getattr(package, name) for name in package.__all__]
    units = [unit for unit in units if isinstance(unit, type) and issubclass(unit, ez.Unit)]
    descriptions = [inspect.getdoc(unit).splitlines()[0] for unit in units]
    assert len(units) >= 11 and len(set(descriptions)) == len(units)
    for unit, description in zip(units, descriptions, strict=True):
        assert "__doc__" in vars(unit) and vars(unit)["__doc__"] and description.endswith("."), unit


def test_settings_of_sigproc_reach_a_running_unit():
    unit = package.EWMAUnit(time_constant=1.0)
    unit.create_processor()
    asyncio.run(unit.on_settings(ezmsg.sigproc.ewma.EWMASettings(time_constant=0.25)))
    assert type(unit.processor.settings) is package.EWMASettings
    assert unit.processor.settings.time_constant == 0.25


def test_settings_of_sigproc_are_checked():
    for make in (package.EWMATransformer, package.EWMAUnit):
        with pytest.raises(ValueError, match="'time_constant' must be .*, got -1.0"):
            make(ezmsg.sigproc.ewma.EWMASettings(time_constant=-1.0))


def test_settings_of_sigproc_warn_of_the_axis_once():
    with pytest.warns(FutureWarning):
        given = ezmsg.sigproc.ewma.EWMASettings(axis="time")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert package.EWMATransformer(given).settings.axis == "time"


def test_single_fields_of_a_running_filter_can_be_replaced():
    transformer = package.ButterworthFilterTransformer(**BAND)
    transformer.update_settings(order=3)
    assert transformer.settings == package.ButterworthFilterSettings(**{**BAND, "order": 3})


class Unrelated(ez.Settings):
    order: int = 2


@pytest.mark.parametrize("names", SIGPROC, ids=[name for name, _ in SIGPROC])
def test_settings_of_another_kind_are_refused(names):
    transformer, unit = (getattr(package, name) for name in names)
    allowed = f"'settings' must be {transformer.get_settings_type().__module__}.*, got .*Unrelated.*"
    for make in (transformer, unit):
        with pytest.raises(TypeError, match=allowed):
            make(Unrelated())
        with pytest.raises(TypeError, match=allowed):
            make(settings=Unrelated())
    with pytest.raises(TypeError, match=allowed):
        transformer().update_settings(Unrelated())
    with pytest.raises(TypeError, match=allowed):
        unit().apply_settings(Unrelated())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_help_shows_the_settings_of_a_transformer(name):
    kind = getattr(package, name)
    shown = set(inspect.signature(kind).parameters)
    assert shown == {field.name for field in dataclasses.fields(kind.get_settings_type())}


# ------------------------------------------------------------------------------------------------------------ errors

OF_NAMES = [
    (package.AdaptiveLNCSettings, {}, "cancel_method", ValueError),
    (package.AffineTransformSettings, {"weights": np.eye(2)}, "kernel", ValueError),
    (package.AsArraySettings, {}, "backend", ValueError),
    (package.ChebyshevFilterSettings, {}, "btype", ValueError),
    (package.CombFilterSettings, {}, "quality_scaling", ValueError),
    (package.CommonRereferenceSettings, {}, "mode", ValueError),
    (package.FilterSettings, {"coefs": None}, "coef_type", ValueError),
    (package.FilterbankSettings, {"kernels": [np.ones(3)]}, "min_phase", ValueError),
    (package.NetworkSettings, {"model_class": "helpers.networks.Doubled"}, "dtype", TypeError),
    (package.NetworkSettings, {"model_class": "helpers.networks.Doubled"}, "state", ValueError),
    (package.ReadLateSettings, {}, "dtype", TypeError),
    (package.ReadLateSettings, {}, "rounding", ValueError),
    (package.RechunkSettings, {}, "remainder", ValueError),
    (package.RMSBandPowerSettings, {}, "materialize", ValueError),
    (package.ThresholdSettings, {}, "auto_scale", ValueError),
]


@pytest.mark.parametrize(("kind", "others", "field", "error"), OF_NAMES, ids=str)
@pytest.mark.parametrize("given", ["no such thing", True, 7.5, ["mean"]], ids=str)
def test_allowed_values_are_named_in_one_form(kind, others, field, error, given):
    with pytest.raises(error, match=rf"^'{field}' must be (None or )?one of '.*', got {re.escape(repr(given))}$"):
        kind(**others, **{field: given})


def test_no_error_names_values_or_types_in_another_form():
    for path in Path(package.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"must be '[^'{]+' or '", text), path
        assert not re.search(r"(got|gave) a \{type\(", text), path
        assert "one of {', '.join" not in text or path.parent.name in ("command", "stream"), path
