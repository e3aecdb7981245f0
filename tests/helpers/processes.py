"""Processes and graphs of their own, with a time limit, for tests of what belongs to a whole process.

Such are MLX's cache limit, which modules are imported, and what a fork inherits.
"""

import asyncio
import base64
import functools
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import ezmsg.core as ez
import pytest

from . import warm
from .ports import free_port
from .warm import TESTS, TIME_LIMIT

P = ParamSpec("P")
T = TypeVar("T")


def in_fresh_process(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test function in a new Python process, which shares nothing with that of pytest.

    The test module is imported there anew, as MLX and this package are; parameters and fixtures travel by pickle. What
    the function raises, or a hang, fails the test. It may start processes and graphs itself.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        call = pickle.dumps((Path(inspect.getfile(test)), test.__name__, args, kwargs))
        process = warm.start(["-m", "helpers.processes"], environment=environment(), with_stderr=True)
        _output_of(process, base64.b64encode(call).decode())

    return run


def run_code(code: str, *args: object) -> str:
    """Run Python source in a process that has imported nothing, with *args* in ``sys.argv[1:]``; its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", inspect.cleandoc(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        text=True,
        errors="replace",
        start_new_session=True,
    )
    return _output_of(process)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def _output_of(process: subprocess.Popen[str] | warm.Forked, given: str = "") -> str:
    try:
        text, _ = process.communicate(given, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        text, _ = warm.end_with_stacks(process)
        pytest.fail(f"The process did not end within {TIME_LIMIT:g} s.\n{text}", pytrace=False)
    if process.returncode != 0:
        pytest.fail(text, pytrace=False)
    return text


def _main() -> None:
    path, name, args, kwargs = pickle.loads(base64.b64decode(sys.stdin.read()))
    # By its bare name, so that processes started from here can import it for what they unpickle.
    sys.path.insert(0, str(path.parent))
    test = getattr(importlib.import_module(path.stem), name)
    try:
        test.__wrapped__(*args, **kwargs)
    except BaseException as error:
        # With the values of local variables: pytest's rewriting of assert does not reach here.
        sys.exit("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))


def in_forked_child(function: Callable[[], T], time_limit: float = 120.0) -> T:
    """Call *function* in a forked child of this process; its result. AssertionError if the child hangs.

    On a thread of its own, as ezmsg runs units: MLX's streams belong to threads, and those of the parent's thread
    do not work in the child.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        with ThreadPoolExecutor(1) as executor:
            sender.send(executor.submit(function).result())

    process = context.Process(target=answer)
    process.start()
    sender.close()
    if not receiver.poll(time_limit):
        process.kill()
        process.join()
        raise AssertionError(f"The forked child did not answer within {time_limit:g} s.")
    result = receiver.recv()
    process.join()
    return result


class RecordedLog(logging.Handler):
    """What ezmsg logs at INFO and above, within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def _of(self, level: int) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno == level]

    @property
    def infos(self) -> list[str]:
        return self._of(logging.INFO)

    @property
    def warnings(self) -> list[str]:
        return self._of(logging.WARNING)

    @property
    def errors(self) -> list[str]:
        return self._of(logging.ERROR)

    def __enter__(self) -> "RecordedLog":
        self._level_before = ez.logger.level
        ez.logger.setLevel(logging.INFO)
        ez.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        ez.logger.removeHandler(self)
        ez.logger.setLevel(self._level_before)


class WatchdogSettings(ez.Settings):
    time_limit: float
    barked: list[bool]


class Watchdog(ez.Unit):
    SETTINGS = WatchdogSettings

    @ez.task
    async def bark(self) -> None:
        await asyncio.sleep(self.SETTINGS.time_limit)
        self.SETTINGS.barked.append(True)
        raise ez.NormalTermination


def run_graph(
    components: dict[str, ez.Component],
    connections: Iterable[tuple[ez.Component, ez.Component]],
    process_components: Collection[ez.Component] = (),
    time_limit: float = 240.0,
) -> None:
    """Run a graph that ends by itself, with a server of its own; AssertionError if it does not end in time."""
    barked: list[bool] = []
    ez.run(
        components={**components, "WATCHDOG": Watchdog(WatchdogSettings(time_limit, barked))},
        connections=list(connections),
        process_components=list(process_components),
        graph_address=("127.0.0.1", free_port()),
        auto_start=True,
    )
    assert not barked, f"The graph did not end within {time_limit:g} s."


if __name__ == "__main__":
    _main()
