"""What can be said of the texts of the kernels for Metal without running them."""

import os
import re

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from helpers import metal_cuda, metal_emulation
from helpers.metal_texts import CLANG, MODULES, errors_of_clang, launches_of, opencl_of

from ezmsg.mlx.kernels import layout
from ezmsg.mlx.kernels.sources import read_source

ALL = bool(os.environ.get("EZMSG_MLX_ALL_METAL"))

SPACES = ("device", "constant", "threadgroup", "thread")

METAL = "ezmsg.mlx.kernels.metal"

pytestmark = pytest.mark.skipif(metal_emulation.COMPILER is None, reason="needs Linux and g++")


@pytest.fixture(params=MODULES)
def launches(request, monkeypatch):
    # Traced, not run: nothing is compiled.
    monkeypatch.setattr(metal_emulation, "run", lambda launch, inputs, results: None)
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        yield launches_of(request.param)


def test_each_recurrence_has_a_bounded_number_of_texts(launches):
    assert 1 <= len(launches) <= 6


def test_each_pointer_has_an_address_space(launches):
    for launch in launches:
        # A type, an asterisk or an ampersand, and a name: what is multiplied is no type.
        pointers = re.findall(
            r"((?:\w+\s+)*)\b(?:bool|float|int|uint|Pair|State|Statistics|Section)\s*[*&]+\s*\w+", launch.text
        )
        assert len(pointers) >= launch.text.count("[[buffer(") >= 6
        for qualifiers in pointers:
            assert set(qualifiers.split()) & set(SPACES), qualifiers


def test_nothing_is_left_to_the_compiler_to_find_an_address_space_for(launches):
    # MSL 4.1 takes references, pointers and "this" for those of any address space where none is named.
    for launch in launches:
        assert not re.search(r"\b(auto|decltype|this|class)\b", launch.text)
        for body in re.findall(r"^struct \w+ \{\n(.*?)\n?\};", launch.text, re.MULTILINE | re.DOTALL):
            # Members are values: no functions, pointers or references.
            assert re.fullmatch(r"(?:\w+ [\w, ]+;\s*)+", body), body


@pytest.mark.parametrize("word", ["double", "new", "malloc", "half", "volatile", "atomic", "goto", "//"])
def test_words_that_are_not_in_them(launches, word):
    assert not any(re.search(rf"\b{word}\b" if word.isalpha() else word, launch.text) for launch in launches)


def test_each_literal_with_a_point_is_a_float(launches):
    for launch in launches:
        literals = re.findall(r"\b(?:\d+\.\d*(?:e[+-]?\d+)?|0x\d+p[+-]?\d+)\w*", launch.text)
        assert literals and all(literal.endswith("f") for literal in literals), literals


def test_threadgroup_memory_is_within_what_metal_has(launches):
    for launch in launches:
        constants = {name: int(value) for name, value in re.findall(r"constexpr uint (\w+) = (\d+);", launch.text)}
        sizes = re.findall(r"^threadgroup \w+ \w+\[(.*?)\];", launch.text, re.MULTILINE)
        total = sum(4 * eval(size, {}, constants) for size in sizes)
        assert (sizes or "barrier" not in launch.text) and total <= 32768, total


@pytest.mark.skipif(CLANG is None, reason="needs clang")
def test_a_compiler_that_knows_address_spaces_takes_them(launches, tmp_path):
    for launch in launches:
        assert errors_of_clang(opencl_of(launch), tmp_path) == ""


@pytest.mark.skipif(metal_cuda.COMPILER is None, reason="needs nvcc")
def test_a_compiler_for_gpus_takes_them(launches):
    # As tests/gpu/metal_on_cuda.py runs them.
    for launch in launches if ALL else launches[-1:]:
        assert metal_cuda.compiled(metal_cuda.source_of(launch)).stat().st_size > 10_000


@pytest.mark.skipif(CLANG is None, reason="needs clang")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "device float* lost = all_taken;"),
        ("uint n = x_shape[0];", "uint n = x_shape[0]; device const int* same = x_shape;"),
        ("uint n = x_shape[0];", "uint n = x_shape[0]; thread float* same = y;"),
        ("uint n = x_shape[0];", "uint n = x_shape[0]; x_shape[0] = 1;"),
        ("uint n = x_shape[0];", "uint n = nothing[0];"),
        # As the run-time compiler of macOS 27 has it: what an object of any address space refers to is of any, too.
        (
            "uint n = x_shape[0];",
            "struct Kept { float v[4]; thread float& at(uint i) { return v[i]; } }; Kept kept; uint n = x_shape[0];",
        ),
    ],
)
def test_that_compiler_would_refuse_a_wrong_address_space(before, after, monkeypatch, tmp_path):
    monkeypatch.setattr(metal_emulation, "run", lambda launch, inputs, results: None)
    with metal_emulation.installed(monkeypatch, *MODULES.values()):
        for launch in launches_of("ewma"):
            opencl = opencl_of(launch)
            assert before in opencl and "error" in errors_of_clang(opencl.replace(before, after), tmp_path)


@pytest.mark.parametrize("name", ["LARGEST_SAMPLE", "LARGEST_SCORED", "SMALLEST_VARIANCE", "RESOLUTION"])
def test_limits_are_the_same_in_python_and_in_the_sources(name):
    header, _ = read_source(METAL, "zscore.metal")
    text = re.search(rf"\b{name} = (\S+)f;", header)[1]
    value = float.fromhex(text) if text.startswith("0x") else float(text)
    assert np.float32(value) == getattr(layout, name)
