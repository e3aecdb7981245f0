"""The options of the self-test, apart from it, so that they are told without MLX."""

import argparse

SUMMARY = "Whether this package works on a machine, and how fast."


def parse(prog: str, arguments: list[str] | None) -> argparse.Namespace:
    """``json`` and ``require`` of the command *prog*.

    Raises:
        SystemExit: *arguments* are wrong, or ask for help.
    """
    parser = argparse.ArgumentParser(prog, description=SUMMARY)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--require", choices=("cpu", "cuda", "metal"), help="fail unless MLX uses this backend")
    return parser.parse_args(arguments)
