"""The command ``ezmsg-mlx``, also as ``python -m ezmsg.mlx``.

A subcommand is imported when it is asked for, so that ``--help`` need not load what the others need.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from importlib import metadata

from .options import BROKEN_PIPE, DONE, INTERRUPTED, USAGE, Parser, UsageError

__all__ = ["main"]

COMMANDS = {
    "process": "run a chain over recordings, into Zarr groups",
    "info": "what is in a recording, or in all of a folder",
    "show": "draw results into a picture",
    "selftest": "whether the package works on this machine, and how fast",
    "memory": "the memory of a running graph, live",
}
"""The subcommands and what they do."""

PROG = "ezmsg-mlx"

EPILOG = f"""\
examples:
  {PROG} info recordings/
  {PROG} process recordings/ --chain band-pass --output filtered
  {PROG} show filtered/session.zarr
  {PROG} memory

{PROG} COMMAND --help lists the options of one.
Completion with the TAB key, in bash or zsh (it needs the package shtab):
  eval "$({PROG} --print-completion bash)"
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command with *arguments*, by default those of the process.

    Returns:
        The exit status: 0 done, 1 something failed, 2 wrong usage or a package is missing, 130 interrupted, 141 nobody
        reads the output any more.

    Raises:
        SystemExit: With status 0 after ``--help`` or ``--version``, with 2 after wrong usage.
    """
    _open_standard_files()
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


def _open_standard_files() -> None:
    """See to it that every name of a file can be printed, and that no file gets the number of a closed stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is the one that is closed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files may hold bytes that are no text. A stream that is read as well cannot be changed.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


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
    listed = "\n".join(["commands:", *(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()), "", EPILOG])
    parser = Parser(PROG, description="MLX in ezmsg, from a shell.", epilog=listed)
    parser.add_argument("--version", action="version", version=metadata.version("ezmsg-mlx"))
    parser.add_argument("--print-completion", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="?", metavar="COMMAND", choices=list(COMMANDS), help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="those of the command")
    given = parser.parse_args(arguments)
    prog = f"{PROG} {given.command}"
    try:
        if given.print_completion:
            print(_completion(parser, given.print_completion))
            return DONE
        if given.command is None:
            parser.print_help()
            return DONE
        if given.command == "selftest":
            return _selftest(given.arguments)
        if given.command == "memory":
            from ..memory import __main__ as memory

            return memory.main(given.arguments, prog, Parser)
        return importlib.import_module(f".{given.command}", __package__).main(prog, given.arguments)
    except (ImportError, UsageError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _selftest(arguments: list[str]) -> int:
    """Print the report of the self-test; the exit status."""
    # Wrong usage and --help end here, before MLX is loaded.
    given = _selftest_parser().parse_args(arguments)
    from .. import selftest

    return selftest.main(given.require, as_json=given.json)


def _selftest_parser() -> Parser:
    parser = Parser(
        f"{PROG} selftest",
        description="Whether this package works on a machine, and how fast.",
        epilog=f"examples:\n  {PROG} selftest\n  {PROG} selftest --json --require metal",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--require", choices=("cpu", "cuda", "metal"), help="fail unless MLX uses this backend")
    return parser


def _completion(parser: Parser, shell: str) -> str:
    """The script that completes the command in a shell."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError('completion needs shtab: pip install "ezmsg-mlx[offline]"') from error

    from ..memory import __main__ as memory
    from . import info, process, show

    parsers = {
        "process": process.parser(f"{PROG} process"),
        "info": info.parser(f"{PROG} info"),
        "show": show.parser(f"{PROG} show"),
        "selftest": _selftest_parser(),
        "memory": memory.parser(f"{PROG} memory", Parser),
    }
    whole = argparse.ArgumentParser(PROG)
    whole.add_argument("--version", action="store_true", help="the version of the package")
    commands = whole.add_subparsers()
    for name, each in parsers.items():
        for action in each._actions:
            if action.type is None and action.choices is None and not isinstance(action, argparse._StoreTrueAction):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, parents=[each], add_help=False, help=COMMANDS[name])
    return shtab.complete(whole, shell)
