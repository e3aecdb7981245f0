"""The prediction of a fitted Kalman filter, on every MLX backend: a linear decoder with a memory.

Fitting and refitting stay with ezmsg-learn.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, BaseTransformerUnit, processor_state, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis
from ezmsg.util.messages.util import replace
from scipy.linalg import LinAlgError, solve_discrete_are

from .kernels.products import Factor, times
from .linear_regressor import check_matrix
from .stream.convert import as_float32, is_mlx_array, known_mlx
from .stream.device import uses_gpu
from .stream.fusible import SLACK, Array, Axes, FusedStage
from .stream.unit import (
    TransformerTakesSettings,
    UnitTakesSettings,
    a_type,
    check_fields,
    check_message,
    check_number,
    known,
    own_settings,
)

if TYPE_CHECKING:
    import mlx.core as mx

_OPERATION = "prediction"

SETTLED = 1e-10
"""Relative change of the gain in one step up to which it counts as the one of the long run."""

ROWS_A_GRAPH = 256
"""Samples after which the graph of a long message is begun to be computed on a GPU."""

Matrix = npt.NDArray[np.float64]


class RefitKalmanFilterSettings(ez.Settings):
    """Settings of :obj:`RefitKalmanFilter`: a fitted Kalman filter, in the names of ezmsg-learn's model.

    Raises:
        TypeError: A matrix is not an array of real numbers, or another field is not of its type.
        ValueError: The shapes do not fit each other, or a number is not finite.
    """

    A_state_transition_matrix: npt.NDArray
    """How the state goes on by itself from sample to sample, ``(n_states, n_states)``."""

    W_process_noise_covariance: npt.NDArray
    """Covariance of what the state does otherwise, ``(n_states, n_states)``."""

    H_observation_matrix: npt.NDArray
    """Features for each state, ``(n_features, n_states)``."""

    Q_measurement_noise_covariance: npt.NDArray
    """Covariance of the rest of the features, ``(n_features, n_features)``."""

    steady_state: bool = False
    """Whether the gain is that of the long run from the first sample on."""

    alpha_fading_memory: float = 1.0
    """By how much more than the state says the features count; without effect with ``steady_state``."""

    K_kalman_gain: npt.NDArray | None = None
    """The gain of the long run, ``(n_states, n_features)``. None: worked out from the others."""

    P_state_covariance: npt.NDArray | None = None
    """Covariance of the error of the state before the first sample, ``(n_states, n_states)``. None: that of the long
    run, worked out from the others."""

    labels: tuple[str, ...] | None = None
    """Names of the states; None for none."""

    def __post_init__(self) -> None:
        n = check_matrix("A_state_transition_matrix", self.A_state_transition_matrix).shape[0]
        check_matrix("A_state_transition_matrix", self.A_state_transition_matrix, (n, n))
        check_matrix("W_process_noise_covariance", self.W_process_noise_covariance, (n, n))
        m = check_matrix("H_observation_matrix", self.H_observation_matrix, (None, n)).shape[0]
        check_matrix("Q_measurement_noise_covariance", self.Q_measurement_noise_covariance, (m, m))
        if self.K_kalman_gain is not None:
            check_matrix("K_kalman_gain", self.K_kalman_gain, (n, m))
        if self.P_state_covariance is not None:
            check_matrix("P_state_covariance", self.P_state_covariance, (n, n))
        check_fields(self, flags=("steady_state",))
        check_number("alpha_fading_memory", self.alpha_fading_memory)
        if self.labels is not None and len(self.labels) != n:
            raise ValueError(f"'labels' must have {n} names, as many as there are states, got {self.labels!r}")

    @classmethod
    def of(cls, fitted: object, *, labels: tuple[str, ...] | None = None) -> RefitKalmanFilterSettings:
        """The settings with which the predictions of *fitted* are made.

        Args:
            fitted: ezmsg-learn's ``RefitKalmanFilter`` or ``RefitKalmanFilterProcessor``, fitted; or the path of a
                checkpoint that the latter has saved. A checkpoint is a pickle: load only those that you trust.
            labels: Names of the states.

        Raises:
            TypeError: *fitted* is none of these, or has not been fitted.
        """
        if isinstance(fitted, (str, Path)):
            with open(fitted, "rb") as file:
                return cls(**pickle.load(file), labels=labels)
        state = getattr(fitted, "state", None)
        model = fitted if state is None else getattr(state, "model", None)
        if getattr(model, "A_state_transition_matrix", None) is None:
            raise TypeError(f"'fitted' must be a fitted Kalman filter of ezmsg-learn, got {a_type(fitted)}")
        arrays = (
            "A_state_transition_matrix",
            "W_process_noise_covariance",
            "H_observation_matrix",
            "Q_measurement_noise_covariance",
            "K_kalman_gain",
            "P_state_covariance",
        )
        given: dict[str, Any] = {
            name: None if (value := getattr(model, name)) is None else np.asarray(value) for name in arrays
        }
        return cls(
            **given,
            steady_state=bool(getattr(model, "steady_state", False)),
            alpha_fading_memory=float(getattr(model, "alpha_fading_memory", 1.0)),
            labels=labels,
        )


class Gains:
    """The gain for each sample, which does not depend on the data.

    With the covariance ``P`` of the error of the state, from sample to sample::

        P = alpha**2 * (A @ P @ A.T + W)
        K = P @ H.T @ inv(H @ P @ H.T + Q)
        P = (I - K @ H) @ P @ (I - K @ H).T + K @ Q @ K.T

    The inverse is that of a matrix of features by features. With ``C = H.T @ inv(Q) @ H`` the same gain is
    ``P @ inv(I + C @ P) @ H.T @ inv(Q)``, where the second is one of states by states (the matrix inversion lemma).
    """

    def __init__(self, settings: RefitKalmanFilterSettings) -> None:
        self._a, self._w, self._h, self._q = (
            np.asarray(value, np.float64)
            for value in (
                settings.A_state_transition_matrix,
                settings.W_process_noise_covariance,
                settings.H_observation_matrix,
                settings.Q_measurement_noise_covariance,
            )
        )
        self._scale = float(settings.alpha_fading_memory) ** 2
        self._weighted = self._observed_by_noise()
        covariance, gain = settings.P_state_covariance, settings.K_kalman_gain
        if covariance is None or (gain is None and settings.steady_state):
            found = self._of_the_long_run()
            covariance = found if covariance is None else covariance
            gain = self._gain(found) if gain is None else gain
        self._covariance = np.asarray(covariance, np.float64)
        self.gain: Matrix = np.zeros(self._h.T.shape) if gain is None else np.asarray(gain, np.float64)
        """The gain for the sample that :meth:`advance` was called for last."""
        self.settled = settings.steady_state
        """Whether the gain stays what it is."""

    def advance(self) -> None:
        """Go to the next sample."""
        if self.settled:
            return
        covariance = self._scale * (self._a @ self._covariance @ self._a.T + self._w)
        before, self.gain = self.gain, self._gain(covariance)
        rest = np.eye(len(self._a)) - self.gain @ self._h
        self._covariance = rest @ covariance @ rest.T + self.gain @ self._q @ self.gain.T
        largest = np.abs(self.gain).max()
        self.settled = bool(np.abs(self.gain - before).max() <= SETTLED * largest)

    @property
    def transition(self) -> Matrix:
        """Transition of the state from one sample to the next, without the features: ``(I - K @ H) @ A``."""
        return self._a - self.gain @ self._h @ self._a

    @property
    def free_transition(self) -> Matrix:
        """The same for a sample that is left out: ``A``."""
        return self._a

    def _observed_by_noise(self) -> Matrix | None:
        """``H.T @ inv(Q)``; None where Q cannot be inverted."""
        try:
            # Also of a matrix that is not quite symmetric, by rounding.
            inverse = np.linalg.inv(np.linalg.cholesky((self._q + self._q.T) / 2.0))
        except np.linalg.LinAlgError:
            return None
        diagonal = np.abs(np.diagonal(inverse))
        return None if diagonal.max() > 1e6 * diagonal.min() else self._h.T @ inverse.T @ inverse

    def _gain(self, covariance: Matrix) -> Matrix:
        if self._weighted is None:
            return covariance @ self._h.T @ np.linalg.pinv(self._h @ covariance @ self._h.T + self._q)
        inner = np.eye(len(self._a)) + self._weighted @ self._h @ covariance
        return covariance @ np.linalg.solve(inner, self._weighted)

    def _of_the_long_run(self) -> Matrix:
        """The covariance that the discrete algebraic Riccati equation has for its solution, as ezmsg-learn takes it."""
        for more in (0.0, 1e-7):
            try:
                return solve_discrete_are(self._a.T, self._h.T, self._w, self._q + more * np.eye(len(self._q)))
            except (LinAlgError, ValueError):
                continue
        return np.eye(len(self._a))


@processor_state
class RefitKalmanFilterState:
    """State of :obj:`RefitKalmanFilterTransformer`."""

    x: npt.NDArray | mx.array | None = None
    """The state, ``(n_states,)``: float64 on the host, float32 on a GPU; None before the first sample."""

    gains: Gains | None = None
    """The gain, as far as it has come."""

    dim: str = ""
    """Name of the stream dimension."""

    n_features: int = 0
    """Along the other dimension."""


class RefitKalmanFilterTransformer(
    TransformerTakesSettings,
    BaseStatefulTransformer[RefitKalmanFilterSettings, AxisArray, AxisArray, RefitKalmanFilterState],
):
    """The state of a Kalman filter for each sample of features.

    The counterpart of ezmsg-learn's ``RefitKalmanFilterProcessor`` with a fitted model
    (:meth:`RefitKalmanFilterSettings.of`), which begins at a state of zeros::

        x[n] = A @ x[n-1] + K[n] @ (z[n] - H @ A @ x[n-1])

    MLX data comes out as float32 MLX data and follows the results in float64 within 1e-5 of the largest value. A
    sample with a feature that is NaN or infinite is left out: the state goes on by itself, and comes back. Messages may
    be cut anywhere.

    Another model may be set while a stream runs, after a refit: the state goes on if it has as many numbers.

    The result has the dimensions of time and ``"state"``, and a key that ends in ``_filtered``, as in ezmsg-learn.

    Raises:
        ValueError: The message is not of the stream dimension and one of features, as many as the model has.
        TypeError: Complex MLX data; what is given is not a message.
    """

    _in_force: RefitKalmanFilterSettings | None = None
    _arrays: tuple[mx.array, ...] | None = None

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._message_hash(message)

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take another model, or other values of single fields, from the next message on."""
        # Not as in ezmsg-baseproc, which compares arrays for equality and drops the state.
        given = self.settings if new_settings is None else own_settings(self.get_settings_type(), new_settings)
        self.settings = replace(given, **kwargs) if kwargs else given

    def settling_time(self, tolerance: float, gain: float) -> float:
        """See :class:`ezmsg.mlx.stream.fusible.Settles`."""
        gains = Gains(self.settings)
        for _ in range(10_000):
            gains.advance()
            if gains.settled:
                break
        radius = float(np.abs(np.linalg.eigvals(gains.transition)).max())
        if not gains.settled or radius >= 1.0:
            return float("inf")
        return 2 * gain * (1 + np.log(SLACK / tolerance) / -np.log(max(radius, 1e-12)))

    def _reset_state(self, message: AxisArray) -> None:
        self._state.x = None
        self._in_force = None
        self._take_up(message)

    def _take_up(self, message: AxisArray) -> None:
        """Put the settings in force, with the state so far where it fits."""
        state, settings = self._state, self.settings
        n_features, n_states = np.shape(settings.H_observation_matrix)
        dim = resolve_stream_dim(message)
        shape = message.data.shape
        if len(shape) != 2 or shape[1 - message.get_axis_idx(dim)] != n_features:
            raise ValueError(
                f"The message has shape {shape} with dims {message.dims}; allowed are the stream dimension and one of "
                f"{n_features} features."
            )
        gains = Gains(settings)
        if state.x is not None and state.x.shape != (n_states,):
            state.x = None
        state.gains, state.dim, state.n_features = gains, dim, n_features
        self._in_force, self._arrays = settings, None

    def _process(self, message: AxisArray) -> AxisArray:
        if self.settings is not self._in_force:
            self._take_up(message)
        state, data = self._state, message.data
        is_first = message.get_axis_idx(state.dim) == 0
        y: Array
        if is_mlx_array(data):
            import mlx.core as mx

            x = as_float32(data, _OPERATION)
            x = x if is_first else x.T
            y = self._on_gpu(x) if uses_gpu() else mx.array(self._on_host(np.asarray(x)).astype(np.float32))
        else:
            y = self._on_host(data if is_first else data.T)
            y = y.astype(data.dtype) if data.dtype.kind == "f" else y
        axes = _axes_of(message.axes, message.dims, state.dim, self.settings.labels)
        return replace(
            message, data=y, dims=[state.dim, "state"], axes=axes, key=f"{message.key}_filtered", stream_dim=state.dim
        )

    def _on_host(self, rows: npt.NDArray) -> Matrix:
        state, gains = self._state, known(self._state.gains)
        x = np.zeros(len(gains.free_transition)) if state.x is None else np.asarray(state.x, np.float64)
        y = np.empty((len(rows), len(x)))
        complete = np.isfinite(rows).all(axis=1)
        n = 0
        while n < len(rows) and not gains.settled:
            gains.advance()
            x = gains.transition @ x + gains.gain @ rows[n] if complete[n] else gains.free_transition @ x
            y[n] = x
            n += 1
        x = steps(x, rows[n:], complete[n:], gains.transition, gains.free_transition, gains.gain, y[n:])
        state.x = x
        return y

    def _on_gpu(self, rows: mx.array) -> mx.array:
        import mlx.core as mx

        state, gains = self._state, known(self._state.gains)
        n_states = len(gains.free_transition)
        if state.x is None or isinstance(state.x, np.ndarray):
            state.x = mx.array(np.zeros(n_states, np.float32) if state.x is None else np.asarray(state.x, np.float32))
        if not rows.shape[0]:
            return mx.zeros((0, n_states))
        x, parts, arrays = state.x, [], self._arrays
        for start in range(0, rows.shape[0], ROWS_A_GRAPH):
            part = rows[start : start + ROWS_A_GRAPH]
            n = 0
            while n < part.shape[0] and not gains.settled:
                gains.advance()
                x, one = steps_on_gpu(x, part[n : n + 1], *arrays_of(gains))
                parts.append(one)
                n += 1
            if n < part.shape[0]:
                # Those of the gain that stays.
                arrays = self._arrays = arrays or arrays_of(gains)
                x, some = steps_on_gpu(x, part[n:], *arrays)
                parts.append(some)
            mx.async_eval(x, parts[-1])
        state.x = x
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def fuse(self, message: AxisArray) -> FusedStage | None:
        """See :mod:`ezmsg.mlx.stream.fusible`; time first."""
        stage = FusedRefitKalmanFilter(self, message)
        return stage if stage.axis == 0 else None


def _axes_of(axes: Axes, dims: list[str], dim: str, labels: tuple[str, ...] | None) -> Axes:
    kept = {name: axis for name, axis in axes.items() if name == dim or name not in dims}
    if labels is not None:
        kept["state"] = CoordinateAxis(data=np.array(labels), dims=["state"])
    return kept


def steps(
    x: Matrix,
    rows: npt.NDArray,
    complete: npt.NDArray[np.bool_],
    transition: Matrix,
    free_transition: Matrix,
    gain: Matrix,
    y: npt.NDArray,
) -> Matrix:
    """The state after *rows* of features; and those after each of them, into *y*."""
    if not len(rows):
        return x
    observed = np.where(complete[:, None], rows, 0.0) @ gain.T
    for n in range(len(rows)):
        x = transition @ x + observed[n] if complete[n] else free_transition @ x
        y[n] = x
    return x


def arrays_of(gains: Gains) -> tuple[mx.array, ...]:
    """The matrices of a sample, as :func:`steps_on_gpu` takes them."""
    import mlx.core as mx

    matrices = (mx.array(matrix.astype(np.float32)) for matrix in (gains.transition, gains.free_transition))
    return (*matrices, *Factor(gains.gain.T).arrays())


def steps_on_gpu(
    x: mx.array, rows: mx.array, transition: mx.array, free_transition: mx.array, weights: mx.array, offset: mx.array
) -> tuple[mx.array, mx.array]:
    """The state after *rows* of features, and those after each of them."""
    import mlx.core as mx

    complete = mx.isfinite(rows).all(axis=1)
    observed = times(mx.where(complete[:, None], rows, 0.0), 1, (weights, offset))
    found = []
    for n in range(rows.shape[0]):
        # Sums of a few products each, which are not those of TF32.
        matrix = mx.where(complete[n], transition, free_transition)
        x = (matrix * x).sum(axis=1) + observed[n]
        found.append(x)
    return x, mx.stack(found)


class FusedRefitKalmanFilter(FusedStage[RefitKalmanFilterTransformer]):
    """The steps of a filter whose gain has settled. Arrays: the state, and the matrices of a step."""

    def __init__(self, transformer: RefitKalmanFilterTransformer, message: AxisArray) -> None:
        super().__init__(transformer, message)
        self._dims = list(message.dims)

    def load(self) -> tuple[tuple[mx.array, ...], None] | None:
        """See :class:`FusedStage`. While the gain changes, the transformer runs by itself."""
        import mlx.core as mx

        state = self.transformer.state
        gains = known(state.gains)
        if not gains.settled or state.x is None:
            return None
        x = mx.array(np.asarray(state.x, np.float32)) if isinstance(state.x, np.ndarray) else state.x
        return (x, *arrays_of(gains)), None

    def store(self, arrays: tuple[mx.array, ...], counts: None) -> None:
        """See :class:`FusedStage`."""
        self.transformer.state.x = arrays[0]

    def relabel(self, axes: Axes, n_samples: int, counts: None) -> Axes:
        """See :class:`FusedStage`."""
        return _axes_of(axes, self._dims, self.dim, self.transformer.settings.labels)

    def apply(self, x: Array, arrays: tuple[Array, ...], variant: None) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`FusedStage`."""
        before, *matrices = arrays
        if not isinstance(x, np.ndarray):
            last, results = steps_on_gpu(known_mlx(before), x, *cast("list[mx.array]", matrices))
            return results, (last, *matrices)
        transition, free_transition, weights, _ = cast("list[npt.NDArray]", matrices)
        y = np.empty((len(x), len(transition)), np.float32)
        wide = np.asarray(before, np.float64)
        after = steps(wide, x, np.isfinite(x).all(axis=1), transition, free_transition, weights.T, y)
        return y, (after.astype(np.float32), *matrices)


class RefitKalmanFilter(
    UnitTakesSettings,
    BaseTransformerUnit[RefitKalmanFilterSettings, AxisArray, AxisArray, RefitKalmanFilterTransformer],
):
    """Decodes with a fitted Kalman filter; see :obj:`RefitKalmanFilterTransformer`."""

    SETTINGS = RefitKalmanFilterSettings  # type: ignore[assignment]
