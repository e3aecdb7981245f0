"""Units whose transformer makes several messages of one, or none."""

import typing
from collections.abc import Iterable

import ezmsg.core as ez
from ezmsg.baseproc import (
    BaseStatefulTransformer,
    BaseTransformer,
    BaseTransformerUnit,
    CompositeProcessor,
    profile_subpub,
)
from ezmsg.util.messages.axisarray import AxisArray

SettingsT = typing.TypeVar("SettingsT", bound=ez.Settings)
OutputT = typing.TypeVar("OutputT")
TransformerT = typing.TypeVar("TransformerT", bound=BaseTransformer | BaseStatefulTransformer | CompositeProcessor)


class PublishesEach(BaseTransformerUnit[SettingsT, AxisArray, OutputT, TransformerT]):
    """A unit that publishes what its transformer makes of a message one after the other."""

    @ez.subscriber(BaseTransformerUnit.INPUT_SIGNAL)
    @ez.publisher(BaseTransformerUnit.OUTPUT_SIGNAL)
    @profile_subpub(trace_oldest=False)
    async def on_signal(self, message: AxisArray) -> typing.AsyncGenerator:
        """Publish each result of *message*."""
        for result in self._results(message, await self.processor.__acall__(message)):
            yield self.OUTPUT_SIGNAL, result

    def _results(self, message: AxisArray, output: OutputT) -> Iterable[AxisArray]:
        """The messages to publish of what the transformer has returned, which is a list unless this is overridden."""
        return typing.cast("list[AxisArray]", output)
