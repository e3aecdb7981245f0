"""Who fills MLX's buffer cache: the message lengths that each converting node has met."""

from __future__ import annotations

import collections
import math
import statistics
import sys
import threading
import weakref
from collections.abc import Iterable

import ezmsg.core as ez
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ..cache import MIB
from ..stream.device import gpu_backend
from ..stream.plancaches import plan_caches
from .shapereport import LengthUse, NodeShapes, ShapeReport, plans_in_words

WARN_AT_LENGTHS = 32
"""A node that has met so many lengths is warned about, once in the process."""

MOST_SHAPES = 4096
"""So many shapes of a node are kept apart; messages of further ones are counted together."""

# Where nothing was measured: the input, and one result as large.
_BYTES_IN_CACHE_PER_BYTE = 2.0


class ShapeCounts:
    """The message shapes of one node.

    Whoever counts adds 1 to ``seen[shape][0]`` itself, since that is to cost next to nothing, and calls :meth:`add` for
    a shape that is not there.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self.lengths: dict[tuple[int, ...], int] = {}
        self.n_bytes: dict[tuple[int, ...], int] = {}
        self.n_not_kept = 0

    def add(self, message: AxisArray) -> None:
        """Count a message of a shape that the caller does not know to have been seen."""
        shape = tuple(message.data.shape)
        if shape in self.seen:
            self.seen[shape][0] += 1
            return
        if len(self.seen) >= MOST_SHAPES:
            self.n_not_kept += 1
            return
        n_samples = shape[message.get_axis_idx(resolve_stream_dim(message))] if message.dims else 1
        # Arrays of other libraries may not tell their size; most samples have four bytes.
        n_bytes = getattr(message.data, "nbytes", 4 * math.prod(shape))
        self.lengths[shape], self.n_bytes[shape] = n_samples, n_bytes
        self.seen[shape] = [1]
        if n_samples:
            _REGISTRY.first_of(self, shape)


class _Registry:
    """All nodes of this process, and the order in which they met new shapes."""

    def __init__(self) -> None:
        self.nodes: weakref.WeakSet[ShapeCounts] = weakref.WeakSet()
        self.compiled: weakref.WeakKeyDictionary[object, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._growth: weakref.WeakKeyDictionary[ShapeCounts, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
        self._last: tuple[weakref.ref[ShapeCounts], tuple[int, ...], int] | None = None
        self._has_warned = False
        self._lock = threading.Lock()

    def first_of(self, counts: ShapeCounts, shape: tuple[int, ...]) -> None:
        with self._lock:
            # What has been added to the cache since the last new shape came is its work: others find their buffers.
            self._note_growth()
            self._last = (weakref.ref(counts), shape, _cache_memory())
        if counts in self.nodes and len(counts.seen) >= WARN_AT_LENGTHS and not self._has_warned:
            self._warn(counts)

    def _note_growth(self) -> None:
        if self._last is None:
            return
        node, shape, before = self._last
        if (counts := node()) is not None:
            self._growth.setdefault(counts, {})[shape] = _cache_memory() - before

    def _warn(self, counts: ShapeCounts) -> None:
        node = self.report_of(counts)
        if node.n_lengths < WARN_AT_LENGTHS:
            return
        self._has_warned = True
        steady = node.steady
        worst = [use for use in node.lengths if use is not steady][:3]
        named = ", ".join(f"{use.length} samples ({use.estimate_mb:.1f} MiB)" for use in worst)
        text = (
            f"{node.node} has met {node.n_lengths} message lengths, {len(node.once)} of them once. Each leaves buffers "
            f"in MLX's cache; by estimate most of them {named}. Rechunk in front of it, with "
            f"RechunkSettings(sizes={node.rechunk_sizes}), leaves {len(node.rechunk_sizes)}."
        )
        if gpu_backend() == "cuda":
            text += f" FFTs and convolutions take a plan for each length, too: {plans_in_words(plan_caches())}"
        ez.logger.warning(text)

    def report_of(self, counts: ShapeCounts) -> NodeShapes:
        with self._lock:
            self._note_growth()
            growth = dict(self._growth.get(counts, {}))
        seen = counts.seen.copy()
        ratios = [grown / counts.n_bytes[shape] for shape, grown in growth.items() if grown > 0 < counts.n_bytes[shape]]
        ratio = statistics.median(ratios) if ratios else _BYTES_IN_CACHE_PER_BYTE
        n_messages: collections.Counter[int] = collections.Counter()
        n_bytes: collections.Counter[int] = collections.Counter()
        for shape, (count,) in seen.items():
            if length := counts.lengths[shape]:
                n_messages[length] += count
                grown = growth.get(shape, 0)
                n_bytes[length] += grown if grown > 0 else round(ratio * counts.n_bytes[shape])
        uses = (LengthUse(length, n_messages[length], n_bytes[length] / MIB) for length in n_messages)
        return NodeShapes(
            counts.node,
            sum(n_messages.values()) + counts.n_not_kept,
            tuple(sorted(uses, key=lambda use: use.estimate_mb, reverse=True)),
            counts.n_not_kept,
        )


_REGISTRY = _Registry()


def count_shapes(node: str) -> ShapeCounts:
    """Counts for a node of this name, which :func:`shape_report` tells as long as they are referred to."""
    counts = ShapeCounts(node)
    _REGISTRY.nodes.add(counts)
    return counts


def n_messages() -> int:
    """How many messages living nodes have converted to MLX in this process."""
    return sum(count for counts in list(_REGISTRY.nodes) for (count,) in counts.seen.copy().values())


def note_compiled(run: object, lengths: Iterable[int]) -> None:
    """Have :func:`shape_report` tell, as long as *run* lives, that it is compiled for these lengths."""
    _REGISTRY.compiled[run] = tuple(sorted(lengths))


def shape_report() -> ShapeReport:
    """Which message lengths fill MLX's caches in this process, by the node that converts them.

    Never waits for the device, never loads MLX. Lengths are those of the messages that :obj:`ezmsg.mlx.AsArray` (or its
    transformer) converts to MLX, along the stream dimension; messages without samples do not count.

    Example:
        >>> from ezmsg.mlx import AsArrayTransformer, SimulatedAcquisitionSettings, shape_report, simulated_acquisition
        >>> to_mlx = AsArrayTransformer(backend="mlx")
        >>> stream = SimulatedAcquisitionSettings(n_channels=4, duration=1.0, stall_every=9)
        >>> for message in simulated_acquisition(stream):
        ...     _ = to_mlx(message)
        >>> node = shape_report().nodes[0]
        >>> node.steady.length, node.n_lengths > 1
        (300, True)
    """
    nodes = sorted(map(_REGISTRY.report_of, list(_REGISTRY.nodes)), key=lambda node: node.n_lengths, reverse=True)
    has_plans = "mlx.core" in sys.modules and gpu_backend() == "cuda"
    return ShapeReport(
        tuple(nodes),
        _cache_memory() / MIB,
        tuple(_REGISTRY.compiled.values()),
        plan_caches() if has_plans else None,
    )


def _cache_memory() -> int:
    # Another thread may be loading it at this moment.
    get_cache_memory = getattr(sys.modules.get("mlx.core"), "get_cache_memory", None)
    return 0 if get_cache_memory is None else get_cache_memory()
