"""Processes that are forked, when somebody asks for one, from a process that does nothing else.

A new process is then the child of the one that asked for it, as one that was started in any other way.
"""

import contextlib
import ctypes
import fcntl
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence

_ADOPT_ORPHANS = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux: who is left by its parent becomes a child of the process that has this set."""

_MOST_DESCRIPTORS = 64

_TIME_LIMIT = 240.0
"""Seconds to wait for an answer. The first one comes after the imports, which take seconds, on a busy machine more."""

lock = threading.Lock()
"""To be held from before a channel is chosen until a process has been forked."""


def ask(channel: socket.socket, request: object, descriptors: Sequence[int]) -> int:
    """The process of a new child of this one, which gets copies of the *descriptors*; EOFError if nobody answers."""
    pickled = pickle.dumps(request)
    channel.settimeout(_TIME_LIMIT)
    with _adopting():
        try:
            socket.send_fds(channel, [len(pickled).to_bytes(8, "little")], descriptors)
            channel.sendall(pickled)
            pid = int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "little")
        except OSError:
            pid = 0
            with contextlib.suppress(OSError):
                # A late answer must not be taken for that to another question.
                channel.shutdown(socket.SHUT_RDWR)
    if not pid:
        raise EOFError("the process that forks has ended")
    return pid


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        libc.prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)


def fork_when_asked(channel: socket.socket) -> tuple[object, list[int]]:
    """Fork whenever the other end of the channel asks; returns, with the request, in each new process alone.

    This process ends when the other end is closed. It has to be a child of the one that asks, or a child's child.
    """
    while True:
        try:
            head, given, _, _ = socket.recv_fds(channel, 8, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            head = b""
        if not head:
            os._exit(0)
        request = channel.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        tell, told = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            break
        os.close(told)
        child = os.read(tell, 8)
        os.close(tell)
        for descriptor in given:
            os.close(descriptor)
        # Until this has ended, the new process has another parent than it is to have.
        os.waitpid(between, 0)
        channel.sendall(child or bytes(8))
    channel.close()
    os.close(tell)
    os.write(told, os.getpid().to_bytes(8, "little"))
    os.close(told)
    return pickle.loads(request), given


def renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files the *numbers*, whatever has one of them by now."""
    above = max(*descriptors, *numbers) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
