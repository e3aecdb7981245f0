"""How long the transformers of ezmsg-sigproc remember, and where their results lie."""

import math
import typing

from ezmsg.sigproc.affinetransform import AffineTransformTransformer, CommonRereferenceTransformer
from ezmsg.sigproc.aggregate import RangedAggregateTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.butterworthfilter import ButterworthFilterTransformer
from ezmsg.sigproc.cheby import ChebyshevFilterTransformer
from ezmsg.sigproc.detrend import DetrendTransformer
from ezmsg.sigproc.diff import DiffTransformer
from ezmsg.sigproc.downsample import DownsampleTransformer
from ezmsg.sigproc.ewma import EWMATransformer
from ezmsg.sigproc.filter import FilterByDesignTransformer, FilterTransformer
from ezmsg.sigproc.firfilter import FIRFilterTransformer
from ezmsg.sigproc.kaiser import KaiserFilterTransformer
from ezmsg.sigproc.scaler import AdaptiveStandardScalerTransformer
from ezmsg.sigproc.slicer import SlicerTransformer
from ezmsg.sigproc.spectrum import SpectrumTransformer
from ezmsg.sigproc.transpose import TransposeTransformer
from ezmsg.sigproc.util.binning import BinSchedule
from ezmsg.sigproc.window import WindowTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ..stream.fusible import ResultGrid, averaging_time, filter_time, one_for_each, settling_of


def _nothing(stage: object, tolerance: float, gain: float) -> float:
    return 0.0


for _kind in (
    AffineTransformTransformer,
    CommonRereferenceTransformer,
    RangedAggregateTransformer,
    SlicerTransformer,
    SpectrumTransformer,
    TransposeTransformer,
):
    # Their states hold what follows from the shape of a message.
    settling_of(_kind, _nothing)

settling_of(DiffTransformer, lambda stage, tolerance, gain: gain)


# --------------------------------------------------------------------------------------------- averages and filters


def _average_time(stage: EWMATransformer | AdaptiveStandardScalerTransformer, tolerance: float, gain: float) -> float:
    return averaging_time(stage.settings.time_constant, tolerance)


for _average in (AdaptiveStandardScalerTransformer, DetrendTransformer, EWMATransformer):
    settling_of(_average, _average_time)

settling_of(
    FilterTransformer,
    lambda stage, tolerance, gain: filter_time(stage.settings.coefs, stage.settings.coef_type, tolerance, gain),
)


def _designed_time(stage: FilterByDesignTransformer, tolerance: float, gain: float) -> float:
    design = stage.get_design_function()
    if design is None or not getattr(stage.settings, "order", 1):
        return 0.0
    coefs = design(1.0 / gain)
    return filter_time(coefs, "ba" if isinstance(coefs, tuple) else "sos", tolerance, gain)


for _design in (
    ButterworthFilterTransformer,
    ChebyshevFilterTransformer,
    FIRFilterTransformer,
    KaiserFilterTransformer,
):
    settling_of(_design, _designed_time)


# ------------------------------------------------------------------------------------------------- bins and windows


def _bin_grid(stage: BinnedAggregateTransformer, gain: float) -> ResultGrid:
    settings = stage.settings
    if settings.passthrough:
        return one_for_each(gain)
    schedule = BinSchedule(bin_duration=settings.bin_duration, fractional=settings.fractional)
    schedule.reset(1.0 / gain)
    spb = schedule.spb

    def results_after(n_samples: int) -> int:
        # As the schedule has it: bin number m ends before sample int((m + 1) * spb).
        number = int((n_samples + 1) / spb) + 1
        while int(number * spb) > n_samples:
            number -= 1
        return number

    def begin(number: int) -> None:
        reset = stage._reset_state

        def reset_there(message: AxisArray) -> None:
            reset(message)
            typing.cast(BinSchedule, stage.state.schedule).n_bins_done = number
            del stage.__dict__["_reset_state"]

        # The schedule is made at the first message, which is then cut by it.
        stage.__dict__["_reset_state"] = reset_there

    return ResultGrid(schedule.output_gain, results_after, lambda number: int(number * spb), begin)


settling_of(
    BinnedAggregateTransformer,
    lambda stage, tolerance, gain: 0.0 if stage.settings.passthrough else stage.settings.bin_duration + gain,
    _bin_grid,
)


def _every(stage: DownsampleTransformer, gain: float) -> int:
    settings = stage.settings
    if settings.factor is not None:
        return max(settings.factor, 1)
    return 1 if settings.target_rate is None else max(int(1 / (gain * settings.target_rate)), 1)


def _downsampled_grid(stage: DownsampleTransformer, gain: float) -> ResultGrid:
    every = _every(stage, gain)
    return ResultGrid(gain * every, lambda n_samples: -(-n_samples // every), lambda number: number * every)


settling_of(DownsampleTransformer, lambda stage, tolerance, gain: gain * _every(stage, gain), _downsampled_grid)


def _window_time(stage: WindowTransformer, tolerance: float, gain: float) -> float:
    settings = stage.settings
    if settings.window_dur is None:
        return 0.0
    if settings.window_shift is None or settings.zero_pad_until not in ("none", "shift"):
        # Where the windows lie follows from the lengths of messages.
        return math.inf
    if settings.window_shift > settings.window_dur or stage.is_batcher:
        return math.inf
    return settings.window_dur + gain


def _window_grid(stage: WindowTransformer, gain: float) -> ResultGrid:
    settings = stage.settings
    if settings.window_dur is None or settings.window_shift is None:
        return one_for_each(gain)
    rate = 1.0 / gain
    length, shift = int(settings.window_dur * rate), max(int(settings.window_shift * rate), 1)
    n_first = length if settings.zero_pad_until == "none" else shift

    def results_after(n_samples: int) -> int:
        return max((n_samples - n_first) // shift + 1, 0)

    return ResultGrid(gain * shift, results_after, lambda number: number * shift)


settling_of(WindowTransformer, _window_time, _window_grid)
