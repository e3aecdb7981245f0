"""Mixtures of channels: by a matrix of weights, and differences from a common reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import ezmsg.sigproc.affinetransform as sigproc
import numpy as np
import numpy.typing as npt
from array_api_compat import get_namespace
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state, resolve_feature_dim
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .stream.convert import is_mlx_array, let_states_be_copied
from .stream.device import uses_gpu
from .stream.fusible import Array, Axes, FusedStage, OfEachSample, PassesThrough
from .stream.unit import (
    TakesMessages,
    TransformerTakesSettings,
    UnitTakesSettings,
    check_fields,
    check_message,
    check_one_of,
)

if TYPE_CHECKING:
    import mlx.core as mx

_MODES = ("mean", "median", "passthrough")


class AffineTransformSettings(sigproc.AffineTransformSettings):
    """The settings of :obj:`ezmsg.sigproc.affinetransform.AffineTransform`, checked when they are built.

    Raises:
        TypeError: ``axis`` or ``right_multiply`` has the wrong type.
        ValueError: ``kernel`` is not ``"auto"``, ``"dense"`` or ``"blocks"``.
    """

    def __post_init__(self) -> None:
        check_one_of("kernel", self.kernel, sigproc.KERNELS)
        check_fields(self, flags=("right_multiply",), names=("axis",))


@processor_state
class AffineTransformState(sigproc.AffineTransformState):
    """That of ezmsg-sigproc, with the signs of the weights."""

    signs: npt.NDArray[np.float32] | mx.array | None = None
    """Of each weight, as (inputs, outputs), in the array library of the stream; None where no weight is zero."""


class AffineTransformTransformer(
    TransformerTakesSettings,
    TakesMessages,
    sigproc.AffineTransformTransformer,
    BaseStatefulTransformer[AffineTransformSettings, AxisArray, AxisArray, AffineTransformState],
):
    """A product with a matrix of weights, as :obj:`ezmsg.sigproc.affinetransform.AffineTransformTransformer` has it.

    An input takes no part where its weight is zero: one that is NaN or infinite leaves that output alone. Elsewhere it
    counts as in any sum. On a GPU, weights with zeros cost two more products a message; on the CPU only messages that
    hold such values do.

    Raises:
        TypeError: What is given is not a message.
    """

    _state: AffineTransformState

    async def __acall__(self, message: AxisArray) -> AxisArray:
        # Without weights, ezmsg-sigproc lets messages through in its synchronous call only.
        return self(message) if _passes(self.settings.weights) else await super().__acall__(message)

    def _reset_state(self, message: AxisArray) -> None:
        super()._reset_state(message)
        state = self._state
        if is_mlx_array(message.data):
            let_states_be_copied()
            if isinstance(state.signs, np.ndarray):
                state.signs = _evaluated(state.signs)

    def set_weights(self, weights: npt.NDArray | mx.array, *, recalc_structure: bool = False) -> None:
        """Replace the values of the weights; see ezmsg-sigproc's.

        Args:
            weights: (inputs, outputs), or with one row more for an offset.
            recalc_structure: Whether other weights may be zero than before. Without it, weights of MLX are not looked
                at on the host, which would wait for them: if none was zero before, none counts as zero.
        """
        super().set_weights(weights, recalc_structure=recalc_structure)
        state = self._state
        if not is_mlx_array(weights):
            state.signs = _signs_of_numpy(weights[: state.n_in]) if isinstance(weights, np.ndarray) else None
        elif recalc_structure or state.signs is not None:
            state.signs = _signs_of_mlx(weights[: state.n_in])
            if recalc_structure:
                state.signs = _signs_of_numpy(np.asarray(state.signs))

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: a product is that of one sample."""
        return 0.0

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return fuse_affine(self, message)

    def _hash_message(self, message: AxisArray) -> int:
        # The weights are arrays in the library of a stream and of its type.
        return self._message_hash(message, extra=(type(message.data), message.data.dtype))

    def _process(self, message: AxisArray) -> AxisArray:
        x, signs = message.data, self._state.signs
        if signs is None or not may_hold_infinite(x):
            return super()._process(message)
        axis = message.get_axis_idx(self.settings.axis or resolve_feature_dim(message))
        result = super()._process(replace(message, data=finite_part(x)))
        return replace(result, data=with_what_is_infinite(result.data, x, axis, signs))


def _passes(weights: object) -> bool:
    return weights is None or (isinstance(weights, str) and weights == "passthrough")


def may_hold_infinite(x: Array) -> bool:
    """Whether *x* holds a sample that is NaN or infinite; True for all data on a GPU, which is not waited for.

    False for data of other array libraries, which ezmsg-sigproc computes as it does.
    """
    if isinstance(x, np.ndarray):
        return x.dtype.kind == "f" and not bool(np.isfinite(x).all())
    if not is_mlx_array(x):
        return False
    import mlx.core as mx

    return uses_gpu() or not bool(mx.isfinite(x).all())


def _signs_of_numpy(weights: npt.NDArray) -> npt.NDArray[np.float32] | None:
    return None if weights.all() else np.sign(weights).astype(np.float32)


def _signs_of_mlx(weights: mx.array) -> mx.array:
    import mlx.core as mx

    signs = mx.sign(weights.astype(mx.float32))
    # Another thread may run the stream.
    mx.async_eval(signs)
    return signs


def _evaluated(signs: npt.NDArray[np.float32]) -> mx.array:
    import mlx.core as mx

    made = mx.array(signs)
    mx.eval(made)
    return made


def finite_part(x: Array) -> Array:
    """*x* with zeros in place of what is not finite."""
    xp = get_namespace(x)
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def with_what_is_infinite(y: Array, x: Array, axis: int, signs: Array) -> Array:
    """*y*, the product of the finite part of *x* with weights of *signs*, with what the rest of *x* adds to it.

    That is NaN, or infinity where all that is not finite has a product of the same sign.
    """
    xp = get_namespace(y)
    signs = xp.asarray(signs)
    moved = xp.moveaxis(x, axis, -1)
    # Whole numbers so small that every device adds them up without an error.
    n_taken = (~xp.isfinite(moved)).astype(xp.float32) @ xp.abs(signs)
    side = xp.isposinf(moved).astype(xp.float32) - xp.isneginf(moved).astype(xp.float32)
    balance = side @ signs
    added = xp.where(n_taken == balance, np.inf, xp.where(n_taken == -balance, -np.inf, np.nan))
    added = xp.where(n_taken == 0, 0.0, added)
    return y + xp.moveaxis(added, -1, axis).astype(y.dtype)


class FusedAffine(OfEachSample[sigproc.AffineTransformTransformer]):
    """One matrix product with all weights; blocks are left to the transformer.

    Arrays: the weights, and their signs where some are zero, so that ones that are set in the middle of a stream count
    from then on.
    """

    def __init__(self, transformer: sigproc.AffineTransformTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._name = transformer.settings.axis or resolve_feature_dim(message)
        self._mixed = message.get_axis_idx(self._name)
        self._n_in = message.data.shape[self._mixed]
        self._loaded: object = None
        self._spreads = _signs_of(transformer) is None

    @property
    def mixes_samples(self) -> bool:
        """Whether it goes along the stream dimension, where the length would change."""
        return self._mixed == self.axis

    def load(self) -> tuple[tuple[mx.array, ...], None] | None:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state, signs = self.transformer.state, _signs_of(self.transformer)
        weights: object = state.weights
        self._loaded = weights
        # Of MLX in a stream of MLX: what else there is has been set, and is for the transformer.
        if state.blocks is not None or not is_mlx_array(weights) or (signs is None) != self._spreads:
            return None
        if signs is None:
            return (weights,), None
        return ((weights, signs), None) if is_mlx_array(signs) else None

    def has_changed(self) -> bool:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        state = self.transformer.state
        return state.weights is not self._loaded or state.blocks is not None

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        new_axis = self.transformer.state.new_axis
        return axes if new_axis is None else {**axes, self._name: new_axis}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        if self._spreads or (isinstance(x, np.ndarray) and np.isfinite(x).all()):
            return self._product(x, arrays[0]), arrays
        y = self._product(finite_part(x), arrays[0])
        return with_what_is_infinite(y, x, self._mixed, arrays[1]), arrays

    def _product(self, x: Array, weights: Array) -> Array:
        last = x.ndim - 1
        order = [*(axis for axis in range(x.ndim) if axis != self._mixed), self._mixed]
        if self._mixed != last:
            x = x.transpose(order)
        y = x @ weights[:-1] + weights[-1:] if weights.shape[0] - 1 == self._n_in else x @ weights
        return y.transpose([order.index(axis) for axis in range(x.ndim)]) if self._mixed != last else y


def _signs_of(transformer: sigproc.AffineTransformTransformer) -> Array | None:
    return transformer._state.signs if isinstance(transformer, AffineTransformTransformer) else None


def fuse_affine(transformer: sigproc.AffineTransformTransformer, message: AxisArray) -> FusedStage | None:
    """The product of this package or of ezmsg-sigproc, in which a zero times NaN is NaN as in the transformer."""
    if _passes(transformer.settings.weights):
        return PassesThrough(transformer, message)
    stage = FusedAffine(transformer, message)
    return None if stage.load() is None or stage.mixes_samples else stage


class AffineTransform(
    UnitTakesSettings,
    BaseTransformerUnit[AffineTransformSettings, AxisArray, AxisArray, AffineTransformTransformer],
):
    """Multiplies the channels with a matrix of weights; see :obj:`AffineTransformTransformer`."""

    SETTINGS = AffineTransformSettings  # type: ignore[assignment]


class CommonRereferenceSettings(sigproc.CommonRereferenceSettings):
    """The settings of :obj:`ezmsg.sigproc.affinetransform.CommonRereference`, checked when they are built.

    Raises:
        TypeError: ``axis`` or ``include_current`` has the wrong type.
        ValueError: ``mode`` is not ``"mean"``, ``"median"`` or ``"passthrough"``.
    """

    def __post_init__(self) -> None:
        check_one_of("mode", self.mode, _MODES)
        check_fields(self, flags=("include_current",), names=("axis",))


class Groups(NamedTuple):
    """The channels that share a reference, as the kernels of :mod:`ezmsg.mlx.kernels.cpu` take them."""

    members: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    gains: npt.NDArray[np.float32]

    @classmethod
    def of(cls, state: sigproc.CommonRereferenceState) -> Groups:
        """Those that ezmsg-sigproc has found for a stream, of which there is one at least."""
        groups = [np.asarray(group, np.intp) for group in state.groups or ()]
        if isinstance(state.scale, float):
            gains = np.full(len(groups), state.scale, np.float32)
        else:
            # The same for all channels of a group.
            gains = np.asarray(state.scale, np.float32)[[group[0] for group in groups]]
        ends = np.cumsum([group.size for group in groups], dtype=np.intp)
        return cls(np.concatenate(groups), ends, gains)

    def each(self) -> Iterator[tuple[npt.NDArray[np.intp], float]]:
        """The channels of each group, and by what their differences are multiplied."""
        for begin, end, gain in zip((0, *self.ends), self.ends, self.gains, strict=False):
            yield self.members[begin:end], float(gain)

    def is_all_of(self, n_channels: int) -> bool:
        """Whether all channels are one group."""
        return self.ends.size == 1 and int(self.ends[0]) == n_channels

    def without_medians(self, x: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
        """*x* with the medians over *axis* subtracted, in new memory."""
        from .kernels.cpu.median import subtract_medians

        rows = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        result = np.empty_like(rows)
        n_channels = rows.shape[-1]
        subtract_medians(rows.reshape(-1, n_channels), result.reshape(-1, n_channels), *self)
        return np.ascontiguousarray(np.moveaxis(result, -1, axis))

    def without_means(self, x: npt.NDArray, axis: int) -> npt.NDArray:
        """*x* with the means over *axis* subtracted, in new memory; integers become float64."""
        result = np.array(x, x.dtype if x.dtype.kind == "f" else np.float64)
        for members, gain in self.each():
            index = (slice(None),) * axis + (slice(None) if self.is_all_of(x.shape[axis]) else members,)
            # NumPy adds half precision up in float32.
            centred = result[index] - result[index].mean(axis=axis, keepdims=True)
            result[index] = centred if gain == 1.0 else centred * gain
        return result

    def on_device(self, x: mx.array, axis: int, mode: str) -> mx.array:
        """*x* with the means or medians over *axis* subtracted, in MLX operations.

        Group by group, and not as a product with a matrix of zeros and shares, in which one NaN is in all channels.
        """
        import mlx.core as mx

        reduce = mx.median if mode == "median" else mx.mean
        n_channels, shape = x.shape[axis], [1] * x.ndim
        shape[axis] = -1
        if self.is_all_of(n_channels):
            y = x - reduce(x, axis=axis, keepdims=True)
            return y if self.gains[0] == 1.0 else y * float(self.gains[0])
        place, gains = np.full(n_channels, self.ends.size, np.int32), np.ones(n_channels, np.float32)
        references = []
        for number, (members, gain) in enumerate(self.each()):
            place[members], gains[members] = number, gain
            of_group = mx.take(x, mx.array(members.astype(np.int32)), axis=axis)
            references.append(reduce(of_group, axis=axis, keepdims=True))
        # Channels of no group have a reference of 0.
        every = mx.concatenate([*references, mx.zeros_like(references[0])], axis=axis)
        y = x - mx.take(every, mx.array(place), axis=axis)
        return y if (gains == 1.0).all() else y * mx.array(gains).astype(x.dtype).reshape(shape)


@processor_state
class CommonRereferenceState(sigproc.CommonRereferenceState):
    """That of ezmsg-sigproc, with its groups as the kernels take them."""

    members: npt.NDArray[np.intp] | None = None
    """The channels of all groups, one group after the other; None where there is no reference."""

    ends: npt.NDArray[np.intp] | None = None
    """Where in ``members`` each group ends."""

    gains: npt.NDArray[np.float32] | None = None
    """By what the differences of each group are multiplied."""

    n_channels: int = 0
    """Length of the dimension that the reference is over, which may be that of the stream."""


class CommonRereferenceTransformer(
    TransformerTakesSettings,
    sigproc.CommonRereferenceTransformer,
    BaseStatefulTransformer[CommonRereferenceSettings, AxisArray, AxisArray, CommonRereferenceState],
):
    """A common reference, as :obj:`ezmsg.sigproc.affinetransform.CommonRereferenceTransformer` has it.

    A channel that is NaN makes its own group NaN and no other. Means in half precision are added up in float32. A
    kernel computes the medians of float32 data, of NumPy and of MLX on its CPU device: it counts instead of sorting,
    with the same values.

    Raises:
        TypeError: What is given is not a message.
    """

    _state: CommonRereferenceState

    def _reset_state(self, message: AxisArray) -> None:
        super()._reset_state(message)
        state = self._state
        if is_mlx_array(message.data):
            let_states_be_copied()
        state.members = state.ends = state.gains = None
        state.n_channels = message.data.shape[self._axis_of(message)]
        if not state.passthrough:
            state.members, state.ends, state.gains = Groups.of(state)

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: a reference is that of one sample."""
        return 0.0

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        return fuse_common_rereference(self, message)

    def groups(self) -> Groups | None:
        """The channels that share a reference; None where there is none, or before the first message."""
        state = self._state
        if state.members is None or state.ends is None or state.gains is None:
            return None
        return Groups(state.members, state.ends, state.gains)

    def _axis_of(self, message: AxisArray) -> int:
        return message.get_axis_idx(self.settings.axis or resolve_feature_dim(message))

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        # What is worked out for a stream are arrays in its library and of its type.
        return self._message_hash(message, extra=(type(message.data), message.data.dtype))

    def _process(self, message: AxisArray) -> AxisArray:
        data, axis, mode = message.data, self._axis_of(message), self.settings.mode
        if data.shape[axis] != self._state.n_channels:
            # Along the stream dimension, whose length no hash has.
            self._reset_state(message)
        groups = self.groups()
        if mode == "passthrough" or groups is None:
            return message
        if is_mlx_array(data):
            y = _without_reference(data, axis, mode, groups)
            return super()._process(message) if y is None else replace(message, data=y)
        if type(data) is np.ndarray and data.dtype.kind in "biuf":
            if mode == "mean":
                return replace(message, data=groups.without_means(data, axis))
            if data.dtype == np.float32:
                return replace(message, data=groups.without_medians(data, axis))
        return super()._process(message)


def _without_reference(data: mx.array, axis: int, mode: str, groups: Groups) -> mx.array | None:
    """None: what ezmsg-sigproc does for data of this dtype."""
    import mlx.core as mx

    if mode == "median":
        if data.dtype != mx.float32:
            return None
        return groups.on_device(data, axis, mode) if uses_gpu() else _without_medians(data, axis, groups)
    if data.dtype in (mx.float16, mx.bfloat16):
        return groups.on_device(data.astype(mx.float32), axis, mode).astype(data.dtype)
    return groups.on_device(data, axis, mode) if data.dtype in (mx.float32, mx.float64) else None


def _without_medians(data: mx.array, axis: int, groups: Groups) -> mx.array:
    import mlx.core as mx

    samples = np.asarray(data)
    if axis != samples.ndim - 1 or not samples.flags.c_contiguous:
        return mx.array(groups.without_medians(samples, axis))
    from .kernels.cpu.compiled import computed
    from .kernels.cpu.median import subtract_medians

    return computed(
        samples.reshape(-1, samples.shape[axis]),
        data.shape,
        lambda source, target: subtract_medians(source, target, *groups),
    )


class FusedCommonRereference(OfEachSample[sigproc.CommonRereferenceTransformer]):
    """A common reference as a function of arrays."""

    def __init__(self, transformer: sigproc.CommonRereferenceTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self.channels = message.get_axis_idx(transformer.settings.axis or resolve_feature_dim(message))
        self._n_channels = message.data.shape[self.channels]
        self._share, self._is_last = np.float32(1.0 / self._n_channels), self.channels == message.data.ndim - 1
        self._mode, self._groups = transformer.settings.mode, Groups.of(transformer.state)
        self._is_one, self._gain = self._groups.is_all_of(self._n_channels), np.float32(self._groups.gains[0])
        if not uses_gpu():
            from .kernels.cpu import loops, median

            median.compile_ahead()
            self._subtract_row_means = loops.subtract_row_means
            self._subtract = loops.subtract_means if self._mode == "mean" else median.subtract_medians

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`~ezmsg.mlx.stream.fusible.FusedStage`."""
        if not isinstance(x, np.ndarray):
            return self._groups.on_device(x, self.channels, self._mode), arrays
        if self._is_one and self._mode == "mean":
            return self._without_mean(x), arrays
        if self._is_last:
            rows = x.reshape(-1, self._n_channels)
            self._subtract(rows, rows, *self._groups)
            return x, arrays
        subtract = self._groups.without_means if self._mode == "mean" else self._groups.without_medians
        return subtract(x, self.channels), arrays

    def _without_mean(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self._is_last:
            self._subtract_row_means(x.reshape(-1, self._n_channels), self._share)
        else:
            # In order along the axis, as MLX adds up.
            means: npt.NDArray[np.float32] = np.add.reduce(x, axis=self.channels, keepdims=True) * self._share
            x -= means
        if self._gain != 1.0:
            x *= self._gain
        return x


def fuse_common_rereference(transformer: sigproc.CommonRereferenceTransformer, message: AxisArray) -> FusedStage | None:
    """The common reference of this package or of ezmsg-sigproc, unless it is one over samples.

    Means of groups are ezmsg-sigproc's own there, with NaN in all channels; so are medians of groups on a GPU.
    """
    state, mode = transformer.state, transformer.settings.mode
    if mode not in ("mean", "median") or state.passthrough:
        return PassesThrough(transformer, message)
    is_ours = isinstance(transformer, CommonRereferenceTransformer)
    if not (is_ours or state.single) and (mode == "mean" or uses_gpu()):
        return None
    stage = FusedCommonRereference(transformer, message)
    return None if stage.channels == stage.axis else stage


class CommonRereference(
    UnitTakesSettings,
    BaseTransformerUnit[CommonRereferenceSettings, AxisArray, AxisArray, CommonRereferenceTransformer],
):
    """Subtracts a common reference from the channels; see :obj:`CommonRereferenceTransformer`."""

    SETTINGS = CommonRereferenceSettings  # type: ignore[assignment]
