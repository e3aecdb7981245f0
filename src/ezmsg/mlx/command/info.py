"""``ezmsg-mlx info``: what is in a recording, or in all recordings of a folder."""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from .options import (
    DONE,
    SOME_FAILED,
    USAGE,
    Parser,
    UsageError,
    add_recording_options,
    on_terminal,
    recording_options,
    recordings_in,
)
from .progress import duration

if typing.TYPE_CHECKING:
    from ..offline import RecordingInfo, StreamInfo

MOST_LABELS = 6


def parser(prog: str) -> Parser:
    """The parser of the options."""
    reader = Parser(
        prog,
        description="What is in a recording: streams, kinds and gains of their channels, rates,\n"
        "lengths, gaps, and what cannot be processed.",
        epilog=f"""\
examples:
  {prog} session.nwb
  {prog} recordings/
  {prog} noise.bin --format rawbinary --source n_channels=8 \\
      --source sampling_rate=30000

On a terminal a few lines for each recording, elsewhere a line of JSON.""",
    )
    reader.add_argument("recordings", nargs="+", metavar="RECORDING", help="recordings, or folders of them")
    add_recording_options(reader, of_streams=False)
    reader.add_argument("--json", action="store_true", help="lines of JSON on a terminal, too")
    reader.add_argument("--formats", action=_Formats, help="list the formats that are known")
    return reader


def main(prog: str, arguments: list[str]) -> int:
    """Print it; the exit status."""
    options = parser(prog).parse_args(arguments)
    from ..offline import describe_recording

    status, given = DONE, recording_options(options)
    for text in options.recordings:
        try:
            recordings = recordings_in(Path(text), given.get("format"))
        except UsageError as error:
            print(f"{prog}: error: {error}", file=sys.stderr)
            status = USAGE
            continue
        for recording in recordings:
            try:
                found = describe_recording(recording, **given)
            except (ImportError, OSError, TypeError, ValueError) as error:
                print(f"{prog}: error: {recording}: {error}", file=sys.stderr)
                status = USAGE if isinstance(error, (ImportError, TypeError)) else status or SOME_FAILED
                continue
            if any(stream.problem for stream in found.streams):
                status = status or SOME_FAILED
            as_lines = options.json or not on_terminal()
            print(json.dumps(as_json(found)) if as_lines else "\n".join(as_text(found)), flush=True)
    return status


class _Formats(argparse.Action):
    """List the formats, and end."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..offline import recording_formats

        formats = recording_formats()
        width = max(map(len, formats))
        for name in sorted(formats):
            print(f"{name:{width}}  {formats[name].description}")
        print(f"{'':{width}}  and each of neo's readers, by its name in lower case")
        parser.exit(0)


def as_json(found: RecordingInfo) -> dict[str, object]:
    """All that is known, as JSON holds it."""
    streams = [
        {**stream._asdict(), "segments": [segment._asdict() for segment in stream.segments]} for stream in found.streams
    ]
    return {"path": str(found.path), "format": found.format, "streams": streams}


def as_text(found: RecordingInfo) -> Iterator[str]:
    """Lines for a reader."""
    yield f"{found.path}: {found.format}"
    for stream in found.streams:
        if stream.problem:
            yield f"  {stream.name}: cannot be processed: {stream.problem}"
            continue
        yield f"  {stream.name}: {_of_stream(stream)}"
        yield f"    {_of_scaling(stream)}"
        for number, segment in enumerate(stream.segments):
            gaps = f", {len(segment.gaps)} gap{'s' * (len(segment.gaps) != 1)}" if segment.gaps else ""
            other = f", other {' and '.join(segment.differs)} than segment 0" if segment.differs else ""
            yield f"    segment {number}: {segment.n_samples} samples from {segment.start:.6g} s on{gaps}{other}"


def _of_stream(stream: StreamInfo) -> str:
    labels = ", ".join(stream.labels[:MOST_LABELS]) + (", ..." if len(stream.labels) > MOST_LABELS else "")
    length = duration(sum(segment.duration for segment in stream.segments))
    n = len(stream.labels)
    kind = f"{stream.kind} " if stream.kind else ""
    return f"{length} of {n} {kind}channel{'s' * (n != 1)} at {stream.sampling_rate:g} Hz ({labels})"


def _of_scaling(stream: StreamInfo) -> str:
    """The value of a count, in the unit of voltage that fits."""
    gains, offset, unit = stream.gains or (1.0,), stream.offset, stream.unit
    if unit in ("volts", "V"):
        factor, unit = next(
            ((factor, unit) for factor, unit in ((1.0, "V"), (1e3, "mV")) if max(map(abs, gains)) * factor >= 0.1),
            (1e6, "µV"),
        )
        gains, offset = tuple(gain * factor for gain in gains), offset * factor
    if not unit and set(gains) == {1.0} and not offset:
        return f"{stream.dtype} without a unit"
    low, high = min(gains), max(gains)
    of_one = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
    added = f", and {offset:.6g} {unit} are added".rstrip() if offset else ""
    return f"{stream.dtype}, a count is {of_one} {unit}".rstrip() + added
