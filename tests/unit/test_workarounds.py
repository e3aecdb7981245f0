"""ezmsg 3.10.0b5 lets a graph stand still; with this package in it, it goes on. Tests name what to remove when it does.

This module does not import ezmsg.mlx: each process decides whether it does.
"""

import asyncio
import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import AsyncGenerator
from importlib import metadata

import ezmsg.core as ez
import numpy as np
from ezmsg.core.messagechannel import Channel
from helpers.ports import free_port
from helpers.processes import in_fresh_process, run_graph

WORKAROUNDS = "ezmsg.mlx.stream.workarounds"
UNITS = [point.value for point in metadata.distribution("ezmsg-mlx").entry_points if point.group == "ezmsg.components"]


def graph_server() -> ez.GraphContext:
    return ez.GraphContext(("127.0.0.1", free_port()), auto_start=True)


async def lost_while_memory_is_replaced() -> list[str]:
    """What asyncio says of tasks that the collector ended, while a message goes through that needs a larger slot."""
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context["message"]))
    async with graph_server() as context:
        publisher = await context.publisher("TOPIC", allow_local=False, buf_size=1024)
        subscriber = await context.subscriber("TOPIC")
        await publisher.broadcast(np.zeros(100))
        await subscriber.recv()

        await publisher.broadcast(np.arange(10_000))
        received = asyncio.create_task(subscriber.recv())
        # What happens now and then in a long run, each time that the loop turns.
        while not received.done() and not lost:
            gc.collect()
            await asyncio.sleep(0)
        if received.done():
            np.testing.assert_array_equal(received.result(), np.arange(10_000))
        received.cancel()
    return lost


async def error_when_a_subscriber_leaves() -> str:
    """What a publisher raises if one of two subscribers leaves while a message is being sent to it; "" if nothing."""
    async with graph_server() as context:
        publisher = await context.publisher("TOPIC", force_tcp=True)
        slow = await Channel.create(publisher.id, context.graph_address)
        slow._proto.pause_reading()
        subscriber = await context.subscriber("TOPIC")
        # More than the socket's buffers hold, so that the publisher has to wait for the slow one.
        sending = asyncio.create_task(publisher.broadcast(np.ones(10_000_000, np.uint8)))
        await asyncio.sleep(0)
        assert not sending.done()
        slow.close()
        try:
            await sending
        except RuntimeError as error:
            return str(error)
        assert (await subscriber.recv()).sum() == 10_000_000
        # All slots, and each once more: the one that left keeps none.
        for i in range(70):
            await publisher.broadcast(np.full(10, i))
            assert (await subscriber.recv())[0] == i
    return ""


async def is_cancelled_while_it_closes_memory() -> bool:
    """Whether what waits for memory to be closed can be cancelled."""
    async with graph_server() as context:
        publisher = await context.publisher("TOPIC")
        publisher._shm.close()
        waiting = asyncio.create_task(publisher._shm.wait_closed())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
        return waiting.cancelled()


@in_fresh_process
def test_what_waits_for_memory_to_be_closed_can_be_cancelled():
    importlib.import_module("ezmsg.mlx.stream")
    assert asyncio.run(is_cancelled_while_it_closes_memory())


@in_fresh_process
def test_ezmsg_still_suppresses_the_cancellation_of_what_waits_for_memory_to_be_closed():
    assert not asyncio.run(is_cancelled_while_it_closes_memory()), "cured in ezmsg: remove _that_can_be_cancelled"


@in_fresh_process
def test_a_receiver_follows_its_publisher_to_larger_memory():
    importlib.import_module("ezmsg.mlx.stream")
    assert asyncio.run(lost_while_memory_is_replaced()) == []


@in_fresh_process
def test_ezmsg_still_needs_its_reattachment_held():
    lost = asyncio.run(lost_while_memory_is_replaced())
    assert lost == ["Task was destroyed but it is pending!"], "cured in ezmsg: remove _held_until_done"


@in_fresh_process
def test_a_publisher_outlives_a_subscriber_that_leaves():
    importlib.import_module("ezmsg.mlx.stream")
    assert asyncio.run(error_when_a_subscriber_leaves()) == ""


@in_fresh_process
def test_a_channel_that_has_gone_is_skipped_and_one_that_has_come_is_left_to_the_next_message():
    channels, seen = importlib.import_module(WORKAROUNDS)._Channels(a=1, b=2, c=3), []
    for channel in channels.values():
        seen.append(channel)
        if channel == 1:
            del channels["b"]
            channels["d"] = 4
    assert seen == [1, 3] and list(channels.values()) == [1, 3, 4]


@in_fresh_process
def test_ezmsg_still_needs_channels_that_may_change():
    error = asyncio.run(error_when_a_subscriber_leaves())
    assert error == "dictionary changed size during iteration", "cured in ezmsg: remove _Channels"


@in_fresh_process
def test_a_second_call_changes_nothing():
    from ezmsg.core.messagechannel import ChannelProtocol
    from ezmsg.core.pubclient import Publisher
    from ezmsg.core.shm import SHMContext

    workarounds = importlib.import_module(WORKAROUNDS)
    before = ChannelProtocol._reattach_shm, Publisher.__init__, SHMContext.wait_closed
    workarounds.apply_workarounds()
    assert (ChannelProtocol._reattach_shm, Publisher.__init__, SHMContext.wait_closed) == before


@in_fresh_process
def test_one_variable_turns_them_off():
    from ezmsg.core.messagechannel import ChannelProtocol
    from ezmsg.core.pubclient import Publisher
    from ezmsg.core.shm import SHMContext

    os.environ["EZMSG_MLX_WORKAROUNDS"] = "0"
    importlib.import_module(WORKAROUNDS)
    found = ChannelProtocol._reattach_shm, Publisher.__init__, SHMContext.wait_closed
    assert not any(hasattr(method, "__wrapped__") for method in found)


@in_fresh_process
def test_an_ezmsg_without_the_faults_is_left_as_it_is():
    from ezmsg.core.messagechannel import ChannelProtocol
    from ezmsg.core.pubclient import Publisher
    from ezmsg.core.shm import SHMContext

    def frames_available(self):
        self._reattaching = task = asyncio.create_task(self._reattach_shm())
        self.tasks.add(task)

    async def broadcast(self, message):
        for channel in list(self._channels.values()):
            await channel

    async def wait_closed(self):
        await asyncio.wait({self._graph_task})

    ChannelProtocol.frames_available, Publisher.broadcast, SHMContext.wait_closed = (
        frames_available,
        broadcast,
        wait_closed,
    )
    importlib.import_module(WORKAROUNDS)
    found = ChannelProtocol._reattach_shm, Publisher.__init__, SHMContext.wait_closed
    assert not any(hasattr(method, "__wrapped__") for method in found)


@in_fresh_process
def test_each_unit_brings_the_workarounds():
    assert UNITS
    for unit in UNITS:
        for name in [name for name in sys.modules if name.startswith("ezmsg.mlx")]:
            del sys.modules[name]
        module, name = unit.split(":")
        getattr(importlib.import_module(module), name)
        assert WORKAROUNDS in sys.modules, unit


class Foreign(ez.Unit):
    """Says whether its process, in which nothing else runs, has the workarounds."""

    OUTPUT_SIGNAL = ez.OutputStream(bool)

    @ez.publisher(OUTPUT_SIGNAL)
    async def say(self) -> AsyncGenerator:
        yield self.OUTPUT_SIGNAL, WORKAROUNDS in sys.modules


class SinkSettings(ez.Settings):
    heard: list[bool]


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(bool)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: bool) -> None:
        self.SETTINGS.heard.append(message)
        raise ez.NormalTermination


@in_fresh_process
def test_a_spawned_process_without_units_of_ours_has_the_workarounds():
    from ezmsg.mlx import Pow, PowSettings

    multiprocessing.set_start_method("spawn")
    heard: list[bool] = []
    source, sink = Foreign(), Sink(SinkSettings(heard))
    run_graph(
        {"SOURCE": source, "OURS": Pow(PowSettings()), "SINK": sink},
        [(source.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)],
        process_components=[source],
    )
    assert heard == [True]
