"""A stand-in for MLX's allocators, so that the rules of the cache limit can be tested on both kinds."""

import sys
import types
from collections import Counter

import pytest

from ezmsg.mlx import cache
from ezmsg.mlx.cache import MIB
from ezmsg.mlx.cache.auto import AutoLimit
from ezmsg.mlx.cache.guard import CacheGuard
from ezmsg.mlx.cache.limit import MLX_CPU_DEFAULT

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
            self.cached = min(self.cached, limit)
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
        owned = self.of_shape[shape] = min(self.of_shape.get(shape, 0), self.cached)
        n_bytes = int(mib * MIB)
        if self.gpu and self.cached - owned + n_bytes > self.limit:
            # What was used least recently goes.
            self.of_shape = {shape: min(n_bytes, self.limit)}
            self.cached = self.of_shape[shape]
            return
        added = min(n_bytes - owned, max(self.limit - self.cached, 0))
        self.of_shape[shape] += added
        self.cached += added

    def held(self, shape: tuple[int, ...]) -> int:
        """What the cache holds of messages of this shape, in bytes."""
        return self.of_shape.get(shape, 0)

    def set_outside(self, limit_mb: float) -> None:
        self.limit = int(limit_mb * MIB)


def stand_in(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> Allocator:
    mlx = Allocator(gpu)
    package = types.ModuleType("mlx")
    package.core = mlx
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", mlx)
    guard = CacheGuard()
    monkeypatch.setattr(cache, "_GUARD", guard)
    monkeypatch.setattr(cache, "_AUTO", AutoLimit(guard))
    return mlx
