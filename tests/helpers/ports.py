"""Ports for graph servers of the tests."""

import socket


def free_port() -> int:
    """A port for a graph server of our own: topics of other graphs on this machine may have the same names."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
