"""Which few lengths a stream of many message lengths is best cut to."""

from collections.abc import Mapping

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
    half, seen, median = sum(lengths.values()) / 2, 0, steady
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= half:
            median = length
            break
    smallest, longest = min(steady, median), max(lengths)
    sizes = (smallest * _FACTOR**power for power in range(N_SIZES))
    return tuple(size for size in sizes if size <= longest)
