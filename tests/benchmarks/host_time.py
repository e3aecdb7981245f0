"""The host's time for a message of the example chain: ``PYTHONPATH=tests python tests/benchmarks/host_time.py``.

Fused as on a GPU, with the device's part replaced by ready results, on any machine; and fused as on the CPU, with all
that it computes. CPU time, least of many rounds, so that it stands on a busy machine, too. ``--profile`` says where the
first goes.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from ezmsg.util.messages.axisarray import AxisArray
from helpers import latency
from helpers.on_no_gpu import as_on_a_gpu, compiled_run, device_replaced
from helpers.speed_messages import messages_of

from ezmsg.mlx import ChainTransformer

RATE = latency.RATE
N_FIRST, N_ROUND = 24, 20


def least(run: Callable[[AxisArray], object], messages: Sequence[AxisArray]) -> float:
    """CPU time of a message in microseconds, in the round of the least."""
    found = []
    for start in range(0, len(messages) - N_ROUND + 1, N_ROUND):
        before = time.process_time()
        for message in messages[start : start + N_ROUND]:
            run(message)
        found.append(1e6 * (time.process_time() - before) / N_ROUND)
    return round(min(found), 1)


def chain_of(n_samples: int, messages: Sequence[AxisArray], bin_duration: float) -> ChainTransformer:
    chain = ChainTransformer(make_chain=functools.partial(latency.make_chain, bin_duration), lengths=(n_samples,))
    for message in messages[:N_FIRST]:
        chain(message)
    return chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help=f"of {N_ROUND} messages [100]")
    parser.add_argument("--profile", action="store_true", help="where the time goes, as on a GPU")
    options = parser.parse_args()
    n = N_FIRST + options.rounds * N_ROUND
    found: dict[str, float] = {}
    mx.disable_compile()
    for name, n_samples, bin_duration in (("bins as messages", 30, 0.001), ("bins of ten messages", 30, 0.01)):
        messages = messages_of(n_samples, 16, n)
        with as_on_a_gpu():
            chain = chain_of(n_samples, messages, bin_duration)
            with device_replaced(compiled_run(chain)):
                found[f"30 samples, {name}, device replaced"] = least(chain, messages[N_FIRST:])
                if options.profile:
                    profile = cProfile.Profile()
                    profile.runcall(least, chain, messages[N_FIRST:])
                    pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    for n_samples in (30, 300):
        messages = messages_of(n_samples, 256, n if n_samples == 30 else N_FIRST + n // 4)
        chain = chain_of(n_samples, messages, n_samples / RATE)
        found[f"{n_samples} x 256, fused on the CPU"] = least(chain, messages[N_FIRST:])
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
