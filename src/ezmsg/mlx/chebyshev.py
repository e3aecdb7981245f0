"""Chebyshev filters of both types in a stream, on every MLX backend."""

import ezmsg.sigproc.cheby as sigproc
from ezmsg.baseproc import BaseTransformerUnit
from ezmsg.sigproc.cheby import ChebyshevFilterSettings as ChebyshevFilterSettings
from ezmsg.util.messages.axisarray import AxisArray

from .filter import FilterByDesign


class ChebyshevFilterTransformer(FilterByDesign[ChebyshevFilterSettings], sigproc.ChebyshevFilterTransformer):
    """Chebyshev filter along the stream dimension; see :obj:`ezmsg.mlx.filter.FilterTransformer`.

    The counterpart of :obj:`ezmsg.sigproc.cheby.ChebyshevFilterTransformer`, with its settings.
    """


class ChebyshevFilter(BaseTransformerUnit[ChebyshevFilterSettings, AxisArray, AxisArray, ChebyshevFilterTransformer]):
    SETTINGS = ChebyshevFilterSettings
