"""Apple's MLX inside ezmsg streaming graphs, with bounded memory, on Metal, CUDA and CPU.

Importing this package neither loads MLX nor compiles anything; the first message does. The public names are listed in
``__init__.pyi``, and loaded when they are asked for, so that a process that converts need not wait for the filters. The
functions :func:`ezmsg.mlx.ewma.ewma` and :func:`ezmsg.mlx.sosfilt.sosfilt` are not among them, since their names here
are those of their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
