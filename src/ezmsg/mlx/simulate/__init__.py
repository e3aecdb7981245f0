"""A simulated neural recording that arrives the way acquisition systems deliver it: with stalls.

Most messages have the same length. Now and then nothing arrives for a while, and then everything unread arrives
as one large message, of a length not seen before. Those rare lengths are what fills MLX's buffer cache, so this is
the stream to try a pipeline on before the real one::

    settings = SimulatedAcquisitionSettings(n_channels=128, duration=60.0)
    for message in simulated_acquisition(settings):
        ...

:obj:`SimulatedAcquisition` is the same stream as the source of a graph, bit for bit.
"""

from .acquisition import (
    SimulatedAcquisition,
    SimulatedAcquisitionProducer,
    SimulatedAcquisitionState,
    simulated_acquisition,
)
from .lengths import message_lengths
from .recording import MICROVOLTS_PER_COUNT
from .settings import SimulatedAcquisitionSettings

__all__ = [
    "MICROVOLTS_PER_COUNT",
    "SimulatedAcquisition",
    "SimulatedAcquisitionProducer",
    "SimulatedAcquisitionSettings",
    "SimulatedAcquisitionState",
    "message_lengths",
    "simulated_acquisition",
]
