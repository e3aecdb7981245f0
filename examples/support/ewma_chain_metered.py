"""The chain's process of ewma_chain_graph.py: the stages as one unit or unit by unit, and what watches them."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ClassVar

import ezmsg.core as ez
from ezmsg.baseproc import BaseTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArraySettings, Chain, ChainSettings, MemoryMonitor, MemoryMonitorSettings

from . import ewma_chain as shared


class MeterUnit(ez.Unit):
    """Measures its own process now and then, beside the stages: nothing that is measured waits for it."""

    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_METER = ez.OutputStream(shared.Meter)

    async def initialize(self) -> None:
        self.meter = shared.Meter()

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        self.meter.count(message)

    @ez.publisher(OUTPUT_METER)
    async def publish(self) -> AsyncGenerator:
        while True:
            self.meter.measure()
            yield self.OUTPUT_METER, self.meter
            await asyncio.sleep(shared.SECONDS_BETWEEN_MEASURES)


class Metered(ez.Collection):
    """Stages, with a meter and a monitor of the memory."""

    SETTINGS = AsArraySettings

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_FEATURES = ez.OutputTopic(AxisArray)
    OUTPUT_METER = ez.OutputTopic(shared.Meter)
    OUTPUT_MEMORY = ez.OutputTopic(AxisArray)

    METER = MeterUnit()
    MONITOR = MemoryMonitor(MemoryMonitorSettings(interval=0.1))

    @property
    def stages(self) -> Sequence[ez.Unit]:
        """In order."""
        raise NotImplementedError

    def configure(self) -> None:
        # Room for the bins of a second of 2500 channels, as the source's ring has room for its longest message.
        features = self.stages[-1].OUTPUT_SIGNAL
        features.num_buffers, features.buf_size = 4, 2**20

    def network(self) -> ez.NetworkDefinition:
        stages = self.stages
        return (
            (self.INPUT_SIGNAL, stages[0].INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in zip(stages, stages[1:])),
            (stages[-1].OUTPUT_SIGNAL, self.OUTPUT_FEATURES),
            (self.INPUT_SIGNAL, self.METER.INPUT_SIGNAL),
            (self.METER.OUTPUT_METER, self.OUTPUT_METER),
            (self.MONITOR.OUTPUT_SIGNAL, self.OUTPUT_MEMORY),
        )


class MeteredChain(Metered):
    """All stages as one unit."""

    make_chain: ClassVar[Callable[[AsArraySettings], list[BaseTransformer]]]
    """Makes the stages, given the settings of the first."""

    STAGES = Chain()

    @property
    def stages(self) -> Sequence[ez.Unit]:
        return (self.STAGES,)

    def configure(self) -> None:
        super().configure()
        self.STAGES.apply_settings(ChainSettings(make_chain=functools.partial(type(self).make_chain, self.SETTINGS)))
