"""What integration tests share."""

from collections.abc import Callable, Iterator

import pytest
from helpers.scripts import Script


@pytest.fixture
def start() -> Iterator[Callable[..., Script]]:
    """Starts a script of the examples; all that it started are gone after the test."""
    scripts: list[Script] = []

    def start(*arguments: str, spawns_anew: bool = False) -> Script:
        scripts.append(Script(*arguments, spawns_anew=spawns_anew))
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()
