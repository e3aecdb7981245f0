"""Run several transformers as one.

In a live graph the host's time a message decides: hops from unit to unit, Python for each stage, evaluations on the
device. :class:`ChainTransformer` and the unit :class:`Chain` run a list of transformers as one. Those that can say what
they do as a function of arrays and state (:mod:`ezmsg.mlx.stream.fusible`) are fused between AsArray and AsArray: on
Metal and CUDA into one function that ``mx.compile`` compiles, on the CPU into NumPy and numba on one memory. The others
run as they are, between the fused ones. :class:`Parallel` is a stage of several branches.

:func:`run_chain` runs transformers over a stream that is at hand, with lists and the flush at its end.
"""

import importlib

from ..stream.fusible import register_when_asked
from .parallel import Parallel, ParallelSettings
from .transformer import BaseChainTransformer, Chain, ChainSettings, ChainTransformer, StageSettings, run_chain

__all__ = [
    "BaseChainTransformer",
    "Chain",
    "ChainSettings",
    "ChainTransformer",
    "Parallel",
    "ParallelSettings",
    "StageSettings",
    "run_chain",
]

register_when_asked("ezmsg.sigproc", lambda: importlib.import_module(f"{__name__}.foreign"))
