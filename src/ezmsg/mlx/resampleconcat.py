"""A stream at the times of another one, and both joined, on every MLX backend."""

from __future__ import annotations

import dataclasses
from typing import cast

import ezmsg.sigproc.resampleconcat as sigproc
import numpy as np
from ezmsg.baseproc import suppress_axis_deprecation
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .resample import ResampleProcessor, ResampleSettings
from .stream.convert import is_mlx_array
from .stream.device import uses_gpu
from .stream.unit import UnitTakesSettings, own_settings


class ResampleConcatSettings(sigproc.ResampleConcatSettings):
    """The settings of :obj:`ezmsg.sigproc.resampleconcat.ResampleConcat`, checked when they are built."""

    def __post_init__(self) -> None:
        with suppress_axis_deprecation():
            _resampler_settings(self)


def _resampler_settings(settings: sigproc.ResampleConcatSettings) -> ResampleSettings:
    """Those of the resampler inside."""
    names = {field.name for field in dataclasses.fields(ResampleSettings)}
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return ResampleSettings(
        resample_rate=None, output_reference=True, **{name: value for name, value in given.items() if name in names}
    )


class ResampleConcatProcessor(sigproc.ResampleConcatProcessor):
    """Interpolates a signal at the times of a reference, and joins both along ``concat_axis``.

    :obj:`ezmsg.sigproc.resampleconcat.ResampleConcatProcessor` with the resampler of this package in it.

    Raises:
        TypeError: Complex MLX data; what is given is not a message.
    """

    def __init__(self, settings: sigproc.ResampleConcatSettings) -> None:
        own = own_settings(ResampleConcatSettings, settings)
        with suppress_axis_deprecation():
            super().__init__(own)
            self._resampler = ResampleProcessor(settings=_resampler_settings(own))

    def __next__(self) -> AxisArray | None:
        """The next joined chunk; None where there is none yet."""
        signal = next(self._resampler)
        reference = self._resampler.state.reference_output
        # By the dimension of time, which need not be the first.
        if reference is None or self.settings.axis not in signal.dims:
            return None
        if not signal.data.shape[signal.get_axis_idx(self.settings.axis)]:
            return None
        if uses_gpu() or not (is_mlx_array(signal.data) and is_mlx_array(reference.data)):
            return self._concat._concat(reference, signal)
        import mlx.core as mx

        # Over views of MLX's memory, so that nothing waits for its thread.
        views = (replace(message, data=np.asarray(message.data)) for message in (reference, signal))
        joined = self._concat._concat(*views)
        return replace(joined, data=mx.array(joined.data))


class ResampleConcat(UnitTakesSettings, sigproc.ResampleConcat):
    """Interpolates a signal at the times of a reference and joins both; see :obj:`ResampleConcatProcessor`."""

    SETTINGS = ResampleConcatSettings

    async def initialize(self) -> None:
        """Make the processor."""
        self.processor = ResampleConcatProcessor(cast(ResampleConcatSettings, self.SETTINGS))
