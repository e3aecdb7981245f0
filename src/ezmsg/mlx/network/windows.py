"""Windows of a stream, the same ones however the stream is cut into messages, in batches of a few sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mlx.core as mx

Samples: TypeAlias = "npt.NDArray[np.float32] | mx.array"
"""float32 of shape (time, features)."""

PADDING = 0.0
"""Value in the rows of a batch that have no window. No result depends on it."""


class Waiting(NamedTuple):
    """Where a stream stands between two messages."""

    samples: Samples | None = None
    """Those from the start of the next window on, in memory of their own; None: there are none."""
    n_skipped: int = 0
    """Samples before the start of the next window that have not come yet."""

    @property
    def start(self) -> int:
        """The start of the next window, counted from the first sample of the next message."""
        return self.n_skipped if self.samples is None else -len(self.samples)


class Batch(NamedTuple):
    """Windows for one call of a model."""

    windows: Samples
    """float32 of shape (batch, window, features), of which the first :attr:`n_windows` are windows."""
    n_windows: int


def batches(n_windows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many windows to take at a time, and the batch size for them: the smallest that holds the last ones."""
    ascending = sorted(sizes)
    while n_windows > 0:
        size = next((size for size in ascending if size >= n_windows), ascending[-1])
        yield min(n_windows, size), size
        n_windows -= size


class Cut(NamedTuple):
    """The windows that a message completes, and what is left."""

    waiting: Samples | None
    data: Samples
    start: int
    """Of the first window, counted from the first sample of the message."""
    n_windows: int
    window: int
    hop: int

    @classmethod
    def of(cls, waiting: Waiting, data: Samples, window: int, hop: int) -> Cut:
        """The windows that *data* completes, of *window* samples every *hop* samples."""
        start = waiting.start
        n_windows = max((len(data) - start - window) // hop + 1, 0)
        return cls(waiting.samples, data, start, n_windows, window, hop)

    def batches(self, sizes: Sequence[int]) -> Iterator[Batch]:
        """The windows, in order."""
        begin = self.start
        for n_windows, size in batches(self.n_windows, sizes):
            n_samples, n_filled = (n_windows - 1) * self.hop + self.window, (size - 1) * self.hop + self.window
            yield Batch(self._strided(self._between(begin, begin + n_samples, n_filled), size), n_windows)
            begin += n_windows * self.hop

    def rest(self) -> Waiting:
        """Where the stream stands after the message."""
        start = self.start + self.n_windows * self.hop
        if start >= len(self.data):
            return Waiting(None, start - len(self.data))
        return Waiting(_copied(self._between(start, len(self.data))))

    def _between(self, begin: int, end: int, n_filled: int = 0) -> Samples:
        """Samples *begin* to *end*, counted from the first of the message, with padding up to *n_filled*."""
        parts = []
        if begin < 0:
            assert self.waiting is not None
            parts.append(self.waiting[len(self.waiting) + begin : len(self.waiting) + min(end, 0)])
        if end > 0:
            parts.append(self.data[max(begin, 0) : end])
        if n_filled > end - begin:
            parts.append(_padding(self.data, n_filled)[: n_filled - (end - begin)])
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _strided(self, samples: Samples, size: int) -> Samples:
        n_features = samples.shape[1]
        if size == 1:
            return samples[None]
        if self.hop == self.window:
            return samples.reshape(size, self.window, n_features)
        shape, strides = (size, self.window, n_features), (self.hop * n_features, n_features, 1)
        if isinstance(samples, np.ndarray):
            samples = np.ascontiguousarray(samples)
            return np.lib.stride_tricks.as_strided(samples, shape, [4 * stride for stride in strides], writeable=False)
        import mlx.core as mx

        return mx.as_strided(samples, shape, strides)


def _joined(parts: list[Samples]) -> Samples:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import mlx.core as mx

    return mx.concatenate(parts)  # type: ignore[arg-type]


def _copied(samples: Samples) -> Samples:
    """In memory of their own: ezmsg uses that of a message again, and a view of an MLX array keeps all of it."""
    if isinstance(samples, np.ndarray):
        return np.array(samples)
    import mlx.core as mx

    return mx.concatenate([samples[:0], samples])


def _padding(like: Samples, n_rows: int) -> Samples:
    if isinstance(like, np.ndarray):
        return np.full((n_rows, like.shape[1]), PADDING, np.float32)
    return _mlx_padding(n_rows, like.shape[1], PADDING)


@functools.lru_cache(maxsize=16)
def _mlx_padding(n_rows: int, n_features: int, value: float) -> mx.array:
    import mlx.core as mx

    made = mx.full((n_rows, n_features), value)
    mx.eval(made)
    return made
