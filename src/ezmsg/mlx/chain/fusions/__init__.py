"""The transformers of this package and of ezmsg-sigproc as functions of arrays, registered when this is imported."""

from . import elementwise, rates, recurrences, spatial

__all__ = ["elementwise", "rates", "recurrences", "spatial"]
