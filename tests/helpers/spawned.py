"""What multiprocessing spawns, forked from a process that has imported what takes longest, and nothing of ours.

For the processes of graphs and of pools: as a spawned one, such a process has neither MLX nor what its parent has done.
"""

import builtins
import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence

import ezmsg.core as ez
from ezmsg.core import pubclient

from . import forks

Way = Callable[[], "socket.socket | None"]
"""Gives the channel to the process that forks, if that would do now."""

_HEEDED = (
    # Set by pytest, or for a terminal that there is not; or heeded in a new process, see take_environment().
    *("PYTEST_", "COLUMNS", "FORCE_COLOR", "PYTHONPATH", "EZMSG_LOGLEVEL", "EZMSG_DISABLE_BACKPRESSURE_WARNING"),
    # Read when they are needed, or by what is not imported yet.
    *("EZMSG_PROFILER", "EZMSG_STRICT_SHUTDOWN", "EZMSG_MLX_", "MLX_", "DASK_", "__DASK_"),
    # Set by Dask for its workers: how many threads compute, and one hash for all, which forked processes have.
    *("MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHONHASHSEED"),
)
"""What names of variables begin with that may differ from those which the first process had."""

_spawn = multiprocessing.util.spawnv_passfds


def fork_from(way: Way) -> None:
    """Have what this process spawns forked; what its forked children spawn is not."""
    owner = os.getpid()

    def spawn(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        # Not the tracker of shared memory, which imports next to nothing.
        if os.getpid() == owner and "--multiprocessing-fork" in arguments:
            with forks.lock, contextlib.suppress(EOFError):
                channel = way()
                if channel is not None:
                    return _ask(channel, arguments, descriptors)
        return _spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = spawn


def spawn_anew() -> None:
    """Have them start as without this module, from now on."""
    multiprocessing.util.spawnv_passfds = _spawn


def have_fork_for_this_process() -> None:
    """Leave a copy of this process, as it is now, that forks what this process spawns from now on."""
    ours, its = socket.socketpair()
    if not os.fork():
        ours.close()
        # With all processes of a terminal; what is forked heeds it again.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
        _begin(*forks.fork_when_asked(its))
    its.close()
    # Else it would wait for the forked children of this process, too.
    os.register_at_fork(after_in_child=ours.close)
    before = dict(os.environ)
    fork_from(lambda: None if differ(before, os.environ) else ours)


def differ(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether variables are not the same that may have been read by what is imported already."""
    return any(before.get(name) != now.get(name) for name in before.keys() | now.keys() if not name.startswith(_HEEDED))


def take_environment(environment: Mapping[str, str], folder: str) -> None:
    """Have another environment and folder than this process was forked with."""
    os.environ.clear()
    os.environ.update(environment)
    ez.logger.setLevel(environment.get("EZMSG_LOGLEVEL", "INFO").upper())
    pubclient.BACKPRESSURE_WARNING = "EZMSG_DISABLE_BACKPRESSURE_WARNING" not in environment
    os.chdir(folder)
    # Processes that are spawned from here begin there.
    multiprocessing.process.ORIGINAL_DIR = folder


def _ask(channel: socket.socket, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    request = {
        "arguments": list(arguments),
        "numbers": [0, 1, 2, *descriptors],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "is_interrupt_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }
    return forks.ask(channel, ("spawn", request), request["numbers"])


def _begin(kind_and_request: tuple[str, dict], descriptors: Sequence[int]) -> None:
    _, request = kind_and_request
    begin(request, descriptors)
    sys.exit()


def begin(request: dict, descriptors: Sequence[int]) -> None:
    """In the new process, do as multiprocessing has a new Python do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["is_interrupt_ignored"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    forks.renumber(descriptors, request["numbers"])
    take_environment(request["environment"], request["folder"])
    arguments = request["arguments"]
    code = arguments.index("-c") + 1
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    sys.modules["__main__"] = main
    sys.modules.pop("__mp_main__", None)
    sys.argv[:] = ["-c", *arguments[code + 1 :]]
    exec(compile(arguments[code], "<string>", "exec"), vars(main))
