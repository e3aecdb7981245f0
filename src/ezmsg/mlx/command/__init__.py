"""The command ``ezmsg-mlx``, one module a subcommand.

A subcommand's module has ``main(prog, arguments)``, which gives the exit status, and is imported when it is asked for,
so that ``ezmsg-mlx --help`` need not load what the others need.
"""

from .main import main

__all__ = ["main"]
