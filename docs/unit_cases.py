"""The units of ezmsg-sigproc, each with what it takes to run it: see ``make_unit_table.py``."""

import asyncio
import typing
from collections.abc import Callable
from importlib import import_module

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from unit_graph import INPUTS

RATE = 1000.0
N_SAMPLES, N_CHANNELS = 200, 4

BAND = {"order": 4, "cuton": 30.0, "cutoff": 100.0}
SOS = {**BAND, "coef_type": "sos"}

Result = AxisArray | list | tuple | None


class Case(typing.NamedTuple):
    unit: str
    """Module and name of the unit, below ezmsg.sigproc."""
    make: Callable[[], Callable[[AxisArray], Result]]
    """What makes that which is called with a message."""
    settings: str = ""
    """What stands in the table for the settings."""
    instead: str = ""
    """What this package has instead."""
    prepare: Callable[[np.ndarray], np.ndarray] = lambda data: data
    """Makes the data of a message of noise."""
    adapt: Callable[[AxisArray], AxisArray] = lambda message: message
    """Makes the message that the unit needs."""
    inputs: tuple[str, ...] = INPUTS
    """Its inputs in a graph; without any, it is not run in one."""


def transformer(path: str, **settings: object) -> Callable[[], Callable[[AxisArray], Result]]:
    module, _, name = path.rpartition(".")

    def make() -> Callable[[AxisArray], Result]:
        from ezmsg.baseproc import suppress_axis_deprecation

        with suppress_axis_deprecation():
            return getattr(import_module(f"ezmsg.sigproc.{module}"), name)(**settings)

    return make


def pair(path: str, settings: str = "", **values: object) -> Callable[[], Callable[[AxisArray], Result]]:
    """A unit with two inputs, which get the same stream."""
    module, _, name = path.rpartition(".")

    def make() -> Callable[[AxisArray], Result]:
        found = import_module(f"ezmsg.sigproc.{module}")
        processor = getattr(found, name)(*([getattr(found, settings)(**values)] if settings else []))
        unit_settings = getattr(processor, "settings", None) if settings else None
        if hasattr(processor, "push_a"):

            def both(message: AxisArray) -> Result:
                processor.push_a(message)
                processor.push_b(message)
                return asyncio.run(processor.__acall__())
        else:

            def both(message: AxisArray) -> Result:
                first = processor(message)
                second = processor.push_b(message)
                return second if first is None else first

        both.settings = unit_settings
        return both

    return make


def sampler() -> Callable[[AxisArray], Result]:
    from ezmsg.baseproc import SampleTriggerMessage

    processor = transformer("sampler.SamplerTransformer", buffer_dur=1.0)()

    def call(message: AxisArray) -> Result:
        results = list(processor(message))
        if message.axes["time"].offset == 0.0:
            results += processor(SampleTriggerMessage(timestamp=0.1, period=(-0.05, 0.05), value="go"))
        return [getattr(result, "sample", result) for result in results]

    return call


def resample(path: str) -> Callable[[], Callable[[AxisArray], Result]]:
    def make() -> Callable[[AxisArray], Result]:
        processor = transformer(path, resample_rate=500.0)()

        def call(message: AxisArray) -> Result:
            processor(message)
            return next(processor)

        call.settings = processor.settings
        return call

    return make


def resample_concat() -> Callable[[AxisArray], Result]:
    module = import_module("ezmsg.sigproc.resampleconcat")
    processor = module.ResampleConcatProcessor(module.ResampleConcatSettings())

    def call(message: AxisArray) -> Result:
        processor.push_reference(message)
        return processor(message)

    call.settings = processor.settings
    return call


def spectrum(message: AxisArray) -> AxisArray:
    """*message* as if its channels were frequencies."""
    axis = AxisArray.LinearAxis(unit="Hz", gain=10.0)
    return replace(message, dims=["time", "freq"], axes={"time": message.axes["time"], "freq": axis})


def polar(message: AxisArray) -> AxisArray:
    axis = AxisArray.CoordinateAxis(data=np.array(["x", "y"]), dims=["ch"], unit="")
    return replace(message, data=message.data[:, :2], axes={"time": message.axes["time"], "ch": axis})


def windowed(message: AxisArray) -> AxisArray:
    """*message* as one window, whose stream dimension is that of windows."""
    windows = AxisArray.TimeAxis(fs=RATE / N_SAMPLES, offset=message.axes["time"].offset)
    return replace(
        message,
        data=message.data.reshape(1, N_SAMPLES, N_CHANNELS),
        dims=["win", "time", "ch"],
        axes={**message.axes, "win": windows},
        stream_dim="win",
    )


def grid(message: AxisArray) -> AxisArray:
    """*message* with its channels in two rows."""
    data = message.data.reshape(-1, 2, N_CHANNELS // 2)
    return replace(message, data=data, dims=["time", "row", "col"], axes={"time": message.axes["time"]})


def cases() -> list[Case]:
    from ezmsg.sigproc.butterworthfilter import ButterworthFilterSettings
    from ezmsg.sigproc.downsample import DownsampleSettings
    from ezmsg.sigproc.spectrogram import SpectrogramSettings
    from scipy.signal import butter, firwin

    t = transformer
    scaler = "`AdaptiveStandardScaler`"
    ssvep = {"time_dim": "time", "ch_dim": "ch", "freqs": [10.0, 20.0]}
    bands = [(5.0, 15.0), (15.0, 35.0)]
    window = SpectrogramSettings(window_dur=0.2, window_shift=0.1)
    band = ButterworthFilterSettings(**SOS)
    taps = firwin(31, [30.0, 100.0], fs=RATE, pass_zero=False)
    sos = butter(4, [30.0, 100.0], "bandpass", fs=RATE, output="sos")
    found = [
        Case(
            "activation.Activation", t("activation.ActivationTransformer", function="sigmoid"), '`function="sigmoid"`'
        ),
        Case("adaptive_lnc.AdaptiveLNC", t("adaptive_lnc.AdaptiveLNCTransformer")),
        Case(
            "affinetransform.AffineTransform",
            t("affinetransform.AffineTransformTransformer", weights=np.eye(4)),
            instead="`AffineTransform`",
        ),
        Case(
            "affinetransform.CommonRereference",
            t("affinetransform.CommonRereferenceTransformer"),
            instead="`CommonRereference`",
        ),
        Case(
            "affinetransform.CommonRereference",
            t("affinetransform.CommonRereferenceTransformer", mode="median"),
            '`mode="median"`',
            "`CommonRereference`",
        ),
        Case(
            "aggregate.RangedAggregate",
            t("aggregate.RangedAggregateTransformer", axis="freq", bands=bands),
            adapt=spectrum,
        ),
        Case("aggregate.AggregateUnit", t("aggregate.AggregateTransformer", axis="ch")),
        Case("align.AlignAlongAxis", pair("align.AlignAlongAxisProcessor", "AlignAlongAxisSettings")),
        Case("asarray.AsArray", t("asarray.AsArrayTransformer", backend="mlx"), '`backend="mlx"`', "`AsArray`"),
        Case("bandpower.BandPower", t("bandpower.BandPowerTransformer", spectrogram_settings=window, bands=bands)),
        Case("binned_aggregate.BinnedAggregate", t("binned_aggregate.BinnedAggregateTransformer")),
        Case(
            "butterworthfilter.ButterworthFilter",
            t("butterworthfilter.ButterworthFilterTransformer", **SOS),
            '`coef_type="sos"`',
            "`ButterworthFilter`",
        ),
        Case(
            "butterworthfilter.ButterworthFilter",
            t("butterworthfilter.ButterworthFilterTransformer", **BAND),
            '`coef_type="ba"`',
            "`ButterworthFilter`",
        ),
        Case(
            "butterworthzerophase.ButterworthZeroPhase",
            t("butterworthzerophase.ButterworthZeroPhaseTransformer", **SOS),
            '`coef_type="sos"`',
        ),
        Case(
            "cheby.ChebyshevFilter",
            t("cheby.ChebyshevFilterTransformer", order=4, ripple_tol=1.0, Wn=100.0, coef_type="sos"),
            '`coef_type="sos"`',
            "`ChebyshevFilter`",
        ),
        Case("combfilter.CombFilterUnit", t("combfilter.CombFilterTransformer", coef_type="sos"), '`coef_type="sos"`'),
        Case("concat.Concat", pair("concat.ConcatProcessor", "ConcatSettings")),
        Case("coordinatespaces.CoordinateSpaces", t("coordinatespaces.CoordinateSpacesTransformer"), adapt=polar),
        Case(
            "decimate.ChebyForDecimate",
            t("decimate.ChebyForDecimateTransformer", order=4, ripple_tol=1.0, Wn=100.0, coef_type="sos"),
            '`coef_type="sos"`',
            "`ChebyForDecimate`",
        ),
        Case("denormalize.DenormalizeUnit", t("denormalize.DenormalizeTransformer", seed=0), "`seed=0`"),
        Case("detrend.DetrendUnit", t("detrend.DetrendTransformer"), instead="`DetrendUnit`"),
        Case("diff.DiffUnit", t("diff.DiffTransformer")),
        Case("digitize.Digitize", t("digitize.DigitizeTransformer", min_val=-5.0, max_val=5.0)),
        Case("downsample.Downsample", t("downsample.DownsampleTransformer", factor=4)),
        Case("ewma.EWMAUnit", t("ewma.EWMATransformer"), instead="`EWMAUnit`"),
        Case("extract_axis.ExtractAxisDataUnit", t("extract_axis.ExtractAxisData"), adapt=spectrum),
        Case("fbcca.FBCCA", t("fbcca.FBCCATransformer", **ssvep), adapt=windowed),
        Case(
            "fbcca.StreamingFBCCA",
            t("fbcca.StreamingFBCCATransformer", **ssvep, window_dur=0.4),
        ),
        Case("filter.Filter", t("filter.FilterTransformer", coef_type="sos", coefs=sos), "sections", "`Filter`"),
        Case("filter.Filter", t("filter.FilterTransformer", coefs=(taps, np.array([1.0]))), "31 taps (FIR)"),
        Case("filterbank.Filterbank", t("filterbank.FilterbankTransformer", kernels=[taps, taps[::-1]])),
        Case("fir_hilbert.FIRHilbertFilterUnit", t("fir_hilbert.FIRHilbertFilterTransformer", order=30, f_lo=50.0)),
        Case("fir_hilbert.FIRHilbertEnvelopeUnit", t("fir_hilbert.FIRHilbertEnvelopeTransformer", order=30, f_lo=50.0)),
        Case(
            "fir_pmc.ParksMcClellanFIR",
            t("fir_pmc.ParksMcClellanFIRTransformer", order=30, cuton=100.0, cutoff=200.0, transition=50.0),
        ),
        Case("firfilter.FIRFilter", t("firfilter.FIRFilterTransformer", order=31, cutoff=100.0)),
        Case("flatten.Flatten", t("flatten.FlattenTransformer"), adapt=grid),
        Case("gaussiansmoothing.GaussianSmoothingFilter", t("gaussiansmoothing.GaussianSmoothingFilterTransformer")),
        Case("kaiser.KaiserFilter", t("kaiser.KaiserFilterTransformer", cutoff=100.0, ripple=40.0, width=50.0)),
        Case("linear.LinearTransform", t("linear.LinearTransformTransformer", scale=2.0, offset=1.0)),
        Case("materialize.Materialize", t("materialize.MaterializeTransformer")),
        Case("math.abs.Abs", t("math.abs.AbsTransformer")),
        Case("math.add.ConstAdd", t("math.add.ConstAddTransformer", value=1.0)),
        Case("math.add.Add", pair("math.add.AddProcessor")),
        Case("math.anscombe.Anscombe", t("math.anscombe.AnscombeTransformer"), prepare=np.abs),
        Case(
            "math.anscombe.InverseAnscombe",
            t("math.anscombe.InverseAnscombeTransformer"),
            prepare=lambda data: 3.0 + np.abs(data),
        ),
        Case("math.clip.Clip", t("math.clip.ClipTransformer", min=-1.0, max=1.0)),
        Case("math.difference.ConstDifference", t("math.difference.ConstDifferenceTransformer", value=1.0)),
        Case("math.difference.Difference", pair("math.difference.DifferenceProcessor")),
        Case("math.invert.Invert", t("math.invert.InvertTransformer")),
        Case("math.log.Log", t("math.log.LogTransformer"), prepare=lambda data: np.abs(data) + 1.0),
        Case("math.pow.Pow", t("math.pow.PowTransformer"), instead="`Pow`"),
        Case("math.scale.Scale", t("math.scale.ScaleTransformer", scale=2.0)),
        Case("merge.Merge", pair("merge.MergeProcessor", "MergeSettings")),
        Case("quantize.QuantizerUnit", t("quantize.QuantizeTransformer", min_val=-5.0, max_val=5.0)),
        Case("resample.ResampleUnit", resample("resample.ResampleProcessor"), "`resample_rate=500`"),
        Case("resampleconcat.ResampleConcat", resample_concat, inputs=("INPUT_REFERENCE", "INPUT_SIGNAL")),
        Case("rollingscaler.RollingScalerUnit", t("rollingscaler.RollingScalerProcessor"), instead=scaler),
        Case("sampler.Sampler", sampler, inputs=()),
        Case("scaler.AdaptiveStandardScaler", t("scaler.AdaptiveStandardScalerTransformer"), instead=scaler),
        Case(
            "signalinjector.SignalInjector",
            t("signalinjector.SignalInjectorTransformer", frequency=10.0, mixing_seed=0),
        ),
        Case("singlebandpow.RMSBandPower", t("singlebandpow.RMSBandPowerTransformer", bandpass=band)),
        Case(
            "singlebandpow.SquareLawBandPower",
            t(
                "singlebandpow.SquareLawBandPowerTransformer",
                bandpass=band,
                lowpass=ButterworthFilterSettings(order=4, cutoff=10.0, coef_type="sos"),
                downsample=DownsampleSettings(factor=4),
            ),
        ),
        Case("slicer.Slicer", t("slicer.SlicerTransformer", selection="0:2", axis="ch")),
        Case("spectrogram.Spectrogram", t("spectrogram.SpectrogramTransformer", window_dur=0.2, window_shift=0.1)),
        Case("spectrum.Spectrum", t("spectrum.SpectrumTransformer", axis="time")),
        Case("transpose.Transpose", t("transpose.TransposeTransformer", axes=("ch", "time"))),
        Case("wavelets.CWT", t("wavelets.CWTTransformer", frequencies=[20.0, 40.0], wavelet="cmor1.5-1.0")),
        Case("window.Window", t("window.WindowTransformer", newaxis="win", window_dur=0.2, window_shift=0.1)),
    ]
    return [case._replace(instead=INSTEAD[case.unit]) if case.unit in INSTEAD else case for case in found]


NONE = {
    "bandpower.BandPower": "in a `Chain`, which calls its transformer",
    "denormalize.DenormalizeUnit": "none: it makes signals for tests, with NumPy's random numbers",
    "extract_axis.ExtractAxisDataUnit": "none: it gives the values of an axis, which are on the host",
    "fbcca.FBCCA": "none: canonical correlations of a few windows a second; MLX has no decompositions on a GPU",
    "fbcca.StreamingFBCCA": "none, as for `FBCCA`",
    "signalinjector.SignalInjector": "none: it makes signals for tests; place it before the conversion",
    "spectrogram.Spectrogram": "in a `Chain`, which calls its transformer",
}
"""Why there is no unit of this package, and what to do."""

OWN = {
    "activation.Activation": "Activation",
    "adaptive_lnc.AdaptiveLNC": "AdaptiveLNC",
    "butterworthzerophase.ButterworthZeroPhase": "ButterworthZeroPhase",
    "combfilter.CombFilterUnit": "CombFilterUnit",
    "filterbank.Filterbank": "Filterbank",
    "fir_hilbert.FIRHilbertFilterUnit": "FIRHilbertFilterUnit",
    "fir_hilbert.FIRHilbertEnvelopeUnit": "FIRHilbertEnvelopeUnit",
    "wavelets.CWT": "CWT",
    "resample.ResampleUnit": "ResampleUnit",
    "resampleconcat.ResampleConcat": "ResampleConcat",
    "singlebandpow.RMSBandPower": "RMSBandPower",
    "singlebandpow.SquareLawBandPower": "SquareLawBandPower",
}
"""Units of this package with the name of one that does not stay in MLX."""

INSTEAD = NONE | {unit: f"`{name}`" for unit, name in OWN.items()}

NOT_RUN = {
    "ewmfilter.EWM": "deprecated; it hands over to AdaptiveStandardScaler",
    "filter.BaseFilterByDesignTransformerUnit": "the base of other units",
    "sampler.TriggerGenerator": "takes no data",
}
"""Units that are not in the table, and why."""
