"""Functions of each sample by itself."""

from __future__ import annotations

from typing import cast

import ezmsg.sigproc.math.pow as sigproc_pow
import numpy as np
from array_api_compat import get_namespace
from ezmsg.sigproc.math.abs import AbsTransformer
from ezmsg.sigproc.math.clip import ClipTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ...pow import PowTransformer
from ...stream.fusible import Array, FusedStage, fusion_of
from .loops import logarithm


class FusedAbs(FusedStage[AbsTransformer]):
    """The absolute value."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        if isinstance(x, np.ndarray):
            return np.abs(x, out=x), arrays
        return get_namespace(x).abs(x), arrays


class FusedClip(FusedStage[ClipTransformer]):
    """The value between two bounds."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        settings = self.transformer.settings
        if isinstance(x, np.ndarray):
            return np.clip(x, settings.min, settings.max, out=x), arrays
        return get_namespace(x).clip(x, settings.min, settings.max), arrays


class FusedPow(FusedStage[PowTransformer | sigproc_pow.PowTransformer]):
    """A power."""

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        exponent = float(self.transformer.settings.exponent)
        if isinstance(x, np.ndarray):
            return (np.multiply(x, x, out=x) if exponent == 2.0 else np.power(x, exponent, out=x)), arrays
        return (x * x if exponent == 2.0 else x**exponent), arrays


class FusedLog(FusedStage[LogTransformer]):
    """The logarithm to any base."""

    def __init__(self, transformer: LogTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        import mlx.core as mx

        self._least = np.finfo(np.float32).smallest_normal if transformer.settings.clip_zero else np.float32(-np.inf)
        self._divisor = np.float32(cast(float, mx.log(mx.array(transformer.settings.base)).item()))

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        if isinstance(x, np.ndarray):
            x = np.ascontiguousarray(x)
            logarithm(x.reshape(-1), self._least, self._divisor)
            return x, arrays
        xp = get_namespace(x)
        if self.transformer.settings.clip_zero:
            x = xp.clip(x, float(self._least), None)
        return xp.log(x) / xp.log(self.transformer.settings.base), arrays


fusion_of(AbsTransformer)(FusedAbs)
fusion_of(ClipTransformer)(FusedClip)
fusion_of(PowTransformer)(FusedPow)
fusion_of(sigproc_pow.PowTransformer)(FusedPow)
fusion_of(LogTransformer)(FusedLog)
