"""Comb filter in a stream, on every MLX backend: notches or peaks at a frequency and its harmonics."""

import ezmsg.sigproc.combfilter as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign, check_filter_fields
from .stream.unit import UnitTakesSettings, check_count, check_number


class CombFilterSettings(sigproc.CombFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.combfilter.CombFilterUnit`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("fundamental_freq", self.fundamental_freq)
        check_count("num_harmonics", self.num_harmonics)
        check_number("q_factor", self.q_factor)
        for field, allowed in (("filter_type", ("notch", "peak")), ("quality_scaling", ("constant", "proportional"))):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field!r} must be {' or '.join(map(repr, allowed))}, got {getattr(self, field)!r}")
        check_filter_fields(self)


class CombFilterTransformer(FilterByDesign[CombFilterSettings], sigproc.CombFilterTransformer):
    """Comb filter along the stream dimension, one section a harmonic; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.combfilter.CombFilterTransformer`, with its settings. Harmonics at half the
    sampling rate and above are left out; without any below it messages come back as they are.
    """


class CombFilterUnit(
    UnitTakesSettings, BaseTransformerUnit[CombFilterSettings, AxisArray, AxisArray, CombFilterTransformer]
):
    """Removes a frequency and its harmonics, or keeps nothing else; see :obj:`CombFilterTransformer`."""

    SETTINGS = CombFilterSettings  # type: ignore[assignment]
