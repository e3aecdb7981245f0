"""Models for tests of units."""

import mlx.core as mx
import mlx.nn as nn


class Doubled(nn.Module):
    """Twice what it is given, without weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2.0 * x


class Counting(nn.Module):
    """The sum of all that it has been given."""

    def __call__(self, x: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
        state = x.sum(axis=1) if state is None else state + x.sum(axis=1)
        return state, state
