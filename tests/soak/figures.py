"""The figures of a run, as a file of results (see docs/results/render.py)."""

import datetime
import os
import platform
from importlib.metadata import version

import psutil

from soak.observe import Observer
from soak.verdict import PROCESSES, QUANTITIES, Reports, courses_on_device, lost

_PACKAGES = {"ezmsg-mlx": "ezmsg-mlx", "MLX": "mlx", "ezmsg": "ezmsg", "ezmsg-sigproc": "ezmsg-sigproc"}


def figures(command: str, minutes: float, reports: Reports, observer: Observer, left: list[str]) -> dict:
    """The figures as they go into docs/results/data, first against last.

    Args:
        command: By which they were made.
        minutes: Wall time of the source.
        reports: Of the processes, by their names.
        observer: Of their memory.
        left: What was there after the end.
    """
    chain, sink = reports.get("chain", {}), reports.get("sink", {})
    versions = {name: version(package).partition("+")[0] for name, package in _PACKAGES.items()}
    counts = {
        "messages": sink.get("n_messages"),
        "samples compared": sink.get("n_samples"),
        "messages refused on purpose, each logged once": len(sink.get("gaps", ())),
        "samples lost, repeated or wrong outside those": len(sink.get("wrong", ())) + sum(map(_length, lost(reports))),
        "times that MLX's cache was given back in silence": chain.get("n_released"),
        "MLX's cache at most, MiB": _rounded(chain.get("cache")),
        "MLX's cache above its limit at most, MiB": _rounded(chain.get("excess")),
        "processes and segments left behind": len(left),
    }
    rows = [{"name": name, "first": None, "last": count} for name, count in counts.items()]
    courses = {
        f"{words} of {name}": observer.first_and_last(name, quantity)
        for name in PROCESSES
        for quantity, words in QUANTITIES.items()
    }
    courses |= courses_on_device(reports, observer)
    rows += [
        {"name": f"{name}, MiB", "first": _rounded(first), "last": _rounded(last)}
        for name, (first, last) in courses.items()
    ]
    return {
        "title": f"Soak test with faults, {minutes:g} minutes",
        "machine": f"{chain.get('device') or 'unknown device'}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "versions": {**versions, "NumPy": version("numpy"), "Python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": command,
        "form": "graph",
        "state": "settled",
        "input": "host",
        "spread": f"One run. First: from second {observer.settled_after:.0f} on, for a sixtieth of the run",
        "columns": [
            {"head": "", "key": "name"},
            {"head": "first", "key": "first"},
            {"head": "last, or in all", "key": "last"},
        ],
        "rows": rows,
    }


def _length(gap: tuple[int, int]) -> int:
    start, stop = gap
    return stop - start


def _rounded(value: float | None) -> float | None:
    # NaN is not JSON.
    return None if value is None or value != value else round(value, 1)
