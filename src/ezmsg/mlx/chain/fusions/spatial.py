"""Functions of the channels of one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import ezmsg.sigproc.affinetransform as sigproc
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import resolve_feature_dim
from ezmsg.sigproc.affinetransform import AffineTransformTransformer
from ezmsg.sigproc.aggregate import AggregateTransformer, AggregationFunction
from ezmsg.util.messages.axisarray import AxisArray

from ...affinetransform import CommonRereferenceTransformer, Groups
from ...kernels.cpu.median import compile_ahead, subtract_medians
from ...stream.device import uses_gpu
from ...stream.fusible import Array, Axes, FusedStage, fusion_of
from .loops import subtract_row_means

if TYPE_CHECKING:
    import mlx.core as mx


class FusedCommonRereference(FusedStage[sigproc.CommonRereferenceTransformer]):
    """Subtracts the mean or the median of all channels, on the CPU also the medians of groups."""

    def __init__(self, transformer: sigproc.CommonRereferenceTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        axis = transformer.settings.axis or resolve_feature_dim(message)
        self._channels = message.get_axis_idx(axis)
        self._n_channels = message.data.shape[self._channels]
        self._share, self._is_last = np.float32(1.0 / self._n_channels), self._channels == message.data.ndim - 1
        self._is_median = transformer.settings.mode == "median"
        if self._is_median and not uses_gpu():
            self._groups = Groups.of(transformer.state)
            compile_ahead()
        else:
            self._scale = float(transformer.state.scale)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        if isinstance(x, np.ndarray):
            if self._is_median:
                return self._without_medians(x), arrays
            if self._is_last:
                subtract_row_means(x.reshape(-1, self._n_channels), self._share)
            else:
                # In order along the axis, as MLX adds up.
                x -= np.add.reduce(x, axis=self._channels, keepdims=True) * self._share
        elif self._is_median:
            import mlx.core as mx

            x = x - mx.median(x, axis=self._channels, keepdims=True)
        else:
            x = x - x.mean(axis=self._channels, keepdims=True)
        if self._scale != 1.0:
            x = np.multiply(x, np.float32(self._scale), out=x) if isinstance(x, np.ndarray) else x * self._scale
        return x, arrays

    def _without_medians(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if not self._is_last:
            return self._groups.subtract(x, self._channels)
        rows = x.reshape(-1, self._n_channels)
        subtract_medians(rows, rows, *self._groups)
        return x


@fusion_of(sigproc.CommonRereferenceTransformer)
@fusion_of(CommonRereferenceTransformer)
def fuse_common_rereference(transformer: sigproc.CommonRereferenceTransformer, message: AxisArray) -> FusedStage | None:
    """The mean or the median of all channels, subtracted; on the CPU also the medians of groups."""
    state, mode = transformer.state, transformer.settings.mode
    if mode not in ("mean", "median") or state.passthrough:
        return None
    if not state.single and (mode == "mean" or uses_gpu()):
        return None
    return FusedCommonRereference(transformer, message)


class FusedAffine(FusedStage[AffineTransformTransformer]):
    """One matrix product with all weights; blocks are left to the transformer.

    The weights are part of the arrays, so that ones that are set in the middle of a stream count from then on.
    """

    def __init__(self, transformer: AffineTransformTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._name = transformer.settings.axis or resolve_feature_dim(message)
        self._mixed = message.get_axis_idx(self._name)
        self._n_in = message.data.shape[self._mixed]

    def load(self) -> tuple[tuple[mx.array, ...], None] | None:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        if state.blocks is not None or state.weights is None:
            return None
        # ezmsg-sigproc declares NumPy's only, and keeps them in the array library of the messages.
        return (cast("mx.array", state.weights),), None

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        """See :class:`FusedStage`."""
        new_axis = self.transformer.state.new_axis
        return axes if new_axis is None else {**axes, self._name: new_axis}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        (weights,) = arrays
        last = x.ndim - 1
        order = [*(axis for axis in range(x.ndim) if axis != self._mixed), self._mixed]
        if self._mixed != last:
            x = x.transpose(order)
        if weights.shape[0] - 1 == self._n_in:
            y = x @ weights[:-1] + weights[-1:]
        else:
            y = x @ weights
        if self._mixed != last:
            y = y.transpose([order.index(axis) for axis in range(x.ndim)])
        return y if not isinstance(y, np.ndarray) else np.ascontiguousarray(y), arrays


@fusion_of(AffineTransformTransformer)
def fuse_affine(transformer: AffineTransformTransformer, message: AxisArray) -> FusedStage | None:
    """A matrix product of the channels."""
    stage = FusedAffine(transformer, message)
    # Without state it passes messages through; along the stream dimension the length would change.
    return stage if stage.load() is not None and stage._mixed != stage.axis else None


_REDUCED = {AggregationFunction.MEAN, AggregationFunction.SUM, AggregationFunction.MIN, AggregationFunction.MAX}


class FusedAggregate(FusedStage[AggregateTransformer]):
    """Reduces another dimension than that of the stream."""

    def __init__(self, transformer: AggregateTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._reduced = message.get_axis_idx(transformer.settings.axis)

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        """See :class:`FusedStage`."""
        return {name: axis for name, axis in axes.items() if name != self.transformer.settings.axis}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        return getattr(x, self.transformer.settings.operation.value)(axis=self._reduced), arrays


@fusion_of(AggregateTransformer)
def fuse_aggregate(transformer: AggregateTransformer, message: AxisArray) -> FusedStage | None:
    """Mean, sum, least or largest along another dimension than that of the stream."""
    stage = FusedAggregate(transformer, message)
    if transformer.settings.operation not in _REDUCED or stage._reduced == stage.axis:
        return None
    return stage
