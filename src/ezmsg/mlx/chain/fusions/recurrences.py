"""Moving averages and filters, by the kernels that their transformers use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ...butterworthfilter import ButterworthFilterTransformer
from ...cheby import ChebyshevFilterTransformer
from ...detrend import DetrendTransformer
from ...ewma import EWMATransformer
from ...filter import FilterTransformer
from ...filterbydesign import FilterByDesign
from ...kernels import default_path, kernel
from ...scaler import AdaptiveStandardScalerTransformer
from ...stream.device import uses_gpu
from ...stream.fusible import Array, Axes, FusedStage, Step, fusion_of

if TYPE_CHECKING:
    import mlx.core as mx


def _run(recurrence: str, x: Array, coefficients: object, zi: Array, axis: int, sizes: tuple[int, ...]) -> tuple:
    """The kernel of *recurrence*, for arrays of either library."""
    path = default_path()
    if recurrence != "sosfilt" and path == "cpu" and isinstance(x, np.ndarray):
        from . import hostkernels

        return (hostkernels.average if recurrence == "ewma" else hostkernels.scores)(x, coefficients, zi, axis)
    run = kernel(recurrence, path).run
    if not isinstance(x, np.ndarray):
        return run(x, coefficients, zi, axis, sizes)
    import mlx.core as mx

    # Copies, which MLX's CPU device gives at once: nothing waits for an evaluation.
    y, zf = run(mx.array(x), coefficients, mx.array(zi), axis, sizes)
    return np.asarray(y), np.asarray(zf)


class FusedAverage(FusedStage[EWMATransformer]):
    """Array: the state of the average, with its weights until they have settled. Count: the samples so far."""

    subtracts = False

    def __init__(self, transformer: EWMATransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._alpha, self._sizes = transformer.state.alpha, transformer.settings.mlx_metal_chunk_sizes
        self._accumulates = transformer.settings.accumulate
        self._shape = transformer.state.zi.shape

    def load(self) -> tuple[tuple[mx.array, ...], Hashable] | None:
        state = self.transformer.state
        if isinstance(state.zi, np.ndarray):
            # A message of NumPy's has come between; the transformer goes on from its state.
            return None
        if state.zi.shape == self._shape or not uses_gpu():
            return (state.zi,), state.n_seen
        import mlx.core as mx

        # The transformer has stopped correcting, but the function is compiled for a state with weights: all are 1.
        high, low = mx.split(state.zi, 2, axis=self.axis)
        return (mx.concatenate([state.zi, mx.ones_like(high), mx.zeros_like(low)], axis=self.axis),), state.n_seen

    def store(self, arrays: tuple[mx.array, ...], counts: Hashable) -> None:
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: Hashable, axes: Axes) -> Step | None:
        if not self._accumulates:
            return Step(None, n_samples, counts, axes)
        counts += n_samples
        # The transformer itself looks whether the weights have settled.
        is_left = counts >= self.transformer.state.next_weight_check
        return None if is_left else Step(None, n_samples, counts, axes)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Hashable) -> tuple[Array, tuple[Array, ...]]:
        y, after = _run("ewma", x, self._alpha, arrays[0], self.axis, self._sizes)
        if self.subtracts:
            y = np.subtract(x, y, out=x) if isinstance(x, np.ndarray) else x - y
        return y, (after,) if self._accumulates else arrays


class FusedDetrend(FusedAverage):
    subtracts = True


def _is_set_up(transformer: EWMATransformer) -> bool:
    zi = transformer.state.zi
    return not transformer.settings.passthrough and zi is not None and not isinstance(zi, np.ndarray)


@fusion_of(EWMATransformer)
def fuse_average(transformer: EWMATransformer, message: AxisArray) -> FusedStage | None:
    return FusedAverage(transformer, message) if _is_set_up(transformer) else None


@fusion_of(DetrendTransformer)
def fuse_detrend(transformer: DetrendTransformer, message: AxisArray) -> FusedStage | None:
    return FusedDetrend(transformer, message) if _is_set_up(transformer) else None


class FusedScores(FusedStage[AdaptiveStandardScalerTransformer]):
    """z-scores. Array: mean, variance and weight. Count: the samples so far."""

    def __init__(self, transformer: AdaptiveStandardScalerTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._alpha, self._sizes = transformer.state.alpha, transformer.settings.mlx_metal_chunk_sizes
        self._accumulates = transformer.settings.accumulate

    def load(self) -> tuple[tuple[mx.array, ...], Hashable] | None:
        state = self.transformer.state
        return None if state.zi is None else ((state.zi,), state.n_seen)

    def store(self, arrays: tuple[mx.array, ...], counts: Hashable) -> None:
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: Hashable, axes: Axes) -> Step:
        return Step(None, n_samples, counts + n_samples if self._accumulates else counts, axes)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Hashable) -> tuple[Array, tuple[Array, ...]]:
        y, after = _run("zscore", x, self._alpha, arrays[0], self.axis, self._sizes)
        return y, (after,) if self._accumulates else arrays


@fusion_of(AdaptiveStandardScalerTransformer)
def fuse_scores(transformer: AdaptiveStandardScalerTransformer, message: AxisArray) -> FusedStage | None:
    return FusedScores(transformer, message) if transformer.state.zi is not None else None


class FusedSections(FusedStage[FilterTransformer | FilterByDesign]):
    """Second-order sections. Array: their state."""

    def __init__(self, transformer: FilterTransformer | FilterByDesign, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._sections, self._sizes = self._filter.state.sections, transformer.settings.mlx_metal_chunk_sizes

    @property
    def _filter(self) -> FilterTransformer:
        # One that is designed is made anew with each reset.
        transformer = self.transformer
        return transformer if isinstance(transformer, FilterTransformer) else transformer.state.filter

    def load(self) -> tuple[tuple[mx.array, ...], Hashable] | None:
        state = self._filter.state
        # Other sections, and channels that have not begun, are for the transformer itself.
        if state.sections is None or state.not_begun is not None:
            return None
        return ((state.zi,), None) if np.array_equal(state.sections, self._sections) else None

    def store(self, arrays: tuple[mx.array, ...], counts: Hashable) -> None:
        self._filter.state.zi = arrays[0]

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: Hashable) -> tuple[Array, tuple[Array, ...]]:
        y, zf = _run("sosfilt", x, self._sections, arrays[0], self.axis, self._sizes)
        return y, (zf,)


@fusion_of(FilterTransformer)
def fuse_sections(transformer: FilterTransformer, message: AxisArray) -> FusedStage | None:
    state = transformer.state
    # Without sections the filter is not computed by a kernel.
    is_ours = state.sections is not None and message.dims[state.axis_idx] == resolve_stream_dim(message)
    return FusedSections(transformer, message) if is_ours else None


@fusion_of(ButterworthFilterTransformer)
@fusion_of(ChebyshevFilterTransformer)
def fuse_design(transformer: FilterByDesign, message: AxisArray) -> FusedStage | None:
    # An order of 0 lets messages through.
    if not transformer.settings.order or fuse_sections(transformer.state.filter, message) is None:
        return None
    return FusedSections(transformer, message)
