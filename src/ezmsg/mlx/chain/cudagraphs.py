"""How MLX starts the kernels of a fused chain on CUDA."""

import os
from collections.abc import MutableMapping

CUDA_GRAPHS = "MLX_USE_CUDA_GRAPHS"


def start_kernels_one_by_one(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX start kernels one by one in this process and those that it starts, unless the user has said otherwise.

    Else MLX makes a CUDA graph for each evaluation. A message of a fused chain is one evaluation of a few kernels, for
    which the graph takes longer than the kernels do. MLX reads the variable once in a process, when it first
    computes on the GPU, so whoever has used it there before keeps the graphs.
    """
    environ.setdefault(CUDA_GRAPHS, "0")
