"""The prediction of a fitted linear model, on every MLX backend: the last step of a linear decoder.

Fitting stays with ezmsg-learn, scikit-learn or whatever else gives weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, AxisBase, CoordinateAxis
from ezmsg.util.messages.util import replace

from .kernels.products import Factor, times
from .stream.convert import as_float32, is_mlx_array
from .stream.fusible import Array, Axes, FusedStage
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    a_type,
    check_fields,
    check_message,
    known,
    own_settings,
)

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "prediction"


def check_matrix(name: str, value: object, shape: tuple[int | None, int | None] = (None, None)) -> npt.NDArray:
    """A matrix of finite real numbers, in float64; for the error, the caller calls it *name*.

    Args:
        name: Of the field.
        value: The matrix.
        shape: What it has to have along each of the two dimensions; None for any length of 1 or more.

    Raises:
        TypeError: *value* is not an array of real numbers.
        ValueError: It has another shape, or numbers that are not finite.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"'{name}' must be an array of real numbers, got one of dtype {array.dtype}")
    wanted = tuple(array.shape[i] if n is None and i < array.ndim else n for i, n in enumerate(shape))
    if array.ndim != 2 or not array.size or array.shape != wanted:
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"'{name}' must be a matrix of shape ({sizes}), got shape {array.shape}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"'{name}' must have finite numbers only")
    return array


class LinearRegressorSettings(ez.Settings):
    """Settings of :obj:`LinearRegressor`: a fitted linear model.

    Raises:
        TypeError: ``weights`` or ``intercept`` is not an array of real numbers, or another field is not of its type.
        ValueError: Their shapes do not fit each other, or a number is not finite.
    """

    weights: npt.NDArray
    """Weights of each feature for each output, ``(n_features, n_outputs)``."""

    intercept: npt.NDArray | None = None
    """Constants that are added to each output, ``(n_outputs,)``; None for zeros."""

    labels: tuple[str, ...] | None = None
    """Names of the outputs. None: with as many outputs as features the names of these stay, as after a re-reference;
    otherwise they are ``ch0``, ``ch1`` and so on."""

    axis: str | None = None
    """The dimension of the features. None: ``ch``, or else the last one that is not the stream dimension."""

    key: str | None = None
    """The key of the results; None leaves that of the message."""

    def __post_init__(self) -> None:
        n_outputs = check_matrix("weights", self.weights).shape[1]
        if self.intercept is not None:
            check_matrix("intercept", np.atleast_2d(np.asarray(self.intercept)), (1, n_outputs))
        if self.labels is not None and len(self.labels) != n_outputs:
            raise ValueError(f"'labels' must have {n_outputs} names, one for each output, got {self.labels!r}")
        check_fields(self, names=("axis", "key"))

    @classmethod
    def of(cls, fitted: Any, *, axis: str | None = None) -> LinearRegressorSettings:
        """The settings with which the predictions of *fitted* are made.

        Args:
            fitted: One of

                - a linear model as scikit-learn has it, with ``coef_`` and ``intercept_``;
                - ezmsg-learn's ``LinearRegressorTransformer`` or ``AdaptiveLinearRegressorTransformer``, fitted, whose
                  outputs have the names that it was trained with and whose key ends in ``_pred``;
                - ezmsg-learn's ``LRRTransformer`` (linear regression re-referencing), fitted or with given weights.
            axis: The dimension of the features, as in the settings.

        Raises:
            TypeError: *fitted* is none of these, or has not been fitted.
        """
        state = getattr(fitted, "state", None)
        if hasattr(state, "effective"):
            weights = getattr(state, "effective", None)
            if weights is None:
                raise TypeError(f"'fitted' must be a fitted model, got {a_type(fitted)} without weights")
            return cls(np.asarray(weights), axis=axis or getattr(fitted.settings, "axis", None))
        template = getattr(state, "template", None)
        model = fitted if state is None else getattr(state, "model", None)
        weights, intercept = _weights_of(model, fitted)
        labels = None
        if template is not None and "ch" in template.axes:
            labels = tuple(str(label) for label in template.axes["ch"].data)
            labels = labels if len(labels) == weights.shape[1] else None
        return cls(weights, intercept, labels, axis, template.key if template is not None else None)


def _weights_of(model: Any, fitted: object) -> tuple[npt.NDArray, npt.NDArray]:
    """Weights, (n_features, n_outputs), and intercepts of a linear model of scikit-learn or river."""
    models = list(model.values()) if isinstance(model, dict) else [model]
    if models and all(hasattr(one, "intercept") and hasattr(one, "weights") for one in models):
        # river: one model an output, with a weight for each name of a feature, which ezmsg-learn numbers from f0 on.
        numbers = [{int(name[1:]): weight for name, weight in one.weights.items()} for one in models]
        n_features = 1 + max((max(given, default=-1) for given in numbers), default=-1)
        weights = np.zeros((n_features, len(models)))
        for column, given in enumerate(numbers):
            weights[list(given), column] = list(given.values())
        if n_features:
            return weights, np.array([float(one.intercept) for one in models])
    elif hasattr(model, "coef_") and hasattr(model, "intercept_"):
        weights = np.atleast_2d(np.asarray(model.coef_)).T
        return weights, np.broadcast_to(np.asarray(model.intercept_, np.float64).ravel(), weights.shape[1:]).copy()
    raise TypeError(
        "'fitted' must be a fitted linear model with 'coef_' and 'intercept_', or a transformer of ezmsg-learn with "
        f"one, got {a_type(fitted)}"
    )


@processor_state
class LinearRegressorState:
    """State of :obj:`LinearRegressorTransformer`, computed once for a stream."""

    feature_dim: str = ""
    """Name of the dimension of the features."""

    feature_idx: int = 0
    """Its position."""

    new_axis: AxisBase | None = None
    """The axis of the outputs; None where that of the features stays."""

    factor: Factor | None = None
    """The weights, ready to be multiplied with."""


class LinearRegressorTransformer(
    TransformerTakesSettings,
    BaseStatefulTransformer[LinearRegressorSettings, AxisArray, AxisArray, LinearRegressorState],
):
    """``y = x @ weights + intercept`` along the dimension of features, for each sample by itself.

    The prediction of a linear model, or of linear regression re-referencing: see :meth:`LinearRegressorSettings.of`.
    MLX data comes out as float32 MLX data, computed to the precision of float32 on every backend (MLX multiplies
    matrices in TF32 on a GPU, with errors of 1e-3). NumPy data comes out as NumPy data. A feature that is NaN or
    infinite makes the outputs of its sample so, and no other sample's.

    Example:
        >>> import numpy as np
        >>> from ezmsg.mlx import LinearRegressorSettings, LinearRegressorTransformer
        >>> from ezmsg.util.messages.axisarray import AxisArray
        >>> decode = LinearRegressorTransformer(LinearRegressorSettings(np.eye(3)[:, :2], labels=("vx", "vy")))
        >>> features = AxisArray(np.ones((2, 3)), ["time", "ch"], axes={"time": AxisArray.TimeAxis(fs=50.0)})
        >>> decode(features).data.shape
        (2, 2)

    Raises:
        ValueError: The message has another number of features than ``weights``.
        TypeError: Complex MLX data; what is given is not a message.
    """

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._message_hash(message)

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take another model, or other values of single fields, from the next message on."""
        # Not as in ezmsg-baseproc, which compares arrays for equality.
        given = self.settings if new_settings is None else own_settings(self.get_settings_type(), new_settings)
        self.settings = replace(given, **kwargs) if kwargs else given
        self._request_reset()

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`: a prediction is that of one sample."""
        return 0.0

    def _reset_state(self, message: AxisArray) -> None:
        state, settings = self._state, self.settings
        state.feature_dim = dim = settings.axis or _features_of(message)
        state.feature_idx = message.get_axis_idx(state.feature_dim)
        n_features, n_outputs = np.shape(settings.weights)
        if message.data.shape[state.feature_idx] != n_features:
            raise ValueError(
                f"The message has {message.data.shape[state.feature_idx]} features along {dim!r}, the weights are for "
                f"{n_features}."
            )
        state.factor = Factor(settings.weights, settings.intercept)
        labels = settings.labels
        if labels is None and n_features != n_outputs:
            labels = tuple(f"ch{i}" for i in range(n_outputs))
        state.new_axis = None if labels is None else _labelled(message.axes.get(dim), dim, labels)

    def _process(self, message: AxisArray) -> AxisArray:
        state, key = self._state, self.settings.key
        x = as_float32(message.data, _OPERATION) if is_mlx_array(message.data) else message.data
        y = known(state.factor).of(x, state.feature_idx)
        axes = message.axes if state.new_axis is None else {**message.axes, state.feature_dim: state.new_axis}
        return replace(message, data=y, axes=axes, key=message.key if key is None else key)

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`."""
        stage = FusedLinearRegressor(self, message)
        return stage if self._state.feature_idx != stage.axis else None


def _features_of(message: AxisArray) -> str:
    others = [dim for dim in message.dims if dim != resolve_stream_dim(message)]
    return "ch" if "ch" in others or not others else others[-1]


def _labelled(axis: AxisBase | None, name: str, labels: tuple[str, ...]) -> CoordinateAxis:
    if not isinstance(axis, CoordinateAxis):
        axis = CoordinateAxis(data=np.array([]), dims=[name])
    # Its fingerprint is asked for once here, and not by all that come after in each message.
    axis = replace(axis, data=np.array(labels))
    getattr(axis, "fingerprint", None)
    return axis


class FusedLinearRegressor(FusedStage[LinearRegressorTransformer]):
    """One matrix product, and the intercept."""

    def load(self) -> tuple[tuple[mx.array, ...], None]:
        """See :class:`FusedStage`."""
        return known(self.transformer.state.factor).arrays(), None

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        """See :class:`FusedStage`."""
        state = self.transformer.state
        return axes if state.new_axis is None else {**axes, state.feature_dim: state.new_axis}

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        return times(x, self.transformer.state.feature_idx, arrays), arrays


class LinearRegressor(
    UnitTakesSettings,
    BaseTransformerUnit[LinearRegressorSettings, AxisArray, AxisArray, LinearRegressorTransformer],
):
    """Predicts with a fitted linear model; see :obj:`LinearRegressorTransformer`."""

    SETTINGS = LinearRegressorSettings  # type: ignore[assignment]
