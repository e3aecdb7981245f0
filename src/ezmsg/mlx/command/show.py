"""``ezmsg-mlx show``: draw a page of results."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import typing
from pathlib import Path

from .options import DONE, SOME_FAILED, USAGE, Parser, UsageError, add_recording_options, recording_options

if typing.TYPE_CHECKING:
    from .page import Overview, Traces

N_TRACES = 4


def main(prog: str, arguments: list[str]) -> int:
    """Draw the page; the exit status."""
    options = _parse(prog, arguments)
    try:
        _show(prog, options)
    except ImportError as error:
        extra = "" if "pip install" in str(error) else ': pip install "ezmsg-mlx[examples]"'
        print(f"{prog}: error: {error}{extra}", file=sys.stderr)
        return USAGE
    except (OSError, ValueError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return SOME_FAILED
    print(options.output)
    return DONE


def parser(prog: str) -> Parser:
    """The parser of the options."""
    reader = Parser(
        prog,
        description="Draw a page: results over time and channels, the recording above, seams and\ngaps marked.",
        epilog=f"""\
examples:
  {prog} features/session.zarr
  {prog} features/session.zarr --channels 0:4 --output part.pdf
  {prog} out/noise.zarr --raw noise.bin --format rawbinary \\
      --source sampling_rate=30000 --source n_channels=8

Memory does not grow with the length of the results: of long ones, a part of
each column is read.""",
    )
    add = reader.add_argument
    add("results", type=Path, metavar="RESULTS", help="a Zarr group that the command process has written")
    add("--output", type=Path, metavar="FILE", help="picture to draw, as .png, .pdf or .svg [RESULTS.png]")
    add("--raw", type=Path, metavar="FILE", help="the recording [one of that name beside the results or above them]")
    text = f"up to {N_TRACES} channels to draw, as labels, indices (0:4) or kinds [those that vary most]"
    add("--channels", metavar="LIST", help=text)
    add("--start", type=float, metavar="S", help="from this time on, in seconds [the beginning]")
    add("--stop", type=float, metavar="S", help="up to this time [the end]")
    add_recording_options(reader)
    return reader


def _parse(prog: str, arguments: list[str]) -> argparse.Namespace:
    reader = parser(prog)
    options = reader.parse_args(arguments)
    options.output = options.output or options.results.with_name(f"{options.results.name}.png")
    for name in ("start", "stop"):
        if (value := getattr(options, name)) is not None and not math.isfinite(value):
            reader.error(f"argument --{name}: must be a finite number, got {value}")
    if options.output.suffix not in (".png", ".pdf", ".svg"):
        reader.error(f"argument --output: must be a name in .png, .pdf or .svg, got {str(options.output)!r}")
    if not options.output.absolute().parent.is_dir():
        reader.error(f"argument --output: there is no folder {str(options.output.parent)!r}")
    return options


def _show(prog: str, options: argparse.Namespace) -> None:
    from .page import draw, read_overview

    found = read_overview(options.results, options.start, options.stop)
    channels = _channels(found, options.channels)
    raw = _recording(prog, options, found, [found.labels[channel] for channel in channels])
    draw(found, channels, "asked for" if options.channels else "that vary most", raw, options.output)


def _recording(prog: str, options: argparse.Namespace, found: Overview, labels: list[str]) -> Traces | None:
    """The recording; None if there is none, or if one that was not named cannot be read."""
    from .page import read_traces

    recording = options.raw or _beside(options.results, found.source)
    if recording is None:
        return None
    try:
        return read_traces(recording, recording_options(options), labels, found.times)
    except (OSError, TypeError, ValueError) as error:
        if options.raw:
            raise UsageError("--raw", f"{error}") from error
        print(f"{prog}: drawn without the recording: {error}", file=sys.stderr)
        return None


def _channels(found: Overview, asked: str | None) -> list[int]:
    import numpy as np

    from ..offline.signals import channels_of_choice

    if asked:
        kinds = {kind: [n for n, each in enumerate(found.kinds) if each == kind] for kind in found.kinds}
        labelled = [(label, number) for number, label in enumerate(found.labels)]
        try:
            numbers = channels_of_choice(asked, labelled, kinds=kinds)
        except ValueError as error:
            raise UsageError("--channels", str(error).removeprefix("'channels' ")) from error
        if len(numbers) > N_TRACES:
            raise UsageError("--channels", f"must be {N_TRACES} channels at most, got {len(numbers)}")
        return numbers
    # Of a channel without a finite value nothing varies.
    finite = np.isfinite(found.middle).any(axis=0)
    spread = np.full(len(found.labels), -1.0)
    low, high = np.nanpercentile(found.middle[:, finite], (5, 95), axis=0) if finite.any() else (0.0, 0.0)
    spread[finite] = high - low
    return sorted(np.argsort(-spread, kind="stable")[:N_TRACES].tolist())


def _beside(results: Path, name: str) -> Path | None:
    """The recording, if it is where one would look for it."""
    for folder in (results.absolute().parent, *results.absolute().parent.parents[:1]):
        with contextlib.suppress(OSError):
            if name and (folder / name).exists():
                return folder / name
    return None
