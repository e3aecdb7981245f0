"""Chebyshev filters of both types in a stream, on every MLX backend."""

import math
import numbers
from collections.abc import Callable

import ezmsg.sigproc.cheby as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.sigproc.filter import BACoeffs, SOSCoeffs
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign, check_filter_fields
from .stream.unit import UnitTakesSettings, as_float, check_fields, check_one_of, is_real


class ChebyshevFilterSettings(sigproc.ChebyshevFilterSettings):
    """The settings of :obj:`ezmsg.sigproc.cheby.ChebyshevFilter`, checked when they are built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.order, bool) or not isinstance(self.order, numbers.Integral) or self.order < 0:
            raise ValueError(f"'order' must be an integer of at least 0 (0: no filter), got {self.order!r}")
        if self.ripple_tol is not None and not _is_positive(self.ripple_tol):
            raise ValueError(f"'ripple_tol' must be None or a finite number of dB > 0, got {self.ripple_tol!r}")
        corners = self.Wn if isinstance(self.Wn, (tuple, list)) else (self.Wn,)
        if self.Wn is not None and not (len(corners) in (1, 2) and all(map(_is_positive, corners))):
            raise ValueError(f"'Wn' must be None or one or two finite frequencies > 0, got {self.Wn!r}")
        check_one_of("btype", self.btype, ("lowpass", "highpass", "bandpass", "bandstop"))
        check_one_of("cheby_type", self.cheby_type, ("cheby1", "cheby2"))
        check_fields(self, flags=("analog", "wn_hz"))
        check_filter_fields(self)


def _is_positive(value: object) -> bool:
    return is_real(value) and 0 < as_float(value) < math.inf


class ChebyshevFilterTransformer(FilterByDesign[ChebyshevFilterSettings], sigproc.ChebyshevFilterTransformer):
    """Chebyshev filter along the stream dimension; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.cheby.ChebyshevFilterTransformer`, with its settings. ``wn_hz=False`` counts
    for both types; there it is left out of the design of type II.
    """

    def get_design_function(self) -> Callable[..., BACoeffs | SOSCoeffs | None]:
        """The design of a filter from the sampling rate in Hz."""
        design = super().get_design_function()
        if self.settings.wn_hz or self.settings.cheby_type != "cheby2":
            return design
        # Frequencies in Hz at 2 Hz are frequencies where 1 is the Nyquist frequency.
        return lambda fs, **fields: design(2.0, **fields)


class ChebyshevFilter(
    UnitTakesSettings,
    BaseTransformerUnit[ChebyshevFilterSettings, AxisArray, AxisArray, ChebyshevFilterTransformer],
):
    """Chebyshev filter of either type along the stream dimension; see :obj:`ChebyshevFilterTransformer`."""

    SETTINGS = ChebyshevFilterSettings  # type: ignore[assignment]
