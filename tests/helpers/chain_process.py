"""The example chain in a process of its own, block by block, so that two of them can take turns."""

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from ezmsg.mlx import RechunkSettings, RechunkTransformer, SimulatedAcquisitionSettings, simulated_acquisition

_blocks: Iterator[tuple[float, float]]


class ChainProcess(ProcessPoolExecutor):
    """A fresh process that runs the chain over the next block of messages when it is told to, and idles meanwhile."""

    def __init__(self, stream: SimulatedAcquisitionSettings, n_messages: int, rechunk: RechunkSettings | None) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(1, mp_context=context, initializer=_start, initargs=(stream, n_messages, rechunk))

    def next_block(self) -> tuple[float, float]:
        """CPU time of the chain for the next *n_messages* messages, in seconds, and MLX's cache in MiB after them.

        Of all threads together: unlike wall-clock time it does not count the waiting for other processes.
        """
        return self.submit(_next_block).result()


def _start(stream: SimulatedAcquisitionSettings, n_messages: int, rechunk: RechunkSettings | None) -> None:
    global _blocks
    _blocks = _run(stream, n_messages, rechunk)


def _next_block() -> tuple[float, float]:
    return next(_blocks)


def _run(
    stream: SimulatedAcquisitionSettings, n_messages: int, rechunk: RechunkSettings | None
) -> Iterator[tuple[float, float]]:
    from support import ewma_chain, fresh_process

    import ewma_chain_offline
    import mlx.core as mx

    fresh_process.lift_small_default()
    chain = ewma_chain_offline.make_chain(ewma_chain.to_mlx(None))
    cut = RechunkTransformer(rechunk) if rechunk else lambda message: [message]
    messages = simulated_acquisition(stream)
    while block := list(itertools.islice(messages, n_messages)):
        started_at = time.process_time()
        for message in block:
            for piece in cut(message):
                for stage in chain:
                    piece = stage(piece)
        yield time.process_time() - started_at, mx.get_cache_memory() / 2**20
