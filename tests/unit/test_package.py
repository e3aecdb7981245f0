"""What the distribution announces, and what importing it costs."""

import ast
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import ezmsg.core as ez
import pytest

import ezmsg.mlx

PACKAGE = Path(ezmsg.mlx.__file__).parent
COMPONENTS = [point for point in metadata.distribution("ezmsg-mlx").entry_points if point.group == "ezmsg.components"]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("point", COMPONENTS, ids=lambda point: point.name)
def test_component_is_a_unit_of_that_name(point):
    unit = point.load()
    assert issubclass(unit, ez.Unit)
    assert point.name == f"mlx.{unit.__name__}"


def test_there_are_components():
    assert {"mlx.AsArray", "mlx.EWMAUnit"} <= {point.name for point in COMPONENTS}


def test_every_public_unit_is_a_component():
    units = {
        name
        for name in ezmsg.mlx.__all__
        if isinstance(getattr(ezmsg.mlx, name), type) and issubclass(getattr(ezmsg.mlx, name), ez.Unit)
    }
    assert {point.name for point in COMPONENTS} >= {f"mlx.{name}" for name in units}


def test_importing_the_package_and_its_modules_loads_neither_mlx_nor_numba():
    # ezmsg-sigproc's own modules of filters and windows load MLX and numba, and these extend them. The self-test is a
    # program.
    others = {"__init__", "__version__", "filter", "butterworthfilter", "cheby", "selftest", "adaptive_lnc", "decimate"}
    others |= {"butterworthzerophase", "combfilter", "filterbank", "fir_hilbert", "singlebandpow", "wavelets"}
    entries = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = sorted(path.stem for path in entries if path.stem not in others)
    assert {"ewma", "cache", "kernels", "offline"} <= set(modules)
    code = f"""
import sys
import ezmsg.mlx
for name in {modules}:
    __import__(f"ezmsg.mlx.{{name}}")
print(sorted(name for name in sys.modules if name.split(".")[0] in ("mlx", "numba")))
"""
    assert run_python(code).strip() == "[]"


def test_type_checkers_see_the_public_names():
    tree = ast.parse(Path(ezmsg.mlx.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    # With the name repeated, which tells type checkers that it is public.
    seen = {alias.asname: alias.name for node in imports for alias in node.names}
    assert set(seen) == set(ezmsg.mlx.__all__) and all(alias == name for alias, name in seen.items())


def test_public_names_exist_and_are_sorted():
    assert ezmsg.mlx.__all__ == sorted(set(ezmsg.mlx.__all__))
    for name in ezmsg.mlx.__all__:
        assert hasattr(ezmsg.mlx, name), name


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_ezmsg_stays_a_namespace():
    assert not (PACKAGE.parent / "__init__.py").exists()
    assert importlib.util.find_spec("ezmsg").origin is None
