"""Moving averages and filters, by the kernels that their transformers use."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ...butterworthfilter import ButterworthFilterTransformer
from ...cheby import ChebyshevFilterTransformer
from ...detrend import DetrendTransformer
from ...ewma import EWMATransformer
from ...filter import FilterByDesign, FilterTransformer
from ...kernels import Recurrence, default_path, kernel
from ...scaler import AdaptiveStandardScalerTransformer
from ...stream.device import uses_gpu
from ...stream.fusible import Advance, Array, FusedStage, fusion_of
from . import hostkernels

if TYPE_CHECKING:
    import mlx.core as mx


KernelCoefficients: TypeAlias = float | npt.NDArray[np.float64]
"""``alpha`` of averages and z-scores, sections of filters."""


def _run(
    recurrence: Recurrence, x: Array, coefficients: KernelCoefficients, zi: Array, axis: int, sizes: tuple[int, ...]
) -> tuple[Array, Array]:
    """The kernel of *recurrence*, for arrays of either library."""
    run = kernel(recurrence, default_path()).run
    if not isinstance(x, np.ndarray):
        return run(x, coefficients, cast("mx.array", zi), axis, sizes)
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
        self._accumulates, self._has_host_kernel = transformer.settings.accumulate, default_path() == "cpu"
        self._shape = cast("mx.array", transformer.state.zi).shape

    def load(self) -> tuple[tuple[mx.array, ...], int] | None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        if isinstance(state.zi, np.ndarray):
            # A message of NumPy's has come between; the transformer goes on from its state.
            return None
        zi = cast("mx.array", state.zi)
        if zi.shape == self._shape or not uses_gpu():
            return (zi,), state.n_seen
        import mlx.core as mx

        # The transformer has stopped correcting, but the function is compiled for a state with weights: all are 1.
        high, low = mx.split(zi, 2, axis=self.axis)
        return (mx.concatenate([zi, mx.ones_like(high), mx.zeros_like(low)], axis=self.axis),), state.n_seen

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: int) -> Advance | None:
        """See :class:`FusedStage`."""
        if not self._accumulates:
            return Advance(None, n_samples, counts)
        counts += n_samples
        # The transformer itself looks whether the weights have settled.
        is_left = counts >= self.transformer.state.next_weight_check
        return None if is_left else Advance(None, n_samples, counts)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        y, after = self._averaged(x, arrays[0])
        if self.subtracts:
            y = np.subtract(x, y, out=x) if isinstance(x, np.ndarray) else x - y
        return y, (after,) if self._accumulates else arrays

    def _averaged(self, x: Array, zi: Array) -> tuple[Array, Array]:
        if self._has_host_kernel and isinstance(x, np.ndarray):
            return hostkernels.average(x, self._alpha, cast(hostkernels.Samples, zi), self.axis)
        return _run("ewma", x, self._alpha, zi, self.axis, self._sizes)


class FusedDetrend(FusedAverage):
    """The data minus its average, with the state of the average."""

    subtracts = True


def _is_set_up(transformer: EWMATransformer) -> bool:
    zi = transformer.state.zi
    return not transformer.settings.passthrough and zi is not None and not isinstance(zi, np.ndarray)


@fusion_of(EWMATransformer)
def fuse_average(transformer: EWMATransformer, message: AxisArray) -> FusedStage | None:
    """The average, while its state is MLX's."""
    return FusedAverage(transformer, message) if _is_set_up(transformer) else None


@fusion_of(DetrendTransformer)
def fuse_detrend(transformer: DetrendTransformer, message: AxisArray) -> FusedStage | None:
    """The data minus its average, while the state of that is MLX's."""
    return FusedDetrend(transformer, message) if _is_set_up(transformer) else None


class FusedScores(FusedStage[AdaptiveStandardScalerTransformer]):
    """z-scores. Array: mean, variance and weight. Count: the samples so far."""

    def __init__(self, transformer: AdaptiveStandardScalerTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._alpha, self._sizes = cast(float, transformer.state.alpha), transformer.settings.mlx_metal_chunk_sizes
        self._accumulates, self._has_host_kernel = transformer.settings.accumulate, default_path() == "cpu"

    def load(self) -> tuple[tuple[mx.array, ...], int] | None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        return None if state.zi is None else ((state.zi,), state.n_seen)

    def store(self, arrays: tuple[mx.array, ...], counts: int) -> None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        (state.zi,), state.n_seen = arrays, counts

    def advance(self, n_samples: int, counts: int) -> Advance:
        """See :class:`FusedStage`."""
        return Advance(None, n_samples, counts + n_samples if self._accumulates else counts)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        y, after = self._scored(x, arrays[0])
        return y, (after,) if self._accumulates else arrays

    def _scored(self, x: Array, zi: Array) -> tuple[Array, Array]:
        if self._has_host_kernel and isinstance(x, np.ndarray):
            return hostkernels.scores(x, self._alpha, cast(hostkernels.Samples, zi), self.axis)
        return _run("zscore", x, self._alpha, zi, self.axis, self._sizes)


@fusion_of(AdaptiveStandardScalerTransformer)
def fuse_scores(transformer: AdaptiveStandardScalerTransformer, message: AxisArray) -> FusedStage | None:
    """z-scores, while their state is MLX's."""
    return FusedScores(transformer, message) if transformer.state.zi is not None else None


class FusedSections(FusedStage[FilterTransformer | FilterByDesign]):
    """Second-order sections. Array: their state."""

    def __init__(self, transformer: FilterTransformer | FilterByDesign, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._sections = cast("npt.NDArray[np.float64]", self._filter.state.sections)
        self._has_host_kernel = default_path() == "cpu"
        self._sizes = transformer.settings.mlx_metal_chunk_sizes

    @property
    def _filter(self) -> FilterTransformer:
        # One that is designed is made anew with each reset.
        transformer = self.transformer
        if isinstance(transformer, FilterTransformer):
            return transformer
        return cast(FilterTransformer, transformer.state.filter)

    def load(self) -> tuple[tuple[mx.array, ...], None] | None:
        """See :class:`FusedStage`."""
        state = self._filter.state
        # Other sections, and channels that have not begun, are for the transformer itself.
        if state.sections is None or state.not_begun is not None:
            return None
        zi = cast("mx.array", state.zi)
        return ((zi,), None) if np.array_equal(state.sections, self._sections) else None

    def store(self, arrays: tuple[mx.array, ...], counts: None) -> None:
        """See :class:`FusedStage`."""
        self._filter.state.zi = arrays[0]

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        zi = arrays[0]
        if self._has_host_kernel and isinstance(x, np.ndarray):
            result, after = hostkernels.sections(x, self._sections, cast(hostkernels.Samples, zi), self.axis)
            return result, (after,)
        y, zf = _run("sosfilt", x, self._sections, zi, self.axis, self._sizes)
        return y, (zf,)


@fusion_of(FilterTransformer)
def fuse_sections(transformer: FilterTransformer, message: AxisArray) -> FusedStage | None:
    """A filter that a kernel computes."""
    state = transformer.state
    # Without sections the filter is not computed by a kernel.
    is_ours = state.sections is not None and message.dims[state.axis_idx] == resolve_stream_dim(message)
    return FusedSections(transformer, message) if is_ours else None


@fusion_of(ButterworthFilterTransformer)
@fusion_of(ChebyshevFilterTransformer)
def fuse_design(transformer: FilterByDesign, message: AxisArray) -> FusedStage | None:
    """A designed filter that a kernel computes."""
    # An order of 0 lets messages through.
    child = transformer.state.filter
    if not transformer.settings.order or child is None or fuse_sections(child, message) is None:
        return None
    return FusedSections(transformer, message)
