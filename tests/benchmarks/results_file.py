"""Files for docs/results/data, as the benchmarks write them; docs/results/render.py says what is in them."""

import contextlib
import datetime
import json
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

PACKAGES = {
    "ezmsg-mlx": "ezmsg-mlx",
    "mlx": "MLX",
    "ezmsg": "ezmsg",
    "ezmsg-sigproc": "ezmsg-sigproc",
    "zarr": "Zarr",
    "numcodecs": "numcodecs",
}


def write_results(
    path: Path,
    *,
    title: str,
    command: str,
    spread: str,
    columns: Sequence[tuple[str, str, int | None]],
    rows: Sequence[dict[str, object]],
    notes: Sequence[str] = (),
    machine: str | None = None,
    packages: Sequence[str] = tuple(PACKAGES),
    state: str = "from the start",
) -> None:
    """Write what a script has measured with input on the host.

    Args:
        path: The file.
        title: What was measured.
        command: By which command.
        spread: What figures are of what.
        columns: Head, key and digits of each.
        rows: The figures.
        notes: Sentences below the table.
        machine: What it is called; None for the kind of processor.
        packages: Those whose versions count.
        state: As render.py has it.
    """
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[PACKAGES[name]] = re.sub(r"dev.*", "dev", metadata.version(name))
    found = {
        "title": title,
        "machine": machine or platform.processor() or platform.machine(),
        "versions": {**versions, "NumPy": np.__version__, "Python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": command,
        "form": "script",
        "state": state,
        "input": "host",
        "spread": spread,
        "columns": [
            {"head": head, "key": key, **({} if digits is None else {"digits": digits})}
            for head, key, digits in columns
        ],
        "rows": list(rows),
        **({"notes": list(notes)} if notes else {}),
    }
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
