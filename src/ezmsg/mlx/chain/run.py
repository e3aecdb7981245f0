"""Run several transformers as one."""

from collections.abc import Iterable, Iterator

from ezmsg.util.messages.axisarray import AxisArray

from ..stream.steps import Chain, flush_steps, run_steps, steps_of

__all__ = ["run_chain"]


def run_chain(chain: Chain, messages: Iterable[AxisArray]) -> Iterator[AxisArray]:
    """Run bare transformers over messages, from the first message to the flush at the end.

    Args:
        chain: A transformer, or a sequence of them, applied in order. One that returns a list, like
            :class:`~ezmsg.mlx.RechunkTransformer`, has its messages fed on one by one; None ends the message there.
        messages: The stream. It is read one message at a time.

    Yields:
        The results, in order. When *messages* end, every transformer that has a ``flush`` is flushed, and what comes of
        that goes through the rest of the chain.

    Raises:
        TypeError: *chain* holds something that cannot be called, or *messages* something that is not a message.

    Example:
        >>> from ezmsg.mlx import AsArrayTransformer, EWMATransformer, RechunkTransformer, run_chain
        >>> from ezmsg.mlx import SimulatedAcquisitionSettings, simulated_acquisition
        >>> chain = [RechunkTransformer(sizes=(300,)), AsArrayTransformer(backend="mlx"), EWMATransformer()]
        >>> stream = simulated_acquisition(SimulatedAcquisitionSettings(n_channels=4, duration=0.1))
        >>> sum(len(result.data) for result in run_chain(chain, stream))
        3000
    """
    steps = steps_of(chain)
    return _results(steps, messages)


def _results(steps: list, messages: Iterable[AxisArray]) -> Iterator[AxisArray]:
    for message in messages:
        if not isinstance(message, AxisArray):
            raise TypeError(f"messages holds a {type(message).__name__}; allowed are messages of type AxisArray.")
        yield from run_steps(steps, message)
    yield from flush_steps(steps)
