"""The options of the command, and the errors that end it with one sentence."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

if typing.TYPE_CHECKING:
    from ..offline import RecordingSource, ZarrSink
    from ..stream.unit import Stages

DONE = 0
SOME_FAILED = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Status that a shell gives a program that SIGPIPE has ended."""


class UsageError(Exception):
    """An option, as it is written, asks for something that cannot be had."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"argument {option}: {text}")


class Parser(argparse.ArgumentParser):
    """Reads options; wrong usage is one sentence and a hint."""

    def __init__(self, prog: str, **options: typing.Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, **{"formatter_class": formatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> typing.NoReturn:
        """End with status 2."""
        self.exit(USAGE, f"{self.prog}: error: {message}\n{self.prog} --help lists the options.\n")


def on_terminal() -> bool:
    """Whether the output goes to a terminal; there may be none at all."""
    return sys.stdout is not None and sys.stdout.isatty()


RecordingOptions: typing.TypeAlias = dict[str, typing.Any]
"""Options that were given, as keyword arguments of :func:`ezmsg.mlx.offline.open_recording`."""


class _Argument(argparse.Action):
    """``NAME=VALUE`` into a dictionary, with the value as Python reads it, or else as text."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, text: object, option: str | None = None
    ) -> None:
        name, equals, value = str(text).partition("=")
        if not equals or not name.isidentifier():
            parser.error(f"argument {option}: must be NAME=VALUE, got {text!r}")
        found: object = value
        with contextlib.suppress(SyntaxError, ValueError):
            found = ast.literal_eval(value)
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), name.replace("-", "_"): found})


def add_recording_options(
    parser: argparse.ArgumentParser, *, of_streams: bool = True, of_channels: bool = False
) -> None:
    """Add them to *parser*; *of_streams* and *of_channels*: those that choose a part of a recording, too."""
    group = parser.add_argument_group("how recordings are read")
    text = "of the recordings, for example spikeglx or nwb [told by the names of files]"
    group.add_argument("--format", metavar="NAME", help=text)
    if of_streams:
        group.add_argument("--stream", metavar="NAME", help="which signal of a recording [the only one]")
        text = "which segment, from 0, or all of them one after the other [the only one]"
        group.add_argument("--segment", type=_segment, metavar="N|all", help=text)
    if of_channels:
        text = "labels, indices (0:32 is 0 to 31) and kinds (analog), with commas [all of the signal]"
        group.add_argument("--channels", metavar="LIST", help=text)
    text = "an argument of the source, for example sampling_rate=30000 and n_channels=384 of raw binary"
    group.add_argument("--source", action=_Argument, metavar="NAME=VALUE", help=text)


def _segment(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0 or 'all', got {text!r}")
    return text if text == "all" else int(text)


def recording_options(options: argparse.Namespace, *more: str) -> RecordingOptions:
    """Options that were given, and *more* of them."""
    found = {name: getattr(options, name, None) for name in ("format", "stream", "segment", *more)}
    return {**{name: value for name, value in found.items() if value is not None}, **(options.source or {})}


ResultOptions: typing.TypeAlias = Mapping[str, typing.Any]
"""Options that were given, as keyword arguments of :class:`ezmsg.mlx.ZarrSink`; the compressor by its name."""

CODECS = {"lz4": 5, "zstd": 5}
"""Those of Blosc, with the levels that they have where none is given."""

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32")


def add_result_options(parser: argparse.ArgumentParser, taken: Collection[str]) -> None:
    """Add them to *parser*, but for those whose names are *taken* by parameters of the chain."""
    group = parser.add_argument_group("how results are kept")
    add = group.add_argument
    text = "that of the installed Zarr, none, lz4 or zstd, these with a level from 1 to 9, as in zstd:1 [default]"
    add("--compressor", type=_compressor, default="default", metavar="NAME[:LEVEL]", help=text)
    if "dtype" not in taken:
        text = "integers are rounded to the nearest one and saturate [as the chain gives them]"
        add("--dtype", choices=DTYPES, help=text)
    add("--chunk-mb", type=_positive, metavar="MB", help="size of the rows of a chunk, in MiB [4]")
    add("--chunk-samples", type=_count, metavar="N", help="rows of a chunk instead")
    add("--chunk-channels", type=_count, metavar="N", help="channels of a chunk [all]")


def result_options(options: argparse.Namespace, taken: Collection[str]) -> ResultOptions:
    """Options that were given."""
    names = {"compressor", "dtype", "chunk_mb", "chunk_samples", "chunk_channels"}.difference(taken)
    return {name: value for name in sorted(names) if (value := getattr(options, name)) is not None}


def sink_options(given: ResultOptions) -> dict[str, typing.Any]:
    """The same with a codec as the compressor."""
    name, _, level = given.get("compressor", "default").partition(":")
    if name in CODECS:
        from ..offline.reading import import_extra

        numcodecs = import_extra("numcodecs")
        # Bits: smaller than with bytes, and zstd takes less time.
        codec = numcodecs.Blosc(cname=name, clevel=int(level or CODECS[name]), shuffle=numcodecs.Blosc.BITSHUFFLE)
    else:
        codec = None if name == "none" else name
    return {**given, "compressor": codec}


def _compressor(text: str) -> str:
    name, colon, level = text.partition(":")
    if (name in CODECS and (not colon or level in list("123456789"))) or text in ("default", "none"):
        return text
    raise argparse.ArgumentTypeError(
        f"must be default, none, lz4 or zstd, the last two with a level from 1 to 9 (zstd:1), got {text!r}"
    )


def _real(allowed: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """A function that reads a number; *allowed* says which ones are, for the error."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if is_allowed(value := float(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")

    return read


_positive = _real("a finite number > 0", lambda value: 0.0 < value < math.inf)
_seconds = _real("a number > 0 or 'inf'", lambda value: value > 0.0)
_margin = _real("a finite number >= 0 or 'exact'", lambda value: 0.0 <= value < math.inf)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class ChainChoice:
    """A chain by its name, so that each process that runs it can build it."""

    name: str
    """Of a ready chain, or ``module:function``."""

    parameters: Mapping[str, float | int | str | bool]
    """Those of a ready chain that were given."""

    def factory(self) -> Callable[[], Stages]:
        """A function that builds the chain; ValueError, which says what is wrong with the name, without one."""
        if ":" in self.name:
            return _own(self.name)
        return functools.partial(_ready(self.name), **self.parameters)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.parameters.items())])


def _ready(name: str) -> Callable[..., Stages]:
    from ..chains import READY

    if name not in READY:
        raise ValueError(f"must be one of {', '.join(READY)} or 'module:function', got {name!r}")
    return READY[name]


def _own(name: str) -> Callable[[], Stages]:
    module_name, _, function_name = name.partition(":")
    # As "python -m" does, since a module of the user's is usually where the command is called.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does
        raise ValueError(f"module {module_name!r} cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} has no function {function_name!r}")
    return function


def add_parameters(parser: argparse.ArgumentParser, chain: str) -> list[str]:
    """Add an option for each parameter of a ready chain; their names. ValueError if there is no such chain."""
    if ":" in chain:
        return []
    function = _ready(chain)
    group = parser.add_argument_group(f"of the chain {chain}")
    types, texts = typing.get_type_hints(function, localns={"ChainTransformer": object}), _texts(function)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        kind, option = types[name], f"--{name.replace('_', '-')}"
        text = f"{texts[name]} [{parameter.default}]".replace("%", "%%")
        if kind is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif typing.get_origin(kind) is typing.Literal:
            group.add_argument(option, choices=typing.get_args(kind), help=text)
        else:
            metavar = "N" if kind is int else "X"
            group.add_argument(option, type=kind, metavar=metavar, help=text)
    return list(parameters)


def _texts(function: Callable[..., object]) -> dict[str, str]:
    """Descriptions of the arguments in the docstring, each in one line."""
    part = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", part, re.M)}


def described() -> dict[str, str]:
    """The ready chains, and what each does in one sentence."""
    from ..chains import READY

    return {name: inspect.cleandoc(function.__doc__ or "").partition("\n")[0] for name, function in READY.items()}


@dataclass(frozen=True)
class Job:
    """A recording and where its results go."""

    recording: str
    results: str
    options: Mapping[str, typing.Any]
    """How it is read: keyword arguments of :func:`ezmsg.mlx.offline.open_recording`."""

    kept: ResultOptions
    """How its results are kept."""

    def sink(self, path: str | os.PathLike | None = None) -> ZarrSink:
        """The sink of its results, at *path* instead if that is given."""
        from ..offline import ZarrSink

        return ZarrSink(path or self.results, **sink_options(self.kept))

    def open(self) -> RecordingSource:
        """The recording as a source."""
        from ..offline import open_recording

        return open_recording(self.recording, **self.options)


def find_jobs(given: Iterable[str], output: Path, options: Mapping[str, typing.Any], kept: ResultOptions) -> list[Job]:
    """The recordings that are given, and those in folders that are, whose results go into folders of the same names."""
    places: dict[Path, Path] = {}
    for text in given:
        for recording in recordings_in(Path(text), options.get("format")):
            place = output.absolute() / _name(recording, Path(text))
            if places.setdefault(place, recording) != recording:
                both = f"{str(places[place])!r} and {str(recording)!r}"
                raise UsageError("RECORDING", f"{both} have one name, and so would their results")
    return [Job(os.path.abspath(recording), str(place), options, kept) for place, recording in places.items()]


def recordings_in(path: Path, format: str | None) -> list[Path]:
    """The recording that is given, or all in the folder that is; UsageError if there is none."""
    from ..offline import find_recordings

    if not path.exists():
        raise UsageError("RECORDING", f"there is no {str(path)!r}")
    if path.is_file():
        return [path]
    try:
        recordings = find_recordings(path, format)
    except ValueError as error:
        raise UsageError("--format", str(error)) from error
    if not recordings:
        raise UsageError("RECORDING", f"{str(path)!r} has no recordings of a format that is known")
    return recordings


def _name(recording: Path, given: Path) -> Path:
    """Of the results, in the folder of all results."""
    name = recording.name if recording.is_dir() else recording.stem
    below = Path() if recording == given or given.is_file() else recording.relative_to(given).parent
    return below / f"{name or 'results'}.zarr"


DESCRIPTION = """\
Run a chain over recordings, into Zarr groups.

Started again after Ctrl-C or a crash, it goes on where it was, and leaves
complete results alone.
"""

EPILOG = """\
examples:
  {prog} session.nwb --chain band-pass --high 5000 --output filtered
  {prog} recordings/ --chain spike-band-power --output features \\
      --workers 4
  {prog} a.ns6 --channels 0:32 --chain my_module:chain --output out
  {prog} noise.bin --format rawbinary --source n_channels=8 \\
      --source sampling_rate=30000 --chain band-pass --output out --dry-run

exit status:
  0    all results are complete
  1    some recordings failed; the others are complete
  2    wrong usage, or a scheduler that does not answer; nothing was done
  130  interrupted by Ctrl-C; the same command goes on

On a terminal there is a progress bar, elsewhere a line of JSON for each event.
"""


class Options(argparse.Namespace):
    """The parsed options of ``process``."""

    jobs: list[Job]
    chain: ChainChoice
    chain_name: str
    output: Path
    workers: int | None
    scheduler: str | None
    margin: float | typing.Literal["exact"] | None
    tolerance: float
    checkpoint_seconds: float
    dry_run: bool
    json: bool


def parse(prog: str, arguments: list[str]) -> Options:
    """The options of the command *prog*; SystemExit if they are wrong, or ask for help or a list."""
    parser = make_parser(prog)
    # First of all, since a chain has options of its own.
    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--chain")
    first.add_argument("--list-chains", action="store_true")
    with contextlib.suppress(argparse.ArgumentError):
        early, _ = first.parse_known_args(arguments)
        if early.list_chains:
            print("\n".join(f"{name}: {text}" for name, text in described().items()))
            parser.exit(0)
    names: list[str] = []
    try:
        names = add_parameters(parser, early.chain) if early.chain else []
        add_result_options(parser, names)
    except ValueError as error:
        parser.error(f"argument --chain: {error}")
    options = parser.parse_args(arguments, Options())
    if options.workers and options.scheduler:
        parser.error("argument --workers: not allowed with --scheduler, whose cluster has its own workers")
    parameters = {name: value for name in names if (value := getattr(options, name)) is not None}
    options.chain = ChainChoice(options.chain_name, parameters)
    try:
        factory = options.chain.factory()
    except ValueError as error:
        parser.error(f"argument --chain: {error}")
    try:
        # Wrong parameters show now, and not in each recording.
        factory()
    except Exception as error:  # whatever a function of the user's raises
        name = next((name for name in names if str(error).startswith(f"'{name}' ")), "chain")
        kind = "" if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: "
        parser.error(f"argument --{name.replace('_', '-')}: {kind}{error}")
    try:
        kept = result_options(options, names)
        options.jobs = find_jobs(options.recordings, options.output, recording_options(options, "channels"), kept)
    except UsageError as error:
        parser.error(str(error))
    return options


def make_parser(prog: str) -> Parser:
    """The parser of the options of ``process``, without those of a chain and of results."""
    parser = Parser(prog, description=DESCRIPTION, epilog=EPILOG.format(prog=prog))
    add = parser.add_argument
    add("recordings", nargs="+", metavar="RECORDING", help="recordings, or folders of them")
    text = 'what to run: the name of a ready chain (see --list-chains) or "module:function"'
    add("--chain", required=True, dest="chain_name", metavar="CHAIN", help=text)
    add("--list-chains", action="store_true", help="list the ready chains; --chain NAME --help tells their options")
    add("--output", required=True, type=_folder, metavar="FOLDER", help="where results go, as NAME.zarr")
    add("--workers", type=_count, metavar="N", help="run on N processes of this machine [1: in this process]")
    add("--scheduler", metavar="ADDRESS", help="run on the Dask cluster of this scheduler, whose workers see the files")
    text = 'seconds that a worker begins a piece earlier, or "exact" to cut no recording [follows from the chain]'
    add("--margin", type=lambda text: text if text == "exact" else _margin(text), metavar="S", help=text)
    text = "what results of pieces may differ by from those of one run, as a share of the largest [1e-6]"
    add("--tolerance", type=_positive, default=1e-6, metavar="X", help=text)
    text = 'every S seconds, or "inf" for never [60]'
    add("--checkpoint", type=_seconds, default=60.0, dest="checkpoint_seconds", metavar="S", help=text)
    add("--dry-run", action="store_true", help="say how long it will take and how large results are; write nothing")
    add("--json", action="store_true", help="lines of JSON on a terminal, too")
    add_recording_options(parser, of_channels=True)
    return parser


def _folder(text: str) -> Path:
    path = Path(text)
    above = nearest(path)
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder, since {str(above)!r} is a file")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write into {text!r}: no permission in {str(above)!r}")
    if path.is_symlink() and not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} is a link to {os.readlink(path)!r}, which is not there")
    return path


def nearest(path: Path) -> Path:
    """*path*, or the nearest folder above it that is there."""
    path = Path(os.path.abspath(path))
    return next(parent for parent in (path, *path.parents) if parent.exists())
