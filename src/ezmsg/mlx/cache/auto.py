"""A limit on MLX's buffer cache that finds itself: it follows the working set of the running stream.

There is one such limit in a process, since there is one cache; all nodes that ask for ``"auto"`` share it. It begins
with MLX's own limit on the CPU, 32 MiB, and with 512 MiB on a GPU. When the stream is steady it is measured: the cache
is emptied, so that it holds nothing but what the steady message leaves in it, and the most that it has held after
:data:`N_MEASURED` messages is the working set. A cache that fills its limit meanwhile gets one of twice the size, and
is measured on. After a stall in the middle of that, it is emptied again, and the count goes on.

On a GPU messages overlap: when one begins, buffers of those before it are still in use, since the device has not come
to them, or since MLX has not heard yet that it has. So they count, too, and the limit has room for three messages: one
that begins, one that is computed, and one whose buffers come back. At a limit of one working set, each message would
find that what it needs has just been freed.

The stream is measured again when it has become steady at another length. On the CPU it is also measured again when a
stall has passed that left the cache full: a full cache turns away there what is freed, so what a stall has left would
keep the place of the steady message's buffers for good.

On the CPU the limit stays at MLX's own as long as the working set fits into it: from 30 to 9000 samples of 64 to 1024
channels a larger one did not make the example chain faster there. Beyond, it did.
"""

import math
import os
import weakref
from typing import TypeAlias

import ezmsg.core as ez

from ..stream.convert import import_mlx
from ..stream.device import has_gpu_allocator
from .guard import CacheGuard
from .limit import MIB, MLX_CPU_DEFAULT

Shape: TypeAlias = tuple[int, ...]

N_QUIET = 4
"""So many messages of one length in a row are a steady stream."""

N_MEASURED = 12
"""For so many steady messages the cache is watched. In a graph, one message begins before the last one has left."""

MARGIN = 1.25
"""The limit is so many times the working set, as the one that :mod:`ezmsg.mlx.plan` recommends."""

GPU_MARGIN = 3.0
"""The same on a GPU, where so many messages overlap."""

GPU_START_MB = 512.0

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
        """What is asked for, in MiB; from the first message of the first node on."""

        self.working_set_mb: float | None = None
        """As measured last, in MiB. None before the first measurement."""

        self.nodes: dict[int, weakref.ref] = {}
        """Those that ask for it, by their ``id``."""

        self._guard = guard
        self._shapes: dict[int, Shape] = {}
        self._measured_shapes: dict[int, Shape] = {}
        self._disturbed = True
        self._n_quiet = self._n_left = 0
        self._most = self._least_active = 0
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
        self._guard.apply(self, self.limit_mb)

    def forget(self, node: object) -> None:
        """No longer count *node*; without any, nothing is asked for."""
        self._forget(id(node))

    def _forget(self, key: int) -> None:
        # Also called by the garbage collector.
        self._shapes.pop(key, None)
        if self.nodes.pop(key, None) is not None and not self.nodes:
            self._guard.withdraw(self)
            # The next stream is another one.
            self.working_set_mb, self._measured_shapes = None, {}

    def _note(self, node: object, shape: Shape) -> None:
        """Another shape than before: the stream is not steady, or not any more."""
        key = id(node)
        if not self.nodes:
            import_mlx()
            self.node_name = f"{getattr(node, 'node_name', None) or type(node).__name__} (auto)"
            self.limit_mb = GPU_START_MB if has_gpu_allocator() else _floor_mb()
        if key not in self.nodes:
            self.nodes[key] = weakref.ref(node, lambda _: self._forget(key))
            # What it has asked for by a number.
            self._guard.withdraw(node)
        if self._n_left > 0:
            self._interrupted = dict(self._shapes), self._n_left, self._most
        self._shapes[key] = shape
        self._n_quiet = self._n_left = 0
        self._disturbed = True

    def _begin(self) -> None:
        """The stream is steady: measure, if at other lengths than before, or if a stall has filled the cache."""
        if self._guard.leaves_cache_alone:
            return
        self._disturbed = False
        mx = import_mlx()
        if self._measured_shapes == self._shapes and (has_gpu_allocator() or not self._fills(mx.get_cache_memory())):
            # On a GPU a full cache drops what was used least recently, and that is what the stall has left.
            return
        if has_gpu_allocator():
            # What is in use when nothing is under way: no part of what goes round.
            mx.synchronize()
            self._least_active = mx.get_active_memory()
        mx.clear_cache()
        self._start()
        if self._interrupted is not None and self._interrupted[0] == self._shapes:
            # Where stalls come often, no steady stretch is long enough.
            _, self._n_left, self._most = self._interrupted
        self._interrupted = None

    def _start(self) -> None:
        self._n_left = N_MEASURED * len(self.nodes)
        self._most = 0

    def _measure(self) -> None:
        if self._guard.leaves_cache_alone:
            return
        mx = import_mlx()
        if has_gpu_allocator():
            active = mx.get_active_memory()
            self._least_active = min(self._least_active, active)
            self._most = max(self._most, active + mx.get_cache_memory() - self._least_active)
        else:
            self._most = max(self._most, mx.get_cache_memory())
        self._n_left -= 1
        if self._fills(self._most) and self._may_grow() and not self._is_known(self._most):
            self._change(min(2.0 * self.limit_mb, _most_mb()), "the cache is full with steady messages alone")
            self._start()
        if self._n_left > 0:
            return
        if self._is_known(self._most):
            return
        self._measured_shapes, self.working_set_mb = dict(self._shapes), None
        if self._fills(self._most):
            # How large the working set is cannot be seen.
            return
        self.working_set_mb = self._most / MIB
        margin = GPU_MARGIN if has_gpu_allocator() else MARGIN
        wanted = min(max(float(math.ceil(margin * self.working_set_mb)), _floor_mb()), _most_mb())
        if abs(wanted - self.limit_mb) > _CLOSE * self.limit_mb:
            self._change(wanted, f"the working set of the running stream is {self.working_set_mb:.1f} MiB")

    def _change(self, limit_mb: float, why: str) -> None:
        ez.logger.info(f"{self.node_name}: {self.limit_mb:g} MiB -> {limit_mb:g} MiB, since {why}.")
        self.limit_mb = limit_mb

    def _fills(self, cache: int) -> bool:
        if cache >= _FULL * self.limit_mb * MIB:
            return True
        if has_gpu_allocator():
            return False
        # On the CPU a buffer that does not fit is not admitted, so large ones leave a cache that is never full. Where
        # MLX's own limit holds two, it will do.
        largest = 4 * max(map(math.prod, self._shapes.values()), default=0)
        return largest > MLX_CPU_DEFAULT / 2 and cache + largest > self.limit_mb * MIB

    def _is_known(self, cache: int) -> bool:
        """Whether the cache holds all of the working set that was measured at these lengths."""
        if self.working_set_mb is None or self._measured_shapes != self._shapes:
            return False
        return self.working_set_mb <= self.limit_mb and cache >= (1.0 - _CLOSE) * self.working_set_mb * MIB

    def _may_grow(self) -> bool:
        # Where a tighter limit is in force, asking for more would change nothing.
        in_force = self._guard.source.limit_mb
        return self.limit_mb < _most_mb() and (in_force is None or in_force >= self.limit_mb)


def _floor_mb() -> float:
    """The least that is asked for: MLX's own limit on the CPU; on a GPU, where that is the machine, as good as none."""
    return 1.0 if has_gpu_allocator() else MLX_CPU_DEFAULT / MIB


def _most_mb() -> float:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 16 * GPU_START_MB
    return max(_MOST * memory / MIB, GPU_START_MB)
