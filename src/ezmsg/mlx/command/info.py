"""``ezmsg-mlx info``: what is in a recording."""

import argparse
import json
import sys
import typing

from .options import DONE, SOME_FAILED, USAGE, add_recording_options, recording_options
from .progress import duration

if typing.TYPE_CHECKING:
    from ..offline import RecordingInfo, StreamInfo

MOST_LABELS = 6


def main(prog: str, arguments: list[str]) -> int:
    """Print it; the exit status."""
    parser = argparse.ArgumentParser(
        prog,
        description="What is in a recording: streams, channels, rates, lengths, gaps, and what cannot be processed.",
        epilog="On a terminal a few lines for each recording, elsewhere a line of JSON.",
    )
    parser.add_argument("recordings", nargs="+", metavar="RECORDING", help="a file or folder")
    add_recording_options(parser, of_streams=False)
    parser.add_argument("--json", action="store_true", help="lines of JSON on a terminal, too")
    parser.add_argument("--formats", action=_Formats, help="list the formats that are known")
    options = parser.parse_args(arguments)
    from ..offline import describe_recording

    status = DONE
    for recording in options.recordings:
        try:
            found = describe_recording(recording, **recording_options(options))
        except (ImportError, OSError, TypeError, ValueError) as error:
            print(f"{prog}: error: {recording}: {error}", file=sys.stderr)
            status = USAGE if isinstance(error, (FileNotFoundError, ImportError, TypeError)) else SOME_FAILED
            continue
        if any(stream.problem for stream in found.streams):
            status = status or SOME_FAILED
        if options.json or not sys.stdout.isatty():
            print(json.dumps(as_json(found)), flush=True)
        else:
            print("\n".join(as_text(found)), flush=True)
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


def as_json(found: "RecordingInfo") -> dict[str, object]:
    """All that is known, as JSON holds it."""
    streams = [
        {**stream._asdict(), "segments": [segment._asdict() for segment in stream.segments]} for stream in found.streams
    ]
    return {"path": str(found.path), "format": found.format, "streams": streams}


def as_text(found: "RecordingInfo") -> typing.Iterator[str]:
    """Lines for a reader."""
    yield f"{found.path}: {found.format}"
    for stream in found.streams:
        if stream.problem:
            yield f"  {stream.name}: cannot be processed: {stream.problem}"
            continue
        yield f"  {stream.name}: {_of_stream(stream)}"
        for number, segment in enumerate(stream.segments):
            gaps = f", {len(segment.gaps)} gaps" if segment.gaps else ""
            yield f"    segment {number}: {segment.n_samples} samples from {segment.start:.6g} s on{gaps}"


def _of_stream(stream: "StreamInfo") -> str:
    labels = ", ".join(stream.labels[:MOST_LABELS]) + (", ..." if len(stream.labels) > MOST_LABELS else "")
    length = duration(sum(segment.duration for segment in stream.segments))
    unit = f" for {stream.unit}" if stream.unit else ""
    return f"{length} of {len(stream.labels)} channels at {stream.sampling_rate:g} Hz, {stream.dtype}{unit} ({labels})"
