"""Which module may import which: data flows one way, and no module imports one above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ezmsg.mlx

PACKAGE = Path(ezmsg.mlx.__file__).parent

LAYERS = (
    ("stream", "scan"),
    ("kernels", "cache"),
    ("ewma", "network", "sosfilt", "memory", "simulate"),
    (
        "activation",
        "affinetransform",
        "asarray",
        "filter",
        "linear_regressor",
        "peak",
        "pow",
        "readlate",
        "rechunk",
        "scaler",
    ),
    ("adaptive_lnc", "detrend", "filterbank", "resample"),
    ("binned", "butterworthfilter", "cheby", "combfilter", "fir_hilbert", "refit_kalman", "resampleconcat", "wavelets"),
    ("butterworthzerophase", "decimate", "rate", "singlebandpow"),
    ("chain", "plan"),
    ("offline", "chains"),
    ("selftest",),
    ("command",),
    ("__main__",),
)
"""From the bottom up. A module imports from the layers below its own, and from its own part of one."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path not in (PACKAGE / "__version__.py", PACKAGE / "__init__.py")
)


def parts_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_by(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports of this package, also inside functions and for type checkers."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = base + tuple((node.module or "").split(".")) if node.module else base
            for alias in node.names:
                longer = (*module, alias.name)
                file = PACKAGE.joinpath(*longer)
                yield longer if file.is_dir() or file.with_suffix(".py").exists() else module
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                assert not name.startswith("ezmsg.mlx."), f"{path} imports {name} by its full name"


def test_every_part_has_a_layer():
    parts = {parts_of(path)[0] for path in MODULES}
    assert parts == set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_one_above_it(path):
    own = parts_of(path)
    for other in filter(None, imported_by(path)):
        assert other[0] == own[0] or LEVEL[other[0]] < LEVEL[own[0]], f"imports {'.'.join(other)}"


def test_no_modules_import_each_other():
    modules = {parts_of(path): path for path in MODULES}
    below = {name: {other for other in imported_by(path) if other in modules} for name, path in modules.items()}
    done: set[tuple[str, ...]] = set()

    def visit(name: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        assert name not in above, " imports ".join(".".join(part) for part in (*above, name))
        if name not in done:
            for other in below[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in modules:
        visit(name, ())
