"""What :func:`ezmsg.mlx.memory.shape_report` tells: message lengths, how often each came, and what it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..stream.plancaches import PER_LENGTH, PlanCaches
from ..stream.sizes import suggested_sizes

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
    """What one converting node has met."""

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
        nodes = []
        for node in self.nodes[:MOST_IN_SUMMARY]:
            steady = node.steady
            lengths = sorted(node.lengths, key=lambda use: use is not steady)[:most]
            nodes.append(
                {
                    "node": node.node,
                    "n_messages": node.n_messages,
                    "n_lengths": node.n_lengths,
                    "n_once": len(node.once),
                    "lengths": [dataclasses.asdict(use) for use in lengths],
                }
            )
        at_most, capacities = self.plans_at_most, {} if self.plans is None else self.plans.capacities
        return {
            "cache_mb": self.cache_mb,
            "n_lengths": self.n_lengths,
            "compiled": self.compiled,
            "plans": {name: {"at_most": n, "capacity": capacities[name]} for name, n in at_most.items()},
            "nodes": nodes,
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
