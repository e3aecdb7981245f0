"""Power in one frequency band, on every MLX backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ezmsg.sigproc.singlebandpow as sigproc
import numpy as np
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit, CompositeProcessor, suppress_axis_deprecation
from ezmsg.sigproc.binned_aggregate import BinnedAggregateSettings, BinnedAggregateTransformer
from ezmsg.sigproc.materialize import MaterializeMode
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .butterworthfilter import ButterworthFilterTransformer
from .filter import FilterByDesign
from .pow import PowTransformer
from .stream.convert import is_mlx_array
from .stream.device import uses_gpu
from .stream.fusible import FusedSequence, FusedStage, fused_stage
from .stream.unit import (
    TakesMessages,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_member,
    check_number,
    known,
)

_OWN: dict[str, Callable[[Any], Any]] = {
    "ButterworthFilterTransformer": ButterworthFilterTransformer,
    "PowTransformer": PowTransformer,
}


def _with_own_stages(stages: dict[str, Any]) -> dict[str, Any]:
    """*stages* of ezmsg-sigproc, of which the filters and powers are those of this package."""
    return {
        name: own(stage.settings) if (own := _OWN.get(type(stage).__name__)) else stage
        for name, stage in stages.items()
    }


class _OnViews(CompositeProcessor[Any, AxisArray, AxisArray]):
    """A composite whose stages, but for its filters, compute with NumPy over views of MLX's memory on the CPU.

    An evaluation of each of them by MLX takes longer than they do.
    """

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        # Up to the stage that makes fewer samples of them, messages keep their axes; the one behind it takes any rate.
        stages = [fused_stage(stage, message) for stage in self._procs.values()]
        found = [stage for stage in stages if stage is not None]
        return FusedSequence(self, message, found) if len(found) == len(stages) else None

    def _process(self, message: AxisArray | None = None) -> AxisArray | None:
        result = known(message)
        on_views = is_mlx_array(result.data) and not uses_gpu()
        for stage in self._procs.values():
            if on_views:
                result = _as_mlx(result) if isinstance(stage, FilterByDesign) else _as_numpy(result)
            result = cast("BaseTransformer[Any, AxisArray, AxisArray]", stage)(result)
        return self._post_process(_as_mlx(result) if on_views else result)

    async def _aprocess(self, message: AxisArray | None = None) -> AxisArray | None:
        return self._process(message)


def _as_numpy(message: AxisArray) -> AxisArray:
    return replace(message, data=np.asarray(message.data)) if is_mlx_array(message.data) else message


def _as_mlx(message: AxisArray) -> AxisArray:
    if is_mlx_array(message.data):
        return message
    import mlx.core as mx

    return replace(message, data=mx.array(np.ascontiguousarray(message.data)))


class RMSBandPowerSettings(sigproc.RMSBandPowerSettings):
    """The settings of :obj:`ezmsg.sigproc.singlebandpow.RMSBandPower`, checked when they are built."""

    def __post_init__(self) -> None:
        check_number("bin_duration", self.bin_duration)
        check_fields(self, flags=("apply_sqrt",))
        check_member("materialize", self.materialize, MaterializeMode)


class RMSBandPowerTransformer(
    TransformerTakesSettings,
    TakesMessages,
    _OnViews,
    sigproc.RMSBandPowerTransformer,
    CompositeProcessor[RMSBandPowerSettings, AxisArray, AxisArray],
):
    """The root mean square, or the mean square, of a frequency band in bins of time.

    The counterpart of :obj:`ezmsg.sigproc.singlebandpow.RMSBandPowerTransformer`, with its settings: the filter and the
    powers of this package, and ezmsg-sigproc's bins between them.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    # As it is there, of the processors here.
    fuse = _OnViews.fuse

    def _post_process(self, result: AxisArray | None) -> AxisArray | None:
        result = known(super()._post_process(result))
        # As ezmsg-sigproc's windows declare it.
        return result if result.stream_dim == "time" else replace(result, stream_dim="time")

    @staticmethod
    def _initialize_processors(settings: sigproc.RMSBandPowerSettings) -> dict[str, Any]:
        # Bins of a fixed length are what ezmsg-sigproc's windows and the mean over them are.
        with suppress_axis_deprecation():
            bins = BinnedAggregateSettings(axis="time", bin_duration=settings.bin_duration, fractional=False)
        root = {"sqrt": PowTransformer(exponent=0.5)} if settings.apply_sqrt else {}
        return {
            "bandpass": ButterworthFilterTransformer(settings.bandpass),
            "square": PowTransformer(exponent=2.0),
            "bins": BinnedAggregateTransformer(bins),
            **root,
        }


class RMSBandPower(
    UnitTakesSettings, BaseTransformerUnit[RMSBandPowerSettings, AxisArray, AxisArray, RMSBandPowerTransformer]
):
    """The power of a frequency band in bins of time; see :obj:`RMSBandPowerTransformer`."""

    SETTINGS = RMSBandPowerSettings  # type: ignore[assignment]


class SquareLawBandPowerSettings(sigproc.SquareLawBandPowerSettings):
    """The settings of :obj:`ezmsg.sigproc.singlebandpow.SquareLawBandPower`."""


class SquareLawBandPowerTransformer(
    TransformerTakesSettings,
    TakesMessages,
    _OnViews,
    sigproc.SquareLawBandPowerTransformer,
    CompositeProcessor[SquareLawBandPowerSettings, AxisArray, AxisArray],
):
    """The square of a frequency band, smoothed by a low-pass and downsampled.

    :obj:`ezmsg.sigproc.singlebandpow.SquareLawBandPowerTransformer` with the filters and the power of this package in
    it.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    fuse = _OnViews.fuse

    @staticmethod
    def _initialize_processors(settings: sigproc.SquareLawBandPowerSettings) -> dict[str, Any]:
        return _with_own_stages(sigproc.SquareLawBandPowerTransformer._initialize_processors(settings))


class SquareLawBandPower(
    UnitTakesSettings,
    BaseTransformerUnit[SquareLawBandPowerSettings, AxisArray, AxisArray, SquareLawBandPowerTransformer],
):
    """The smoothed power of a frequency band; see :obj:`SquareLawBandPowerTransformer`."""

    SETTINGS = SquareLawBandPowerSettings  # type: ignore[assignment]
