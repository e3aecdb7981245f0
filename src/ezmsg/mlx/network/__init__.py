"""Networks in a graph: any ``mlx.nn.Module`` as a unit, with its state, in bounded shapes.

:class:`Network` cuts a stream into windows and runs a model on them. The model needs nothing of this package. For
models that remember there are layers whose time and memory do not grow: :class:`RecurrentLayer`, which runs a step in a
kernel, :class:`RecurrentStack` and :class:`RecurrentDecoder` of several, and attention to the last samples of a stream
(:class:`RingAttention`, :class:`RingKVCache`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
