"""What holds for a run of tests as a whole."""

import os
import pathlib
import tempfile

# Hundreds of processes import the package, each of which would compile its source.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from helpers import kernels_once, warm

KERNELS = "kernels_once"


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist begins with files of many tests. The slowest have few, graphs and examples, and come first by name:
    # left for last, one of them keeps a single processor busy in the end.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    warm.spawn_here_too()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """In the process that hands out tests, for each of those that run them."""
    config = node.config
    if not hasattr(config, KERNELS):
        folder = tempfile.TemporaryDirectory(prefix="kernels_once_")
        config.add_cleanup(folder.cleanup)
        setattr(config, KERNELS, folder.name)
    node.workerinput[KERNELS] = getattr(config, KERNELS)


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        kernels_once.compile_all(pathlib.Path(session.config.workerinput[KERNELS]))
