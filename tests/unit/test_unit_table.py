"""The documentation's table of what ezmsg-sigproc's units do with MLX data agrees with what they do."""

import importlib
import inspect
import pkgutil
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ezmsg.core as ez
import ezmsg.sigproc
import pytest
from helpers.processes import in_fresh_process

mx = pytest.importorskip("mlx.core")

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="the table is that of MLX's CPU backend on Linux")


def _script() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("make_unit_table")
    finally:
        sys.path.remove(str(DOCS))


@in_fresh_process
def test_table_is_what_runs():
    warnings.simplefilter("ignore")
    script = _script()
    found = script.TABLE.read_text(encoding="utf-8").splitlines()
    made = script.table().splitlines()
    assert made == found, "Run: python docs/make_unit_table.py"


def test_nearly_every_unit_stays_in_mlx_or_has_a_namesake():
    rows = [
        line.split(" | ") for line in _script().TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    assert len(rows) >= 60
    others = [row for row in rows if row[2] != "stays in MLX" and "`" not in row[4].removesuffix(" |")]
    others += [row for row in rows if row[4].startswith("none, as for")]
    assert len(others) <= 5
    assert all(row[4].startswith("none") for row in others)


def _units() -> Iterator[str]:
    prefix = "ezmsg.sigproc."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in pkgutil.walk_packages(ezmsg.sigproc.__path__, prefix):
            for name, kind in vars(importlib.import_module(info.name)).items():
                # In Python 3.10 an alias like list[int] counts as a class.
                if (
                    inspect.isclass(kind)
                    and typing.get_origin(kind) is None
                    and issubclass(kind, ez.Unit)
                    and kind.__module__ == info.name
                ):
                    yield f"{info.name.removeprefix(prefix)}.{name}"


def test_table_has_every_unit():
    script = _script()
    in_table = {case.unit for case in script.cases()}
    assert [unit for unit in _units() if unit not in in_table | script.NOT_RUN.keys()] == []
