"""Example scripts, run as a user runs them."""

import os
import pathlib

from . import warm

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_example(script: str, *options: str, folder: pathlib.Path, columns: int = 80) -> str:
    """Run a script in *folder*, on a terminal of so many columns as far as it can tell; what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EZMSG_", "FORCE_COLOR"))}
    done = warm.run(
        [str(EXAMPLES / script), *options], environment=environment | {"COLUMNS": str(columns)}, folder=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
