"""How long each message of a simulated acquisition is."""

import functools
import typing

import numpy as np

from .settings import SimulatedAcquisitionSettings


def message_lengths(settings: SimulatedAcquisitionSettings) -> typing.Iterator[int]:
    """The lengths in samples of all messages of the stream, in order, without making any data.

    They add up to ``settings.n_samples`` (the last message is cut to fit), and go on for ever if ``duration`` is None.
    """
    n_messages = n_samples = 0
    while length := next_length(settings, n_messages, n_samples):
        yield length
        n_messages += 1
        n_samples += length


def next_length(settings: SimulatedAcquisitionSettings, n_messages: int, n_samples: int) -> int:
    """Length of the message that follows ``n_messages`` with ``n_samples`` together; 0 when the stream is over."""
    length = settings.samples_per_message
    if settings.stall_every:
        n_stalls, position = divmod(n_messages, settings.stall_every)
        if position == settings.stall_every - 1:
            cycle, position = divmod(n_stalls, settings.n_stall_lengths)
            length = _stall_order(settings, cycle)[position]
    return length if settings.n_samples is None else min(length, settings.n_samples - n_samples)


@functools.lru_cache(maxsize=8)
def _stall_order(settings: SimulatedAcquisitionSettings, cycle: int) -> tuple[int, ...]:
    rng = np.random.default_rng([settings.seed, 1, cycle])
    return tuple(rng.permutation(settings.stall_lengths).tolist())
