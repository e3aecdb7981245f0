"""Files for docs/results/data, as the benchmarks write them; docs/results/render.py says what is in them."""

import contextlib
import datetime
import json
import platform
import re
from collections.abc import Mapping, Sequence
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
    "zarrs": "zarrs",
    "tensorstore": "tensorstore",
}

LIVE = ("ezmsg-mlx", "mlx", "ezmsg", "ezmsg-sigproc")
"""Those that count where nothing is read or written."""


def write_results(
    path: str | Path,
    *,
    title: str,
    command: str,
    spread: str,
    columns: Sequence[tuple[str, str, int | None] | Mapping[str, object]],
    rows: Sequence[Mapping[str, object]],
    notes: Sequence[str] = (),
    machine: str | None = None,
    packages: Sequence[str] = tuple(PACKAGES),
    state: str = "from the start",
    form: str = "script",
    input: str = "host",
    others: Mapping[str, object] | None = None,
) -> None:
    """Write what has been measured.

    Args:
        path: The file.
        title: What was measured.
        command: By which command.
        spread: What figures are of what.
        columns: Head, key and digits of each; or as render.py has it.
        rows: The figures.
        notes: Sentences below the table.
        machine: What it is called; None for the kind of processor.
        packages: Those whose versions count.
        state: As render.py has it.
        form: As render.py has it.
        input: As render.py has it.
        others: What else the file is to hold, which the page does not show.
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
        "form": form,
        "state": state,
        "input": input,
        "spread": spread,
        "columns": [column if isinstance(column, Mapping) else _column(*column) for column in columns],
        "rows": list(rows),
        **({"notes": list(notes)} if notes else {}),
        **(others or {}),
    }
    Path(path).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _column(head: str, key: str, digits: int | None) -> dict[str, object]:
    return {"head": head, "key": key, **({} if digits is None else {"digits": digits})}
