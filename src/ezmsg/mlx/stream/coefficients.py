"""Coefficients of filters: sections for a numerator and a denominator, and the state of one form in the other."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import toeplitz
from scipy.signal import sosfilt, tf2sos

from .unit import a_type

Float64: TypeAlias = npt.NDArray[np.float64]

Form: TypeAlias = Literal["sos", "ba", "fir"]
"""Coefficients that the state of a filter belongs to: sections, a numerator and a denominator (scipy's ``lfilter``), or
taps without feedback, whose state is the last samples of the input."""

EXACT_ENOUGH = 5e-6
"""Largest error of a response, relative to its peak, with which sections take the place of *b* and *a*."""

ALIKE = 1e-2
"""The same for a state to go on in the other form: what *b* and *a* of a slow filter lose is their own."""

MAX_SECTIONS = 64
"""Most sections that are looked for. Their number is half the order, and finding them takes its cube."""


def check_sos(sos: object, *, name: str = "sos") -> Float64:
    """*sos* as scipy's functions return it, in float64; errors call it *name*.

    Raises:
        TypeError: *sos* is not an array of real numbers.
        ValueError: Its shape is not (n_sections, 6) with one section or more, it is not finite, or an ``a0`` is not 1.
    """
    try:
        given = np.asarray(sos)
    except ValueError:
        raise TypeError(f"{name} is not an array: its rows differ in length.") from None
    if given.dtype.kind not in "fiu":
        raise TypeError(f"{name!r} must hold real numbers, got dtype {given.dtype}")
    array = np.array(given, dtype=np.float64, order="C", ndmin=2)
    if array.ndim != 2 or array.shape[1] != 6 or not len(array):
        raise ValueError(f"{name!r} must have the shape (n_sections, 6), with one section or more, got {given.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has coefficients that are not finite.")
    if (array[:, 3] != 1.0).any():
        raise ValueError(f"'{name}[:, 3]' must be ones, got {array[:, 3].tolist()}")
    return array


def check_ba(coefs: object, *, name: str = "coefs") -> tuple[npt.NDArray, npt.NDArray]:
    """*coefs* as two arrays *b* and *a*; errors call it *name*.

    Raises:
        TypeError: *coefs* is neither a tuple of two arrays of numbers nor ezmsg-sigproc's ``FilterCoefficients``.
        ValueError: One of the two is not one-dimensional, is empty or not finite, or ``a[0]`` is 0.
    """
    # ezmsg-sigproc's filters load MLX.
    from ezmsg.sigproc.filter import FilterCoefficients

    allowed = "a tuple (b, a) of arrays of numbers or FilterCoefficients"
    pair = (coefs.b, coefs.a) if isinstance(coefs, FilterCoefficients) else coefs
    if not isinstance(pair, tuple) or len(pair) != 2:
        hint = "; for second-order sections set coef_type='sos'" if getattr(coefs, "ndim", 0) == 2 else ""
        raise TypeError(f"{name!r} must be {allowed} with coef_type 'ba', got {a_type(coefs)}{hint}")
    arrays = []
    for part, given in zip("ba", pair, strict=True):
        array = np.asarray(given)
        if array.dtype.kind not in "fiuc":
            raise TypeError(f"{part!r} of {name!r} must hold numbers, got dtype {array.dtype}")
        if array.ndim != 1 or not array.size:
            raise ValueError(f"{part!r} of {name!r} must have one dimension and not be empty, got shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{part!r} of {name!r} must be finite")
        arrays.append(array)
    if arrays[1][0] == 0:
        raise ValueError(f"'a' of {name!r} must not begin with 0")
    return arrays[0], arrays[1]


class Coefficients:
    """Coefficients as a user gives them, checked; and their sections, found at the first use.

    *coefs* are sections, or *b* and *a*, as ezmsg-sigproc takes them; *coef_type*, ``"sos"`` or ``"ba"``, says which.
    Errors are those of :func:`check_sos` and :func:`check_ba`.
    """

    def __init__(self, coefs: object, coef_type: str) -> None:
        self._sos = check_sos(coefs, name="coefs") if coef_type == "sos" else None
        self.ba = check_ba(coefs) if coef_type == "ba" else None
        """*b* and *a*, if it is these that were given."""

    @property
    def is_fir(self) -> bool:
        """Whether *b* and *a* were given, without feedback."""
        return self.ba is not None and not self.ba[1][1:].any()

    @functools.cached_property
    def sections(self) -> Float64 | None:
        """The same filter as sections, (n_sections, 6); None where *b* and *a* do not determine it well enough."""
        return self._sos if self.ba is None else sections_of(*self.ba)


def sections_of(b: npt.NDArray, a: npt.NDArray) -> Float64 | None:
    """Second-order sections of the filter that ``scipy.signal.lfilter(b, a, x)`` is.

    Up to order 2 they are the same coefficients. Above it they come from the roots of both polynomials, which rounding
    in *b* and *a* alone may move far, where many poles are close to each other (high-passes and band-passes with a low
    edge). So the responses of both are compared where they change, together with what rounding may change of that of
    *b* and *a*.

    Returns:
        (n_sections, 6), float64; None without feedback, for complex coefficients, or where the responses differ by more
        than :data:`EXACT_ENOUGH` of their peak.
    """
    if b.dtype.kind == "c" or a.dtype.kind == "c":
        return None
    scale = float(a[0])
    b, a = (np.trim_zeros(part.astype(np.float64) / scale, "b") for part in (b, a))
    order = max(len(b), len(a)) - 1
    if len(a) < 2 or not len(b) or order > 2 * MAX_SECTIONS:
        return None
    if order <= 2:
        return np.array([[*b, *np.zeros(3 - len(b)), *a, *np.zeros(3 - len(a))]])
    # scipy takes leading coefficients of less than 1e-14 for zeros.
    gain = np.abs(b).max()
    sos = tf2sos(b / gain, a)
    sos[0, :3] *= gain
    return sos if is_same_filter(sos, b, a, EXACT_ENOUGH) else None


def is_same_filter(sos: Float64, b: npt.NDArray, a: npt.NDArray, tolerance: float) -> bool:
    """Whether *sos*, (n_sections, 6), is stable and has the response of *b* and *a*, whatever their rounding changes.

    *tolerance* is the largest error of the response, relative to its peak.
    """
    b, a = np.asarray(b, np.float64) / a[0], np.asarray(a, np.float64) / a[0]
    poles = np.concatenate([np.roots(row) for row in sos[:, 3:]])
    if not np.isfinite(sos).all() or (np.abs(poles) >= 1.0).any():
        return False
    near = np.abs(np.angle(poles))[:, None] + (1.0 - np.abs(poles))[:, None] * np.linspace(-4.0, 4.0, 33)
    low = np.geomspace(1e-7, np.pi, 256)
    frequencies = np.concatenate([np.linspace(0.0, np.pi, 512), low, np.pi - low, near.ravel()])
    delay = np.exp(-1j * frequencies)
    numerator, denominator = (
        np.prod([np.polyval(row[::-1], delay) for row in rows], axis=0) for rows in (sos[:, :3], sos[:, 3:])
    )
    response = numerator / denominator
    with np.errstate(divide="ignore", invalid="ignore"):
        given = np.polyval(b[::-1], delay) / np.polyval(a[::-1], delay)
    # What half a unit in the last place of each coefficient changes.
    rounding = 2.0**-53 * (np.abs(b).sum() + np.abs(a).sum() * np.abs(response)) / np.abs(denominator)
    error = np.abs(given - response) + rounding
    return bool((error <= tolerance * np.abs(response).max()).all())


def converted_state(z: Float64, axis: int, source: Form, target: Form, sos: Float64, a: npt.NDArray) -> Float64:
    """The state of a filter in one form as that of the same filter in the other.

    What the filter does from here on without further input is the same: sections are run for as many samples as *b*
    and *a* have states, and ``lfilter``'s state is what *a* makes of these. The other way that is solved for.

    Args:
        z: scipy's state: ``(..., order, ...)`` with the order at *axis* for *b* and *a*, and ``(n_sections, ..., 2,
            ...)`` with 2 at ``axis + 1`` for sections.
        axis: Of the samples.
        source: The form of *z*, ``"sos"`` or ``"ba"``.
        target: The other of the two.
        sos: The filter as sections.
        a: Its denominator, as long as the longer of numerator and denominator.

    Returns:
        The state in the form *target*, float64.
    """
    order, n_sections = len(a) - 1, len(sos)
    units = np.eye(2 * n_sections).reshape(2 * n_sections, n_sections, 2)
    free = np.stack([sosfilt(sos, np.zeros(order), zi=unit)[0] for unit in units], axis=1)
    first = np.asarray(a[:order], np.float64) / a[0]
    mapping = toeplitz(first, np.zeros(order)) @ free
    if source == "sos":
        moved = np.moveaxis(z, axis + 1, 1)
        flat = mapping @ moved.reshape(2 * n_sections, -1)
        return np.moveaxis(flat.reshape(order, *moved.shape[2:]), 0, axis)
    moved = np.moveaxis(z, axis, 0)
    # A section of lower order never has more than 0 in the state that it does not need.
    second = (sos[:, [2, 5]] != 0.0).any(axis=1)
    used = np.stack([second | (sos[:, [1, 4]] != 0.0).any(axis=1), second], axis=1).ravel()
    flat = np.zeros((2 * n_sections, moved.reshape(order, -1).shape[1]))
    flat[used] = np.linalg.lstsq(mapping[:, used], moved.reshape(order, -1), rcond=0.0)[0]
    return np.moveaxis(flat.reshape(n_sections, 2, *moved.shape[1:]), 1, axis + 1)


def carried_state(
    z: npt.NDArray, axis: int, source: Form, before: Coefficients, target: Form, after: Coefficients
) -> npt.NDArray | None:
    """The state of a filter whose coefficients or their form change, for the new ones to go on with.

    Args:
        z: scipy's state, as in :func:`converted_state`; for taps without feedback the last samples.
        axis: Of the samples.
        source: The form of *z*.
        before: The coefficients so far.
        target: The form that is needed.
        after: The new coefficients, or the same ones.

    Returns:
        *z* itself where the form stays, whether it is of a fitting length or not. But sections that are found for *b*
        and *a* differ from those of a design, so that states of one become those of the other. None where the form
        changes and the filter is not the same in the other one.
    """
    if source == target and (source != "sos" or (before.ba is None) == (after.ba is None)):
        return z
    ba = before.ba if after.ba is None else after.ba
    if "fir" in (source, target) or ba is None:
        return None
    b, a = ba
    left, entered = (before.sections if source == "sos" else None), (after.sections if target == "sos" else None)
    for form, sos in ((source, left), (target, entered)):
        if form == "sos" and (sos is None or not is_same_filter(sos, b, a, ALIKE)):
            return z if source == target else None
    a = np.pad(a, (0, max(len(b) - len(a), 0)))
    if left is not None:
        z = converted_state(z, axis, "sos", "ba", left, a)
    return z if entered is None else converted_state(z, axis, "ba", "sos", entered, a)
