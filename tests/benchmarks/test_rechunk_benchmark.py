"""Rechunk in front of the example chain, on the CPU with the limit on MLX's cache lifted: a small cache at equal speed.

Ratios of CPU times. Two processes take turns, one block of messages each, so that whatever else the machine does
concerns both::

    pytest tests/benchmarks/test_rechunk_benchmark.py -s
"""

import statistics

import pytest
from compare_cache_limits import SIZES
from helpers.chain_process import ChainProcess

from ezmsg.mlx import RechunkSettings, SimulatedAcquisitionSettings

mx = pytest.importorskip("mlx.core")

N_STALL_LENGTHS = 40
STALL_EVERY = 30


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="about MLX's CPU backend")
def test_rechunk_needs_a_tenth_of_the_cache_at_the_same_speed():
    stream = SimulatedAcquisitionSettings(stall_every=STALL_EVERY, n_stall_lengths=N_STALL_LENGTHS)
    with (
        ChainProcess(stream, STALL_EVERY, None) as plain,
        ChainProcess(stream, STALL_EVERY, RechunkSettings(sizes=SIZES)) as rechunked,
    ):
        # Compilation: not part of the times.
        for chain in (plain, rechunked):
            chain.next_block()
        speeds = []
        for number in range(N_STALL_LENGTHS - 1):
            # Who goes first changes, too.
            order = (plain, rechunked) if number % 2 else (rechunked, plain)
            results = {chain: chain.next_block() for chain in order}
            speeds.append(results[plain][0] / results[rechunked][0])
    cache = results[rechunked][1] / results[plain][1]
    speed = statistics.median(speeds)
    print(f"\nRechunk: {cache:.1%} of the cache ({results[plain][1]:.0f} MiB), {speed:.2f} of the speed")
    assert cache <= 0.10
    assert speed >= 0.95
