"""Tests that need a CUDA device: `python -m pytest tests/gpu -o addopts=`."""

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not mx.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="MLX has no CUDA device here"))
