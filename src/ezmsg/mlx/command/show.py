"""``ezmsg-mlx show``: draw a page of results."""

import argparse
import contextlib
import math
import sys
import typing
from pathlib import Path

from .options import DONE, SOME_FAILED, USAGE, UsageError, add_recording_options, recording_options

if typing.TYPE_CHECKING:
    from .page import Overview

N_TRACES = 4


def main(prog: str, arguments: list[str]) -> int:
    """Draw the page; the exit status."""
    options = _parse(prog, arguments)
    try:
        _show(options)
    except UsageError as error:
        print(f"{prog}: error: argument {error.option}: {error}", file=sys.stderr)
        return USAGE
    except ImportError as error:
        extra = "" if "pip install" in str(error) else ': pip install "ezmsg-mlx[examples]"'
        print(f"{prog}: error: {error}{extra}", file=sys.stderr)
        return USAGE
    except (OSError, ValueError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return SOME_FAILED
    print(options.output)
    return DONE


def _parse(prog: str, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        description="Draw a page: results over time and channels, the recording above, seams and gaps marked.",
        epilog="Memory does not grow with the length of the results: of long ones, a part of each column is read.",
    )
    add = parser.add_argument
    add("results", type=Path, metavar="RESULTS", help="a Zarr group that the command process has written")
    add("--output", type=Path, metavar="FILE", help="picture to draw, as .png, .pdf or .svg [RESULTS.png]")
    add("--raw", type=Path, metavar="FILE", help="the recording [one of that name beside the results or above them]")
    add("--channels", metavar="LABELS", help=f"up to {N_TRACES} channels to draw, with commas [those that vary most]")
    add("--start", type=float, metavar="S", help="from this time on, in seconds [the beginning]")
    add("--stop", type=float, metavar="S", help="up to this time [the end]")
    add_recording_options(parser)
    options = parser.parse_args(arguments)
    options.output = options.output or options.results.with_name(f"{options.results.name}.png")
    for name in ("start", "stop"):
        if (value := getattr(options, name)) is not None and not math.isfinite(value):
            parser.error(f"argument --{name}: must be a finite number, got {value}")
    if options.output.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"argument --output: must be a name in .png, .pdf or .svg, got {str(options.output)!r}")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"argument --output: there is no folder {str(options.output.parent)!r}")
    return options


def _show(options: argparse.Namespace) -> None:
    from .page import draw, read_overview, read_traces

    found = read_overview(options.results, options.start, options.stop)
    channels = _channels(found, options.channels)
    recording = options.raw or _beside(options.results, found.source)
    raw = None
    if recording is not None:
        try:
            raw = read_traces(
                recording, recording_options(options), [found.labels[channel] for channel in channels], found.times
            )
        except (OSError, ValueError) as error:
            raise UsageError("--raw", f"{error}") from error
    draw(found, channels, "asked for" if options.channels else "that vary most", raw, options.output)


def _channels(found: "Overview", asked: str | None) -> list[int]:
    import numpy as np

    if asked:
        labels = [label.strip() for label in asked.split(",")]
        if unknown := [label for label in labels if label not in found.labels]:
            known = ", ".join(found.labels[:8]) + (", ..." if len(found.labels) > 8 else "")
            raise UsageError("--channels", f"must be {known}, got {unknown[0]!r}")
        if len(labels) > N_TRACES:
            raise UsageError("--channels", f"must be {N_TRACES} channels at most, got {len(labels)}")
        return [found.labels.index(label) for label in labels]
    low, high = np.nanpercentile(found.middle, (5, 95), axis=0)
    return sorted(np.argsort(low - high, kind="stable")[:N_TRACES].tolist())


def _beside(results: Path, name: str) -> Path | None:
    """The recording, if it is where one would look for it."""
    for folder in (results.absolute().parent, *results.absolute().parent.parents[:1]):
        with contextlib.suppress(OSError):
            if name and (folder / name).exists():
                return folder / name
    return None
