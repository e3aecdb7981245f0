"""Example scripts, run as a user runs them."""

import os
import pathlib
import signal
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

TIME_LIMIT = 300.0
"""Seconds after which a script is ended with all its processes. Only a hang takes that long, on a busy machine too."""


def run_example(script: str, *options: str, folder: pathlib.Path, columns: int = 80) -> str:
    """Run a script in *folder*, on a terminal of so many columns as far as it can tell; what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EZMSG_", "FORCE_COLOR"))}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *options],
        cwd=folder,
        env=environment | {"COLUMNS": str(columns)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out
