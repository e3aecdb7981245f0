"""Comb filter in a stream, on every MLX backend: notches or peaks at a frequency and its harmonics."""

from collections.abc import Callable

import ezmsg.sigproc.combfilter as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.sigproc.filter import BACoeffs, SOSCoeffs
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign, check_filter_fields
from .stream.unit import UnitTakesSettings, check_count, check_number, check_one_of


class CombFilterSettings(sigproc.CombFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.combfilter.CombFilterUnit`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("fundamental_freq", self.fundamental_freq)
        check_count("num_harmonics", self.num_harmonics)
        check_number("q_factor", self.q_factor)
        check_one_of("filter_type", self.filter_type, ("notch", "peak"))
        check_one_of("quality_scaling", self.quality_scaling, ("constant", "proportional"))
        check_filter_fields(self)


class CombFilterTransformer(FilterByDesign[CombFilterSettings], sigproc.CombFilterTransformer):
    """Comb filter along the stream dimension, one section a harmonic; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.combfilter.CombFilterTransformer`, with its settings. Harmonics at half the
    sampling rate and above are left out. Without any below it, messages come back as they are where harmonics are to be
    removed.

    Raises:
        ValueError: Harmonics are to be kept, and there is none below half the sampling rate; a band is as wide as that,
            or so narrow that float64 does not tell its edges apart; the stream dimension has no regular axis.
    """

    def get_design_function(self) -> Callable[..., BACoeffs | SOSCoeffs | None]:
        """The design of a filter from the sampling rate in Hz."""
        design: Callable[..., BACoeffs | SOSCoeffs | None] = super().get_design_function()
        keeps = self.settings.filter_type == "peak"

        def designed(fs: float, **fields: str) -> BACoeffs | SOSCoeffs | None:
            sections = design(fs, coef_type="sos")
            if sections is None and keeps:
                raise ValueError("there is nothing to keep")
            if sections is not None and not _is_stable(np.asarray(sections)):
                raise ValueError("a band is as wide as half the sampling rate, or too narrow for float64")
            return design(fs, **fields)

        return designed


def _is_stable(sections: npt.NDArray[np.float64]) -> bool:
    """Whether all poles of *sections* are inside of the unit circle."""
    a1, a2 = sections[:, 4], sections[:, 5]
    return bool(np.all((np.abs(a2) < 1.0) & (np.abs(a1) < 1.0 + a2)))


class CombFilterUnit(
    UnitTakesSettings, BaseTransformerUnit[CombFilterSettings, AxisArray, AxisArray, CombFilterTransformer]
):
    """Removes a frequency and its harmonics, or keeps nothing else; see :obj:`CombFilterTransformer`."""

    SETTINGS = CombFilterSettings  # type: ignore[assignment]
