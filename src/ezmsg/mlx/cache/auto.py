"""A limit on MLX's buffer cache that finds itself: it follows the working set of the running stream.

There is one such limit in a process, since there is one cache; all nodes that ask for ``"auto"`` share it. It begins
with MLX's own limit on the CPU, 32 MiB, and with 512 MiB on a GPU. When the stream is steady it is measured: the cache
is emptied, so that it holds nothing but what the steady message leaves in it, and the most that is cached or in use in
:data:`N_MEASURED` messages, less what is in use all the time, is the working set. A cache that fills its limit
meanwhile gets one of twice the size, and is measured on. After a stall in the middle of that, it is emptied again, and
the count goes on. The stream is measured again when it has become steady at another length.

On a GPU messages overlap: when one begins, buffers of those before it are still in use, since the device has not come
to them, or since MLX has not heard yet that it has. So the limit has room for three messages: one that begins, one that
is computed, and one whose buffers come back. At a limit of one working set, each message would find that what it needs
has just been freed. What a stall has left goes by itself, since MLX drops there what was used least recently.

On the CPU a full cache does not take freed buffers. They go back to the system, and the pages of new ones have to be
zeroed again. So the limit is lifted in two cases: while the stream is measured, and for a message of another length,
which then finds its own buffers again. When the stream is steady again, the limit goes back to its value, and MLX drops
the buffers that were freed first, which are those of the stall.

Then the limit is lifted once more, to test whether the steady message still finds all buffers that it needs. If the
cache grows, the limit goes back and the test is repeated. If it grows again, the stream has changed: a stall may leave
something in a stage, like a part of a bin, that changes the sizes of its buffers. Then the stream is measured again.
"""

import math
import os
import weakref
from types import ModuleType
from typing import TypeAlias

import ezmsg.core as ez

from ..stream.convert import import_mlx
from ..stream.device import has_gpu_allocator
from ..stream.hostmemory import device_memory
from .guard import MIB, MLX_CPU_DEFAULT, CacheGuard

Shape: TypeAlias = tuple[int, ...]

N_QUIET = 4
"""So many messages of one length in a row are a steady stream."""

N_MEASURED = 12
"""For so many steady messages the cache is watched. In a graph, one message begins before the last one has left."""

LEAST_MB = 1.0
"""The least that is asked for."""

MARGIN = 1.25
"""The limit is so many times the working set, as the one that :mod:`ezmsg.mlx.plan` recommends."""

GPU_MARGIN = 3.0
"""The same on a GPU, where so many messages overlap."""

GPU_START_MB = 512.0

LIFTED_MB = 512.0
"""Limit on the CPU while it is lifted, or twice the limit where that is more: the default of a node."""

# In bytes. On the CPU the limit is lifted for a message of another length that is larger, as float32: glibc's malloc
# keeps what is freed, but for allocations above this size.
_LARGE = 32 * MIB

# It stays lifted for so many changes of the length until the stream is steady again. A stall is two.
_MOST_CHANGES = 8

# A measured limit that is this close to the one in force is not worth a change.
_CLOSE = 0.1

# A cache above this share of its limit counts as full: the next buffer may not fit.
_FULL = 0.9

# Largest share of the machine's memory that the limit goes up to.
_MOST = 0.25


class AutoLimit:
    """The limit of this process that nodes ask for with ``"auto"``. It is itself what asks the guard for it.

    Args:
        guard: Where the limit is applied.
    """

    def __init__(self, guard: CacheGuard) -> None:
        self.node_name = "auto"
        self.limit_mb = 0.0
        """Request in MiB, from the first message of the first node on."""

        self.working_set_mb: float | None = None
        """As measured last, in MiB. None before the first measurement."""

        self.nodes: dict[int, weakref.ref] = {}
        """Those that ask for it, by their ``id``."""

        self._guard = guard
        self._shapes: dict[int, Shape] = {}
        self._measured_shapes: dict[int, Shape] = {}
        self._disturbed = True
        self._n_quiet = self._n_left = self._n_changes = 0
        self._most = self._least_active = 0
        self._lifted_mb: float | None = None
        self._is_check = self._has_grown = False
        self._interrupted: tuple[dict[int, Shape], int, int] | None = None

    def apply(self, node: object, shape: Shape) -> None:
        """Take note of a message of *node*, whose data has this shape, and keep the limit in force."""
        if self._shapes.get(id(node)) == shape:
            self._n_quiet += 1
            if self._n_left > 0:
                self._measure()
            elif self._disturbed and self._n_quiet >= N_QUIET * len(self.nodes):
                self._begin()
        else:
            self._note(node, shape)
        self._guard.apply(self, self._asked_mb, is_passing=self._lifted_mb is not None)

    def forget(self, node: object) -> None:
        """No longer count *node*; without any, nothing is asked for."""
        self._forget(id(node))

    def _forget(self, key: int) -> None:
        # Also called by the garbage collector.
        self._shapes.pop(key, None)
        if self.nodes.pop(key, None) is not None and not self.nodes:
            self._guard.withdraw(self)
            # The next stream is another one.
            self.working_set_mb, self._measured_shapes, self._lifted_mb = None, {}, None

    def _note(self, node: object, shape: Shape) -> None:
        """Another shape than before: the stream is not steady, or not any more."""
        key = id(node)
        if not self.nodes:
            import_mlx()
            self.node_name = f"{getattr(node, 'node_name', None) or type(node).__name__} (auto)"
            self.limit_mb = GPU_START_MB if has_gpu_allocator() else MLX_CPU_DEFAULT / MIB
        if key not in self.nodes:
            self.nodes[key] = weakref.ref(node, lambda _: self._forget(key))
            # What it has asked for by a number.
            self._guard.withdraw(node)
        if self._n_left > 0 and not self._is_check:
            self._interrupted = dict(self._shapes), self._n_left, self._most
        if self._n_left > 0:
            # It was lifted for that.
            self._lower()
        self._shapes[key] = shape
        self._n_quiet = self._n_left = 0
        self._disturbed = True
        self._n_changes += 1
        if self._n_changes > _MOST_CHANGES:
            self._lower()
        elif self.working_set_mb is not None and 4 * math.prod(shape) > _LARGE and not has_gpu_allocator():
            self._lift()

    def _begin(self) -> None:
        """The stream is steady: measure, if at other lengths than before; else see whether the limit still holds it."""
        if self._guard.leaves_cache_alone or (not has_gpu_allocator() and self._is_overruled(self.limit_mb)):
            return
        self._disturbed, self._n_changes = False, 0
        self._is_check = self._measured_shapes == self._shapes
        if not self._is_check:
            self._start()
        elif not has_gpu_allocator():
            # MLX drops what was freed first. The steady messages have used their buffers since.
            self._lower()
            self._n_left, self._has_grown = N_MEASURED * len(self.nodes), False

    def _start(self) -> None:
        """Empty the cache, and watch it."""
        mx = import_mlx()
        self._is_check = False
        if has_gpu_allocator():
            # What is in use when nothing is under way: no part of what goes round.
            mx.synchronize()
        else:
            self._lift()
        self._least_active = _active(mx)
        mx.clear_cache()
        self._n_left, self._most = N_MEASURED * len(self.nodes), 0
        if self._interrupted is not None and self._interrupted[0] == self._shapes:
            # Where stalls come often, no steady stretch is long enough.
            _, self._n_left, self._most = self._interrupted
        self._interrupted = None

    def _measure(self) -> None:
        if self._guard.leaves_cache_alone:
            return
        mx = import_mlx()
        active = _active(mx)
        self._least_active = min(self._least_active, active)
        used = active + mx.get_cache_memory() - self._least_active
        self._n_left -= 1
        if self._is_check:
            self._check(used)
            return
        self._most = max(self._most, used)
        if self._fills(self._most) and self._may_grow():
            self._grow()
            self._n_left = N_MEASURED * len(self.nodes)
        if self._n_left == 0:
            self._settle()

    def _check(self, used: int) -> None:
        """On the CPU, after a stall: a cache that grows does not hold what the steady message needs."""
        if self._lifted_mb is None:
            self._lift()
            self._most = used
        elif self._n_left == 0:
            has_grown = used > self._most + _CLOSE * self.limit_mb * MIB
            self._lower()
            if has_grown and not self._has_grown:
                # By what had to go for the rest of the stall, if the limit holds all; then it does not happen again.
                self._n_left, self._has_grown = N_MEASURED * len(self.nodes), True
            elif has_grown:
                self._start()

    def _settle(self) -> None:
        """The stream is measured: the limit follows."""
        # Which buffers are free at the same time is a matter of chance, too: the most that has been seen counts.
        known_mb = self.working_set_mb or 0.0 if self._measured_shapes == self._shapes else 0.0
        self._measured_shapes, self.working_set_mb = dict(self._shapes), None
        fills, filled_mb = self._fills(self._most), self._asked_mb
        self._lower()
        if fills:
            # How large the working set is cannot be seen.
            if filled_mb > self.limit_mb:
                self._change(filled_mb, "the cache is full with steady messages alone")
            return
        self.working_set_mb = max(self._most / MIB, known_mb)
        margin = GPU_MARGIN if has_gpu_allocator() else MARGIN
        wanted = min(max(float(math.ceil(margin * self.working_set_mb)), LEAST_MB), _most_mb())
        if abs(wanted - self.limit_mb) > _CLOSE * self.limit_mb:
            self._change(wanted, f"the working set of the running stream is {self.working_set_mb:.1f} MiB")

    def _grow(self) -> None:
        if self._lifted_mb is None:
            self._change(min(2.0 * self.limit_mb, _most_mb()), "the cache is full with steady messages alone")
        else:
            self._lifted_mb = min(2.0 * self._lifted_mb, _most_mb())

    def _lift(self) -> None:
        self._lifted_mb = min(max(LIFTED_MB, 2.0 * self.limit_mb), _most_mb())

    def _lower(self) -> None:
        self._lifted_mb = None

    def _change(self, limit_mb: float, why: str) -> None:
        ez.logger.info(f"{self.node_name}: {self.limit_mb:g} MiB -> {limit_mb:g} MiB, since {why}.")
        self.limit_mb = limit_mb

    @property
    def _asked_mb(self) -> float:
        return self.limit_mb if self._lifted_mb is None else self._lifted_mb

    def _fills(self, cache: int) -> bool:
        return cache >= _FULL * self._asked_mb * MIB

    def _may_grow(self) -> bool:
        return self._asked_mb < _most_mb() and not self._is_overruled(self._asked_mb)

    def _is_overruled(self, asked_mb: float) -> bool:
        # Where a tighter limit is in force, asking for more would change nothing.
        in_force = self._guard.source.limit_mb
        return in_force is not None and in_force < asked_mb


def _active(mx: ModuleType) -> int:
    """Bytes in use, without the memory of messages and results: that is used again without going through the cache."""
    active: int = mx.get_active_memory()
    return active - device_memory().use().kept


def _most_mb() -> float:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 16 * GPU_START_MB
    return max(_MOST * memory / MIB, GPU_START_MB)
