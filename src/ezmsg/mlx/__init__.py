"""Apple's MLX inside ezmsg streaming graphs, with bounded memory, on Metal, CUDA and CPU."""

from .__version__ import __version__ as __version__
