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


class Mean(nn.Module):
    """The mean of a window, through a layer that begins as one that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.layer.weight = mx.eye(8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x.mean(axis=1))
