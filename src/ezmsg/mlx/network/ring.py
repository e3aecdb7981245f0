"""Attention over the last samples of a stream, with keys and values in a ring of a fixed size.

A cache that grows with its context has another shape at each step: more memory, more time, and a buffer of another size
in MLX's cache. The ring has one shape. Positions count from the sample that attends backwards, so that step 100 000 is
computed as exactly as step 1.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..stream.unit import check_one_of

Positions = Literal["rotary", "learned"]
"""How attention knows which sample came when."""


class RingState(NamedTuple):
    """Keys and values of the last samples, and how many samples there were."""

    keys: mx.array
    """(batch, head, size, head_dim); sample *i* is in place ``i % size``."""
    values: mx.array
    """The same."""
    n_seen: mx.array
    """int32: samples so far; from a multiple of *size* on it goes on counting at *size*, which means the same."""


class RingKVCache:
    """Keys and values of the last *size* samples, for attention whose time and memory do not grow.

    Args:
        size: Samples that are attended to, the present one included.
        n_heads: Heads of keys and values.
        head_dim: Features of a head; even for rotary positions.
        positions: ``"rotary"`` (Su et al., arXiv 2104.09864): keys are turned by their age when they are read, so that
            angles stay small. ``"learned"``: the model adds an embedding to each sample, number :meth:`places`; keys
            stay as they are. Both give the results of full attention over the last *size* samples.
        base: Of the frequencies of rotary positions.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx.network import RingKVCache
        >>> cache = RingKVCache(size=64, n_heads=2, head_dim=8)
        >>> one = mx.ones((1, 2, 1, 8))
        >>> y, state = cache.attend(one, one, one, cache.zero_state(1))
        >>> y.shape, state.keys.shape
        ((1, 2, 1, 8), (1, 2, 64, 8))
    """

    def __init__(
        self, size: int, n_heads: int, head_dim: int, positions: Positions = "rotary", base: float = 10000.0
    ) -> None:
        if size < 1:
            raise ValueError(f"'size' must be an integer of at least 1, got {size!r}")
        check_one_of("positions", positions, ("rotary", "learned"))
        if positions == "rotary" and head_dim % 2:
            raise ValueError(f"'head_dim' must be even for rotary positions, got {head_dim!r}")
        self.size, self.n_heads, self.head_dim, self.positions, self.base = size, n_heads, head_dim, positions, base

    def zero_state(self, n_rows: int, dtype: mx.Dtype = mx.float32) -> RingState:
        """The state before the first sample, for a batch of *n_rows*."""
        shape = (n_rows, self.n_heads, self.size, self.head_dim)
        return RingState(mx.zeros(shape, dtype), mx.zeros(shape, dtype), mx.array(0, mx.int32))

    def places(self, state: RingState, n_samples: int) -> mx.array:
        """The places in the ring of the next samples, (n_samples,): the numbers of their learned positions.

        They go around: after *size* samples, the positions are those of the first ones again, each as far from the
        others as before, counted around the ring. A model that is to know distances exactly takes rotary positions.
        """
        return (state[2] + mx.arange(n_samples)) % self.size

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, state: RingState
    ) -> tuple[mx.array, RingState]:
        """Attention of the next samples to the last *size* ones, themselves included.

        Args:
            queries: (batch, head, samples, head_dim); as many heads as keys, or a multiple.
            keys: (batch, head, samples, head_dim).
            values: The same.
            state: Before these samples; it is not changed.

        Returns:
            The results, of the shape of *queries*, and the state after these samples.

        Raises:
            ValueError: There are more samples than the ring holds.
        """
        n_new, size = keys.shape[2], self.size
        if n_new > size:
            raise ValueError(f"'keys' must be of at most {size} samples at once, the size of the ring, got {n_new}")
        old_keys, old_values, n_seen = state
        # Old places first, then the new samples: how long before the first new one each was.
        ages = mx.concatenate([(n_seen - 1 - mx.arange(size)) % size + 1, -mx.arange(n_new)])
        is_there = mx.concatenate([ages[:size] <= n_seen, mx.ones(n_new, mx.bool_)])
        before = mx.arange(n_new)[:, None] + ages[None, :]
        mask = is_there[None, :] & (before >= 0) & (before < size)
        all_keys, all_values = mx.concatenate([old_keys, keys], axis=2), mx.concatenate([old_values, values], axis=2)
        if self.positions == "rotary":
            queries, all_keys = self._turned(queries, -mx.arange(n_new)), self._turned(all_keys, ages)
        y = mx.fast.scaled_dot_product_attention(
            queries, all_keys, all_values, scale=1.0 / math.sqrt(self.head_dim), mask=mask
        )
        places = (n_seen + mx.arange(n_new)) % size
        n_seen = n_seen + n_new
        n_seen = mx.where(n_seen >= 2 * size, n_seen - size, n_seen)
        return y, RingState(_put(old_keys, keys, places), _put(old_values, values, places), n_seen)

    def _turned(self, x: mx.array, ages: mx.array) -> mx.array:
        """*x* (..., samples, head_dim), each sample turned by its age: halves of the features are pairs."""
        half = self.head_dim // 2
        rates = mx.array((self.base ** (-np.arange(half) / half)).astype(np.float32))
        angles = -ages.astype(mx.float32)[:, None] * rates
        cos, sin = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        one, other = x[..., :half], x[..., half:]
        return mx.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def _put(ring: mx.array, new: mx.array, places: mx.array) -> mx.array:
    """*ring* with *new* samples in *places*."""
    index = mx.broadcast_to(places[None, None, :, None], new.shape)
    return mx.put_along_axis(ring, index, new.astype(ring.dtype), axis=2)


class RingAttention(nn.Module):
    """Self-attention of a stream to its last samples, with a state.

    Args:
        dims: Features of a sample.
        n_heads: Heads, of ``dims / n_heads`` features each.
        size: Samples that are attended to, the present one included.
        positions: As of :class:`RingKVCache`.

    Example:
        >>> import mlx.core as mx
        >>> from ezmsg.mlx.network import RingAttention
        >>> attention = RingAttention(32, n_heads=4, size=128)
        >>> y, state = attention(mx.zeros((1, 1, 32)))
        >>> y, state = attention(mx.zeros((1, 1, 32)), state)
        >>> y.shape
        (1, 1, 32)
    """

    def __init__(self, dims: int, n_heads: int, size: int, positions: Positions = "rotary") -> None:
        super().__init__()
        if dims % n_heads:
            raise ValueError(f"'n_heads' must be a divisor of 'dims', {dims}, got {n_heads!r}")
        self.query_proj, self.key_proj = nn.Linear(dims, dims, bias=False), nn.Linear(dims, dims, bias=False)
        self.value_proj, self.out_proj = nn.Linear(dims, dims, bias=False), nn.Linear(dims, dims, bias=False)
        self.cache = RingKVCache(size, n_heads, dims // n_heads, positions)

    def __call__(self, x: mx.array, state: RingState | None = None) -> tuple[mx.array, RingState]:
        """The results of the next samples, (batch, time, dims), and the state after them; None: before the first."""
        n_rows, n_samples, dims = x.shape
        if state is None:
            state = self.cache.zero_state(n_rows, x.dtype)

        def heads(of: nn.Linear) -> mx.array:
            return of(x).reshape(n_rows, n_samples, self.cache.n_heads, -1).swapaxes(1, 2)

        y, state = self.cache.attend(heads(self.query_proj), heads(self.key_proj), heads(self.value_proj), state)
        return self.out_proj(y.swapaxes(1, 2).reshape(n_rows, n_samples, dims)), state
