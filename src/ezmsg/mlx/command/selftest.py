"""``ezmsg-mlx selftest``: see :mod:`ezmsg.mlx.selftest`."""

from .. import selftestoptions


def main(prog: str, arguments: list[str]) -> int:
    """Print the report; the exit status."""
    # Wrong usage and --help end here, before MLX is loaded.
    selftestoptions.parse(prog, arguments)
    from .. import selftest

    return selftest.main(arguments, prog)
