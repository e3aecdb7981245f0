"""Chains for ``ezmsg-mlx process``, as users have them in modules of their own."""

import multiprocessing
import threading
from collections.abc import Callable

from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx import AsArrayTransformer


def make_chain() -> AsArrayTransformer:
    """Samples as they are, in float32."""
    return AsArrayTransformer(backend="numpy", dtype="float32")


def make_interrupted() -> Callable[[AxisArray], AxisArray]:
    """Ctrl-C comes at the second message."""
    n_messages = 0

    def interrupt(message: AxisArray) -> AxisArray:
        nonlocal n_messages
        n_messages += 1
        if n_messages > 1:
            raise KeyboardInterrupt
        return message

    return interrupt


def make_endless() -> Callable[[AxisArray], AxisArray]:
    """Does not come to an end with the second message."""
    n_messages, never = 0, threading.Event()

    def wait(message: AxisArray) -> AxisArray:
        nonlocal n_messages
        n_messages += 1
        if n_messages > 1:
            print("waiting", flush=True)
            # In steps: a signal that comes right before a wait does not end it.
            while not never.wait(0.1):
                continue
        return message

    return wait


def make_endless_elsewhere() -> Callable[[AxisArray], AxisArray]:
    """The same in other processes, of which one is started at once; in this one, samples as they are."""
    return make_chain() if multiprocessing.parent_process() is None else make_endless()


def make_failing() -> Callable[[AxisArray], AxisArray]:
    """Fails on a recording that begins at 7 s."""

    def fail(message: AxisArray) -> AxisArray:
        if message.axes["time"].offset == 7.0:
            raise ValueError("no such luck")
        return replace(message, data=message.data.astype("float32"))

    return fail


no_function = 3
