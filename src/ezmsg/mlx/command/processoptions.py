"""The options of ``ezmsg-mlx process``, and what they ask for."""

import argparse
import contextlib
import math
import os
import typing
from pathlib import Path

from . import chainoption, recordingoptions, resultoptions
from .chainoption import ChainChoice
from .jobs import Job, find_jobs
from .usage import UsageError

DESCRIPTION = """\
Run a chain over recordings, into Zarr groups.

Started again after Ctrl-C or a crash, it goes on where it was, and leaves complete results alone.
"""

EPILOG = """\
exit status:
  0    all results are complete
  1    some recordings failed; the others are complete
  2    wrong usage, or a scheduler that does not answer; nothing was done
  130  interrupted by Ctrl-C; the same command goes on

On a terminal there is a progress bar, elsewhere a line of JSON for each event.
"""


class Options(typing.NamedTuple):
    """What is asked for."""

    jobs: list[Job]
    chain: ChainChoice
    output: Path
    workers: int | None
    scheduler: str | None
    margin: float | typing.Literal["exact"] | None
    tolerance: float
    checkpoint_seconds: float
    dry_run: bool
    json: bool


def parse(prog: str, arguments: list[str]) -> Options:
    """The options of the command *prog*.

    Raises:
        SystemExit: They are wrong, or ask for help or a list.
    """
    parser = _parser(prog)
    # First of all, since a chain has options of its own.
    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--chain")
    first.add_argument("--list-chains", action="store_true")
    with contextlib.suppress(argparse.ArgumentError):
        early, _ = first.parse_known_args(arguments)
        if early.list_chains:
            print("\n".join(f"{name}: {text}" for name, text in chainoption.described().items()))
            parser.exit(0)
    names: list[str] = []
    try:
        names = chainoption.add_parameters(parser, early.chain) if early.chain else []
        resultoptions.add(parser, names)
    except ValueError as error:
        parser.error(f"argument --chain: {error}")
    options = parser.parse_args(arguments)
    if options.workers and options.scheduler:
        parser.error("argument --workers: not allowed with --scheduler, whose cluster has its own workers")
    parameters = {name: value for name in names if (value := getattr(options, name)) is not None}
    chain = ChainChoice(options.chain, parameters)
    try:
        factory = chain.factory()
    except ValueError as error:
        parser.error(f"argument --chain: {error}")
    try:
        # Wrong parameters show now, and not in each recording.
        factory()
    except Exception as error:  # whatever a function of the user's raises
        name = next((name for name in names if str(error).startswith(f"{name} ")), "chain")
        kind = "" if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: "
        parser.error(f"argument --{name.replace('_', '-')}: {kind}{error}")
    try:
        kept = resultoptions.asked(options, names)
        jobs = find_jobs(options.recordings, options.output, recordingoptions.asked(options), kept)
    except UsageError as error:
        parser.error(f"argument {error.option}: {error}")
    return Options(
        jobs=jobs,
        chain=chain,
        output=options.output,
        workers=options.workers,
        scheduler=options.scheduler,
        margin=options.margin,
        tolerance=options.tolerance,
        checkpoint_seconds=options.checkpoint,
        dry_run=options.dry_run,
        json=options.json,
    )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recordings", nargs="+", metavar="RECORDING", help="recordings, or folders of them")
    add("--chain", required=True, metavar="CHAIN", help=f"what to run: {chainoption.FORM}")
    add("--list-chains", action="store_true", help="list the ready chains; --chain NAME --help tells their options")
    add("--output", required=True, type=_folder, metavar="FOLDER", help="where results go, as NAME.zarr")
    add("--workers", type=_count, metavar="N", help="run on N processes of this machine [1: in this process]")
    add("--scheduler", metavar="ADDRESS", help="run on the Dask cluster of this scheduler, whose workers see the files")
    text = (
        'seconds that a worker begins a piece earlier, or "exact" for recordings in one piece [follows from the chain]'
    )
    add("--margin", type=_margin, metavar="S", help=text)
    text = "what results of pieces may differ by from those of one run, as a share of the largest [1e-6]"
    add("--tolerance", type=_tolerance, default=1e-6, metavar="X", help=text)
    add("--checkpoint", type=_seconds, default=60.0, metavar="S", help='every S seconds, or "inf" for never [60]')
    add("--dry-run", action="store_true", help="say how long it will take and how large results are; write nothing")
    add("--json", action="store_true", help="lines of JSON on a terminal, too")
    recordingoptions.add(parser)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; allowed is an integer >= 1")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f'it is {text!r}; allowed are a number > 0 and "inf"')


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"it is {text!r}; allowed is a finite number > 0")


def _margin(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        if text == "exact" or 0 <= float(text) < math.inf:
            return text if text == "exact" else float(text)
    raise argparse.ArgumentTypeError(f'it is {text!r}; allowed are a finite number >= 0 and "exact"')


def _folder(text: str) -> Path:
    path = Path(text)
    above = nearest(path)
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder, since {str(above)!r} is a file")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write into {text!r}: no permission in {str(above)!r}")
    return path


def nearest(path: Path) -> Path:
    """*path*, or the nearest folder above it that is there."""
    path = Path(os.path.abspath(path))
    return next(parent for parent in (path, *path.parents) if parent.exists())
