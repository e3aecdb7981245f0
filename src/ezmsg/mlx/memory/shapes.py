"""Who fills MLX's buffer cache: the message lengths that each converting node has met."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import statistics
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import ezmsg.core as ez
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ..cache import MIB
from ..stream.device import gpu_backend
from ..stream.workarounds import PER_LENGTH, PlanCaches, plan_caches

N_SIZES = 3
"""So many sizes at most: the smallest keeps the delay short, the larger ones drain a stall in few messages."""

_FACTOR = 4


def suggested_sizes(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Sizes for :obj:`ezmsg.mlx.RechunkSettings` that suit a stream.

    Args:
        counts: How many messages of each length there were, in samples. Empty messages are left out.

    Returns:
        The most common length, or the median one where that is shorter; then four and sixteen times as much, as far as
        a message was that long.
    """
    lengths = {length: count for length, count in counts.items() if length > 0}
    if not lengths:
        return ()
    steady = max(lengths, key=lambda length: (lengths[length], -length))
    ordered = sorted(lengths)
    totals = [*itertools.accumulate(lengths[length] for length in ordered)]
    median = ordered[bisect.bisect_left(totals, totals[-1] / 2)]
    sizes = (min(steady, median) * _FACTOR**power for power in range(N_SIZES))
    return tuple(size for size in sizes if size <= ordered[-1])


MOST_IN_SUMMARY = 12
"""Lengths of a node, and nodes, in :meth:`ShapeReport.summary`, which has to fit into a slot of shared memory."""


@dataclasses.dataclass(frozen=True)
class LengthUse:
    """The messages of one length."""

    length: int
    """Along the stream dimension, in samples."""

    n_messages: int

    estimate_mb: float
    """An estimate of the MiB that its buffers take in MLX's cache as long as they stay there: by how much the cache had
    grown when the next length came, or, where it was full, as much for each byte of the message as other lengths."""


@dataclasses.dataclass(frozen=True)
class NodeShapes:
    """Message lengths of one converting node."""

    node: str
    n_messages: int
    lengths: tuple[LengthUse, ...]
    """The length with the largest estimate first."""

    n_not_kept: int = 0
    """Messages of lengths beyond the first ``MOST_SHAPES``."""

    @property
    def n_lengths(self) -> int:
        """How many different lengths it has met."""
        return len(self.lengths)

    @property
    def steady(self) -> LengthUse | None:
        """The most common length."""
        return max(self.lengths, key=lambda use: (use.n_messages, -use.length), default=None)

    @property
    def steady_share(self) -> float:
        """Share of the messages that have the most common length, 0 to 1."""
        return self.steady.n_messages / self.n_messages if self.steady else 0.0

    @property
    def once(self) -> tuple[int, ...]:
        """The lengths that came once, in samples, in increasing order."""
        return tuple(sorted(use.length for use in self.lengths if use.n_messages == 1))

    def summary(self, most: int) -> dict[str, Any]:
        """See :meth:`ShapeReport.summary`."""
        steady = self.steady
        return {
            "node": self.node,
            "n_messages": self.n_messages,
            "n_lengths": self.n_lengths,
            "n_once": len(self.once),
            "lengths": [
                dataclasses.asdict(use) for use in sorted(self.lengths, key=lambda use: use is not steady)[:most]
            ],
        }

    @property
    def rechunk_sizes(self) -> tuple[int, ...]:
        """``sizes`` of :obj:`ezmsg.mlx.RechunkSettings` that would leave few lengths."""
        return suggested_sizes({use.length: use.n_messages for use in self.lengths})


@dataclasses.dataclass(frozen=True)
class ShapeReport:
    """Which message lengths fill MLX's caches in this process. Print it for a table."""

    nodes: tuple[NodeShapes, ...]
    """One for each living node that converts to MLX, the one with the most lengths first."""

    cache_mb: float
    """MLX's buffer cache now, in MiB."""

    compiled: tuple[tuple[int, ...], ...]
    """For each run of fused stages, the lengths that it is compiled for, in samples."""

    plans: PlanCaches | None
    """MLX's caches of plans on CUDA, with their capacities; None elsewhere. MLX does not tell how many of their entries
    are in use; :attr:`plans_at_most` is what can be known of it."""

    @property
    def n_lengths(self) -> int:
        """How many different lengths the process has met."""
        return len({use.length for node in self.nodes for use in node.lengths})

    @property
    def plans_at_most(self) -> dict[str, int]:
        """How many entries of the caches of FFT and convolution plans one stage can have taken; empty without CUDA.

        An upper bound: a stage behind the converting nodes that does one FFT, or one convolution, along the stream
        dimension of each message takes a plan for each length, up to the capacity. Each further stage of that kind may
        take as many again. A stage that cuts the stream into windows takes fewer.
        """
        if self.plans is None:
            return {}
        counted = (name for name in self.plans.capacities if name in PER_LENGTH)
        return {name: min(self.n_lengths, self.plans.capacities[name]) for name in counted}

    def summary(self, most: int = MOST_IN_SUMMARY) -> dict[str, Any]:
        """The report as dictionaries of a bounded size, to be sent with a message.

        Args:
            most: So many lengths of a node at most: the most common one, then those with the largest estimates.

        Returns:
            ``cache_mb``, ``n_lengths``, ``compiled``, ``plans`` and ``nodes``. ``plans`` has ``at_most`` and
            ``capacity`` of each cache of plans on CUDA that counts lengths. A node has ``node``, ``n_messages``,
            ``n_lengths``, ``n_once`` and ``lengths``, dictionaries of :class:`LengthUse`.
        """
        at_most, capacities = self.plans_at_most, {} if self.plans is None else self.plans.capacities
        return {
            "cache_mb": self.cache_mb,
            "n_lengths": self.n_lengths,
            "compiled": self.compiled,
            "plans": {name: {"at_most": n, "capacity": capacities[name]} for name, n in at_most.items()},
            "nodes": [node.summary(most) for node in self.nodes[:MOST_IN_SUMMARY]],
        }

    def __str__(self) -> str:
        lines = [f"MLX's buffer cache: {self.cache_mb:.0f} MiB; {self.n_lengths} message lengths in this process"]
        for node in self.nodes:
            if (steady := node.steady) is None:
                continue
            lines += [
                f"{node.node}: {node.n_lengths} lengths in {node.n_messages} messages, {len(node.once)} of them once; "
                f"{node.steady_share:.1%} of the messages have {steady.length} samples",
                "    samples  messages  MiB (estimate)",
                *(f"    {use.length:7}  {use.n_messages:8}  {use.estimate_mb:.1f}" for use in node.lengths[:10]),
            ]
            if node.n_lengths > 10:
                rest = sum(use.estimate_mb for use in node.lengths[10:])
                lines.append(f"    {node.n_lengths - 10} more lengths     {rest:.1f}")
        lines += [f"A fused run is compiled for {', '.join(map(str, run))} samples." for run in self.compiled]
        if self.plans is not None:
            lines.append(f"CUDA: {plans_in_words(self.plans)}")
            taken = " or ".join(f"{n} {name}" for name, n in self.plans_at_most.items())
            lines.append(f"A stage with one FFT or one convolution of each message has taken {taken} at most.")
        return "\n".join(lines)


def plans_in_words(plans: PlanCaches) -> str:
    """How many plans MLX keeps, and what it does about more."""
    kept = ", ".join(f"{capacity} {name}" for name, capacity in plans.capacities.items())
    if plans.refuses:
        return (
            f"MLX keeps {kept} and raises after twice as many misses, since MLX_ENABLE_CACHE_THRASHING_CHECK is set; "
            "with 0 it goes on."
        )
    return f"MLX keeps {kept}, and makes others anew each time."


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
