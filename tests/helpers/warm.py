"""Python processes that have what takes longest to import: forked from one that has imported it and nothing else.

A process of a graph spends a second of processor time on SciPy and numba before its first line of ours. Neither MLX,
which must not be used on both sides of a fork, nor this package is loaded when a process is handed over. It is then the
child of the process that asked for it, as one that was started in any other way.
"""

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence

from . import forks, spawned

MODULES = ("numpy", "scipy.signal", "numba", "ezmsg.core", "ezmsg.baseproc", "ezmsg.util.messages.axisarray", "pytest")

OFFLINE = ("distributed", "distributed.nanny", "zarr", "pynwb", "rich.progress")
"""For processes that read and write recordings."""

TIME_LIMIT = 300.0
"""Seconds after which a process is ended with all its children. Only a hang takes that long, on a busy machine too."""

TESTS = pathlib.Path(__file__).parents[1]

_ENVIRONMENT = dict(os.environ)
"""Of the first process, whichever test asks for it."""

_channels: dict[tuple[str, ...], socket.socket] = {}
"""To the processes that fork, by what they have imported besides :data:`MODULES`."""


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | os.PathLike | None = None,
    with_stderr: bool = False,
    spawns_anew: bool = False,
    modules: tuple[str, ...] = (),
) -> "subprocess.Popen[str] | Forked":
    """``python *arguments`` in a session of its own, with pipes; *with_stderr*, one for both outputs.

    The *modules* are imported, too, and all this also in what it spawns, unless it *spawns_anew*. With another
    environment than the first process had, or elsewhere than on Linux, nothing is imported beforehand.
    """
    pipe = subprocess.PIPE
    stderr = subprocess.STDOUT if with_stderr else pipe
    if sys.platform == "linux":
        with forks.lock:
            channel = _channel(environment, modules)
            if channel is not None:
                request = {
                    "arguments": list(arguments),
                    "environment": dict(environment),
                    "folder": os.fspath(folder or os.getcwd()),
                    "spawns_anew": spawns_anew,
                }
                return Forked(channel, request, with_stderr)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def run(
    arguments: Sequence[str], *, environment: Mapping[str, str] = os.environ, folder: str | os.PathLike | None = None
) -> "subprocess.CompletedProcess[str]":
    """The same, until it ends by itself; a hang is an AssertionError with the stacks of all its processes."""
    process = start(arguments, environment=environment, folder=folder)
    try:
        out, err = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        out, err = end_with_stacks(process)
        raise AssertionError(f"It did not end within {TIME_LIMIT:g} s.\n{out}{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def end_with_stacks(process: "subprocess.Popen[str] | Forked") -> tuple[str, str]:
    """End a process that hangs, with all of its session; its output, with the stacks of those that tell them."""
    os.killpg(process.pid, signal.SIGXCPU)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    return out, err or ""


def _heed_interrupts() -> None:
    # As a terminal starts a program: one in the background of a script has Ctrl-C ignored, and passes that on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spawn_here_too(modules: tuple[str, ...] = ()) -> None:
    """Have what this process spawns begin in the same way."""
    if sys.platform == "linux":
        spawned.fork_from(lambda: _channel(os.environ, modules))


def _channel(environment: Mapping[str, str], modules: tuple[str, ...]) -> socket.socket | None:
    """To the process that forks; None if it has another environment."""
    if spawned.differ(_ENVIRONMENT, environment):
        return None
    if modules not in _channels:
        ours, its = socket.socketpair()
        if modules:
            forks.ask(_channel(environment, ()), ("serve", modules), [its.fileno()])
        else:
            _start_to_serve(its)
        its.close()
        atexit.register(_end, os.getpid(), ours)
        _channels[modules] = ours
    return _channels[modules]


def _start_to_serve(channel: socket.socket) -> None:
    path = os.pathsep.join([str(TESTS), _ENVIRONMENT.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", f"from helpers import warm; warm.serve({channel.fileno()})"],
        env={**_ENVIRONMENT, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[channel.fileno()],
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )
    # After the other end is closed, which is registered later and so comes first.
    atexit.register(process.wait)


def _end(owner: int, channel: socket.socket) -> None:
    if os.getpid() == owner:
        # Not close(): a forked child may have a copy.
        channel.shutdown(socket.SHUT_RDWR)


class Forked:
    """What :class:`subprocess.Popen` with text and pipes is, as far as it is used here."""

    def __init__(self, channel: socket.socket, request: Mapping[str, object], with_stderr: bool) -> None:
        self.returncode: int | None = None
        (its_in, our_in), (our_out, its_out) = os.pipe(), os.pipe()
        our_err, its_err = (None, os.dup(its_out)) if with_stderr else os.pipe()
        self.stdin = open(our_in, "w")
        self.stdout = open(our_out, errors="replace")
        self.stderr = None if our_err is None else open(our_err, errors="replace")
        self.pid = forks.ask(channel, ("run", request), [its_in, its_out, its_err])
        for descriptor in (its_in, its_out, its_err):
            os.close(descriptor)
        self._end = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("python", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._end)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def communicate(self, given: str | None = None, timeout: float | None = None) -> tuple[str, str | None]:
        read: dict[io.TextIOBase, str] = {}
        outputs = [file for file in (self.stdout, self.stderr) if file is not None and not file.closed]
        threads = [
            threading.Thread(target=lambda file=file: read.update({file: file.read()}), daemon=True) for file in outputs
        ]
        for thread in threads:
            thread.start()
        if not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(given or "")
                self.stdin.close()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired("python", timeout or 0.0)
        for file in outputs:
            file.close()
        return read.get(self.stdout, ""), None if self.stderr is None else read.get(self.stderr, "")


# ------------------------------------------------------------------------------------ in the process that is forked


def serve(descriptor: int) -> None:
    """Fork whenever somebody asks; in the new process, do what it is for and return."""
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for name in MODULES:
        importlib.import_module(name)
    # With the first call numba prepares its compiler, which takes as long as to import it.
    sys.modules["numba"].njit(lambda x: x)(0.0)
    _serve(socket.socket(fileno=descriptor))


def _serve(channel: socket.socket) -> None:
    # A signal that nothing else sends; see end_with_stacks().
    faulthandler.register(signal.SIGXCPU, all_threads=True)
    # What there is by now is not looked through, and so not copied, in each process.
    gc.freeze()
    (kind, request), descriptors = forks.fork_when_asked(channel)
    if kind == "serve":
        for name in request:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _serve(socket.socket(fileno=descriptors[0]))
    elif kind == "spawn":
        spawned.begin(request, descriptors)
    else:
        os.setsid()
        forks.renumber(descriptors, range(3))
        _run(**request)


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: str, spawns_anew: bool) -> None:
    """As ``python *arguments`` does."""
    before = {os.path.abspath(path) for path in os.environ["PYTHONPATH"].split(os.pathsep)}
    others = [path for path in sys.path[1:] if path not in before]
    sys.path[1:] = filter(None, [*environment.get("PYTHONPATH", "").split(os.pathsep), *others])
    spawned.take_environment(environment, folder)
    if not spawns_anew:
        spawned.have_fork_for_this_process()
    kind, *rest = arguments
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    # By the second name multiprocessing finds what spawned processes send back.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if kind == "-m":
        sys.path[0] = folder
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv[:] = arguments
        main.__file__ = os.path.abspath(kind)
        exec(compile(pathlib.Path(kind).read_bytes(), kind, "exec"), vars(main))
