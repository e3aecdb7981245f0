"""What can be tested without a compiler of how the kernels for CUDA are made."""

import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.mlx.kernels.cuda import ewma, lookback, sosfilt  # noqa: E402
from ezmsg.mlx.kernels.cuda.kernel import cuda_kernel, made_small  # noqa: E402


@pytest.fixture
def made(monkeypatch):
    """What MLX is given of each kernel."""
    kernels = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: kernels.append(arguments))
    return kernels


def test_comments_and_indentation_go_and_directives_keep_their_lines():
    source = "\n  // why\n  int a = 1;  // what\n\n  #pragma unroll\n    for (;;) a = a / 2;\n"
    assert made_small(source) == "int a = 1;\n#pragma unroll\nfor (;;) a = a / 2;\n"


def test_constants_are_in_the_source_and_the_name(made):
    cuda_kernel("name", "y[0] = A + B;", constants={"A": 3, "B": 40}, inputs=("x",), outputs=("y",))
    assert made == [
        {
            "name": "ezmsg_mlx_name_3_40",
            "input_names": ["x"],
            "output_names": ["y"],
            "header": "",
            "source": "constexpr int A = 3;\nconstexpr int B = 40;\ny[0] = A + B;\n",
        }
    ]


def test_mlx_gets_no_comments(made):
    # Past what remembers them, for other tests use them.
    for kernel, arguments in (
        (ewma._kernel, (True, 8)),
        (ewma._kernel, (False, 32)),
        (sosfilt._kernel, (2, 1, 8)),
        (sosfilt._kernel, (2, 2)),
        (lookback._zeros, ()),
    ):
        kernel.__wrapped__(*arguments)
    assert len({kernel["name"] for kernel in made}) == 5
    assert not any("//" in kernel["header"] + kernel["source"] for kernel in made)
