"""The entry point: which subcommand is meant."""

import argparse
import contextlib
import importlib
import os
import sys
from importlib import metadata

from .options import BROKEN_PIPE, INTERRUPTED, USAGE

COMMANDS = {
    "process": "run a chain over recordings, into Zarr groups",
    "info": "what is in a recording",
    "show": "draw results into a picture",
    "selftest": "whether the package works on this machine, and how fast",
    "memory": "the memory of a running graph, live",
}
"""The subcommands, each a module of this package, and what they do."""

PROG = "ezmsg-mlx"


def main(arguments: list[str] | None = None) -> int:
    """Run the command with *arguments*, by default those of the process.

    Returns:
        The exit status: 0 done, 1 something failed, 2 a package is missing, 130 interrupted, 141 nobody reads the
        output any more.

    Raises:
        SystemExit: With status 0 after ``--help`` or ``--version``, with 2 after wrong usage.
    """
    try:
        try:
            return _run(arguments)
        finally:
            # Here, since an error at the end of the process could not be caught.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        _write_nowhere()
        return BROKEN_PIPE


def _write_nowhere() -> None:
    """Send what stdout and stderr still hold to nobody: Python writes it when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            with contextlib.suppress(OSError):
                os.dup2(nowhere, stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it is closed
            continue
    os.close(nowhere)


def _run(arguments: list[str] | None) -> int:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        PROG,
        description="MLX in ezmsg, from a shell.",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
                "",
                f"{PROG} COMMAND --help tells the options of one.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=metadata.version("ezmsg-mlx"))
    parser.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="those of the command")
    given = parser.parse_args(arguments)
    command = importlib.import_module(f".{given.command}", __package__)
    prog = f"{PROG} {given.command}"
    try:
        return command.main(prog, given.arguments)
    except ImportError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
