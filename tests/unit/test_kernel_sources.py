"""What can be tested without a compiler of how kernels are made of their sources."""

import re

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel
from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE
from ezmsg.mlx.kernels.sources import made_small, read_source

CUDA = "ezmsg.mlx.kernels.cuda"
KERNELS = ("ewma_short", "ewma_long", "sosfilt_short", "sosfilt_long", "nothing_published")


def test_comments_and_indentation_go_and_directives_keep_their_lines():
    source = "\n  // why\n  int a = 1;  // what\n\n  #pragma unroll\n    for (;;) a = a / 2;\n"
    assert made_small(source) == "int a = 1;\n#pragma unroll\nfor (;;) a = a / 2;\n"


@pytest.mark.parametrize("name", KERNELS)
def test_a_source_has_a_body_and_each_header_once(name):
    header, body = read_source(CUDA, f"{name}.cu")
    assert body and "KERNEL" not in header + body and "#include" not in header + body and "//" not in header + body
    definitions = re.findall(r"__device__ \w[\w ]*\*? (\w+)\(", header)
    assert len(definitions) == len(set(definitions))


def test_a_part_of_a_body_may_stand_in_several_kernels():
    assert "unsigned n_groups" in read_source(CUDA, "ewma_long.cu")[1]
    assert "unsigned n_groups" in read_source(CUDA, "sosfilt_long.cu")[1]


def test_a_source_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match=r"ewma\.cuh of .* must have a KERNEL"):
        read_source(CUDA, "ewma.cuh")


def test_constants_are_in_the_source_and_the_name(monkeypatch):
    kernels = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: kernels.append(arguments))
    # Past what remembers kernels, which other tests use.
    cuda_kernel.__wrapped__("nothing_published", (), ("published",), WORDS=3)
    assert kernels == [
        {
            "name": "ezmsg_mlx_nothing_published_3",
            "input_names": [],
            "output_names": ["published"],
            "header": "",
            "source": "constexpr int WORDS = 3;\n" + read_source(CUDA, "nothing_published.cu")[1],
        }
    ]


def test_the_largest_sample_is_the_same_in_python_and_in_the_sources():
    header, _ = read_source(CUDA, "sosfilt_short.cu")
    assert np.float32(re.search(r"LARGEST_SAMPLE = ([\d.e+]+)f;", header)[1]) == LARGEST_SAMPLE
