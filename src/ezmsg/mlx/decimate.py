"""A lower sampling rate, with a filter against aliasing, on every MLX backend."""

from collections.abc import Callable

import ezmsg.sigproc.decimate as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.sigproc.filter import BACoeffs, SOSCoeffs
from ezmsg.util.messages.axisarray import AxisArray

from .cheby import ChebyshevFilterSettings, ChebyshevFilterTransformer
from .stream.unit import UnitTakesSettings, is_real


class ChebyForDecimateTransformer(ChebyshevFilterTransformer):
    """Chebyshev filter against aliasing, which leaves messages alone where the rate is not to be halved at least.

    The counterpart of :obj:`ezmsg.sigproc.decimate.ChebyForDecimateTransformer`; see
    :obj:`ezmsg.mlx.filter.FilterTransformer`.
    """

    def get_design_function(self) -> Callable[..., BACoeffs | SOSCoeffs | None]:
        """The design of a filter from the sampling rate in Hz."""
        design, corner = super().get_design_function(), self.settings.Wn

        def designed(fs: float, **fields: str) -> BACoeffs | SOSCoeffs | None:
            if not is_real(corner):
                return None
            factor = int(fs / (2.5 * corner)) if self.settings.wn_hz else round(0.8 / corner)
            return design(fs, **fields) if factor >= 2 else None

        return designed


class ChebyForDecimate(
    UnitTakesSettings,
    BaseTransformerUnit[ChebyshevFilterSettings, AxisArray, AxisArray, ChebyForDecimateTransformer],
):
    """Chebyshev filter against aliasing, for :obj:`Decimate`; see :obj:`ChebyForDecimateTransformer`."""

    SETTINGS = ChebyshevFilterSettings  # type: ignore[assignment]


class Decimate(sigproc.Decimate):
    """A Chebyshev filter of order 8 against aliasing, and every n-th sample.

    The collection :obj:`ezmsg.sigproc.decimate.Decimate` with the filter of this package in it.
    """

    FILTER = ChebyForDecimate()  # type: ignore[assignment]
