"""What numba's cache does not hold, or may not hold, is compiled anew, and the log says so once."""

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import RecordedLog, in_fresh_process

pytest.importorskip("mlx.core", exc_type=ImportError)

KERNEL = """
from ezmsg.mlx.kernels.cpu.compiled import compiled


@compiled()
def double(x):
    return 2.0 * x


@compiled()
def total(x):
    result = 0.0
    for i in range(x.size):
        result += double(x[i])
    return result
"""


def run_kernel(folder: Path) -> tuple[list[str], int]:
    """What the log says while a process that begins now calls a kernel, and how many functions it did not compile."""
    compiled = importlib.import_module("ezmsg.mlx.kernels.cpu.compiled")
    compiled._told = False
    with RecordedLog() as log:
        spec = importlib.util.spec_from_file_location("kernel", folder / "kernel.py")
        kernel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
        assert kernel.double(3.0) == 6.0
        assert kernel.total(np.arange(5.0)) == 20.0
    return log.warnings, sum(sum(function.stats.cache_hits.values()) for function in (kernel.double, kernel.total))


def without_a_block(data: bytes) -> bytes:
    start = data.index(b"\x7fELF") + 32
    return data[:start] + bytes(512) + data[start + 512 :]


@in_fresh_process
def _damaged(folder: Path) -> None:
    assert run_kernel(folder) == ([], 0)
    assert run_kernel(folder) == ([], 2)
    for pattern, damage in [
        ("*.nbi", lambda data: b""),
        ("*.nbi", lambda data: b"not a pickle"),
        ("*.nbi", lambda data: data[: len(data) // 2]),
        ("*.nbc", lambda data: b""),
        ("*.nbc", lambda data: data[: len(data) // 2]),
        # Loads as a pickle, and ends the process if it is taken for machine code.
        ("*.nbc", without_a_block),
    ]:
        files = list((folder / "cache").rglob(pattern))
        assert len(files) == 2
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        (warning,), loaded = run_kernel(folder)
        assert loaded == 0
        assert warning.startswith(f"numba's cache in {files[0].parent} cannot be read (")
        # Mended by that run.
        assert run_kernel(folder) == ([], 2)


@in_fresh_process
def _full(folder: Path) -> None:
    import resource

    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, no_limit[1]))
    (warning,), loaded = run_kernel(folder)
    assert loaded == 0
    assert warning.startswith(f"numba's cache in {folder / 'cache'}")
    assert "cannot be written (OSError: " in warning
    resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert run_kernel(folder) == ([], 0)
    # What is there is used.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, no_limit[1]))
    assert run_kernel(folder) == ([], 2)


@in_fresh_process
def _without_a_place(folder: Path) -> None:
    (warning,), loaded = run_kernel(folder)
    assert loaded == 0
    assert warning.startswith("numba's cache has no place (RuntimeError: cannot cache function")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_damaged_cache_is_mended(folder):
    _damaged(folder)


def test_a_full_disk(folder):
    pytest.importorskip("resource", reason="Windows limits no file sizes")
    _full(folder)


def test_no_place_for_a_cache(folder, monkeypatch):
    (folder / "cache").write_text("a file where the folder should be")
    # Else numba goes on to the folder of the module and to that of the user.
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    _without_a_place(folder)


def test_every_kernel_is_compiled_that_way():
    from numba.core.dispatcher import Dispatcher

    import ezmsg.mlx.kernels.cpu as package

    compiled = importlib.import_module(f"{package.__name__}.compiled")
    functions = [
        function
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        for function in vars(importlib.import_module(module.name)).values()
        if isinstance(function, Dispatcher)
    ]
    assert functions
    for function in functions:
        assert isinstance(function._cache, compiled._OptionalCache), function


@pytest.mark.parametrize(("recurrence", "coefficients", "state"), [
    ("ewma", 0.5, (2,)),
    ("ewma", 0.5, (4,)),
    ("zscore", 0.5, (6,)),
    ("sosfilt", np.array([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]), (1, 4)),
])  # fmt: skip
def test_one_compilation_serves_all_messages(recurrence, coefficients, state):
    import mlx.core as mx

    from ezmsg.mlx.kernels import kernel
    from ezmsg.mlx.kernels.cpu.compiled import KEPT_FLOATS

    module = kernel(recurrence, "cpu")
    module.compile_ahead(coefficients, 3)
    function = {"ewma": "_ewma", "zscore": "_zscore", "sosfilt": "_filter"}[recurrence]
    before = len(getattr(module, function).signatures)
    for shape, axis in (
        ((5, 3), 0),
        ((KEPT_FLOATS, 2), 0),
        ((3, 5), 1),
        ((2, KEPT_FLOATS), 1),
        ((5,), 0),
        ((2, 5, 3), 1),
    ):
        *sections, n_states = state
        zi = mx.zeros((*sections, *(n_states if dim == axis else n for dim, n in enumerate(shape))))
        module.run(mx.ones(shape), coefficients, zi, axis, ())
    assert len(getattr(module, function).signatures) == before == 1
