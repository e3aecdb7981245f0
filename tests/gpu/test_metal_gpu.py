"""The kernels for Metal, whose text runs on an NVIDIA GPU, too."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("cupy", reason="needs CuPy")

SCRIPT = pathlib.Path(__file__).with_name("metal_on_cuda.py")


def test_they_compute_there_what_they_do_in_the_emulation(tmp_path):
    # Faults are put in by the script alone, which takes two minutes more.
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--without-mutants"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
