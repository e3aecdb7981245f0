"""A stand-in for MLX's allocators, so that the rules of the cache limit can be tested on both kinds."""

import collections
import sys
import types
from collections import Counter
from collections.abc import Sequence

import pytest

from ezmsg.mlx import cache
from ezmsg.mlx.cache import MIB, auto
from ezmsg.mlx.cache.auto import AutoLimit
from ezmsg.mlx.cache.guard import MLX_CPU_DEFAULT, CacheGuard
from ezmsg.mlx.stream.hostmemory import Block, HostMemory

GPU_DEFAULT = 130_000 * MIB


class Node:
    def __init__(self, name: str | None = None) -> None:
        self.node_name = name


class Allocator(types.ModuleType):
    """Stands for ``mlx.core``: the cache of its CPU or GPU allocator, and a count of the calls."""

    def __init__(self, gpu: bool) -> None:
        super().__init__("mlx.core")
        self.gpu = gpu
        self.limit = GPU_DEFAULT if gpu else MLX_CPU_DEFAULT
        self.cached = 0
        self.of_shape: dict[tuple[int, ...], int] = {}
        """By the shape of the message whose buffers they are; what was freed last comes last."""

        self.n_missed = 0
        """Bytes that messages have not found in the cache."""

        self.peak = 0
        self.calls: Counter[str] = Counter()
        self.metal = types.SimpleNamespace(is_available=lambda: self.is_available(False))
        self.cuda = types.SimpleNamespace(is_available=lambda: self.is_available(gpu))

    @property
    def limit_mb(self) -> float:
        return self.limit / MIB

    def is_available(self, answer: bool) -> bool:
        self.calls["is_available"] += 1
        return answer

    def set_cache_limit(self, limit: int) -> int:
        assert type(limit) is int
        self.calls["set_cache_limit"] += 1
        old, self.limit = self.limit, limit
        if not self.gpu:
            # A GPU allocator trims at its next allocation instead.
            excess = max(self.cached - limit, 0)
            self.cached -= excess
            for shape, held in self.of_shape.items():
                dropped = min(held, excess)
                self.of_shape[shape], excess = held - dropped, excess - dropped
        return old

    def get_cache_memory(self) -> int:
        self.calls["get_cache_memory"] += 1
        return self.cached

    def get_peak_memory(self) -> int:
        self.calls["get_peak_memory"] += 1
        return self.peak

    def get_active_memory(self) -> int:
        self.calls["get_active_memory"] += 1
        return 0

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def clear_cache(self) -> None:
        self.calls["clear_cache"] += 1
        self.cached = 0
        self.of_shape.clear()

    def free(self, mib: float) -> None:
        """A buffer is freed, and cached if the limit has room for it (on a GPU: for its first byte)."""
        n_bytes = int(mib * MIB)
        self.peak = max(self.peak, n_bytes)
        if self.cached + (0 if self.gpu else n_bytes) <= self.limit:
            self.cached += n_bytes

    def leave(self, shape: tuple[int, ...], mib: float) -> None:
        """A message of this shape has left so many MiB: its buffers are found again, as far as they are there."""
        owned = self.of_shape[shape] = min(self.of_shape.pop(shape, 0), self.cached)
        n_bytes = int(mib * MIB)
        self.n_missed += max(n_bytes - owned, 0)
        if self.gpu and self.cached - owned + n_bytes > self.limit:
            # What was used least recently goes.
            self.of_shape = {shape: min(n_bytes, self.limit)}
            self.cached = self.of_shape[shape]
            return
        added = min(max(n_bytes - owned, 0), max(self.limit - self.cached, 0))
        self.of_shape[shape] += added
        self.cached += added

    def held(self, shape: tuple[int, ...]) -> int:
        """What the cache holds of messages of this shape, in bytes."""
        return self.of_shape.get(shape, 0)

    def set_outside(self, limit_mb: float) -> None:
        self.limit = int(limit_mb * MIB)


class OverlappingMessages(Allocator):
    """The allocator of a GPU on which the buffers of a message come back while a later one is computed.

    Args:
        lag: So many messages later, 0: with its own end.
        sizes: Of the buffers that a message takes, in MiB.
        live: What is in use all the time, in MiB.
        back_at: The share of its buffers that a message has taken when those of an earlier one come back.
    """

    def __init__(self, lag: int, sizes: Sequence[float], live: float = 0.0, back_at: float = 0.5) -> None:
        super().__init__(gpu=True)
        self.lag, self.sizes = lag, [int(size * MIB) for size in sizes]
        self._back_at = int(back_at * len(sizes))
        self.n_misses = 0
        self._live = int(live * MIB)
        self._in_use: collections.deque[list[int]] = collections.deque()
        self._free: list[int] = []

    @property
    def working_set(self) -> int:
        return sum(self.sizes)

    def get_active_memory(self) -> int:
        return self._live + sum(map(sum, self._in_use))

    def synchronize(self) -> None:
        super().synchronize()
        self._give_back(0)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._free.clear()

    def compute(self, scale: float = 1.0) -> None:
        """One message, whose buffers are larger by *scale* than those of the steady one."""
        sizes = [int(scale * size) for size in self.sizes]
        for number, size in enumerate(sizes):
            if number == self._back_at:
                self._give_back(self.lag - 1)
            self._take(size)
        self._in_use.append(sizes)
        if self.lag == 0:
            self._give_back(0)
        self.cached = sum(self._free)

    def _give_back(self, n_kept: int) -> None:
        while len(self._in_use) > max(n_kept, 0):
            self._free += self._in_use.popleft()

    def _take(self, size: int) -> None:
        while sum(self._free) > self.limit:
            # What was used least recently goes.
            self._free.pop(0)
        if size in self._free:
            self._free.remove(size)
        else:
            self.n_misses += 1


def stand_in(monkeypatch: pytest.MonkeyPatch, gpu: bool, mlx: Allocator | None = None) -> Allocator:
    mlx = mlx or Allocator(gpu)
    package = types.ModuleType("mlx")
    package.core = mlx
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", mlx)
    # What other tests have left there may go at any time.
    monkeypatch.setattr(auto, "device_memory", lambda: HostMemory(Block))
    guard = CacheGuard()
    monkeypatch.setattr(cache, "_GUARD", guard)
    monkeypatch.setattr(cache, "_AUTO", AutoLimit(guard))
    return mlx
