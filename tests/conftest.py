"""What holds for a run of tests as a whole."""

import os

import pytest

# Hundreds of processes import the package, each of which would compile its source.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist begins with files of many tests. The slowest have few, graphs and examples, and come first by name:
    # left for last, one of them keeps a single processor busy in the end.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
