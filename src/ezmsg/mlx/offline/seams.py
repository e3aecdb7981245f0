"""How well the results of two neighbouring pieces fit together.

A piece begins a margin earlier than the results that it keeps. The last results of that margin, right in front of the
seam, are also the last ones of the piece before, which has been running for much longer. What they differ by is what
the chain has not forgotten yet, and it becomes less behind the seam. To compare them costs no further computing.
"""

import itertools
import typing
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .packing import pack
from .unpacking import unpack

MOST_ROWS = 256
"""Results in front of a seam that are compared, at most."""

SHARE_OF_MARGIN = 64
"""Of how many results of a margin one is compared: those at its end, where the chain has settled."""


class Seams(typing.NamedTuple):
    """What is kept of a piece to compare it with its neighbours."""

    before: npt.NDArray
    """Results in front of the piece, of shape (row, ...): computed, but not part of it."""

    last: npt.NDArray
    """The last results of the piece, as many as the next one needs at most."""

    largest: npt.NDArray
    """The largest absolute value of each channel in the piece, of shape (...); 0 where none is finite.
    Empty where it has no results."""

    def packed(self) -> bytes:
        """As bytes, for :meth:`unpacked`."""
        return pack(tuple(self), ())

    @classmethod
    def unpacked(cls, packed: bytes) -> "Seams":
        """The inverse of :meth:`packed`."""
        return cls(*typing.cast("tuple[npt.NDArray, npt.NDArray, npt.NDArray]", unpack(packed, ())))


def n_compared(n_margin: int) -> int:
    """How many of the results of a margin are compared."""
    return min(max(n_margin // SHARE_OF_MARGIN, 1), MOST_ROWS, n_margin)


def differences(pieces: Sequence[Seams]) -> list[float]:
    """The largest difference at each seam, as a share of the largest result of the channel; in order.

    Results that are alike count as 0, also where they are not finite. A difference of channels whose results are all 0,
    or of results of which only one is not finite, is infinite.
    """
    largest = [piece.largest for piece in pieces if piece.largest.size]
    peak = np.max(largest, axis=0) if largest else np.zeros(())
    found = []
    for piece, following in itertools.pairwise(pieces):
        n = min(len(piece.last), len(following.before))
        one, other = (rows[len(rows) - n :] for rows in (piece.last, following.before))
        found.append(_difference(one, other, peak))
    return found


def _difference(one: npt.NDArray, other: npt.NDArray, peak: npt.NDArray) -> float:
    if not one.size:
        return 0.0
    one, other = (_as_inexact(each) for each in (one, other))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(same, 0.0, np.abs(one - other) / peak)
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max())


def _as_inexact(values: npt.NDArray) -> npt.NDArray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


class SeamKeeper:
    """Collects the :class:`Seams` of a piece while its results pass by.

    Args:
        n_last: Results to keep of its end.
    """

    def __init__(self, n_last: int) -> None:
        self._n_last = n_last
        self._before: list[npt.NDArray] = []
        self._last: list[npt.NDArray] = []
        self._largest: npt.NDArray | None = None

    def take_before(self, rows: npt.NDArray) -> None:
        """Results of the margin, of shape (row, ...)."""
        self._before.append(np.array(rows))

    def take(self, rows: npt.NDArray) -> None:
        """Results of the piece, of shape (row, ...)."""
        if not len(rows):
            return
        if self._n_last:
            self._last.append(np.array(rows[-self._n_last :]))
            while sum(map(len, self._last[1:])) >= self._n_last:
                del self._last[0]
        largest = self._largest_of(rows)
        self._largest = largest if self._largest is None else np.maximum(self._largest, largest)

    def _largest_of(self, rows: npt.NDArray) -> npt.NDArray:
        if rows.dtype.kind not in "fiu":
            return np.abs(np.nan_to_num(rows)).max(axis=0).astype(np.float64)
        # Two reductions, which copy nothing, since this is done for all results.
        ends = np.array([np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0)], np.float64)
        if not np.isfinite(ends).all():
            rows = np.where(np.isfinite(rows), rows, 0)
            ends = np.array([rows.min(axis=0), rows.max(axis=0)], np.float64)
        return np.abs(ends).max(axis=0)

    def seams(self) -> Seams:
        """What has come by so far."""
        last = np.concatenate(self._last)[-self._n_last :] if self._last else np.zeros((0,))
        before = np.concatenate(self._before) if self._before else np.zeros((0,))
        largest = np.zeros((0,)) if self._largest is None else self._largest
        return Seams(before, last, largest)
