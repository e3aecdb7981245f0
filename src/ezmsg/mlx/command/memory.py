"""``ezmsg-mlx memory``: see :mod:`ezmsg.mlx.memory`."""


def main(prog: str, arguments: list[str]) -> int:
    """Show the memory of a running graph; the exit status."""
    from ..memory import __main__ as memory

    return memory.main(arguments, prog)
